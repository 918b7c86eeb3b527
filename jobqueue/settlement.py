"""What each outcome writes: from a job as it was decided on to columns and an event. No SQL."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple

from django.db.models import Q

from jobqueue import conf, guards
from jobqueue.backoff import Backoff, Drawn
from jobqueue.exceptions import InvalidJob, TransitionNotAllowed
from jobqueue.lifecycle import (
    RULES,
    Cancelled,
    Completed,
    Error,
    ExecutionFingerprint,
    Failed,
    Outcome,
    Released,
    Retry,
    Snoozed,
    State,
    Verb,
    is_allowed,
)
from jobqueue.models import EventKind, Job
from jobqueue.payload import check_payload, check_text

MAX_NOTE: Final = 1000
NO_CLAIM: Final[Mapping[str, Any]] = {"claimed_by": None, "claimed_at": None}
_ALWAYS: Final = Q()
_execution: Final = attrgetter(*ExecutionFingerprint.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Write:
    """One way for a verb to be written: its columns, its own condition, and its event if any."""

    verb: str
    changes: dict[str, Any]
    kind: EventKind | None = None
    message: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    where: Q = _ALWAYS


class Plan(NamedTuple):
    """What was decided on a job, or on jobs alike: the ways to write it, in order.

    Attributes:
        job: as it was decided on; of jobs alike, the first.
        ids: of all the jobs. They differ in nothing else that a decision rests on.
        writes: of these, the first that matches is to be written, to each job by itself.
    """

    job: Job
    ids: Sequence[int]
    writes: Sequence[Write]

    def about(self, job_id: int) -> Job:
        """Return the one of the jobs that has this id."""
        return self.job if job_id == self.job.pk else copied(self.job, pk=job_id)


def copied(job: Job, **changes: Any) -> Job:
    """Return a copy of a job, with changes."""
    other = copy.copy(job)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


def require(job: Job, verb: Verb) -> None:
    """Raise ``TransitionNotAllowed`` unless the table of verbs has ``verb`` for the job's state."""
    if not is_allowed(verb, job.state):
        raise TransitionNotAllowed(job.pk, verb, job.state)


def verb_of(job: Job, outcome: Outcome) -> Verb:
    """Return the verb that an outcome asks for: a retry fails a job whose budget is spent."""
    if isinstance(outcome, Retry) and job.is_budget_spent:
        return Verb.FAIL
    verb, _ = _PLANS[type(outcome)]
    return verb


def gathered(
    items: Iterable[tuple[Job, Outcome]],
) -> tuple[list[tuple[Job, object]], dict[object, tuple[Job, Outcome, list[int]]]]:
    """Return the jobs of a batch, each with its group, and the groups: what is decided as one."""
    batch = []
    groups: dict[object, tuple[Job, Outcome, list[int]]] = {}
    for job, outcome in items:
        group = _alike_by(job, outcome)
        _, _, ids = groups.setdefault(group, (job, outcome, []))
        ids.append(job.pk)
        batch.append((job, group))
    return batch, groups


def _alike_by(job: Job, outcome: Outcome) -> object:
    """Return what is equal for items that can be written as one, and for no others.

    Most jobs complete without a result: then the execution is all that a plan looks at.
    """
    if type(outcome) is Completed and outcome.result is None:
        return _execution(job), outcome.reason
    return object()


def plan(
    job: Job,
    outcome: Outcome,
    now: datetime,
    *,
    by_owner: bool = True,
    rescue: bool = False,
    draws: bool = True,
) -> tuple[Write, ...]:
    """Return the writes that settle ``job``, in the order in which to try them.

    Whether a cancel request wins over a setback is the condition of one write or the other, and
    so is decided by the statement, not by what ``job`` says.

    Args:
        job: the row as it was decided on.
        outcome: what became of its execution.
        now: the database's clock.
        by_owner: whether the execution's own worker writes this; a completion by anybody else is
            out of the ordinary, and leaves an event.
        rescue: whether a sweep writes this, for an executor that is gone.
        draws: whether a wait that is to be spread is drawn now. If not, it is a ``Drawn``: this is
            for many jobs, and each draws its own when it is written.

    Raises:
        TransitionNotAllowed: the verb doesn't fit the state in hand.
        InvalidJob: a result can't be stored.
    """
    verb = verb_of(job, outcome)
    require(job, verb)
    if verb == Verb.FAIL and isinstance(outcome, Retry):
        outcome = Failed(outcome.error)
    _, columns = _PLANS[type(outcome)]
    write = columns(job, outcome, now)
    if draws:
        write = drawn(write)
    kind = write.kind
    if not by_owner and kind is None:
        kind = EventKind.COMPLETED
    if rescue and kind in (EventKind.RETRIED, EventKind.RELEASED):
        kind = EventKind.RESCUED
    if not RULES[verb].yields_to_cancel:
        return (write,) if kind is write.kind else (replace(write, kind=kind),)
    changes, message, detail = write.changes, write.message, write.detail
    unasked, asked = (_where(**guards.cancel_requested(has_been)) for has_been in (False, True))
    cancelled = _finished(State.CANCELLED, now)
    told = f"cancelled as requested: {message}"
    return (
        Write(verb, changes, kind, message, detail, unasked),
        Write(Verb.CANCEL, cancelled, EventKind.CANCELLED, told, detail, asked),
    )


@cache
def _where(**lookups: Any) -> Q:
    """Return one object for one condition, which makes equal ones quick to tell."""
    return Q(**lookups)


def drawn(write: Write) -> Write:
    """Return the write with its wait drawn, if it has one to draw."""
    moment = write.changes.get("run_after")
    if not isinstance(moment, Drawn):
        return write
    return replace(write, changes={**write.changes, "run_after": moment.draw()})


