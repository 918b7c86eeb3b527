"""The verbs: every write to a job that somebody has decided on, fenced.

This, ``fence`` with the one compare-and-update, and ``dispatch``, which takes what it finds, alone
update or delete ``Job``.

A verb takes the copy of the row that the caller decided on and returns a new copy; the one in hand
stays what it was. Without an ``actor`` the write is that of the execution's own worker; others
name themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Case, F, Q, TextField, Value, When
from django.db.models.functions import Coalesce, Greatest

from jobqueue import db, fence, guards, ledger
from jobqueue.exceptions import TransitionNotAllowed
from jobqueue.fence import SettleResult
from jobqueue.lifecycle import (
    FINAL,
    Cancelled,
    Completed,
    Error,
    Failed,
    Outcome,
    Released,
    Report,
    Retry,
    Snoozed,
    State,
    Verb,
    stop_asked,
)
from jobqueue.models import EventKind, Job, JobEvent
from jobqueue.settlement import (
    Plan,
    Write,
    as_delay,
    check_checkpoint,
    check_progress,
    copied,
    gathered,
    plan,
    plan_edit,
    plan_rerun,
    require,
    verb_of,
)

# -- Verbs, one at a time


def start(job: Job, *, using: str | None = None) -> Job:
    """Begin to run a claimed job: claimed -> running. Uses up an attempt.

    Raises:
        TransitionNotAllowed: ``job`` isn't claimed.
        TransitionConflict: it is no longer this claim's, and must not be run.
    """
    using = fence.database_of(job, using)
    require(job, Verb.START)
    changes = {"state": State.RUNNING, "attempt": job.attempt + 1, "attempted_at": db.now(using)}
    if not db.retry_transient(using, lambda: fence.update(job, changes, Q(), using)):
        raise fence.refuse(job, Verb.START, None, using)
    changes["version"] = job.version + 1
    fence.tell(job, Verb.START, changes, None, using)
    return fence.after(job, changes)


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
    return settle(job, Completed(result), actor=actor, using=using)


def fail(
    job: Job, error: Error | str = "", *, actor: str | None = None, using: str | None = None
) -> Job:
    """Finish without success, whatever is left of the budget: running -> failed."""
    return settle(job, Failed(_as_error(error)), actor=actor, using=using)


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
    return settle(job, Retry(_as_error(error), wait), actor=actor, using=using)


def snooze(
    job: Job, delay: timedelta | float, *, actor: str | None = None, using: str | None = None
) -> Job:
    """Put the job off by ``delay``; the attempt is excused: running -> scheduled."""
    return settle(job, Snoozed(as_delay(delay)), actor=actor, using=using)


def release(
    job: Job, reason: str = "", *, actor: str | None = None, using: str | None = None
) -> Job:
    """Hand the job back: claimed or running -> waiting. An attempt that had begun is excused."""
    return settle(job, Released(reason), actor=actor, using=using)


def cancel(
    job: Job, reason: str = "", *, actor: str | None = None, using: str | None = None
) -> Job:
    """Finish a job that is not to be done: any state that isn't final -> cancelled."""
    return settle(job, Cancelled(reason), actor=actor, using=using)


def settle(
    job: Job, outcome: Outcome, *, actor: str | None = None, using: str | None = None
) -> Job:
    """Write one outcome; the verbs above by their values. The errors are those of ``complete``."""
    (result,) = settle_many([(job, outcome)], actor=actor, using=using)
    return result.unwrap()


def settle_many(
    items: Iterable[tuple[Job, Outcome]], *, actor: str | None = None, using: str | None = None
) -> list[SettleResult]:
    """Write many outcomes in one transaction; each is applied, already applied or in conflict.

    Args:
        items: jobs as they were decided on, all of one database, and their outcomes.
        actor: who writes; ``None`` for the executions' own worker.
        using: the database; by default the jobs'.

    Returns:
        One result per item, in their order. A conflict keeps nobody else out.

    Raises:
        TransitionNotAllowed, InvalidJob: before any write, and then none of the items is written.
        DatabaseError: as for one verb; none of the items was written, or, where COMMIT's reply was
            lost, calling again tells.
    """
    batch, groups = gathered(items)
    if not batch:
        return []
    for job, outcome, _ in groups.values():
        require(job, verb_of(job, outcome))
    using = fence.database_of(batch[0][0], using)
    now, own = db.now(using), actor is None
    plans = {
        key: Plan(job, ids, plan(job, outcome, now, by_owner=own))
        for key, (job, outcome, ids) in groups.items()
    }
    return fence.apply([(job, plans[key]) for job, key in batch], actor, using)


# -- Verbs of coordinators alone


def rerun(job: Job, reason: str = "", *, actor: str, using: str | None = None) -> Job:
    """Make a finished job wait again: completed, failed or cancelled -> waiting.

    Its result, progress and claim are cleared, and its budget is raised by one attempt if it is
    spent. The errors are those of ``complete``.
    """
    using = fence.database_of(job, using)
    return _apply_one(job, plan_rerun(job, db.now(using), reason), actor, using)


def edit(
    job: Job, changes: Mapping[str, Any], reason: str = "", *, actor: str, using: str | None = None
) -> Job:
    """Change columns of a job that is scheduled or waiting. The errors are those of ``complete``.

    ``changes`` may have ``queue``, ``priority``, ``run_after`` and ``max_attempts``.
    """
    using = fence.database_of(job, using)
    return _apply_one(job, plan_edit(job, changes, reason), actor, using)


