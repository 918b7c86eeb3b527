"""Every write to a job after its birth, fenced: the only module that updates or deletes ``Job``.

A verb takes the copy of the row that the caller decided on and returns a new copy; the one in hand
stays what it was. Without an ``actor`` the write is that of the execution's own worker; others
name themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import router
from django.db.models import F, Q
from django.db.models.functions import Coalesce, Greatest

from jobqueue import db, ledger, signals
from jobqueue.conf import check_integer
from jobqueue.exceptions import InvalidJob, TransitionConflict, TransitionNotAllowed
from jobqueue.lifecycle import (
    FINAL,
    Cancelled,
    Completed,
    Error,
    Failed,
    Outcome,
    Released,
    Retry,
    Settled,
    Snoozed,
    State,
    Verb,
)
from jobqueue.models import Job, JobEvent
from jobqueue.payload import check_text
from jobqueue.settlement import Write, as_delay, plan, require, verb_of

MAX_NOTE = 1000


@dataclass(frozen=True, slots=True)
class SettleResult:
    """What became of one outcome: ``job`` as it now is, or the ``conflict`` that kept it out."""

    job_id: int
    status: Settled
    job: Job | None = None
    conflict: TransitionConflict | None = None


# -- Verbs, one at a time


def start(job: Job, *, using: str | None = None) -> Job:
    """Begin to run a claimed job: claimed -> running. Uses up an attempt.

    Raises:
        TransitionNotAllowed: ``job`` isn't claimed.
        TransitionConflict: it is no longer this claim's, and must not be run.
    """
    using = database_of(job, using)
    require(job, Verb.START)
    changes = {"state": State.RUNNING, "attempt": job.attempt + 1, "attempted_at": db.now(using)}
    if not db.retry_transient(using, lambda: _update(job, changes, Q(), using)):
        raise ledger.refuse(job, Verb.START, read(job.pk, using), None, using)
    return _announce(job, Write(Verb.START, changes), None, using)


def complete(
    job: Job, result: Any = None, *, actor: str | None = None, using: str | None = None
) -> Job:
    """Store ``result`` (JSON) and finish: running -> completed.

    Every settling verb, from here to ``cancel``, has these errors:

    Raises:
        TransitionNotAllowed: the table of verbs has no such verb for ``job.state``.
        TransitionConflict: the job is no longer what ``job`` says; nothing was written.
        InvalidJob: a value can't be stored; nothing was written.
        DatabaseError: the database failed. Where it can't be known whether the write took effect
            (COMMIT's reply was lost), the executor finds out by calling again.
    """
    return _settle(job, Completed(result), actor, using)


def fail(
    job: Job, error: Error | str = "", *, actor: str | None = None, using: str | None = None
) -> Job:
    """Finish without success, whatever is left of the budget: running -> failed."""
    return _settle(job, Failed(_as_error(error)), actor, using)


def retry(
    job: Job,
    error: Error | str = "",
    delay: timedelta | float | None = None,
    *,
    actor: str | None = None,
    using: str | None = None,
) -> Job:
    """Record a failed attempt: running -> scheduled, or failed when the budget is spent.

    ``delay``, in seconds or as a ``timedelta``, stands in for the job's own backoff; with 0 the
    job is waiting at once.
    """
    wait = None if delay is None else as_delay(delay)
    return _settle(job, Retry(_as_error(error), wait), actor, using)


def snooze(
    job: Job, delay: timedelta | float, *, actor: str | None = None, using: str | None = None
) -> Job:
    """Put the job off by ``delay``; the attempt is excused: running -> scheduled."""
    return _settle(job, Snoozed(as_delay(delay)), actor, using)


def release(
    job: Job, reason: str = "", *, actor: str | None = None, using: str | None = None
) -> Job:
    """Hand the job back: claimed or running -> waiting. An attempt that had begun is excused."""
    return _settle(job, Released(reason), actor, using)


def cancel(
    job: Job, reason: str = "", *, actor: str | None = None, using: str | None = None
) -> Job:
    """Finish a job that is not to be done: any state that isn't final -> cancelled."""
    return _settle(job, Cancelled(reason), actor, using)


def settle_many(
    items: Iterable[tuple[Job, Outcome]],
    *,
    actor: str | None = None,
    rescue: bool = False,
    using: str | None = None,
) -> list[SettleResult]:
    """Write many outcomes in one transaction; each is applied, already applied or in conflict.

    Args:
        items: jobs as they were decided on, all of one database, and their outcomes.
        actor: who writes; ``None`` for the executions' own worker.
        rescue: whether a sweep writes this, for executors that are gone.
        using: the database; by default the jobs'.

    Returns:
        One result per item, in their order. A conflict keeps nobody else out.

    Raises:
        TransitionNotAllowed, InvalidJob: before any write, and then none of the items is written.
        DatabaseError: as for one verb; none of the items was written, or, where COMMIT's reply was
            lost, calling again tells.
    """
    batch = list(items)
    if not batch:
        return []
    for job, outcome in batch:
        require(job, verb_of(job, outcome))
    using = database_of(batch[0][0], using)
    now = db.now(using)
    plans = [(job, plan(job, outcome, now, rescue=rescue)) for job, outcome in batch]
    # In the order of ids, so that two batches never wait for each other crosswise.
    order = sorted(range(len(plans)), key=lambda index: plans[index][0].pk)

    def work() -> dict[int, Write | None]:
        done = {index: _write(*plans[index], actor, using) for index in order}
        events = [
            ledger.event(plans[index][0], write, actor)
            for index, write in done.items()
            if write and write.kind
        ]
        JobEvent.objects.using(using).bulk_create(events)
        return done

    done = db.in_transaction(using, work)
    return [_result(*plans[index], done[index], actor, using) for index in range(len(plans))]


# -- Claims and promotions: what they rest on, state and time, stands in the statement itself


def claim(
    job_ids: Sequence[int], queue: str, worker_id: str, now: datetime, *, start: bool, using: str
) -> list[Job]:
    """Give jobs that still wait in ``queue`` to a worker; return those that it got, in order.

    To be called in the transaction that chose and locked the ids. What is returned has been read
    back: a row which somebody else got is not taken for the worker's.
    """
    changes: dict[str, Any] = {
        "state": State.CLAIMED,
        "claimed_by": worker_id,
        "claimed_at": now,
    }
    if start:
        changes |= {"state": State.RUNNING, "attempt": F("attempt") + 1, "attempted_at": now}
    jobs = Job.objects.using(using)
    jobs.chosen(job_ids, State.WAITING).filter(queue=queue, run_after__lte=now).update(
        version=F("version") + 1, **changes
    )
    mine = jobs.chosen(job_ids, changes["state"]).filter(claimed_by=worker_id, claimed_at=now)
    order = {pk: place for place, pk in enumerate(job_ids)}
    return sorted(mine, key=lambda job: order[job.pk])


def promote_due(queues: Sequence[str] | None, limit: int, *, using: str) -> int:
    """Turn up to ``limit`` scheduled jobs whose time has come into waiting ones; return how many.

    Any worker and any sweep may do so at any time.
    """
    now = db.now(using)
    due = Job.objects.using(using).in_queues(queues).due(now)
    if not due.exists():
        return 0

    def work() -> int:
        ids = db.lock_rows(due, skip_locked=True).values_list("pk", flat=True)[:limit]
        chosen = Job.objects.using(using).chosen(ids, State.SCHEDULED)
        return chosen.filter(run_after__lte=now).update(
            state=State.WAITING, version=F("version") + 1
        )

    return db.in_transaction(using, work)


# -- Writes within an execution: fenced on it, opening no new version


def record_progress(job: Job, percent: int, note: str = "", *, using: str | None = None) -> None:
    """Report how far a running job has come, in whole percent; the figure never falls.

    Raises:
        InvalidJob: ``percent`` isn't 0 to 100, or ``note`` can't be stored or has more than
            1,000 characters.
        TransitionNotAllowed: ``job`` isn't running.
        TransitionConflict: this execution is over; nothing was written.
    """
    try:
        check_integer(percent, "progress", 0, 100)
        check_text(note, "the progress note")
        if len(note) > MAX_NOTE:
            raise ValueError(f"the progress note has {len(note):,} of {MAX_NOTE:,} characters")
    except ValueError as error:
        raise InvalidJob(f"Job {job.pk}: {error}") from None
    changes = {"progress": Greatest(F("progress"), percent), "progress_note": note}
    _update_within(job, "progress", changes, None, using)


def request_cancel(job: Job, *, actor: str, using: str | None = None) -> None:
    """Ask a running job to stop: unless it succeeds all the same, it will end as cancelled.

    Asking again changes nothing.

    Raises:
        TransitionNotAllowed: ``job`` isn't running.
        TransitionConflict: this execution is over; nothing was written.
    """
    _require_running(job, "request cancel")
    now = db.now(database_of(job, using))
    changes = {"cancel_requested_at": Coalesce(F("cancel_requested_at"), now)}
    _update_within(job, "request cancel", changes, actor, using)


# -- Deletion


def delete_finished(job_ids: Sequence[int], before: datetime, *, using: str) -> int:
    """Delete those of the jobs that have been final since before ``before``, and their events.

    Returns how many. A job that was rerun meanwhile, or that somebody has locked, stays.
    """

    def work() -> int:
        old = Job.objects.using(using).chosen(job_ids, *FINAL).filter(finished_at__lt=before)
        locked = list(
            db.lock_rows(old.order_by("pk"), skip_locked=True).values_list("pk", flat=True)
        )
        JobEvent.objects.using(using).filter(job_id__in=locked)._raw_delete(using)
        return old.filter(pk__in=locked)._raw_delete(using) or 0  # None, if there are none

    return db.in_transaction(using, work)


# -- The one primitive, and what follows from its answer


def database_of(job: Job, using: str | None) -> str:
    """The alias to write to: the one named, the one the job was read from, or the router's."""
    return using or job._state.db or router.db_for_write(Job)


def _update(job: Job, changes: dict[str, Any], where: Q, using: str) -> bool:
    fence = Job.objects.using(using).matching(job.pk, job.fingerprint).filter(where)
    return fence.update(version=F("version") + 1, **changes) == 1


def _write(job: Job, writes: Sequence[Write], actor: str | None, using: str) -> Write | None:
    """Return the write that matched, if any did."""
    # Only the owner's: a late owner must not take another's write for its own lost COMMIT.
    mark = {"settled_version": job.version} if actor is None else {}
    for write in writes:
        if _update(job, write.changes | mark, write.where, using):
            return write
    return None


def _settle(job: Job, outcome: Outcome, actor: str | None, using: str | None) -> Job:
    (result,) = settle_many([(job, outcome)], actor=actor, using=using)
    if result.conflict:
        raise result.conflict
    assert result.job is not None
    return result.job


def _require_running(job: Job, verb: str) -> None:
    if job.state != State.RUNNING:
        raise TransitionNotAllowed(job.pk, verb, job.state)


def _update_within(
    job: Job, verb: str, changes: dict[str, Any], actor: str | None, using: str | None
) -> None:
    using = database_of(job, using)
    _require_running(job, verb)
    fence = Job.objects.using(using).matching(job.pk, job.fingerprint)
    if not db.retry_transient(using, lambda: fence.update(**changes)):
        raise ledger.refuse(job, verb, read(job.pk, using), actor, using)


def _result(
    job: Job, writes: Sequence[Write], done: Write | None, actor: str | None, using: str
) -> SettleResult:
    if done:
        after = _announce(job, done, actor, using)
        return SettleResult(job.pk, Settled.APPLIED, job=after)
    found = read(job.pk, using)
    if found and actor is None and _is_already_applied(job, writes, found, using):
        return SettleResult(job.pk, Settled.ALREADY_APPLIED, job=found)
    conflict = ledger.refuse(job, writes[0].verb, found, actor, using)
    return SettleResult(job.pk, Settled.CONFLICT, conflict=conflict)


def read(job_id: int, using: str) -> Job | None:
    """Return the job as it now is, ``None`` if it is gone."""
    return Job.objects.using(using).filter(pk=job_id).first()


def _is_already_applied(job: Job, writes: Sequence[Write], found: Job, using: str) -> bool:
    """Say whether the owner's same write took effect before, and only its reply was lost."""
    kinds = [write.kind for write in writes if write.kind]
    if kinds:
        mine = JobEvent.objects.using(using).filter(job_id=job.pk, actor=job.claimed_by)
        return mine.filter(version=job.version, kind__in=kinds).exists()
    (completion,) = writes
    return (
        found.settled_version == job.version
        and found.version == job.version + 1
        and found.state == completion.changes["state"]
        and found.result == completion.changes["result"]
    )


def _announce(job: Job, write: Write, actor: str | None, using: str) -> Job:
    """Return the job as it now is, and tell whoever listens."""
    after = copy.copy(job)
    for name, value in write.changes.items():
        setattr(after, name, value)
    after.version = job.version + 1
    if actor is None and write.verb != Verb.START:
        after.settled_version = job.version
    signals.send_after_commit(
        signals.job_transitioned,
        Job,
        using,
        job=after,
        verb=write.verb,
        from_state=job.state,
        actor=actor or job.claimed_by,
    )
    return after


def _as_error(error: Error | str) -> Error:
    return error if isinstance(error, Error) else Error(error)
