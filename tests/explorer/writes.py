"""The model's writes on interned rows and histories, each computed and judged once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from jobqueue import guards
from jobqueue.lifecycle import (
    Cancelled,
    Completed,
    Error,
    Failed,
    Outcome,
    Released,
    Retry,
    Snoozed,
)
from tests.explorer import invariants, model
from tests.explorer.values import Answer, Event, Lease, Row, World, matches

# The clock stands still, the worst that it can do: no two executions can be told apart by it.
NOW: Final = 1000
LATER: Final = NOW + 5
LONG_AGO: Final = 0
LEASE: Final = 30

# A worker as the explorer sees it: its row, and whether its process may still act.
FRESH, SILENT, DEAD, CRASHED, GONE = range(5)
LEASES: Final = (
    Lease("alive", NOW, LEASE),
    Lease("alive", LONG_AGO, LEASE),
    Lease("dead", LONG_AGO, LEASE),
    Lease("alive", LONG_AGO, LEASE),
    Lease("dead", LONG_AGO, LEASE),
)
WORKERS: Final = ("A", "B")
SWAPPED: Final = {"A": "B", "B": "A"}

OUTCOMES: Final[dict[str, Outcome]] = {
    "complete": Completed("done"),
    "fail": Failed(Error("")),
    "retry": Retry(Error("")),
    "snooze": Snoozed(model.at(LATER) - model.at(NOW)),
    "release": Released(),
    "cancel": Cancelled(),
}
PATIENT: Final = model.stale_rules(NOW, claimed_after=60)
IMPATIENT: Final = replace(PATIENT, claimed_before=NOW + 1, now=NOW + 1000)
PROBE: Final = 10**9  # a version that no snapshot of today has, but one of tomorrow may

Result = tuple[int, int, Answer, str | None]


class Writes:
    """Rows and histories by number (row 0: gone), and what each write makes of them."""

    def __init__(self) -> None:
        self.rows: list[Any] = [None]
        self.histories: list[tuple[Event, ...]] = [()]
        self._row_ids: dict[Row | None, int] = {None: 0}
        self._history_ids: dict[tuple[Event, ...], int] = {(): 0}
        self._memo: dict[Any, Any] = {}
        self.answers: set[tuple[str, str]] = set()

    def row_id(self, row: Row | None) -> int:
        number = self._row_ids.get(row)
        if number is None:
            number = self._row_ids[row] = len(self.rows)
            self.rows.append(row)
        return number

    def history_id(self, events: tuple[Event, ...]) -> int:
        number = self._history_ids.get(events)
        if number is None:
            number = self._history_ids[events] = len(self.histories)
            self.histories.append(events)
        return number

    def once(self, key: Any, compute: Callable[..., Any], *args: Any) -> Any:
        """Return what ``compute`` gave for this key before."""
        try:
            return self._memo[key]
        except KeyError:
            value = self._memo[key] = compute(*args)
            return value

    # -- Writes that look at the job alone: of each the row, the history, the answer, what it breaks

    def settle(self, row: int, events: int, seen: int, verb: str, actor: str | None) -> Result:
        key = ("settle", row, events, seen, verb, actor)
        write = lambda w: model.settle(w, self.rows[seen], OUTCOMES[verb], actor)  # noqa: E731
        return self.once(key, self._judged, verb, row, events, seen, write)

    def rescue(self, row: int, events: int, seen: int) -> Result:
        verb = "retry" if self.rows[seen].state == "running" else "release"
        write = lambda w: model.rescue(w, self.rows[seen])  # noqa: E731
        return self.once(
            ("rescue", row, events, seen), self._judged, verb, row, events, seen, write
        )

    def start(self, row: int, events: int, seen: int) -> Result:
        write = lambda w: model.start(w, self.rows[seen])  # noqa: E731
        return self.once(
            ("start", row, events, seen), self._judged, "start", row, events, seen, write
        )

    def progress(self, row: int, events: int, seen: int, percent: int) -> Result:
        key = ("progress", row, events, seen, percent)
        write = lambda w: model.record_progress(w, self.rows[seen], percent)  # noqa: E731
        return self.once(key, self._judged, "progress", row, events, seen, write)

    def promote(self, row: int, events: int) -> Result:
        return self.once(
            ("promote", row, events), self._judged, "promote", row, events, row, model.promote
        )

    def claim(self, row: int, events: int, worker: str, lease: int, start: bool) -> Result:
        def write(world: World) -> tuple[World, Answer]:
            world = replace(world, workers=((worker, LEASES[lease]),))
            after, got = model.claim(world, worker, start)
            return (after, Answer.APPLIED) if isinstance(got, Row) else (after, got)

        def judged() -> Result:
            result = self._judged("claim", row, events, row, write)
            if result[2] == Answer.APPLIED and lease not in (FRESH, SILENT, CRASHED):
                return (*result[:3], invariants.LIVE_CLAIM)
            return result

        return self.once(("claim", row, events, worker, lease, start), judged)

    def operate(self, row: int, events: int, verb: str) -> Result:
        """An operator's verb on the row as found, and on a page that is out of date."""
        return self.once(("operate", row, events, verb), self._operate, row, events, verb)

    def _operate(self, row: int, events: int, verb: str) -> Result:
        act = _OPERATOR[verb]
        world = self._world(row, events)
        name = "cancel" if verb == "force cancel" else verb
        result = self._judged(name, row, events, row, lambda w: model.coordinate(w, act))
        if result[2] == Answer.APPLIED:
            stale = self.rows[row].version - 1
            _, answer = model.coordinate(world, act, expected_version=stale)
            if answer != Answer.CONFLICT:
                return (*result[:3], invariants.EXPECTED)
        return result

    def prune(self, row: int, events: int) -> Result:
        def judged() -> Result:
            result = self._judged("delete", row, events, row, lambda w: model.prune(w, NOW))
            if result[2] == Answer.APPLIED and self.rows[row].finished_at != LONG_AGO:
                return (*result[:3], invariants.OLD)
            return result

        return self.once(("prune", row, events), judged)

    # -- Writes to a worker's row, and questions

    def renewal(self, lease: int) -> Answer:
        world = World(None, workers=(("A", LEASES[lease]),), now=NOW)
        return self.once(("renew", lease), lambda: model.renew(world, "A")[1])

    def fencing(self, lease: int) -> Answer:
        world = World(None, workers=(("A", LEASES[lease]),), now=NOW)
        fence = lambda: model.fence_worker(world, "A", NOW - LEASE)[1]  # noqa: E731
        return self.once(("fence", lease), fence)

    def looks_dead(self, lease: int) -> bool:
        world = World(None, workers=(("A", LEASES[lease]),), now=NOW)
        return self.once(("silent", lease), lambda: bool(model.silent_ids(world, PATIENT)))

    def verdict(self, seen: int, lease: int) -> str:
        """Return why a sweep would take the job: "gone", "overdue" or not at all."""
        return self.once(("verdict", seen, lease), self._verdict, seen, lease)

    def _verdict(self, seen: int, lease: int) -> str:
        row = self.rows[seen]
        world = World(None, workers=((row.claimed_by, LEASES[lease]),), now=NOW)
        alive = model.alive_ids(world)
        if not (model.holds("sweep: worker fence") and model.holds("sweep: worker first")):
            alive -= set(model.silent_ids(world, PATIENT))
        if model.stale_verdict(PATIENT, row, alive):
            return "gone"
        return "overdue" if model.stale_verdict(IMPATIENT, row, alive) else ""

    def compared(self, given: int, held: Any) -> tuple[int, frozenset[str], str | None]:
        """Return the row to be released, what the worker is told, and what that breaks."""
        return self.once(("compare", given, held), self._compared, given, held)

    def _compared(self, given: int, held: Any) -> tuple[int, frozenset[str], str | None]:
        mine = self.rows[held] if isinstance(held, int) else held
        unknown, told = model.compared(self.rows[given], mine)
        broken = None
        if isinstance(mine, Row):
            keeps = bool(given) and mine.version == self.rows[given].version
            if keeps == ("lost" in told) or (keeps and unknown):
                broken = invariants.LOST_TOLD
        return self.row_id(unknown), told, broken

    # -- One write, judged

    def _world(self, row: int, events: int) -> World:
        return World(self.rows[row], self.histories[events], now=NOW)

    def _judged(
        self,
        verb: str,
        row: int,
        events: int,
        seen: int,
        write: Callable[[World], tuple[World, Answer]],
    ) -> Result:
        before = self._world(row, events)
        after, answer = write(before)
        self.answers.add((verb, answer))
        broken = None
        if answer == Answer.APPLIED and before.row:
            if self.rows[seen].version != before.row.version:
                broken = invariants.STALE_WRITE
            else:
                broken = invariants.broken_by_write(verb, before.row, after.row, NOW)
        elif after != before:
            broken = invariants.STALE_WRITE
        return self.row_id(after.row), self.history_id(after.events), answer, broken

    # -- What of the past may still matter

    def is_refused(self, row: int, events: int, seen: int) -> bool:
        """Whether whatever its executor decides on what it saw is refused, now and for ever."""
        return self.once(("refused", row, events, seen), self._is_refused, row, events, seen)

    def _is_refused(self, row: int, events: int, seen: int) -> bool:
        answers = {self.settle(row, events, seen, verb, None)[2] for verb in OUTCOMES}
        answers.add(self.start(row, events, seen)[2])
        answers |= {self.progress(row, events, seen, percent)[2] for percent in (0, 1)}
        # Nor may a trace that is yet to be left, and has a later version, be taken for its own.
        version, owner = self.rows[seen].version, self.rows[seen].claimed_by
        settled = Event("released", PROBE, owner, None, "running", "waiting")
        rerun = Event("rerun", PROBE, "operator", PROBE, "completed", "waiting")
        return answers <= {Answer.CONFLICT, Answer.NOT_ALLOWED} and not (
            guards.is_settled_from(PROBE, version)
            or matches(settled, guards.settling_event(version, owner, _SETTLING_KINDS))
            or matches(rerun, guards.rerun_event(version, "completed"))
        )

    def asked_for(self, event: Event, owners: frozenset[tuple[int, str]]) -> bool:
        """Whether a live or later execution's lookup for its own write may find this event."""
        return self.once(("event", event, owners), _asked_for, event, owners)


def _asked_for(event: Event, owners: frozenset[tuple[int, str]]) -> bool:
    for version, owner in owners | {(PROBE, worker) for worker in WORKERS}:
        settling = guards.settling_event(version, owner, _SETTLING_KINDS)
        if matches(event, settling) or matches(event, guards.rerun_event(version, "completed")):
            return True
    return False


_SETTLING_KINDS: Final = {"failed", "retried", "snoozed", "released", "cancelled"}

Act = Callable[[World, Row], tuple[World, Answer]]


def _settling(verb: str) -> Act:
    return lambda world, seen: model.settle(world, seen, OUTCOMES[verb], "operator")


_OPERATOR: Final[dict[str, Act]] = {
    **{verb: _settling(verb) for verb in ("complete", "fail", "release")},
    "force cancel": _settling("cancel"),
    "request cancel": lambda world, seen: model.request_cancel(world, seen, "operator"),
    "rerun": lambda world, seen: model.rerun(world, seen, "operator"),
    "edit": lambda world, seen: model.edit(world, seen, "operator", run_after=LATER),
    "delete": lambda world, seen: model.delete(world, seen, "operator"),
}
