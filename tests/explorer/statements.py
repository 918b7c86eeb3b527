"""What SQL does, on values: compare a row with a condition, raise the version, put columns there.

The conditions are production's own; guards that are a place in a protocol, and no function, are
named where they stand, here and in ``model``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import cache
from typing import Any

from jobqueue import guards
from jobqueue.exceptions import TransitionNotAllowed
from jobqueue.guards import Where
from jobqueue.lifecycle import Outcome
from jobqueue.settlement import Write, plan
from tests.explorer.values import (
    COLUMNS,
    Answer,
    Event,
    Lease,
    Row,
    World,
    at,
    matches,
    tick,
)

# -- Guards that are no function, and what is remembered

_dropped: set[str] = set()


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Drop guards that have their place here, by name."""
    _dropped.update(names)
    forget()
    try:
        yield
    finally:
        _dropped.difference_update(names)
        forget()


def holds(name: str) -> bool:
    """Say whether the guard of this name stands."""
    return name not in _dropped


def forget() -> None:
    """Forget all plans: to be called after each patch of production."""
    planned.cache_clear()


# -- Writes


def has_event(world: World, where: Where) -> bool:
    return any(matches(event, where) for event in world.events)


@cache
def planned(
    seen: Row, outcome: Outcome, now: int, by_owner: bool, rescue: bool
) -> tuple[tuple[Write, Where], ...]:
    """Return production's writes, each with all its conditions; none if the verb isn't allowed."""
    try:
        writes = plan(seen, outcome, at(now), by_owner=by_owner, rescue=rescue)
    except TransitionNotAllowed:
        return ()
    return tuple((_in_columns(write), _conditions(seen, write)) for write in writes)


def _conditions(seen: Row, write: Write) -> Where:
    own = write.where
    assert (own.connector, own.negated) == ("AND", False), own
    return guards.unchanged(seen.fingerprint) | dict(own.children)


def _in_columns(write: Write) -> Write:
    """Return a write of the columns and times that the model has."""
    changes = {
        name: tick(value) if isinstance(value, datetime) else value
        for name, value in write.changes.items()
        if name in COLUMNS
    }
    if "state" in changes:
        changes["state"] = str(changes["state"])
    return replace(write, changes=changes)


def apply(
    world: World,
    seen: Row,
    write: Write,
    where: Where,
    actor: str | None = None,
    mark: Mapping[str, Any] = {},
) -> World | None:
    """Return the world after a write, ``None`` if its conditions find no row."""
    if not (world.row and matches(world.row, where)):
        return None
    row = replace(world.row, **write.changes, **mark, version=_next(world.row))
    events = (*world.events, event_of(seen, write, actor)) if write.kind else world.events
    return replace(world, row=row, events=events)


def _next(row: Row) -> int:
    return row.version + 1 if holds("fence: version rises") else row.version


def event_of(seen: Row, write: Write, actor: str | None) -> Event:
    """The event as ``ledger.event`` has it."""
    return Event(
        kind=str(write.kind),
        version=seen.version,
        actor=actor or seen.claimed_by or "",
        detail_settled_version=write.detail.get("settled_version"),
        from_state=seen.state,
        to_state=write.changes.get("state", seen.state),
    )


def by_plan(
    world: World, seen: Row, decide: Callable[[], Write], actor: str
) -> tuple[World, Answer]:
    try:
        write = _in_columns(decide())
    except TransitionNotAllowed:
        return world, Answer.NOT_ALLOWED
    after = apply(world, seen, write, _conditions(seen, write), actor)
    return (after, Answer.APPLIED) if after else (world, Answer.CONFLICT)


def by_batch(world: World, where: Where, changes: Where) -> tuple[World, Answer]:
    row = world.row
    if not (row and matches(row, where)):
        return world, Answer.NOTHING
    row = replace(row, **changes, version=_next(row))
    return replace(world, row=row), Answer.APPLIED


def with_lease(world: World, worker_id: str, lease: Lease) -> World:
    return replace(world, workers=tuple(sorted({**dict(world.workers), worker_id: lease}.items())))
