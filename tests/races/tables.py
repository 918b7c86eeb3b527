"""The tables of a real engine, as a state of the model's has them, and what is in them afterwards.

The model has brought each state about by its own writes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final
from unittest import mock

from django.db import connections, transaction

from jobqueue import claim, db
from jobqueue.lifecycle import Cancelled, Completed, Error, Failed, State
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.testing.factories import TASK
from tests.explorer import model
from tests.explorer.model import Lease, Row, World
from tests.explorer.values import COLUMNS, Event
from tests.helpers import ENGINES
from tests.races import cast, schedule
from tests.races.actors import LATER, NEVER, ONE, TWO, Part
from tests.races.oracle import Oracle
from tests.races.schedule import FIRST, Schedule, Stage

# The model's clock during a race; before it, all happened at whole hundreds.
NOW: Final = 10_000
ENGINE_OF: Final = {alias: name for name, alias in ENGINES.items()}
REPLY_LOST: Final = "reply lost"
LAST_ATTEMPT: Final = "running, last attempt"
ASKED: Final = "running, cancel requested"


def _lived(*writes: Callable[[World], Any], **columns: Any) -> World:
    world = World(
        Row(run_after=100, max_attempts=3, backoff=LATER, **columns), workers=((ONE, Lease()),)
    )
    for hours, write in enumerate(writes, 2):
        world, _ = write(World(world.row, world.events, world.workers, now=100 * hours))
    return world


def _settled(outcome: Any) -> Callable[[World], Any]:
    return lambda world: model.settle(world, world.row, outcome)


def _claim(world: World) -> Any:
    return model.claim(world, ONE, start=False)


def _start(world: World) -> Any:
    return model.start(world, world.row)


def _say(world: World) -> Any:
    return model.record_progress(world, world.row, 10)


def _ask(world: World) -> Any:
    return model.request_cancel(world, world.row, "ann")


_RUN: Final = (_claim, _start, _say)
STATES: Final[Mapping[str, World]] = {
    "scheduled": _lived(state=State.SCHEDULED.value),
    "waiting": _lived(),
    "claimed": _lived(_claim),
    "running": _lived(*_RUN),
    ASKED: _lived(*_RUN, _ask),
    LAST_ATTEMPT: _lived(*_RUN, attempt=2),
    "completed": _lived(*_RUN, _settled(Completed("done"))),
    "failed": _lived(*_RUN, _settled(Failed(Error("an error")))),
    "cancelled": _lived(*_RUN, _settled(Cancelled())),
    # The first's own write took effect before, and it was not told.
    REPLY_LOST: _lived(*_RUN),
}


@dataclass(slots=True)
class Scene:
    """What a pair finds: the world, and what each of them has to go by."""

    world: World
    first: Part
    second: Part


@dataclass(slots=True)
class Table:
    """The tables of one engine, two seats, and a clock on which the model's times lie."""

    alias: str
    stage: Stage
    began: datetime
    _written: dict[World, list[tuple[str, Any]]] = field(default_factory=dict)
    _scenes: dict[Any, Scene] = field(default_factory=dict)

    # -- From the model to the tables

    def scene(self, schedule: Schedule) -> Scene:
        """Return what the two of a schedule find."""
        key = schedule.state, schedule.first, schedule.second
        if key not in self._scenes:
            self._scenes[key] = self._scene(schedule)
        return self._scenes[key]

    def _scene(self, schedule: Schedule) -> Scene:
        world = STATES[schedule.state]
        seen = world.row
        assert seen
        actors = [cast.ACTORS[name] for name in (schedule.first, schedule.second)]
        if schedule.state == REPLY_LOST and actors[0].settles:
            program = actors[0].program(self._part(ONE, seen))
            world = _carried_out(program, World(seen, world.events, now=500))
        lease = Lease(lease=30 if any(actor.fences for actor in actors) else NEVER)
        world = World(world.row, world.events, ((ONE, lease), (TWO, lease)), NOW)
        rival = TWO if actors[1].verb == "claim" else ONE
        return Scene(world, self._part(ONE, seen), self._part(rival, seen))

    def reset(self, world: World) -> None:
        """Write this world to the tables, and nothing else; next time by the same statements."""
        claim._known.clear()
        if world not in self._written:
            self._written[world] = statements = []

            def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
                if sql.startswith(("DELETE", "INSERT")):
                    statements.append((sql, params))
                return execute(sql, params, many, context)

            with connections[self.alias].execute_wrapper(note):
                self._write(world)
            return
        statements = self._written[world]
        connection = connections[self.alias]
        with transaction.atomic(using=self.alias), connection.cursor() as cursor:
            if connection.vendor == "postgresql":  # takes them all at once
                sql = "; ".join(sql for sql, _ in statements)
                cursor.execute(sql, [value for _, values in statements for value in values or ()])
                return
            for sql, params in statements:
                cursor.execute(sql, params)

    def _write(self, world: World) -> None:
        with transaction.atomic(using=self.alias):
            for table in (JobEvent, Job, Worker):
                table.objects.using(self.alias).all()._raw_delete(self.alias)
            Worker.objects.using(self.alias).bulk_create(
                Worker(
                    id=pk,
                    host="host",
                    pid=1,
                    queues=["default"],
                    lease=timedelta(seconds=lease.lease),
                    last_seen_at=self._time(lease.last_seen_at),
                    state=lease.state,
                )
                for pk, lease in world.workers
            )
            if world.row:
                Job.objects.using(self.alias).bulk_create([self._job(world.row)])
                JobEvent.objects.using(self.alias).bulk_create(
                    self._event(event) for event in world.events
                )

    def _part(self, worker_id: str, seen: Row) -> Part:
        job = self._job(seen)
        job._state.adding, job._state.db = False, self.alias
        return Part(worker_id, job, seen, self.alias)

    def _job(self, row: Row) -> Job:
        names = COLUMNS - {"backoff", "timeout"}
        columns = {name: getattr(row, name) for name in names}
        times = {name: self._time(value) for name, value in columns.items() if name in TIMES}
        return Job(pk=1, task=TASK, **columns | times)

    def _event(self, event: Event) -> JobEvent:
        detail = {"settled_version": event.detail_settled_version}
        names = ("kind", "version", "actor", "from_state", "to_state")
        columns = {name: getattr(event, name) for name in names}
        return JobEvent(job_id=1, attempt=1, detail=detail, **columns)

    def _time(self, tick: int | None) -> datetime | None:
        return None if tick is None else self.began + timedelta(seconds=tick - NOW)

    def _tick(self, moment: datetime) -> float:
        return NOW + (moment - self.began).total_seconds()

    # -- From the tables to what is compared

    def found(self, *, with_workers: bool) -> dict[str, Any]:
        """Return what the tables hold, with times in the model's terms."""
        row = Job.objects.using(self.alias).filter(pk=1).values(*COMPARED).first()
        events = JobEvent.objects.using(self.alias).exclude(kind=EventKind.CONFLICT)
        lines = events.order_by("pk").values_list(
            "kind", "version", "actor", "from_state", "to_state"
        )
        workers = Worker.objects.using(self.alias).values_list("pk", "state")
        return {
            **_columns(row, self._tick),
            "events": [(*line[:2], line[2].partition(" ")[0], *line[3:]) for line in lines],
            "workers": dict(workers if with_workers else ()),
        }


