"""Who may do what next: every step that leads on from a state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from tests.explorer import invariants
from tests.explorer.model import holds
from tests.explorer.values import UNKNOWN, Answer
from tests.explorer.writes import (
    CRASHED,
    DEAD,
    FRESH,
    GONE,
    LONG_AGO,
    NOW,
    OUTCOMES,
    SILENT,
    WORKERS,
    Writes,
)

IDLE: Final = (0, 0, "")
LOST_REPLY: Final = "applied, and the reply is lost"
# What a sweep is about to do: fence a worker, judge a row that it read, write what it judged.
FENCE, JUDGE, WRITE = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far an exploration goes."""

    hands: int = 2
    claims: int | None = None
    acts: int | None = None
    max_attempts: int = 2
    timeout: int | None = 10
    sweeps: int = 2
    workers: int = 2
    progress: bool = True
    forgets: bool = True
    changes_mind: bool = False


class State(NamedTuple):
    """Everything that a next step may depend on, in numbers.

    Attributes:
        row: the job, by number; 0 when it is gone.
        events: the history, by number.
        claims: how many there have been.
        acts: how many the operator still has.
        asked: whether a running job was asked to stop and has not succeeded since.
        accepted: the last attempt of which an outcome was accepted.
        leases: of each worker, its row and process.
        executions: in a worker's hands: whose, the row as seen, and, if the reply of its outcome
            was lost, the verb and what became of the job.
        sweeps: of each, what it is about to do, to what, and why.
        beats: of each worker, the row that its heartbeat is about to release.
    """

    row: int
    events: int
    claims: int
    acts: int
    asked: bool
    accepted: int
    leases: tuple[int, ...]
    executions: tuple[tuple[int, int, str], ...]
    sweeps: tuple[tuple[int, int, str], ...]
    beats: tuple[int, ...]


# Who does what, what the answer is, and the row, by number, that it was decided on; -1 for none.
Label = tuple[str, str, str, int]
# A step: who did what, where it leads, whether a job may count on it, and what it breaks.
Step = tuple[Label, State, bool, str | None]


