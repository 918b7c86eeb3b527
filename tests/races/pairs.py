"""One race of two actors on a real engine, and what the model says of it.

Each begins from a state that the model has brought about.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tests.explorer.model import World
from tests.races import cast, schedule
from tests.races.actors import Actor
from tests.races.oracle import Oracle, OutOfStep
from tests.races.schedule import COMMIT, FIRST, SECOND, Run, Schedule
from tests.races.tables import (
    ASKED,
    ENGINE_OF,
    LAST_ATTEMPT,
    REPLY_LOST,
    STATES,
    Scene,
    Table,
    expected,
)

# Verbs make no difference between the final states.
ONE_ON_EACH: Final = {"completed": "sqlite", "failed": "postgresql", "cancelled": "mariadb"}


def is_possible(race: Schedule) -> bool:
    """Say whether one of the two can do anything there."""
    if race.state == REPLY_LOST:
        return cast.ACTORS[race.first].settles
    return _acts(race.state, race.first) or _acts(race.state, race.second)


def is_frequent(race: Schedule) -> bool:
    """Say whether this is run on every push; see ``test_every_pair``."""
    first, second = cast.ACTORS[race.first], cast.ACTORS[race.second]
    if not _acts(race.state, race.first) or second.is_twin:
        return False
    if race.state == LAST_ATTEMPT and not (first.counts or second.counts):
        return False
    if ONE_ON_EACH.get(race.state, race.engine) != race.engine:
        return False
    is_special = race.state in (ASKED, LAST_ATTEMPT, REPLY_LOST)
    by_program = race.first.startswith(("worker.", "sweep."))
    if race.engine == "postgresql":
        return not (is_special and first.is_twin) and (by_program or race.state != ASKED)
    if is_special or first.is_twin:
        return False
    return race.engine == "sqlite" or by_program or race.state in ONE_ON_EACH


def _acts(state: str, name: str) -> bool:
    row = STATES[state].row
    return row is not None and row.state in cast.ACTORS[name].sources


# -- A race


def play(table: Table, race: Schedule) -> tuple[Run, list[str]]:
    """Run one schedule; return what happened, and in what it is not what the model says."""
    scene = table.scene(race)
    first, second = cast.ACTORS[race.first], cast.ACTORS[race.second]
    table.reset(scene.world)
    run = table.stage.race(
        lambda: first.call(scene.first), race.point, lambda: second.call(scene.second)
    )
    programs = {FIRST: first.program(scene.first), SECOND: second.program(scene.second)}
    return run, judge(table, scene.world, run, {FIRST: first, SECOND: second}, programs)


def judge(
    table: Table,
    world: World,
    run: Run,
    actors: Mapping[str, Actor],
    programs: Mapping[str, Any],
) -> list[str]:
    """Compare a run with the model's, step by step in the order in which they took effect."""
    oracle = Oracle(world, programs)
    try:
        oracle.follow(run.log)
    except OutOfStep as error:
        ends = run.ended.items()
        return [str(error), *(f"the {who} was told {end.error or 'no error'}" for who, end in ends)]
    faults = []
    for who, actor in actors.items():
        ended = run.ended[who]
        told = actor.answer(ended.value, ended.error)
        wanted = actor.in_its_words(oracle.answers[who])
        if told != wanted:
            faults.append(f"the {who} was told {told!s}, and by the model {wanted!s}")
    can_die = any(actor.fences for actor in actors.values())
    have, want = table.found(with_workers=can_die), expected(oracle.world)
    want["workers"] = {pk: want["workers"].get(pk) for pk in have["workers"]}
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            faults.append(f"{name} is {have.get(name)!r}, and in the model {want.get(name)!r}")
    return faults


@dataclass(frozen=True, slots=True)
class Points:
    """Where a call can stand still, and where it makes a difference by the model."""

    every: tuple[int, ...]
    decisive: tuple[int, ...]


def points_of(table: Table, state: str, name: str) -> Points:
    """Return a call's pause points, found by making it with nobody beside it.

    By the model nothing can come in between but before a statement that carries a step and locks
    or writes, and before COMMIT. SQLite is locked from BEGIN on, which then is the last moment.
    """
    scene = table.scene(Schedule(ENGINE_OF[table.alias], state, name, 0, name))
    actor = cast.ACTORS[name]
    table.reset(scene.world)
    run = table.stage.alone(lambda: actor.call(scene.first))
    oracle = Oracle(scene.world, {FIRST: actor.program(scene.first)})
    try:
        oracle.follow(run.log)
    except OutOfStep as error:
        raise OutOfStep(f"{state} | {name}, with nobody beside it: {error}\n{run}") from None
    sent = [entry for entry in run.log if entry.kind != schedule.ROLLBACK]
    decisive: set[int] = set()
    began = steps = 0
    for point, entry in enumerate(sent, 1):
        if entry.kind == "begin":
            began = point
        elif entry.kind == COMMIT:
            decisive.update([point] if steps else [])
            began = steps = 0
        elif entry.kind.startswith(("lock", "update")) and oracle.carried(entry):
            decisive.add(began or point)
            steps += entry.in_transaction
    return Points(tuple(range(1, len(sent) + 1)), tuple(sorted(decisive)))


def schedules(table: Table, first: str, *, every: bool) -> Iterator[Schedule]:
    """Yield all schedules in which this one stands still: every one, or those of every push.

    One that sends nothing, since it decides by what it holds, is the second at one point only.
    """
    for state in STATES:
        pairs = list(_pairs(ENGINE_OF[table.alias], state, first, every=every))
        if not pairs:
            continue
        found = points_of(table, state, first)
        points = found.every if every else found.decisive
        for pair in pairs:
            for point in points[:1] if _is_silent(table, pair) else points:
                yield replace(pair, point=point)


def firsts(engine: str, *, every: bool) -> list[str]:
    """Return those who stand still in some of an engine's schedules."""
    return [
        first
        for first in cast.ACTORS
        if any(any(_pairs(engine, state, first, every=every)) for state in STATES)
    ]


def _pairs(engine: str, state: str, first: str, *, every: bool) -> Iterator[Schedule]:
    for second in cast.ACTORS:
        pair = Schedule(engine, state, first, 0, second)
        if is_possible(pair) and (every or is_frequent(pair)):
            yield pair


def _is_silent(table: Table, race: Schedule) -> bool:
    program = cast.ACTORS[race.second].program(table.scene(race).second)
    return not Oracle(World(None), {SECOND: program}).sides[SECOND].wants


def solos(table: Table) -> Iterator[tuple[str, Scene]]:
    """Yield each actor in each state in which it can do something."""
    for state, name in itertools.product(STATES, cast.ACTORS):
        if _acts(state, name):
            yield name, table.scene(Schedule("sqlite", state, name, 0, name))
