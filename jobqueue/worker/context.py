"""What a running handler can see of its own execution."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Final

from jobqueue.exceptions import JobQueueError


class JobContext:
    """One execution, as its handler sees it. Safe to use from any thread.

    Attributes:
        job_id: the job's id.
        task: dotted path of the handler.
        attempt: which execution of the job this is, from 1.
        fencing_token: the version of the job's row that this execution runs under. It rises with
            every execution of the job, so an outside system that remembers the highest token can
            refuse a superseded execution.
    """

    def __init__(self, job_id: int, task: str, attempt: int, fencing_token: int) -> None:
        self.job_id = job_id
        self.task = task
        self.attempt = attempt
        self.fencing_token = fencing_token
        self._lost = threading.Event()
        self._cancelled = threading.Event()

    @property
    def lost(self) -> bool:
        """Whether the job was taken from this execution: whatever it reports will be refused."""
        return self._lost.is_set()

    @property
    def cancelled(self) -> bool:
        """Whether somebody asked for this job to be cancelled."""
        return self._cancelled.is_set()

    def tell_lost(self) -> None:
        """Called by the worker when the database no longer gives it the job."""
        self._lost.set()

    def tell_cancelled(self) -> None:
        """Called by the worker when a cancel request reaches it."""
        self._cancelled.set()


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
