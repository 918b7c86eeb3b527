"""The fence: the one compare-and-update through which every job's row is changed.

``transitions`` says what each verb writes; what follows from the answer of the database, one row or
none, is decided here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.db import router
from django.db.models import F, Q

from jobqueue import db, guards, ledger, signals
from jobqueue.exceptions import TransitionConflict
from jobqueue.lifecycle import Settled
from jobqueue.models import Job, JobEvent
from jobqueue.settlement import Write


@dataclass(frozen=True, slots=True)
class SettleResult:
    """What became of one outcome: ``job`` as it now is, or the ``conflict`` that kept it out."""

    job_id: int
    status: Settled
    job: Job | None = None
    conflict: TransitionConflict | None = None

    def unwrap(self) -> Job:
        """Return the job, or raise the conflict."""
        if self.conflict:
            raise self.conflict
        assert self.job is not None
        return self.job


def database_of(job: Job, using: str | None) -> str:
    """The alias to write to: the one named, or the router's for this job.

    That isn't always the one the job was read from, which may be a replica.
    """
    return using or router.db_for_write(Job, instance=job)


def read(job_id: int, using: str) -> Job | None:
    """Return the job as it now is, ``None`` if it is gone."""
    return Job.objects.using(using).filter(pk=job_id).first()


def update(job: Job, changes: dict[str, Any], where: Q, using: str) -> bool:
    """Write ``changes`` and the next version, if the row is what ``job`` says; say whether it was.

    What counts is rows matched, not rows changed: Django asks MySQL for those (FOUND_ROWS).
    """
    fence = Job.objects.using(using).matching(job.pk, job.fingerprint).filter(where)
    return fence.update(version=F("version") + 1, **changes) == 1


def apply(
    plans: Sequence[tuple[Job, Sequence[Write]]],
    actor: str | None,
    using: str,
    *,
    quiet: bool = False,
) -> list[SettleResult]:
    """Write many plans in one transaction; of each, the first of its writes that matches.

    Args:
        plans: jobs as they were decided on, and the ways to write what was decided.
        actor: who writes; ``None`` for the executions' own worker.
        using: database alias.
        quiet: leave no event of a refused write; somebody else counts it.
    """
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
    return [
        _result(job, writes, done[index], actor, using, quiet)
        for index, (job, writes) in enumerate(plans)
    ]


def refuse(job: Job, verb: str, actor: str | None, using: str) -> TransitionConflict:
    """Return the conflict of a write that found no row, with its event."""
    conflict = ledger.conflict_of(job, verb, read(job.pk, using))
    ledger.record(job, conflict, actor, using)
    return conflict


def announce(job: Job, write: Write, actor: str | None, using: str) -> Job:
    """Return the job as it now is, and tell whoever listens once that is committed."""
    after = copy.copy(job)
    for name, value in write.changes.items():
        setattr(after, name, value)
    after.version = job.version + 1
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


def mark_of(job: Job, actor: str | None) -> dict[str, int]:
    """Return the mark of the owner's settling write: the version from which it was decided."""
    # Only the owner's: a late owner must not take another's write for its own lost COMMIT.
    return {"settled_version": job.version} if actor is None else {}


def _write(job: Job, writes: Sequence[Write], actor: str | None, using: str) -> Write | None:
    """Return the write that matched, with all that it changed, if any did."""
    for write in writes:
        changes = {**write.changes, **mark_of(job, actor)}
        if update(job, changes, write.where, using):
            return replace(write, changes=changes)
    return None


def _result(
    job: Job,
    writes: Sequence[Write],
    done: Write | None,
    actor: str | None,
    using: str,
    quiet: bool,
) -> SettleResult:
    if done:
        return SettleResult(job.pk, Settled.APPLIED, job=announce(job, done, actor, using))
    found = read(job.pk, using)
    if found and actor is None and is_already_applied(job, writes, found, using):
        return SettleResult(job.pk, Settled.ALREADY_APPLIED, job=found)
    conflict = ledger.conflict_of(job, writes[0].verb, found)
    if not quiet:
        ledger.record(job, conflict, actor, using)
    return SettleResult(job.pk, Settled.CONFLICT, conflict=conflict)


def is_already_applied(job: Job, writes: Sequence[Write], found: Job, using: str) -> bool:
    """Say whether the owner's same write took effect before, and only COMMIT's reply was lost."""
    events = JobEvent.objects.using(using).filter(job_id=job.pk)
    return has_traces(job, writes, found, lambda where: events.filter(**where).exists())


def has_traces(
    job: Job, writes: Sequence[Write], found: Job, has_event: Callable[[guards.Where], bool]
) -> bool:
    """Say whether the owner's write left its traces on the job as found, or in its history.

    A completion leaves no event; one that was rerun since is remembered by that event.
    """
    kinds = [write.kind for write in writes if write.kind]
    if kinds:
        return has_event(guards.settling_event(job.version, job.claimed_by, kinds))
    (completion,) = writes
    # The mark outlives a release; a completion is the last that happens before a rerun.
    is_next = found.version == job.version + 1
    is_settled = is_next and guards.is_settled_from(found.settled_version, job.version)
    if is_settled and guards.is_same_claim(found, job):
        names = ("state", "result")
        return all(getattr(found, name) == completion.changes[name] for name in names)
    return has_event(guards.rerun_event(job.version, completion.changes["state"]))
