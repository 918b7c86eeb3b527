"""One job and its workers as values, and every atomic write to them as a pure function.

What a write does, on which conditions, and what its caller is told comes from production itself:
``settlement.plan`` and its like, ``guards``, the table of verbs, ``fence.has_traces``,
``broker.compare``, ``StaleRules.verdict``; what SQL does there stands in ``statements``. So a guard
that is patched in production is patched here as well; call ``forget()`` then, since plans are
remembered.

Guards that are a place in a protocol, and no function, are named where they stand; ``without``
drops them. Times are whole seconds since an epoch. A refused write leaves no event here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from jobqueue import broker, fence, guards, sweep
from jobqueue.lifecycle import HELD, RULES, Outcome, Released, State, Verb, is_allowed
from jobqueue.models import EventKind
from jobqueue.settlement import Write, plan_edit, plan_rerun
from jobqueue.sweep import StaleRules
from tests.explorer.statements import (
    apply,
    by_batch,
    by_plan,
    event_of,
    has_event,
    holds,
    planned,
    with_lease,
)
from tests.explorer.statements import forget as forget
from tests.explorer.statements import without as without
from tests.explorer.values import (
    NOT_JUDGED,
    UNKNOWN,
    Answer,
    Held,
    Lease,
    Row,
    World,
    at,
    matches,
)

# -- A job's executor and whoever acts in its stead


def settle(
    world: World, seen: Row, outcome: Outcome, actor: str | None = None, rescue: bool = False
) -> tuple[World, Answer]:
    """Write an outcome decided on ``seen``; without an ``actor`` the write is the owner's."""
    writes = planned(seen, outcome, world.now, actor is None, rescue)
    if not writes:
        return world, Answer.NOT_ALLOWED
    mark = fence.mark_of(seen, actor)
    for write, where in writes:
        if after := apply(world, seen, write, where, actor, mark):
            return after, Answer.APPLIED
    if world.row and actor is None:
        traces = [write for write, _ in writes]
        if fence.has_traces(seen, traces, world.row, lambda where: has_event(world, where)):
            return world, Answer.ALREADY_APPLIED
    return world, Answer.CONFLICT


def start(world: World, seen: Row) -> tuple[World, Answer]:
    """Begin to run a claimed job."""
    if not is_allowed(Verb.START, seen.state):
        return world, Answer.NOT_ALLOWED
    changes = {"state": "running", "attempt": seen.attempt + 1, "attempted_at": world.now}
    write = Write(Verb.START, changes)
    after = apply(world, seen, write, guards.unchanged(seen.fingerprint))
    return (after, Answer.APPLIED) if after else (world, Answer.CONFLICT)


def record_progress(world: World, seen: Row, percent: int) -> tuple[World, Answer]:
    """Say how far a running job has come; the figure never falls."""
    if holds("progress: only while running") and seen.state != State.RUNNING:
        return world, Answer.NOT_ALLOWED
    row = world.row
    if not (row and matches(row, guards.unchanged(seen.fingerprint))):
        return world, Answer.CONFLICT
    figure = max(row.progress, percent) if holds("progress: Greatest") else percent
    return replace(world, row=replace(row, progress=figure)), Answer.APPLIED


def request_cancel(world: World, seen: Row, actor: str) -> tuple[World, Answer]:
    """Ask a running job to stop."""
    if holds("cancel request: only while running") and seen.state != State.RUNNING:
        return world, Answer.NOT_ALLOWED
    row = world.row
    if not (row and matches(row, guards.unchanged(seen.fingerprint))):
        return world, Answer.CONFLICT
    asked_at = world.now if row.cancel_requested_at is None else row.cancel_requested_at
    event = event_of(seen, Write("request cancel", {}, EventKind.CANCEL_REQUESTED), actor)
    row = replace(row, cancel_requested_at=asked_at)
    return replace(world, row=row, events=(*world.events, event)), Answer.APPLIED


# -- Coordinators