TIMES: Final = ("claimed_at", "attempted_at", "cancel_requested_at", "run_after", "finished_at")
COMPARED: Final = tuple(sorted(COLUMNS - {"backoff", "timeout"}))


def _columns(row: dict[str, Any] | None, tick: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a row's columns; of times only whether they are set, and whether in this race."""
    if row is None:
        return {"row": None}
    columns = dict(row)
    for name in TIMES:
        if columns[name] is not None:
            moment = tick(columns[name])
            columns[name] = moment if moment in range(0, 1000, 100) else "new"
    return columns


def expected(world: World) -> dict[str, Any]:
    """Return what the tables should hold."""
    row = world.row and {name: getattr(world.row, name) for name in COMPARED}
    return {
        **_columns(row, lambda moment: moment),
        "events": [
            (event.kind, event.version, event.actor, event.from_state, event.to_state)
            for event in world.events
        ],
        "workers": {pk: lease.state for pk, lease in world.workers},
    }


def _carried_out(program: Any, world: World) -> World:
    """Return the world after a program's one write, with nobody beside it."""
    oracle = Oracle(world, {FIRST: program})
    side = oracle.sides[FIRST]
    oracle.follow([schedule.Entry(FIRST, side.wants, "", rows=1)])
    return oracle.world


@contextmanager
def table(alias: str) -> Iterator[Table]:
    """Set the table on one engine. Nobody waits between two tries, and nobody logs."""
    with ExitStack() as stack:
        for module in (db, db.trouble):
            no_waits = mock.patch.object(module, "waits", return_value=itertools.repeat(0.0))
            stack.enter_context(no_waits)
        stack.enter_context(mock.patch.object(logging.getLogger("jobqueue"), "disabled", True))
        yield Table(alias, stack.enter_context(schedule.stage(alias)), db.now(alias))