def delete(job: Job, *, actor: str, using: str | None = None) -> None:
    """Delete a finished job and its history.

    Raises:
        TransitionNotAllowed: the job isn't in a final state.
        TransitionConflict: it is no longer what ``job`` says; it stays.
    """
    using = fence.database_of(job, using)
    require(job, Verb.DELETE)
    row = Job.objects.using(using).matching(job.pk, job.fingerprint)

    def work() -> int:
        if not db.lock_rows(row).values_list("pk", flat=True).first():
            return 0
        JobEvent.objects.using(using).filter(job_id=job.pk)._raw_delete(using)
        return row._raw_delete(using) or 0

    if not db.in_transaction(using, work):
        raise fence.refuse(job, Verb.DELETE, actor, using)


# -- Writes within an execution: fenced on it, opening no new version


def record_progress(job: Job, percent: int, note: str = "", *, using: str | None = None) -> None:
    """Say how far a running job has come, in whole percent; the figure never falls.

    The note is that of the highest figure: one that comes late with a lower one is dropped.

    Raises:
        InvalidJob: ``percent`` isn't 0 to 100, or ``note`` can't be stored or has more than
            1,000 characters.
        TransitionNotAllowed: ``job`` isn't running.
        TransitionConflict: this execution is over; nothing was written.
    """
    check_progress(job.pk, percent, note)
    report(job, Report(percent, note), using=using)


def checkpoint(job: Job, value: Any, *, using: str | None = None) -> None:
    """Store where a running job can go on if it is interrupted: JSON, read by its next attempt.

    Raises:
        InvalidJob: ``value`` can't be stored.
        TransitionNotAllowed, TransitionConflict: as for ``record_progress``.
    """
    value = check_checkpoint(job.pk, value)
    report(job, Report(checkpoint=value, has_checkpoint=True), using=using)


def report(job: Job, said: Report, *, using: str | None = None) -> None:
    """Write a report, checked before, of a running execution. The errors are the same."""
    changes: dict[str, Any] = {}
    verb = "checkpoint" if said.percent is None else "progress"
    if said.percent is not None:
        # The note looks at the old figure, and MySQL assigns from left to right: so it is first.
        is_highest = When(progress__lte=said.percent, then=Value(said.note))
        note = Case(is_highest, default=F("progress_note"), output_field=TextField())
        changes["progress_note"] = note
        changes["progress"] = Greatest(F("progress"), said.percent)
    if said.has_checkpoint:
        changes["checkpoint"] = said.checkpoint
    _update_within(job, verb, changes, None, using)


def request_cancel(job: Job, reason: str = "", *, actor: str, using: str | None = None) -> Job:
    """Ask a running job to stop: unless it succeeds all the same, it will end as cancelled.

    Asking again changes nothing but the history: each asking is an event.

    Raises:
        TransitionNotAllowed: ``job`` isn't running.
        TransitionConflict: this execution is over; nothing was written.
    """
    event = Write("request cancel", {}, EventKind.CANCEL_REQUESTED, reason)
    _require_running(job, event.verb)
    using = fence.database_of(job, using)
    now = db.now(using)
    changes = {"cancel_requested_at": Coalesce(F("cancel_requested_at"), now)}
    _update_within(job, event.verb, changes, actor, using, event)
    db.wake_after_commit(using, [stop_asked(job.pk)])
    return copied(job, cancel_requested_at=job.cancel_requested_at or now)


# -- Deletion


def delete_finished(job_ids: Sequence[int], before: datetime, *, using: str) -> int:
    """Delete those of the jobs that have been final since before ``before``, and their events.

    Returns how many. A job that was rerun meanwhile, or that somebody has locked, stays.
    """

    def work() -> int:
        old = (
            Job.objects.using(using)
            .chosen(job_ids, *FINAL)
            .filter(**guards.finished_before(before))
        )
        locked = list(
            db.lock_rows(old.order_by("pk"), skip_locked=True).values_list("pk", flat=True)
        )
        JobEvent.objects.using(using).filter(job_id__in=locked)._raw_delete(using)
        return old.filter(pk__in=locked)._raw_delete(using) or 0  # None, if there are none

    return db.in_transaction(using, work)


# -- What the above have in common


def _apply_one(job: Job, write: Write, actor: str, using: str) -> Job:
    (result,) = fence.apply([(job, Plan(job, (job.pk,), (write,)))], actor, using)
    return result.unwrap()


def _require_running(job: Job, verb: str) -> None:
    if job.state != State.RUNNING:
        raise TransitionNotAllowed(job.pk, verb, job.state)


def _update_within(
    job: Job,
    verb: str,
    changes: dict[str, Any],
    actor: str | None,
    using: str | None,
    event: Write | None = None,
) -> None:
    using = fence.database_of(job, using)
    _require_running(job, verb)
    execution = Job.objects.using(using).matching(job.pk, job.fingerprint)

    def work() -> int:
        matched = execution.update(**changes)
        if matched and event:
            JobEvent.objects.using(using).bulk_create([ledger.event(job, event, actor)])
        return matched

    run = db.in_transaction if event else db.retry_transient
    if not run(using, work):
        raise fence.refuse(job, verb, actor, using)


def _as_error(error: Error | str) -> Error:
    return error if isinstance(error, Error) else Error(error)
