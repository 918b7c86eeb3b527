"""How many jobs to have in hand: as many as can run at once, and more where they are quick."""

from __future__ import annotations

import math
from typing import Final

# Jobs are claimed ahead of the threads for no longer than this, in seconds: so long may one that
# is on the books as running wait for a thread, and so much work at most is lost in a crash.
HORIZON: Final = 0.1
GROWTH: Final = 4


class Pace:
    """Grows while jobs prove to be quick, and is back at once where they don't.

    Args:
        slots: jobs that run at once.
        most: never more than this many in hand, or ``slots``.
    """

    def __init__(self, slots: int, most: int) -> None:
        self._slots = slots
        self._most = most
        self._took = math.inf
        self._last = slots

    def limit(self, stuck: int) -> int:
        """Return how many jobs to have in hand while ``stuck`` of them are slow."""
        ahead = HORIZON * max(self._slots - stuck, 0) / self._took
        most = max(self._most, self._slots)
        self._last = int(min(self._slots + ahead, max(self._last, self._slots) * GROWTH, most))
        return self._last

    def note(self, jobs: int, seconds: float) -> None:
        """Learn that ``jobs`` have taken ``seconds`` of threads' time in all."""
        if not jobs:
            return
        latest = max(seconds / jobs, 1e-6)
        # A slow batch counts at once, a quick one by half.
        known = self._took < math.inf
        self._took = max(latest, (self._took + latest) / 2) if known else latest

    def slow_down(self) -> None:
        """Have no more in hand than can run: those claimed ahead had to be handed back."""
        self._took = math.inf