def _finished(state: State, now: datetime) -> dict[str, Any]:
    return {"state": state, "finished_at": now, "unique_key": None}


def _complete(job: Job, outcome: Completed, now: datetime) -> Write:
    result = outcome.result
    if not outcome.is_plain:
        try:
            result = check_payload(result, "result", conf.get().MAX_PAYLOAD_BYTES)
        except ValueError as error:
            raise InvalidJob(f"Job {job.pk}: {error}") from None
    changes = {**_finished(State.COMPLETED, now), "result": result}
    return Write(Verb.COMPLETE, changes, message=outcome.reason)


def _fail(job: Job, outcome: Failed, now: datetime) -> Write:
    changes = _finished(State.FAILED, now)
    return Write(Verb.FAIL, changes, EventKind.FAILED, *_told(outcome.error))


def _retry(job: Job, outcome: Retry, now: datetime) -> Write:
    message, detail = _told(outcome.error)
    run_after: datetime | Drawn
    if outcome.delay is not None:
        run_after = now + _checked(job, outcome.delay)
    else:
        try:
            backoff = Backoff.parse(job.backoff)
        except (ValueError, TypeError) as error:
            backoff = conf.get().BACKOFF
            detail["backoff"] = f"{error}; used the default"
        run_after = backoff.due(job.failures, now)
    state = State.WAITING if run_after == now else State.SCHEDULED
    changes = {"state": state, "run_after": run_after, **NO_CLAIM}
    return Write(Verb.RETRY, changes, EventKind.RETRIED, message, detail)


def _snooze(job: Job, outcome: Snoozed, now: datetime) -> Write:
    changes = {
        "state": State.SCHEDULED,
        "run_after": now + _checked(job, outcome.delay),
        "excused": job.excused + 1,
        **NO_CLAIM,
    }
    message = f"for {outcome.delay}"
    return Write(Verb.SNOOZE, changes, EventKind.SNOOZED, message)


def _release(job: Job, outcome: Released, now: datetime) -> Write:
    changes = {"state": State.WAITING, **NO_CLAIM}
    if job.state == State.RUNNING:
        changes["excused"] = job.excused + 1
    return Write(Verb.RELEASE, changes, EventKind.RELEASED, outcome.reason)


def _cancel(job: Job, outcome: Cancelled, now: datetime) -> Write:
    changes = _finished(State.CANCELLED, now)
    return Write(Verb.CANCEL, changes, EventKind.CANCELLED, outcome.reason)


def _checked(job: Job, delay: timedelta) -> timedelta:
    try:
        return as_delay(delay)
    except InvalidJob as error:
        raise InvalidJob(f"Job {job.pk}: {error}") from None


def _told(error: Error) -> tuple[str, dict[str, Any]]:
    return error.message, {"traceback": error.traceback} if error.traceback else {}


_PLANS: Final[Mapping[type[Outcome], tuple[Verb, Callable[..., Write]]]] = {
    Completed: (Verb.COMPLETE, _complete),
    Failed: (Verb.FAIL, _fail),
    Retry: (Verb.RETRY, _retry),
    Snoozed: (Verb.SNOOZE, _snooze),
    Released: (Verb.RELEASE, _release),
    Cancelled: (Verb.CANCEL, _cancel),
}


def plan_rerun(job: Job, now: datetime, reason: str) -> Write:
    """Return the write that makes a finished job wait again, as if it had not run.

    What its owner last settled moves into the event, for one that still asks (see
    ``fence.is_already_applied``). The checkpoint of a job that was completed is of no use to the
    next run; that of any other tells it where to go on.
    """
    require(job, Verb.RERUN)
    changes: dict[str, Any] = {
        "state": State.WAITING,
        "run_after": now,
        "finished_at": None,
        "result": None,
        "progress": 0,
        "progress_note": "",
        "cancel_requested_at": None,
        "settled_version": None,
        **NO_CLAIM,
    }
    if job.is_budget_spent:
        changes["max_attempts"] = job.failures + 1
    if job.state == State.COMPLETED:
        changes["checkpoint"] = None
    detail = {"settled_version": job.settled_version}
    return Write(Verb.RERUN, changes, EventKind.RERUN, reason, detail)


def plan_edit(job: Job, changes: Mapping[str, Any], reason: str) -> Write:
    """Return the write that changes the columns of a queued job, and says what they were."""
    require(job, Verb.EDIT)
    detail = {name: f"{getattr(job, name)} -> {value}" for name, value in changes.items()}
    return Write(Verb.EDIT, dict(changes), EventKind.EDITED, reason, detail)


def check_progress(job_id: int, percent: Any, note: Any) -> None:
    """Raise ``InvalidJob`` unless these can be stored as a job's progress."""
    try:
        conf.check_integer(percent, "progress", 0, 100)
        if not isinstance(note, str):
            raise ValueError(f"the progress note must be text, not {note!r:.80}")
        check_text(note, "the progress note")
        if len(note) > MAX_NOTE:
            raise ValueError(f"the progress note has {len(note):,} of {MAX_NOTE:,} characters")
    except ValueError as error:
        raise InvalidJob(f"Job {job_id}: {error}") from None


def check_checkpoint(job_id: int, value: Any) -> Any:
    """Return ``value`` as the JSON that will be read back, or raise ``InvalidJob``."""
    try:
        return check_payload(value, "the checkpoint", conf.get().MAX_PAYLOAD_BYTES)
    except ValueError as error:
        raise InvalidJob(f"Job {job_id}: {error}") from None


def as_delay(value: timedelta | float) -> timedelta:
    """Return a delay given in seconds or as a ``timedelta``; ``InvalidJob`` if it is negative."""
    try:
        return conf.check_seconds(value, "delay", zero=True)
    except ValueError as error:
        raise InvalidJob(str(error)) from None
