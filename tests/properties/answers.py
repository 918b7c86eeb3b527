"""What a call tells its caller, in the words of the model; anything untyped is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jobqueue import transitions
from jobqueue.exceptions import (
    InvalidJob,
    JobNotFound,
    LeaseLost,
    TransitionConflict,
    TransitionNotAllowed,
)
from jobqueue.fence import SettleResult
from jobqueue.lifecycle import (
    Cancelled,
    Completed,
    Failed,
    Outcome,
    Released,
    Retry,
    Settled,
    Snoozed,
)
from jobqueue.models import Job
from tests.explorer.model import Answer

INVALID = "invalid"
REFUSALS = {
    TransitionConflict: Answer.CONFLICT,
    TransitionNotAllowed: Answer.NOT_ALLOWED,
    JobNotFound: Answer.NOT_FOUND,
    LeaseLost: Answer.LEASE_LOST,
    InvalidJob: INVALID,
}
STATUSES = {
    Settled.APPLIED: Answer.APPLIED,
    Settled.ALREADY_APPLIED: Answer.ALREADY_APPLIED,
    Settled.CONFLICT: Answer.CONFLICT,
}


@dataclass(frozen=True, slots=True)
class Told:
    """An answer, and what came with it."""

    answer: str
    value: Any = None


def told(call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Told:
    """Call; return the answer. Only the errors that the verbs promise are answers."""
    try:
        return Told(Answer.APPLIED, call(*args, **kwargs))
    except tuple(REFUSALS) as error:
        return Told(REFUSALS[type(error)], error)


def as_told(mirrored: Any) -> Told:
    """Return what the mirror said in the same form: an answer, or the value of success."""
    if isinstance(mirrored, str):
        return Told(mirrored)
    return Told(Answer.APPLIED, mirrored)


def statuses(results: list[SettleResult]) -> list[Answer]:
    """Return what became of each item of a batch."""
    return [STATUSES[result.status] for result in results]


def ids(jobs: list[Job]) -> list[int]:
    """Return the jobs' ids."""
    return [job.pk for job in jobs]


def by_verb(job: Job, outcome: Outcome, actor: str | None) -> Job:
    """Write an outcome through the verb of its own."""
    by = {"actor": actor}
    match outcome:
        case Completed(result):
            return transitions.complete(job, result, **by)
        case Failed(error):
            return transitions.fail(job, error, **by)
        case Retry(error, delay):
            return transitions.retry(job, error, delay, **by)
        case Snoozed(delay):
            return transitions.snooze(job, delay, **by)
        case Released(reason):
            return transitions.release(job, reason, **by)
        case Cancelled(reason):
            return transitions.cancel(job, reason, **by)
