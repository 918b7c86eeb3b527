"""The fence: the one compare-and-update through which every job's row is changed.

``transitions`` says what each verb writes; what follows from the answer of the database, one row or
none, is decided here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from django.db import router
from django.db.models import F, Q

from jobqueue import db, guards, ledger, signals
from jobqueue.exceptions import TransitionConflict
from jobqueue.lifecycle import Settled
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
    # The version last: MySQL assigns from left to right, and the mark is the old one.
    return fence.update(**changes, version=F("version") + 1) == 1


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
    write_all = _write_in_batches if db.has_batches(using) and len(plans) > 1 else _write_each

    def work() -> dict[int, Write]:
        done = write_all(plans, actor is None, using)
        events = [
            ledger.event(plans[index][0], done[index], actor)
            for index in sorted(done)
            if done[index].kind
        ]
        if events:
            JobEvent.objects.using(using).bulk_create(events)
        return done

    done = db.in_transaction(using, work)
    return [
        _result(job, writes, done.get(index), actor, using, quiet)
        for index, (job, writes) in enumerate(plans)
    ]


def refuse(job: Job, verb: str, actor: str | None, using: str) -> TransitionConflict:
    """Return the conflict of a write that found no row, with its event."""
    conflict = ledger.conflict_of(job, verb, read(job.pk, using))
    ledger.record(job, conflict, actor, using)
    return conflict


def announce(
    job: Job, verb: str, changes: dict[str, Any], actor: str | None, using: str
) -> SettleResult:
    """Tell whoever listens of a write, once it is committed, and return it as applied."""
    result = SettleResult(job.pk, Settled.APPLIED, applied=(job, changes))
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
    after.version = job.version + 1
    return after


# Only the owner's: a late owner must not take another's write for its own lost COMMIT.
_MARK: Final = {"settled_version": F("version")}


def _write_each(
    plans: Sequence[tuple[Job, Sequence[Write]]], by_owner: bool, using: str
) -> dict[int, Write]:
    """Return, by its place, the write of each plan that matched, if one did."""
    done = {}
    mark = _MARK if by_owner else {}
    for index in _in_order_of_ids(plans, range(len(plans))):
        job, writes = plans[index]
        for write in writes:
            if update(job, {**write.changes, **mark}, write.where, using):
                done[index] = write
                break
    return done


def _write_in_batches(
    plans: Sequence[tuple[Job, Sequence[Write]]], by_owner: bool, using: str
) -> dict[int, Write]:
    """Do the same in one statement for each group of like writes: the first of each, then the next.

    What a group has in common is compared as scalars, which costs nearly nothing; as arrays it
    would cost a quarter (DESIGN.md, section 8).
    """
    done: dict[int, Write] = {}
    tries = max(len(writes) for _, writes in plans)
    for place in range(tries):
        groups: dict[Any, list[int]] = {}
        for index, (job, writes) in enumerate(plans):
            if index not in done and place < len(writes):
                groups.setdefault(_kind(job, writes[place]), []).append(index)
        for group in groups.values():
            members = _in_order_of_ids(plans, group)
            met = _update_group(
                [(plans[i][0], plans[i][1][place]) for i in members], by_owner, using
            )
            done |= {i: plans[i][1][place] for i in members if plans[i][0].pk in met}
    return done


def _in_order_of_ids(plans: Sequence[tuple[Job, Any]], indexes: Iterable[int]) -> list[int]:
    """So that two batches never wait for each other crosswise."""
    return sorted(indexes, key=lambda index: plans[index][0].pk)


def _kind(job: Job, write: Write) -> tuple[Any, ...]:
    """Return what the writes of one statement have in common."""
    fingerprint = replace(job.fingerprint, version=0)
    return (fingerprint, write.verb, tuple(write.changes), str(write.where))


def _update_group(group: Sequence[tuple[Job, Write]], by_owner: bool, using: str) -> set[int]:
    (job, first), *_ = group
    common: dict[str, Any] = {"version": F("version") + 1, **(_MARK if by_owner else {})}
    each: dict[str, list[Any]] = {}
    for name, value in first.changes.items():
        values = [write.changes[name] for _, write in group]
        # The same object, not an equal one: True and 1 are equal, and not the same as JSON.
        if all(other is value for other in values):
            common[name] = value
        else:
            each[name] = values
    where = guards.unchanged(job.fingerprint)
    match = {"id": [job.pk for job, _ in group]}
    if where.pop("version", None) is not None:
        match["version"] = [job.version for job, _ in group]
    rows = Job.objects.using(using).alike(where).filter(first.where)
    return db.update_each(rows, match, common, each)


def _result(
    job: Job,
    writes: Sequence[Write],
    done: Write | None,
    actor: str | None,
    using: str,
    quiet: bool,
) -> SettleResult:
    if done:
        changes = done.changes
        if actor is None:
            changes = {**changes, "settled_version": job.version}
        return announce(job, done.verb, changes, actor, using)
    found = read(job.pk, using)
    if found and actor is None and is_already_applied(job, writes, found, using):
        return SettleResult(job.pk, Settled.ALREADY_APPLIED, found=found)
    conflict = ledger.conflict_of(job, writes[0].verb, found)
    if not quiet:
        ledger.record(job, conflict, actor, using)
    return SettleResult(job.pk, Settled.CONFLICT, conflict=conflict)


def is_already_applied(job: Job, writes: Sequence[Write], found: Job, using: str) -> bool:
    """Say whether the owner's same write took effect before, and only COMMIT's reply was lost.

    A completion leaves no event; one that was rerun since is remembered by that event.
    """
    events = JobEvent.objects.using(using).filter(job_id=job.pk)
    kinds = [write.kind for write in writes if write.kind]
    if kinds:
        mine = guards.settling_event(job.version, job.claimed_by, kinds)
        return events.filter(**mine).exists()
    (completion,) = writes
    if guards.is_settled_from(found.settled_version, job.version):
        names = ("state", "result")
        return all(getattr(found, name) == completion.changes[name] for name in names)
    rerun = guards.rerun_event(job.version, completion.changes["state"])
    return events.filter(**rerun).exists()
