"""The database's clock in the hands of a test: it steps forward and back, and skews by the look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from tests.asserting import set_clock
from tests.explorer.values import at, tick

# After any time that a real clock tells while the tests run: what a column's default wrote is past.
START = tick(datetime(2100, 1, 1, tzinfo=UTC))


class Clock:
    """Stands in for ``db.now``, where the package asks what time it is, claims included.

    A step is what a failover to another host, or NTP, does to the database's clock. A skew is for
    one actor alone, as if each asked another server. The host's own clock is never asked.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.seconds = self.latest = START

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Be the clock of every database."""
        set_clock(monkeypatch, lambda using: at(self.seconds))

    def step(self, by: int) -> None:
        """Go forward or back; ``latest`` is as late as it has ever been for anybody."""
        self.seconds += by
        self.latest = max(self.latest, self.seconds)

    @contextmanager
    def skewed(self, by: int) -> Iterator[int]:
        """Tell whoever looks meanwhile another time; yield it."""
        self.step(by)
        try:
            yield self.seconds
        finally:
            self.step(-by)
