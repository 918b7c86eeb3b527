"""Every exception of this package: one base, small leaves."""

from __future__ import annotations

from datetime import timedelta

from jobqueue.lifecycle import ExecutionFingerprint


class JobQueueError(Exception):
    """Base of everything that this package raises on purpose."""


class InvalidJob(JobQueueError, ValueError):
    """A job, an option or a payload that can't be stored or run as given."""


class UnfencedWrite(JobQueueError, TypeError):
    """Somebody tried to change a job's row without going through a fenced verb."""


class JobNotFound(JobQueueError, LookupError):
    """No job has this id."""

    def __init__(self, job_id: int) -> None:
        super().__init__(f"There is no job {job_id}.")
        self.job_id = job_id


class TransitionNotAllowed(JobQueueError):
    """The table of verbs has no such verb for the state held in hand; no SQL was sent."""

    def __init__(self, job_id: int, verb: str, state: str) -> None:
        super().__init__(f"Job {job_id} is {state}: {verb} is not allowed.")
        self.job_id = job_id
        self.verb = verb
        self.state = state


class TransitionConflict(JobQueueError):
    """The job is no longer what the caller decided on; nothing was written.

    ``expected`` is the fingerprint that the caller had, or the version where that was all;
    ``found`` is ``None`` when the row is gone, and ``tries`` how often it was tried.
    """

    tries = 1

    def __init__(
        self,
        job_id: int,
        verb: str,
        expected: ExecutionFingerprint | int,
        found: ExecutionFingerprint | None,
    ) -> None:
        seen = f"version {expected}" if isinstance(expected, int) else expected
        now = f"it is now {found}" if found else "it is gone"
        super().__init__(f"Job {job_id} moved on: {verb} was decided on {seen}; {now}.")
        self.job_id = job_id
        self.verb = verb
        self.expected = expected
        self.found = found


class JobBusy(JobQueueError):
    """A job could not be locked or written, try after try, because of other transactions.

    ``holder`` says who to look for, where the database tells; ``__cause__`` is its last error.
    """

    def __init__(self, job_id: int, tries: int, reason: str, holder: str) -> None:
        look = f" Look for {holder}." if holder else ""
        when = f"in each of {tries} tries" if tries > 1 else "when it was tried"
        super().__init__(f"Job {job_id} was busy {when}: {reason}.{look}")
        self.job_id = job_id
        self.tries = tries
        self.holder = holder


class LeaseLost(JobQueueError):
    """The worker's row is not alive: it was declared dead, or never registered."""

    def __init__(self, worker_id: str) -> None:
        super().__init__(f"Worker {worker_id} holds no live lease.")
        self.worker_id = worker_id


class Snooze(JobQueueError):
    """Raised by a handler to be run again after ``delay``, without using up an attempt."""

    def __init__(self, delay: timedelta | float) -> None:
        super().__init__(f"snoozed for {delay}")
        self.delay = delay


class Retry(JobQueueError):
    """Raised by a handler to fail this attempt and try again after ``delay`` (default: backoff)."""

    def __init__(self, delay: timedelta | float | None = None, reason: str = "") -> None:
        super().__init__(reason or "retry requested by the handler")
        self.delay = delay


class Fail(JobQueueError):
    """Raised by a handler to fail the job for good, whatever is left of its budget."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "failed by the handler")


class Cancel(JobQueueError):
    """Raised by a handler to cancel its own job."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "cancelled by the handler")
