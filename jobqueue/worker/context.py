"""What a running handler can see of its own execution, and say about it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final

from jobqueue.exceptions import Cancel, JobQueueError
from jobqueue.lifecycle import Effects, Report
from jobqueue.settlement import check_checkpoint, check_progress


def _nobody() -> None:
    """Stand in for whoever wants to be told."""


# One for all: it is held for as long as it takes to put two values together.
_report_lock: Final = threading.Lock()

Atomic = Callable[[str | None], AbstractContextManager[Effects]]


class JobContext:
    """One execution, as its handler sees it. Safe to use from any thread.

    Attributes:
        job_id: the job's id.
        task: dotted path of the handler.
        attempt: which execution of the job this is, from 1.
        fencing_token: the version of the job's row that this execution runs under. It rises with
            every execution of the job, so an outside system that remembers the highest token can
            refuse a superseded execution.
        deadline: when the job's time is up, by ``time.monotonic()``; ``None`` if it has no timeout.
    """

    def __init__(
        self,
        job_id: int,
        task: str,
        attempt: int,
        fencing_token: int,
        checkpoint: Any = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.job_id = job_id
        self.task = task
        self.attempt = attempt
        self.fencing_token = fencing_token
        self.deadline: float | None = None
        self._checkpoint = checkpoint
        self._timeout = timeout
        self._atomic: Atomic | None = None
        self._lost = False
        self._cancelled = False
        self._report: Report | None = None
        self._told: Callable[[], object] = _nobody

    @property
    def lost(self) -> bool:
        """Whether the job was taken from this execution: whatever it reports will be refused."""
        return self._lost

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked for this job to be cancelled."""
        return self._cancelled

    @property
    def time_left(self) -> float | None:
        """Seconds until the job's time is up, 0 if it is; ``None`` if it has no timeout."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def raise_if_cancelled(self) -> None:
        """Give the job up, if somebody asked for that or its time is up.

        Raises:
            Cancel: somebody asked for it.
            TimeoutError: its timeout is over; like any other error, a failed attempt.
        """
        if self.cancelled:
            raise Cancel("cancelled as requested")
        if self.time_left == 0:
            raise TimeoutError(f"the job's timeout of {self._timeout} is over")

    @property
    def checkpoint(self) -> Any:
        """The value that was last saved, by this execution or by the one before it."""
        return self._checkpoint

    def save_checkpoint(self, value: Any) -> None:
        """Remember where the next attempt can go on, if this one is interrupted.

        Written with the progress, within about a second, and before the outcome.

        Raises:
            InvalidJob: ``value`` isn't JSON.
        """
        value = check_checkpoint(self.job_id, value)
        with _report_lock:
            self._checkpoint = value
            self._report = (self._report or Report()).with_checkpoint(value)

    def progress(self, percent: int, note: str = "") -> None:
        """Say how far the job has come, 0 to 100, as often as you like.

        The highest figure is written, at most once a second, and before the outcome.

        Raises:
            InvalidJob: ``percent`` isn't an integer from 0 to 100, or ``note`` has more than 1,000
                characters or some that can't be stored.
        """
        check_progress(self.job_id, percent, note)
        with _report_lock:
            self._report = (self._report or Report()).with_progress(percent, note)

    def atomic(self, using: str | None = None) -> AbstractContextManager[Effects]:
        """Complete the job in one transaction with the block's own writes::

            with context.atomic() as effects:
                Invoice.objects.create(...)
                effects.result = {"invoice": 17}

        The fenced completion is the transaction's last statement. If this execution has been
        superseded, nothing of the block is committed. What the handler does or returns after the
        block changes the outcome no more.

        Args:
            using: must be the job's own database, if it is given.

        Raises:
            TransitionConflict: by the end of the block: the job was taken from this execution.
            JobQueueError: ``using`` is another database, or the job is completed already.
            RuntimeError: called within a transaction, which could undo it later.
        """
        if self._atomic is None:
            raise JobQueueError("context.atomic() needs a worker on the job's own database")
        return self._atomic(using)

    # -- For the worker

    def complete_by(self, atomic: Atomic) -> None:
        """Have ``atomic()`` do this."""
        self._atomic = atomic

    def begin(self) -> float:
        """Called when the handler begins; return when that is, by ``time.monotonic()``."""
        now = time.monotonic()
        if self._timeout is not None:
            self.deadline = now + self._timeout.total_seconds()
        return now

    def when_told(self, call: Callable[[], object]) -> None:
        """Have ``call`` called when the handler is to stop; at once, if it is already."""
        self._told = call
        if self._lost or self._cancelled:
            call()

    def tell_lost(self) -> None:
        """Called when the database no longer gives the worker the job."""
        self._lost = True
        self._told()

    def tell_cancelled(self) -> None:
        """Called when a cancel request reaches the worker."""
        self._cancelled = True
        self._told()

    @property
    def has_report(self) -> bool:
        """Whether there is something to be written."""
        return self._report is not None

    def take_report(self) -> Report | None:
        """Return what is to be written, and forget it."""
        with _report_lock:
            report, self._report = self._report, None
            return report

    def give_back(self, report: Report) -> None:
        """Take a report back that couldn't be written; what was said since stands over it."""
        with _report_lock:
            self._report = self._report.over(report) if self._report else report


_current: Final[ContextVar[JobContext]] = ContextVar("jobqueue_context")


def current_context() -> JobContext:
    """Return the context of the job that the calling code runs in.

    Raises:
        JobQueueError: called outside a job.
    """
    try:
        return _current.get()
    except LookupError:
        raise JobQueueError("current_context() was called outside a running job") from None
