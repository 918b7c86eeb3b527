"""Retry policies: how long a job waits after its n-th failure. Pure, overflow-safe, jittered."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

MAX_SECONDS = 365 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """Wait ``base * factor ** (failures - 1)`` seconds, at most ``cap``, then spread it.

    ``jitter`` is the share of the wait, 0 to 1, that is drawn at random: with 0.2 a job waits
    80 to 100 % of the computed time, so ``cap`` is never exceeded. Spreading retries keeps jobs
    that failed together from coming back together (AWS Architecture Blog, "Exponential Backoff
    And Jitter", 2015).

    Raises:
        ValueError: a figure is not finite or out of its range.
    """

    base: float = 5.0
    factor: float = 2.0
    cap: float = 3600.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        ranges = {
            "base": (0.0, MAX_SECONDS),
            "factor": (1.0, 1000.0),
            "cap": (0.0, MAX_SECONDS),
            "jitter": (0.0, 1.0),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"backoff {name} must be a number, not {value!r}")
            if not low <= value <= high:  # nor is NaN
                limits = f"{low:,.0f} to {high:,.0f}"
                raise ValueError(f"backoff {name} must be {limits}, not {value!r:.80}")

    @classmethod
    def parse(cls, value: Backoff | Mapping[str, Any] | float | timedelta) -> Backoff:
        """Build a policy from what ``enqueue(backoff=)`` and the job's row may hold.

        A number (of seconds) or a ``timedelta`` means the same wait after every failure.

        Raises:
            ValueError: the value is none of these, names an unknown figure, or is out of range.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, timedelta):
            value = value.total_seconds()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return cls(base=value, factor=1.0, cap=value, jitter=0.0)
        if isinstance(value, Mapping):
            unknown = sorted(map(repr, set(value) - set(cls.__dataclass_fields__)))
            if unknown:
                raise ValueError(f"backoff has no figure {', '.join(unknown)}")
            return cls(**value)
        raise ValueError(f"backoff must be a Backoff, seconds or a mapping, not {value!r}")

    def as_dict(self) -> dict[str, float]:
        """Return the figures, fit for JSON and for ``parse``."""
        return asdict(self)

    def delay(self, failures: int, draw: Callable[[], float] = random.random) -> timedelta:
        """Return the wait after the ``failures``-th failure (1 is the first)."""
        try:
            wait = min(self.cap, self.base * float(self.factor) ** (max(failures, 1) - 1))
        except OverflowError:  # the power's, at high counts
            wait = self.cap if self.base else 0.0
        return timedelta(seconds=wait * (1 - self.jitter * draw()))

    def due(self, failures: int, now: datetime) -> datetime | Drawn:
        """Return when a job that has failed so often comes again, or between which times."""
        earliest, latest = (
            now + self.delay(failures, lambda: 1),
            now + self.delay(failures, lambda: 0),
        )
        return latest if earliest == latest else Drawn(earliest, latest)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A time that each of many jobs draws for itself."""

    earliest: datetime
    latest: datetime

    def draw(self) -> datetime:
        """Return one of them."""
        return self.latest - random.random() * (self.latest - self.earliest)