class Actors:
    """The steps of all actors, from a state."""

    def __init__(self, writes: Writes, bounds: Bounds) -> None:
        self.writes = writes
        self.bounds = bounds

    def steps(self, s: State) -> Iterator[Step]:
        """Yield every step that leads on."""
        yield from self._time(s)
        for worker, lease in enumerate(s.leases):
            yield from self._worker(s, worker, lease)
        for place, execution in enumerate(s.executions):
            yield from self._execution(s, place, *execution)
        for place, sweep in enumerate(s.sweeps):
            if place == 0 or sweep != s.sweeps[0]:
                yield from self._sweep(s, place, *sweep)
        yield from self._promotion(s)
        if s.acts:
            yield from self._operator(s)

    # -- Time

    def _time(self, s: State) -> Iterator[Step]:
        row = self.writes.rows[s.row]
        if row and row.run_after > NOW:
            due = self.writes.row_id(replace(row, run_after=LONG_AGO))
            yield ("time", "the job's time comes", "", -1), s._replace(row=due), True, None
        if row and row.finished_at == NOW and s.acts:
            old = self.writes.row_id(replace(row, finished_at=LONG_AGO))
            yield ("time", "the finished job grows old", "", -1), s._replace(row=old), True, None
        for worker, lease in enumerate(s.leases):
            if lease == FRESH:
                after = s._replace(leases=_put(s.leases, worker, SILENT))
                yield (
                    _plainly(WORKERS[worker], "stalls until its lease has run out"),
                    after,
                    False,
                    None,
                )

    # -- Workers

    def _worker(self, s: State, worker: int, lease: int) -> Iterator[Step]:
        if lease in (CRASHED, GONE):
            return
        name = WORKERS[worker]
        yield from self._heartbeat(s, worker, lease)
        if s.row and (self.bounds.claims is None or s.claims < self.bounds.claims):
            yield from self._claim(s, worker, lease)
        if lease != FRESH:
            ended = s._replace(
                leases=_put(s.leases, worker, CRASHED if lease == SILENT else GONE),
                executions=tuple(e for e in s.executions if e[0] != worker),
                beats=_put(s.beats, worker, 0),
            )
            yield _plainly(name, "crashes"), ended, False, None
        elif not s.beats[worker] and all(e[0] != worker for e in s.executions):
            left = s._replace(leases=_put(s.leases, worker, GONE))
            yield _plainly(name, "leaves"), left, False, None

    def _heartbeat(self, s: State, worker: int, lease: int) -> Iterator[Step]:
        name = WORKERS[worker]
        answer = self.writes.renewal(lease)
        if answer == Answer.APPLIED and lease != FRESH:
            after = s._replace(leases=_put(s.leases, worker, FRESH))
            broken = invariants.DEAD_TOLD if lease == DEAD else None
            yield (name, "renews its lease", answer, -1), after, True, broken
        if s.beats[worker]:
            beat = s.beats[worker]
            result = self.writes.settle(s.row, s.events, beat, "release", name)
            after = s._replace(beats=_put(s.beats, worker, 0))
            label = (name, "releases what it does not know of:", result[2], beat)
            yield self._written(s, after, label, result, True, "release")
        else:
            yield from self._compare(s, worker, lease)

    def _compare(self, s: State, worker: int, lease: int) -> Iterator[Step]:
        mine = [e for e in s.executions if e[0] == worker]
        rows = self.writes.rows
        row = rows[s.row]
        given = s.row if row and row.state in ("claimed", "running") else 0
        if given and row.claimed_by != WORKERS[worker]:
            given = 0
        held: Any = None
        if any(became for _, _, became in mine):
            held = UNKNOWN
        elif mine:
            newest = max(mine, key=lambda e: rows[e[1]].version)
            held = newest[1]
        unknown, told, broken = self.writes.compared(given, held)
        after = s
        if unknown:
            after = after._replace(beats=_put(s.beats, worker, unknown))
        if "lost" in told:
            after = after._replace(executions=_without(s.executions, newest))
        if after is not s or broken:
            said = ", ".join(sorted(told)) or "nothing"
            label = (WORKERS[worker], "compares what it holds, and is told", said, -1)
            yield label, after, lease in (FRESH, SILENT), broken

    def _claim(self, s: State, worker: int, lease: int) -> Iterator[Step]:
        for start in (True, False):
            result = self.writes.claim(s.row, s.events, WORKERS[worker], lease, start)
            if result[2] != Answer.APPLIED:
                continue
            what = "claims and starts" if start else "claims"
            got = s if self.bounds.claims is None else s._replace(claims=s.claims + 1)
            lost = _plainly(WORKERS[worker], f"{what}, and the reply is lost")
            yield self._written(s, got, lost, result, True)
            if len(s.executions) == self.bounds.hands:
                continue
            execution = (worker, result[0], "")
            got = got._replace(executions=(*s.executions, execution))
            yield self._written(s, got, _plainly(WORKERS[worker], what), result, True)

    def _execution(
        self, s: State, place: int, worker: int, seen: int, became: str
    ) -> Iterator[Step]:
        rest = (*s.executions[:place], *s.executions[place + 1 :])
        over = s._replace(executions=rest)
        if not became:
            yield from self._start(s, over, worker, seen)
            yield from self._progress(s, worker, seen)
        # With a timeout no job may count on its handler: it may hang for ever in a live worker.
        counts = self.bounds.timeout is None
        asked, _, became = became.rpartition(">")
        for verb in [asked] if asked and not self.bounds.changes_mind else OUTCOMES:
            result = self.writes.settle(s.row, s.events, seen, verb, None)
            answer = result[2]
            if answer == Answer.NOT_ALLOWED:
                continue
            # Of a job that is gone nobody can tell any more what became of it.
            broken = result[3]
            if s.row:
                row = self.writes.rows[seen]
                broken = broken or invariants.broken_by_answer(verb, row, became or None, answer)
            result = (*result[:3], broken)
            again = "again " if became else ""
            label = (WORKERS[worker], f"{again}wants to {verb}", answer, seen)
            yield self._written(s, over, label, result, counts, verb)
            if answer == Answer.APPLIED:
                doubt = (worker, seen, f"{verb}>{self._became(result[0], verb)}")
                doubt = s._replace(executions=(*rest, doubt))
                yield self._written(s, doubt, (*label[:2], LOST_REPLY, seen), result, counts, verb)

    def _became(self, row: int, verb: str) -> str:
        state = str(self.writes.rows[row].state)
        names = {"retry": "retried", "snooze": "snoozed", "release": "released"}
        return state if state in invariants.FINALS else names.get(verb, state)

    def _start(self, s: State, over: State, worker: int, seen: int) -> Iterator[Step]:
        result = self.writes.start(s.row, s.events, seen)
        if result[2] == Answer.NOT_ALLOWED:
            return
        label = (WORKERS[worker], "starts", result[2], seen)
        if result[2] == Answer.APPLIED:
            yield self._written(s, s, (*label[:2], LOST_REPLY, seen), result, True)
            over = over._replace(executions=(*over.executions, (worker, result[0], "")))
        yield self._written(s, over, label, result, True)

    def _progress(self, s: State, worker: int, seen: int) -> Iterator[Step]:
        if not self.bounds.progress:
            return
        for percent in (0, 1):
            result = self.writes.progress(s.row, s.events, seen, percent)
            if result[2] == Answer.APPLIED:
                label = (WORKERS[worker], f"says that it has come to {percent}:", result[2], seen)
                yield self._written(s, s, label, result, True)

    # -- Sweeps

    def _sweep(self, s: State, place: int, doing: int, what: int, why: str) -> Iterator[Step]:
        name = f"sweep {place + 1}"
        done = s._replace(sweeps=_put(s.sweeps, place, IDLE))
        if doing == FENCE:
            yield from self._fence(s, done, name, what)
        elif doing == JUDGE:
            holder = WORKERS.index(self.writes.rows[what].claimed_by)
            reason = self.writes.verdict(what, s.leases[holder])
            after = s._replace(sweeps=_put(s.sweeps, place, (WRITE, what, reason)))
            label = (name, "judges", reason or "in good hands", what)
            yield label, after if reason else done, True, None
        elif doing == WRITE:
            result = self.writes.rescue(s.row, s.events, what)
            broken = result[3] or self._taken_from_the_living(s, result[2], what, why)
            label = (name, "takes back", result[2], what)
            yield self._written(s, done, label, (*result[:3], broken), True, "retry")
        else:
            yield from self._look(s, place, name)

    def _look(self, s: State, place: int, name: str) -> Iterator[Step]:
        for worker, lease in enumerate(s.leases):
            if lease in (FRESH, SILENT, CRASHED) and self.writes.looks_dead(lease):
                after = s._replace(sweeps=_put(s.sweeps, place, (FENCE, worker, "")))
                yield _plainly(name, f"reads that {WORKERS[worker]} is silent"), after, True, None
        row = self.writes.rows[s.row]
        if row and row.state in invariants.HELD:
            after = s._replace(sweeps=_put(s.sweeps, place, (JUDGE, s.row, "")))
            yield (name, "reads", "", s.row), after, True, None

    def _fence(self, s: State, done: State, name: str, worker: int) -> Iterator[Step]:
        lease = s.leases[worker]
        answer = self.writes.fencing(lease) if holds("sweep: worker fence") else Answer.NOTHING
        broken = None
        if answer == Answer.APPLIED:
            dead = GONE if lease == CRASHED else DEAD
            done = done._replace(leases=_put(s.leases, worker, dead))
            broken = invariants.ONLY_SILENT if lease == FRESH else None
        yield (name, f"declares {WORKERS[worker]} dead", answer, -1), done, True, broken

    def _taken_from_the_living(self, s: State, answer: Answer, seen: int, why: str) -> str | None:
        if answer != Answer.APPLIED:
            return None
        row = self.writes.rows[seen]
        lives = s.leases[WORKERS.index(row.claimed_by)] in (FRESH, SILENT, CRASHED)
        overdue = why == "overdue" and (row.state == "claimed" or row.timeout is not None)
        return invariants.KEEPS if lives and not overdue else None

    # -- Anybody, and the operator

    def _promotion(self, s: State) -> Iterator[Step]:
        result = self.writes.promote(s.row, s.events)
        if result[2] == Answer.APPLIED:
            yield self._written(s, s, ("anybody", "promotes", result[2], s.row), result, True)

    def _operator(self, s: State) -> Iterator[Step]:
        acted = s if self.bounds.acts is None else s._replace(acts=s.acts - 1)
        for verb in (
            *("complete", "fail", "release", "force cancel", "request cancel"),
            *("rerun", "edit", "delete"),
        ):
            result = self.writes.operate(s.row, s.events, verb)
            if result[2] == Answer.APPLIED:
                label = ("operator", f"orders {verb} of", result[2], s.row)
                yield self._written(s, acted, label, result, False, verb)
        result = self.writes.prune(s.row, s.events)
        if result[2] == Answer.APPLIED:
            label = ("prune", "deletes", result[2], s.row)
            yield self._written(s, acted, label, result, False)

    # -- What a write leads to

    def _written(
        self, s: State, after: State, label: Label, result: Any, counts: bool, verb: str = ""
    ) -> Step:
        row, events, _, broken = result
        if row == s.row and events == s.events:
            return label, after, counts, broken
        asked, accepted, ghost = self.writes.once(
            ("ghosts", s.row, row, s.asked, s.accepted, verb),
            *(self._ghosts, s.row, row, s.asked, s.accepted, verb),
        )
        after = after._replace(row=row, events=events, asked=asked, accepted=accepted)
        return label, after, counts, broken or ghost

    def _ghosts(
        self, old: int, new: int, asked: bool, accepted: int, verb: str
    ) -> tuple[bool, int, str | None]:
        """Return what is remembered of the job's past after a write, and what the write breaks."""
        before, after = self.writes.rows[old], self.writes.rows[new]
        if after is None:
            return False, accepted, None
        broken = invariants.broken_by_past(verb, asked, before, after)
        if before.state == "running" and after.state != "running":
            if before.attempt <= accepted:
                broken = broken or invariants.ONE_OUTCOME
            accepted = before.attempt
        if after.state == "completed" or verb == "rerun":
            asked = False
        elif verb == "request cancel":
            asked = True
        return asked, accepted, broken


def _plainly(who: str, what: str) -> Label:
    return who, what, "", -1


def _put(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _without(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    place = values.index(value)
    return (*values[:place], *values[place + 1 :])
