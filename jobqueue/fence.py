"""The fence: the one compare-and-update through which every job's row is changed.

``transitions`` says what each verb writes; what follows from the answer of the database, one row or
none, is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

from django.db import router
from django.db.models import F, Q

from jobqueue import db, groups, guards, ledger, signals
from jobqueue.backoff import Drawn
from jobqueue.exceptions import TransitionConflict
from jobqueue.lifecycle import Outcome, Settled, State, work_in
from jobqueue.models import Job, JobEvent
from jobqueue.settlement import Plan, Write, copied, drawn, plan

# Of jobs alike, which write was met by which ids.
Written = tuple[Plan, Write, Sequence[int]]


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
        return after(*self.applied) if self.applied else self.found

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
    expected = guards.unchanged(job.fingerprint)
    run = _updating(tuple(expected), job.state, where, tuple(changes), using)
    new = {f"new_{name}": value for name, value in changes.items()}
    return run(id=job.pk, **expected, **new) == 1


@lru_cache(maxsize=256)
def _updating(
    expected: tuple[str, ...], state: str, where: Q, changed: tuple[str, ...], using: str
) -> db.Update:
    """Return the statement for all jobs of a state of which the same is expected and changed."""
    rows = groups.expecting(expected, state, using).filter(where, pk=db.Blank(Job, "id"))
    new = {name: db.Blank(Job, name, f"new_{name}") for name in changed}
    return db.Update(rows, {"version": F("version") + 1, **new})


def apply(decided: Sequence[tuple[Job, Plan]], actor: str | None, using: str) -> list[SettleResult]:
    """Write many plans in one transaction; of each, the first of its writes that matches.

    Args:
        decided: jobs as they were decided on, each with the plan that it is among.
        actor: who writes; ``None`` for the executions' own worker.
        using: database alias.
    """
    plans = list({id(plan): plan for _, plan in decided}.values())
    done: dict[int, dict[int, tuple[Write, dict[str, Any]]]] = {id(each): {} for each in plans}
    waiting = set()
    for each, way, ids in write(plans, actor, using):
        changes = {**way.changes, **mark_of(each.job, actor), "version": each.job.version + 1}
        done[id(each)].update(dict.fromkeys(ids, (way, changes)))
        waiting |= _work_for(each.job, way)
    db.wake_after_commit(using, waiting)
    results = []
    for job, each in decided:
        if applied := done[id(each)].pop(job.pk, None):
            way, changes = applied
            tell(job, way.verb, changes, actor, using)
            results.append(SettleResult(job.pk, Settled.APPLIED, applied=(job, changes)))
        else:
            results.append(_unwritten(job, each.writes, actor, using))
    return results


def write(plans: Sequence[Plan], actor: str | None, using: str) -> list[Written]:
    """Write plans, each for jobs alike, in one transaction; return what of each met which ids.

    What is missing moved on; nothing is said of it.
    """
    write_all = _write_in_batches if _is_batch(plans, using) else _write_each
    return db.in_transaction(using, lambda: list(write_all(plans, actor, using)))


def _is_batch(plans: Sequence[Plan], using: str) -> bool:
    # A job that is there twice is written once, and the other of the two is in conflict with it.
    ids = [job_id for each in plans for job_id in each.ids]
    return len(ids) > 1 and len(set(ids)) == len(ids) and db.has_batches(using)


def _work_for(job: Job, way: Write) -> set[str]:
    """Return what is to be told to workers who wait for something to do."""
    is_waiting = way.changes.get("state", job.state) == State.WAITING
    return {work_in(way.changes.get("queue", job.queue))} if is_waiting else set()


def rescue(
    items: Sequence[tuple[db.Alike[Job], Outcome]], now: datetime, actor: str, using: str
) -> Iterator[tuple[Job, str, Sequence[int]]]:
    """Write what a sweep decided on jobs alike whose executors are gone.

    Where one statement writes rows and their events, it is a transaction by itself: what was
    written before one that fails stays.

    Yields:
        What is written: the item's job, the state, and the ids of those that are in it by this.
        The others moved on: no event is left of that, since the sweep counts them.
    """
    plans = [
        Plan(job, ids, plan(job, outcome, now, by_owner=False, rescue=True, draws=False))
        for (job, ids), outcome in items
    ]
    is_alone = _is_batch(plans, using) and not db.is_in_transaction(using)
    run = _write_in_batches if is_alone else write
    waiting = set()
    try:
        for jobs, way, ids in run(plans, actor, using):
            waiting |= _work_for(jobs.job, way)
            if signals.job_transitioned.has_listeners(Job):
                changes = {**way.changes, "version": jobs.job.version + 1}
                for job_id in ids:
                    tell(jobs.about(job_id), way.verb, changes, actor, using)
            yield jobs.job, way.changes["state"], ids
    finally:
        db.wake_after_commit(using, waiting)


def refuse(job: Job, verb: str, actor: str | None, using: str) -> TransitionConflict:
    """Return the conflict of a write that found no row, with its event."""
    conflict = ledger.conflict_of(job, verb, read(job.pk, using))
    ledger.record(job, conflict, actor, using)
    return conflict


def tell(job: Job, verb: str, changes: dict[str, Any], actor: str | None, using: str) -> None:
    """Tell whoever listens of a write that matched, once it is committed."""
    # Asked here as well, so that the copy which listeners get is made for them alone.
    if signals.job_transitioned.has_listeners(Job):
        signals.send_after_commit(
            signals.job_transitioned,
            Job,
            using,
            job=after(job, changes),
            verb=verb,
            from_state=job.state,
            actor=actor or job.claimed_by,
        )


def after(job: Job, changes: dict[str, Any]) -> Job:
    """Return a copy of a job as it is by a write."""
    known = {name: value for name, value in changes.items() if type(value) is not Drawn}
    result = copied(job, **known)
    if len(known) < len(changes):
        # The database has drawn it: it is read there when it is asked for.
        result.__dict__.pop("run_after", None)
    return result


def mark_of(job: Job, actor: str | None) -> dict[str, int]:
    """Return the mark of the owner's settling write: the version from which it was decided."""
    # Only the owner's: a late owner must not take another's write for its own lost COMMIT.
    return {"settled_version": job.version} if actor is None else {}