def coordinate(
    world: World,
    act: Callable[[World, Row], tuple[World, Answer]],
    expected_version: int | None = None,
) -> tuple[World, Answer]:
    """Act on the row as it is found and locked, if it has the version that the caller saw."""
    if world.row is None:
        return world, Answer.NOT_FOUND
    is_expected = expected_version in (None, world.row.version)
    if holds("coordinator: expected version") and not is_expected:
        return world, Answer.CONFLICT
    return act(world, world.row)


def rerun(world: World, seen: Row, actor: str) -> tuple[World, Answer]:
    """Make a finished job wait again."""
    return by_plan(world, seen, lambda: plan_rerun(seen, at(world.now), ""), actor)


def edit(world: World, seen: Row, actor: str, **changes: int) -> tuple[World, Answer]:
    """Change ``run_after`` or ``max_attempts`` of a queued job."""
    return by_plan(world, seen, lambda: plan_edit(seen, changes, ""), actor)


def delete(world: World, seen: Row, actor: str) -> tuple[World, Answer]:
    """Delete a finished job and its history."""
    if not is_allowed(Verb.DELETE, seen.state):
        return world, Answer.NOT_ALLOWED
    if world.row and matches(world.row, guards.unchanged(seen.fingerprint)):
        return replace(world, row=None, events=()), Answer.APPLIED
    return world, Answer.CONFLICT


# -- Batches chosen by id


def promote(world: World) -> tuple[World, Answer]:
    """Turn the scheduled job, if its time has come, into a waiting one."""
    where = guards.in_states(*RULES[Verb.PROMOTE].sources)
    if holds("due time: promote"):
        where |= guards.due(world.now)
    return by_batch(world, where, {"state": "waiting"})


def claim(world: World, worker_id: str, start: bool = True) -> tuple[World, Row | Answer]:
    """Give the waiting job to a worker; ``LEASE_LOST`` or ``NOTHING`` if it gets none."""
    lease = world.lease_of(worker_id)
    if holds("claim: liveness") and not (lease and matches(lease, guards.alive())):
        return world, Answer.LEASE_LOST
    where = guards.in_states(*RULES[Verb.CLAIM].sources)
    if holds("due time: claim"):
        where |= guards.due(world.now)
    changes = {"state": "claimed", "claimed_by": worker_id, "claimed_at": world.now}
    if start and world.row:
        attempt = world.row.attempt + 1
        changes |= {"state": "running", "attempt": attempt, "attempted_at": world.now}
    after, answer = by_batch(world, where, changes)
    return (after, after.row) if after.row and answer == Answer.APPLIED else (world, answer)


def prune(world: World, before: int) -> tuple[World, Answer]:
    """Delete the job, if it has been final since before ``before``."""
    where = guards.in_states(*RULES[Verb.DELETE].sources) | guards.finished_before(before)
    if world.row and matches(world.row, where):
        return replace(world, row=None, events=()), Answer.APPLIED
    return world, Answer.NOTHING


# -- Workers


def register(world: World, worker_id: str, lease: int = 30) -> World:
    """Announce a worker."""
    return with_lease(world, worker_id, Lease("alive", world.now, lease))


def renew(world: World, worker_id: str) -> tuple[World, Answer]:
    """Renew a lease that still holds."""
    lease = world.lease_of(worker_id)
    is_alive = lease and matches(lease, guards.alive())
    if lease is None or (holds("renewal: only while alive") and not is_alive):
        return world, Answer.LEASE_LOST
    renewed = replace(lease, last_seen_at=world.now)
    return with_lease(world, worker_id, renewed), Answer.APPLIED


def leave(world: World, worker_id: str) -> tuple[World, Answer]:
    """End the lease of a worker that holds nothing any more."""
    lease = world.lease_of(worker_id)
    if not (lease and matches(lease, guards.alive())):
        return world, Answer.NOTHING
    return with_lease(world, worker_id, replace(lease, state="stopped")), Answer.APPLIED


