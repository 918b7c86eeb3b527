"""A job in this worker's hands, from its claim until its outcome has been written."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from jobqueue.lifecycle import Outcome, Report
from jobqueue.worker.context import JobContext

# At most one write of progress a second and job.
REPORT_EVERY: Final = 1.0
# How long an outcome that the database refused, while it took others, waits for its next try.
REFUSED_WAIT: Final = 5.0


@dataclass(slots=True, weakref_slot=True, eq=False)
class Execution:
    """What the loop knows of one execution.

    Attributes:
        job: as it was claimed.
        context: what its handler sees.
        outcome: what became of it, once it has ended.
        lost: the database gave the job to somebody else, or to nobody: nothing is written any more.
        closing: its handler is in ``context.atomic()``, and may complete it at any moment.
        completed: its handler has completed it there: nothing is left to write.
        reported_at: when progress was last written, by ``time.monotonic()``.
        settle_at: not before this time; the database refused the outcome, and took others.
        taken_at: when it came into this worker's hands, by the same clock.
        began_at: when a thread began to run it; 0 before.
        took: how long that took, in seconds.
        is_coroutine: it runs on the event loop, and takes up no thread.
    """

    job: Any
    context: JobContext
    outcome: Outcome | None = None
    lost: bool = False
    closing: bool = False
    completed: bool = False
    reported_at: float = 0.0
    settle_at: float = 0.0
    taken_at: float = 0.0
    began_at: float = 0.0
    took: float = 0.0
    is_coroutine: bool = False
    _last_words: Report | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """The id alone would not do: a lost job may come back before its handler has ended.

        After a failover it may even do so under the same version.
        """
        return self.job.pk, self.job.version, self.job.claimed_at

    @property
    def is_open(self) -> bool:
        """Whether the outcome is still to be written."""
        return not (self.lost or self.completed)

    def begin(self) -> float:
        """Note that a thread begins to run it; return when."""
        self.began_at = self.context.begin()
        return self.began_at

    def is_overdue(self, when: float) -> bool:
        """Whether it should have ended before ``when``, and has not."""
        deadline = self.context.deadline
        return deadline is not None and deadline < when and self.outcome is None

    def is_ripe(self, now: float) -> bool:
        """Whether the outcome may be written: what was said before it has been."""
        if self.outcome is None or now < self.settle_at:
            return False
        # While its handler is closing it, nobody else writes what it said.
        return not (self.is_open and not self.closing and self.context.has_report)

    @property
    def judged(self) -> Any:
        """The job, to be compared with what the database gives; ``None`` if its end is near."""
        return None if self.closing or self.completed else self.job

    def lose(self) -> None:
        """Write no more, and tell the handler."""
        self.lost = True
        self.context.tell_lost()

    @contextmanager
    def closed_by_handler(self) -> Iterator[None]:
        """Nobody else judges it or writes what it says while the block lasts."""
        self.closing = True
        try:
            yield
        finally:
            if self._last_words and not self.completed:
                self.context.give_back(self._last_words)
            self._last_words, self.closing = None, False

    # -- As the broker's ``Closing``

    def last_words(self) -> Report | None:
        """Return what was said and is to be written with the completion."""
        self._last_words = self.context.take_report()
        return self._last_words

    def committed(self) -> None:
        """Note that the handler has completed the job."""
        self.completed = True

    def refused(self) -> bool:
        """Note that it came too late to; return whether that is news."""
        is_news = self.is_open
        if is_news:
            self.lose()
        return is_news


def reports_due(executions: Iterable[Execution]) -> Iterator[tuple[Execution, Report]]:
    """Yield what has been said and is due to be written: at once, if the execution has ended."""
    now = time.monotonic()
    for execution in executions:
        is_due = execution.outcome is not None or now - execution.reported_at >= REPORT_EVERY
        is_ours = execution.is_open and not execution.closing
        if is_ours and is_due and (report := execution.context.take_report()):
            yield execution, report
