"""The fence: the one compare-and-update through which every job's row is changed.

``transitions`` says what each verb writes; what follows from the answer of the database, one row or
none, is decided here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import router
from django.db.models import F, Q

from jobqueue import db, guards, ledger, signals
from jobqueue.exceptions import TransitionConflict
from jobqueue.lifecycle import Settled, State, work_in
from jobqueue.models import Job, JobEvent
from jobqueue.settlement import Write


@dataclass(frozen=True, slots=True)
class SettleResult:
    """What became of one outcome.

    Attributes:
        job_id: the job's id.
        status: whether it was applied.
        conflict: what kept it out, if it was in conflict.
        found: the job as it was found to be, if it was applied already.
        applied: the job as it was decided on, and what was written, if it was applied now.
    """

    job_id: int
    status: Settled
    conflict: TransitionConflict | None = None
    found: Job | None = None
    applied: tuple[Job, dict[str, Any]] | None = None

    @property
    def state(self) -> str | None:
        """The state that the job is in by this outcome; ``None`` if it isn't."""
        if self.applied:
            return str(self.applied[1].get("state", self.applied[0].state))
        return self.found.state if self.found else None

    @property
    def job(self) -> Job | None:
        """A copy of the job as it now is; ``None`` if the outcome wasn't taken."""
        return _after(*self.applied) if self.applied else self.found

    def unwrap(self) -> Job:
        """Return the job, or raise the conflict."""
        if self.conflict:
            raise self.conflict
        job = self.job
        assert job is not None
        return job


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
    # A job that is there twice is written once, and the other of the two is in conflict with it.
    are_apart = len({job.pk for job, _ in plans}) == len(plans)
    is_batch = len(plans) > 1 and are_apart and db.has_batches(using)
    write_all = _write_in_batches if is_batch else _write_each

    def work() -> dict[int, Write]:
        done = write_all(plans, actor, using)
        events = [
            ledger.event(plans[index][0], done[index], actor)
            for index in sorted(done)
            if done[index].kind
        ]
        if events:
            db.insert_rows(events, using)
        return done

    done = db.in_transaction(using, work)
    results = []
    for index, (job, writes) in enumerate(plans):
        if write := done.get(index):
            changes = {**write.changes, **mark_of(job, actor)}
            results.append(applied(job, write.verb, changes, actor, using))
        else:
            results.append(_unwritten(job, writes, actor, using, quiet))
    waiting = (
        plans[index][0].queue
        for index, write in done.items()
        if write.changes.get("state") == State.WAITING
    )
    db.wake_after_commit(using, map(work_in, waiting))
    return results


def refuse(job: Job, verb: str, actor: str | None, using: str) -> TransitionConflict:
    """Return the conflict of a write that found no row, with its event."""
    conflict = ledger.conflict_of(job, verb, read(job.pk, using))
    ledger.record(job, conflict, actor, using)
    return conflict


def applied(
    job: Job, verb: str, changes: dict[str, Any], actor: str | None, using: str
) -> SettleResult:
    """Return the result of a write that matched, and tell whoever listens once it is committed."""
    changes = {**changes, "version": job.version + 1}
    result = SettleResult(job.pk, Settled.APPLIED, applied=(job, changes))
    # Asked here as well, so that the copy which listeners get is made for them alone.
    if signals.job_transitioned.has_listeners(Job):
        signals.send_after_commit(
            signals.job_transitioned,
            Job,
            using,
            job=result.job,
            verb=verb,
            from_state=job.state,
            actor=actor or job.claimed_by,
        )
    return result


def _after(job: Job, changes: dict[str, Any]) -> Job:
    after = copy.copy(job)
    for name, value in changes.items():
        setattr(after, name, value)
    return after


def mark_of(job: Job, actor: str | None) -> dict[str, int]:
    """Return the mark of the owner's settling write: the version from which it was decided."""
    # Only the owner's: a late owner must not take another's write for its own lost COMMIT.
    return {"settled_version": job.version} if actor is None else {}


def _write_each(
    plans: Sequence[tuple[Job, Sequence[Write]]], actor: str | None, using: str
) -> dict[int, Write]:
    """Return, by its place, the write of each plan that matched, if one did."""
    done = {}
    for index in _in_order_of_ids(plans):
        job, writes = plans[index]
        for write in writes:
            if update(job, {**write.changes, **mark_of(job, actor)}, write.where, using):
                done[index] = write
                break
    return done


def _write_in_batches(
    plans: Sequence[tuple[Job, Sequence[Write]]], actor: str | None, using: str
) -> dict[int, Write]:
    """Do the same in a statement for each group of like writes: the first of each, then others."""
    done: dict[int, Write] = {}
    for place in range(max(len(writes) for _, writes in plans)):
        groups: dict[Any, list[int]] = {}
        for index in _in_order_of_ids(plans):
            job, writes = plans[index]
            if index not in done and place < len(writes):
                groups.setdefault(_kind(job, writes[place]), []).append(index)
        if len(groups) > 1:
            jobs = Job.objects.using(using).filter(pk__in=[job.pk for job, _ in plans])
            list(db.lock_rows(jobs.order_by("pk")).values_list("pk"))
        for group in groups.values():
            met = _update_group([(plans[i][0], plans[i][1][place]) for i in group], actor, using)
            done |= {i: plans[i][1][place] for i in group if plans[i][0].pk in met}
    return done


def _in_order_of_ids(plans: Sequence[tuple[Job, Any]]) -> list[int]:
    """So that two batches never wait for each other crosswise."""
    return sorted(range(len(plans)), key=lambda index: plans[index][0].pk)


def _kind(job: Job, write: Write) -> tuple[Any, ...]:
    """Return what the writes of one statement have in common."""
    nulls = (job.claimed_by is None, job.claimed_at is None, job.attempted_at is None)
    return (*nulls, write.verb, *write.changes, str(write.where) if write.where else "")


def _update_group(group: Sequence[tuple[Job, Write]], actor: str | None, using: str) -> set[int]:
    """Write a group; what all of it has in common goes as a scalar.

    To compare scalars costs nearly nothing; as arrays it would cost a quarter (DESIGN.md, 8).
    """
    (first, write), *_ = group
    changes = [{**write.changes, **mark_of(job, actor)} for job, write in group]
    common: dict[str, Any] = {"version": F("version") + 1}
    each: dict[str, list[Any]] = {}
    for name, value in changes[0].items():
        values = [change[name] for change in changes]
        if _is_one_value(values):
            common[name] = value
        else:
            each[name] = values
    where = guards.unchanged(first.fingerprint)
    match: dict[str, list[Any]] = {"id": [job.pk for job, _ in group]}
    for name in [name for name in where if name in guards.FINGERPRINT]:
        values = [getattr(job, name) for job, _ in group]
        if not _is_one_value(values):
            del where[name]
            match[name] = values
    rows = Job.objects.using(using).alike(where).filter(write.where)
    return db.update_each(rows, match, common, each)


def _is_one_value(values: Sequence[Any]) -> bool:
    """Whether all are one object or one value; as JSON ``True`` is not 1, though equal."""
    first = values[0]
    kind = type(first)
    if kind in (int, str, datetime):
        return all(type(value) is kind and value == first for value in values)
    return all(value is first for value in values)


def _unwritten(
    job: Job, writes: Sequence[Write], actor: str | None, using: str, quiet: bool
) -> SettleResult:
    found = read(job.pk, using)
    if found and actor is None and is_already_applied(job, writes, found, using):
        return SettleResult(job.pk, Settled.ALREADY_APPLIED, found=found)
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