def held_by(world: World, worker_id: str) -> Row | None:
    """Return the job, if the database gives it to this worker."""
    row = world.row
    return row if row and row.state in HELD and row.claimed_by == worker_id else None


def compared(row: Row | None, held: Row | Held | None) -> tuple[Row | None, frozenset[str]]:
    """Compare what the database gives a worker with what it holds.

    Returns the row that it doesn't know of, which is then to be released, and what it is told:
    "cancel", "lost".
    """
    told = frozenset({"cancel"} if row and row.cancel_requested_at is not None else ())
    if held is UNKNOWN:
        return None, told
    mine = {} if held is None else {1: None if held is NOT_JUDGED else held}
    unknown, lost = broker.compare(mine, {1: row} if row else {})
    if lost:
        told = frozenset({"lost"})
    return (row if unknown and holds("reconciliation: unknown rows") else None), told


def reconcile(
    world: World, worker_id: str, held: Row | Held | None
) -> tuple[World, frozenset[str]]:
    """Compare, and release what isn't known, with nobody in between."""
    unknown, told = compared(held_by(world, worker_id), held)
    if unknown:
        world, _ = release_unknown(world, unknown, worker_id)
    return world, told


def release_unknown(world: World, row: Row, worker_id: str) -> tuple[World, Answer]:
    """Release a row whose claim its worker never learned of."""
    return settle(world, row, Released(), actor=worker_id)


def heartbeat(
    world: World, worker_id: str, held: Row | Held | None
) -> tuple[World, frozenset[str] | Answer]:
    """Renew, and reconcile if that was possible."""
    world, answer = renew(world, worker_id)
    if answer == Answer.LEASE_LOST:
        return world, answer
    return reconcile(world, worker_id, held)


# -- Sweeps


def stale_rules(
    now: int, claimed_after: int = 60, running_after: int | None = None, grace: int = 30
) -> StaleRules:
    """Return production's rules, of whole seconds."""
    running_before = None if running_after is None else now - running_after
    return StaleRules(now, now - claimed_after, running_before, grace)


def silent_ids(world: World, rules: StaleRules) -> tuple[str, ...]:
    """Return the workers that look dead: alive by their rows, and silent for too long."""
    alive = [(pk, lease) for pk, lease in world.workers if matches(lease, guards.alive())]
    return tuple(pk for pk, lease in alive if not rules.lives(lease))


def fence_worker(world: World, worker_id: str, cutoff: int) -> tuple[World, Answer]:
    """Declare a worker dead, if it is still alive by its row and silent since ``cutoff``."""
    lease = world.lease_of(worker_id)
    where = guards.alive() | guards.silent_since(cutoff)
    if not (lease and matches(lease, where)):
        return world, Answer.NOTHING
    return with_lease(world, worker_id, replace(lease, state="dead")), Answer.APPLIED


def alive_ids(world: World) -> frozenset[str]:
    """Return the workers with a live row."""
    return frozenset(pk for pk, lease in world.workers if matches(lease, guards.alive()))


def stale_verdict(rules: StaleRules, seen: Row, alive: Collection[str]) -> str | None:
    """Say why a held job is stale, if it is."""
    return rules.verdict(seen, alive)


def rescue(world: World, seen: Row, actor: str = "sweep") -> tuple[World, Answer]:
    """Take back a job that was found stale."""
    outcome = sweep._outcome(seen, "")
    return settle(world, seen, outcome, actor, rescue=True)


def sweep_all(world: World, rules: StaleRules, actor: str = "sweep") -> tuple[World, Answer]:
    """One whole sweep, with nobody in between; the answer is that of its rescue, if any."""
    for worker_id in silent_ids(world, rules):
        lease = dict(world.workers)[worker_id]
        world, _ = fence_worker(world, worker_id, rules.now - lease.lease)
    world, _ = promote(world)
    row = world.row
    if not (row and row.state in HELD and stale_verdict(rules, row, alive_ids(world))):
        return world, Answer.NOTHING
    return rescue(world, row, actor)