def _write_each(plans: Sequence[Plan], actor: str | None, using: str) -> Iterator[Written]:
    """Write job by job: of each the first of its writes that matches, and its event."""
    events = []
    ids, places = groups.in_order_of_ids([each.ids for each in plans])
    for job_id, index in zip(ids, places, strict=True):
        job = plans[index].about(job_id)
        for way in map(drawn, plans[index].writes):
            if update(job, {**way.changes, **mark_of(job, actor)}, way.where, using):
                yield plans[index], way, [job_id]
                if way.kind:
                    events.append(ledger.event(job, way, actor))
                break
    if events:
        db.insert_rows(events, using)


def _write_in_batches(plans: Sequence[Plan], actor: str | None, using: str) -> Iterator[Written]:
    """Do the same in a statement for each group of like writes: the first of each, then others."""
    left: dict[int, Sequence[int]] = {index: each.ids for index, each in enumerate(plans)}
    for place in range(max(len(each.writes) for each in plans)):
        kinds: dict[Any, list[int]] = {}
        for index in left:
            job, _, writes = plans[index]
            if place < len(writes):
                kinds.setdefault(groups.kind_of(job, writes[place]), []).append(index)
        if len(kinds) > 1 and db.is_in_transaction(using):
            all_ids = [job_id for ids in left.values() for job_id in ids]
            jobs = Job.objects.using(using).filter(pk__in=all_ids)
            list(db.lock_rows(jobs.order_by("pk")).values_list("pk"))
        for group in kinds.values():
            parts = [_part(plans[i], left[i], place, actor) for i in group]
            met = db.retry_transient(using, partial(groups.update, parts, actor, using))
            for index, (_, ids, way, _) in zip(group, parts, strict=True):
                if met.issuperset(ids):
                    yield plans[index], way, left.pop(index)
                elif written := [job_id for job_id in ids if job_id in met]:
                    left[index] = [job_id for job_id in ids if job_id not in met]
                    yield plans[index], way, written


def _part(each: Plan, ids: Sequence[int], place: int, actor: str | None) -> groups.Part:
    way = each.writes[place]
    return groups.Part(each.job, ids, way, {**way.changes, **mark_of(each.job, actor)})


def _unwritten(job: Job, writes: Sequence[Write], actor: str | None, using: str) -> SettleResult:
    found = read(job.pk, using)
    if found and actor is None and is_already_applied(job, writes, found, using):
        return SettleResult(job.pk, Settled.ALREADY_APPLIED, found=found)
    conflict = ledger.conflict_of(job, writes[0].verb, found)
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
