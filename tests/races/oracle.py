"""What the model says of a race: each atomic step, where the log has the statement that carries it.

A program is a generator: it yields the kind of the statement that carries its next step ("update
job", or several with a bar between them), and is sent a view of the world as that statement found
it. What it does there is seen by the other when the transaction ends, as on every engine here. The
world's clock goes on with every statement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.explorer.model import Row, World
from tests.races.schedule import COMMIT, ROLLBACK, Entry

_LOCKING = ("lock job", "update job", "delete job")


class OutOfStep(AssertionError):
    """Production did not go the way of its program."""


@dataclass(slots=True)
class Side:
    """One of the two: its program, and what its open transaction has changed and locked."""

    who: str
    program: Any
    wants: str = ""
    answer: Any = None
    own: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    has_job: bool = False
    steps: list[Entry] = field(default_factory=list)

    def send(self, view: View | None) -> None:
        """Let the program do its next step, and say what it waits for then."""
        try:
            self.wants = self.program.send(view)
        except StopIteration as end:
            self.wants, self.answer = "", end.value

    def takes(self, entry: Entry) -> bool:
        """Say whether this is the statement that the program waits for."""
        return entry.kind in self.wants.split("|")


class View:
    """What one statement finds, and the door through which its program acts."""

    def __init__(self, oracle: Oracle, side: Side, entry: Entry) -> None:
        self._oracle, self._side, self._entry = oracle, side, entry

    @property
    def world(self) -> World:
        """What was committed, and over it what the own transaction has written."""
        return replace(self._oracle.world, **self._side.own)

    @property
    def kind(self) -> str:
        """What kind of statement this is, for a program that waits for one of several."""
        return self._entry.kind

    @property
    def row(self) -> Row | None:
        """The job's row in it."""
        return self.world.row

    @property
    def is_refused(self) -> bool:
        """Whether the row was somebody else's, and that was an error: this one never waits."""
        if " FOR UPDATE" in self._entry.sql and " NOWAIT" not in self._entry.sql:
            raise OutOfStep(f"this was not to wait for a lock: {self._entry}")
        if self._entry.error and not self._oracle.other(self._side).has_job:
            raise OutOfStep(f"nobody has the job locked, but: {self._entry}")
        return self._entry.error is not None

    @property
    def is_passed_over(self) -> bool:
        """Whether the row was somebody else's, and so not seen."""
        skips = "SKIP LOCKED" in self._entry.sql
        return skips and self._oracle.other(self._side).has_job

    def names(self, ids: Collection[str]) -> str:
        """Return the one of these ids that stands among the statement's parameters."""
        (name,) = [pk for pk in ids if pk in self._entry.params]
        return name

    def do(self, write: Callable[..., tuple[World, Any]], *args: Any) -> Any:
        """Change the world, and return the answer."""
        after, answer = write(self.world, *args)
        self._oracle.write(self._side, after, within=self._entry.in_transaction)
        return answer


class Oracle:
    """Follows a log, step by step."""

    def __init__(self, world: World, programs: Mapping[str, Any]) -> None:
        self.world = world
        self.sides = {who: Side(who, program) for who, program in programs.items()}
        for side in self.sides.values():
            side.send(None)

    @property
    def answers(self) -> dict[str, Any]:
        """What each of them is told."""
        return {who: side.answer for who, side in self.sides.items()}

    def other(self, side: Side) -> Side:
        """Return the one who isn't this one."""
        others = [other for other in self.sides.values() if other is not side]
        return others[0] if others else Side("nobody", None)

    def follow(self, log: Sequence[Entry]) -> None:
        """Take the steps that the log carries, in its order."""
        for entry in _carrying(log):
            self.world = replace(self.world, now=self.world.now + 1)
            side = self.sides[entry.who]
            if entry.kind in (COMMIT, ROLLBACK):
                self._end(side, entry)
                continue
            if side.takes(entry):
                side.steps.append(entry)
                side.send(View(self, side, entry))
            if entry.in_transaction and not entry.error and entry.rows > 0:
                side.has_job = side.has_job or entry.kind in _LOCKING
        for side in self.sides.values():
            if side.wants:
                raise OutOfStep(f"the {side.who} was to {side.wants}, and never did")

    def carried(self, entry: Entry) -> bool:
        """Say whether this statement of the log was one of the steps."""
        return any(entry is step for side in self.sides.values() for step in side.steps)

    def write(self, side: Side, after: World, *, within: bool) -> None:
        """Put what a step changed where it belongs: in the open transaction, or in the world."""
        before = replace(self.world, **side.own)
        names = [name for name in PARTS if getattr(before, name) != getattr(after, name)]
        for name in names:
            side.base.setdefault(name, getattr(self.world, name))
            side.own[name] = getattr(after, name)
        if not within:
            self._publish(side)

    def _end(self, side: Side, entry: Entry) -> None:
        if entry.kind == COMMIT:
            self._publish(side)
        side.own, side.base, side.has_job = {}, {}, False

    def _publish(self, side: Side) -> None:
        for name, value in side.own.items():
            if getattr(self.world, name) != side.base[name]:
                raise OutOfStep(f"the {side.who} wrote {name} while the other was writing it")
            self.world = replace(self.world, **{name: value})
        side.own, side.base = {}, {}


PARTS = ("row", "events", "workers")


def _carrying(log: Sequence[Entry]) -> Iterator[Entry]:
    """Leave out a write that found no row where its transaction then tried another way."""
    for place, entry in enumerate(log):
        if not (
            entry.kind == "update job" and entry.in_transaction and entry.rows == 0
        ) or not _tries_again(entry.who, log[place + 1 :]):
            yield entry


def _tries_again(who: str, rest: Sequence[Entry]) -> bool:
    for entry in rest:
        if entry.who == who and entry.kind in ("update job", COMMIT, ROLLBACK):
            return entry.kind == "update job"
    return False
