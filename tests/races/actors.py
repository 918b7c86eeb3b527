"""Who takes part in the races of pairs: what each calls, and the same steps in the model.

There is one job, number 1. Workers act on the copy that they hold, read before anybody acted; all
others read for themselves. A program names the statements that carry its steps (see ``oracle``):
what lies between two of them is one atomic write, and that is its claim about production.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from django.db import connections

from jobqueue import broker, coordinator, db
from jobqueue.exceptions import (
    JobBusy,
    JobNotFound,
    LeaseLost,
    TransitionConflict,
    TransitionNotAllowed,
)
from jobqueue.lifecycle import (
    HELD,
    Cancelled,
    Completed,
    Outcome,
    Released,
    Report,
    State,
)
from jobqueue.models import Job
from jobqueue.sweep import SweepReport
from tests.explorer import model
from tests.explorer.model import Answer, Row
from tests.races.oracle import View

ONE, TWO = "one:1:1", "two:2:2"
# In seconds; whatever was there before the race is older than this, and nothing in it is.
OVERDUE = 60
NEVER = 10**6
LATER = 3600
BUSY = "busy"

Program = Generator[str, View, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """What an actor has to go by: its worker's id, its copy of the job, and the database."""

    worker_id: str
    job: Job
    seen: Row
    alias: str


@dataclass(frozen=True, slots=True)
class Actor:
    """One verb in somebody's hands: in production, in the model, and when it can do anything."""

    verb: str
    sources: frozenset[State]
    call: Callable[[Part], Any]
    program: Callable[[Part], Program]
    told: Callable[[Any], Any] = lambda value: Answer.APPLIED
    # An executor's outcome, which is written again when the reply to it was lost.
    settles: bool = False
    # It is told no more than that the outcome is written: by this call, or by the one before.
    is_vague: bool = False
    # It declares silent workers dead.
    fences: bool = False
    # It asks whether the budget is spent.
    counts: bool = False
    # It sends what another actor sends, by another function.
    is_twin: bool = False

    def answer(self, value: Any, error: Exception | None) -> Any:
        """Return what the caller was told, in the model's words."""
        if error is None:
            return self.told(value)
        for kind, answer in _ERRORS.items():
            if isinstance(error, kind):
                return answer
        return f"{type(error).__name__}: {error}"

    def in_its_words(self, answer: Any) -> Any:
        """Return the model's answer as far as the caller is told it."""
        if self.is_vague and answer == Answer.ALREADY_APPLIED:
            return Answer.APPLIED
        return answer


_ERRORS: Mapping[type[Exception], str] = {
    TransitionNotAllowed: Answer.NOT_ALLOWED,
    TransitionConflict: Answer.CONFLICT,
    JobNotFound: Answer.NOT_FOUND,
    LeaseLost: Answer.LEASE_LOST,
    JobBusy: BUSY,
}

# -- What they do in the model


def settling(outcome: Outcome) -> Callable[[Part], Program]:
    """The owner writes; on no row it looks whether it had written this before."""

    def program(part: Part) -> Program:
        _, answer = model.settle(model.World(part.seen), part.seen, outcome)
        if answer == Answer.NOT_ALLOWED:
            return answer
        view = yield "update job"
        if view.do(model.settle, part.seen, outcome) == Answer.APPLIED:
            return Answer.APPLIED
        view = yield "read job"
        if view.row is None:
            return Answer.CONFLICT
        if isinstance(outcome, Completed) and view.row.settled_version == part.seen.version:
            return view.do(model.settle, part.seen, outcome)
        view = yield "read jobevent"
        return view.do(model.settle, part.seen, outcome)

    return program


def in_one_write(
    write: Callable[..., Any], *args: Any, kind: str = "update job"
) -> Callable[[Part], Program]:
    """One fenced statement decides."""

    def program(part: Part) -> Program:
        _, answer = write(model.World(part.seen), part.seen, *args)
        if answer == Answer.NOT_ALLOWED:
            return answer
        view = yield kind
        return view.do(write, part.seen, *args)

    return program


def in_a_block(part: Part) -> Program:
    """Report and complete in one transaction: its first write that matches has the row."""
    if part.seen.state != State.RUNNING:
        return Answer.NOT_ALLOWED
    view = yield "update job"
    if view.do(model.record_progress, part.seen, 70) != Answer.APPLIED:
        return Answer.CONFLICT
    view.do(model.settle, part.seen, Completed("done"))
    return Answer.APPLIED


def coordinating(write: Callable[..., Any]) -> Callable[[Part], Program]:
    """The row is locked where it is read, so all is one step; or it is somebody else's."""

    def program(part: Part) -> Program:
        for _ in range(coordinator.TRIES):
            view = yield "lock job"
            if not view.is_refused:
                return view.do(model.coordinate, write)
        return BUSY

    return program


def on_a_page(part: Part) -> Program:
    """An operator who doesn't lock: what was read is compared as it is written."""
    view = yield "read job|lock job"
    seen = view.row
    if seen is None:
        return Answer.NOT_FOUND
    if seen.version != part.seen.version:
        return Answer.CONFLICT
    _, answer = model.settle(model.World(seen), seen, Cancelled(), "ann")
    if answer == Answer.NOT_ALLOWED:
        return answer
    view = yield "update job"
    return view.do(model.settle, seen, Cancelled(), "ann")


def promoting(part: Part) -> Program:
    """Look whether there is anything, then take the rows that nobody else has."""
    view = yield "read job"
    if model.promote(view.world)[1] == Answer.NOTHING:
        return Answer.NOTHING
    view = yield "lock job"
    answer = Answer.NOTHING if view.is_passed_over else view.do(model.promote)
    if answer == Answer.APPLIED:
        yield "update job"
    return answer


def claiming(*, start: bool) -> Callable[[Part], Program]:
    """Look at the lease; promote, if something was due; take the rows that nobody else has."""

    def program(part: Part) -> Program:
        view = yield "read worker"
        if part.worker_id not in model.alive_ids(view.world):
            return Answer.LEASE_LOST
        looked = view.row
        # One statement locks the lease, chooses, locks and writes, where the engine has it.
        in_one = db.has_batches(part.alias)
        lock = "update job" if in_one else "lock worker"
        has_clock = connections[part.alias].vendor != "sqlite"
        if looked and looked.state == State.SCHEDULED:
            now = (yield "select").world.now if has_clock else view.world.now
            if looked.run_after <= now:
                yield from promoting(part)
        # What becomes due after a look at the clock, where that is a statement, isn't claimed.
        has_looked = has_clock and not db.tells_update_time(part.alias)
        now = (yield "select").world.now if has_looked else 0
        view = yield lock
        if part.worker_id not in model.alive_ids(view.world):
            return Answer.NOTHING
        if not in_one:
            view = yield "lock job"
        if view.is_passed_over:
            return Answer.NOTHING
        now = now if has_looked else view.world.now
        got = view.do(lambda world: model.claim(replace(world, now=now), part.worker_id, start))
        return got if isinstance(got, Answer) else Answer.APPLIED

    return program


def taking_over(part: Part) -> Program:
    """Two steps after another: for all the others, the job is in the same state afterwards."""
    answer = yield from coordinating(
        lambda world, row: model.settle(world, row, Released(), "ann")
    )(part)
    if answer != Answer.APPLIED:
        return answer
    return (yield from claiming(start=True)(part))


def beating(*, knows: bool) -> Callable[[Part], Program]:
    """Renew; read what names this worker; give back what it doesn't know."""

    def program(part: Part) -> Program:
        view = yield "update worker"
        if view.do(model.renew, part.worker_id) == Answer.LEASE_LOST:
            return Answer.LEASE_LOST
        view = yield "read job"
        held = part.seen if knows and part.seen.state in HELD else None
        unknown, told = model.compared(model.held_by(view.world, part.worker_id), held)
        if unknown:
            view = yield "update job"
            view.do(model.release_unknown, unknown, part.worker_id)
        return told

    return program


def sweeping(claimed_after: int, running_after: int | None) -> Callable[[Part], Program]:
    """Workers first; promote; read the held row, then who lives, then write."""

    def program(part: Part) -> Program:
        view = yield "read worker"
        rules = model.stale_rules(view.world.now, claimed_after, running_after)
        leases = dict(view.world.workers)
        fenced = 0
        for _ in model.silent_ids(view.world, rules):
            view = yield "update worker"
            worker_id = view.names(leases)
            cutoff = rules.now - leases[worker_id].lease
            fenced += view.do(model.fence_worker, worker_id, cutoff) == Answer.APPLIED
        yield from promoting(part)
        view = yield "read job"
        seen = view.row
        if seen is None or seen.state not in HELD:
            return (fenced, Answer.NOTHING)
        view = yield "read worker"
        if not model.stale_verdict(rules, seen, model.alive_ids(view.world)):
            return (fenced, Answer.NOTHING)
        view = yield "update job"
        return (fenced, view.do(model.rescue, seen))

    return program


def pruning(part: Part) -> Program:
    """Look for old rows, then take those that nobody else has."""
    view = yield "read job"
    before = view.world.now - OVERDUE
    if model.prune(view.world, before)[1] == Answer.NOTHING:
        return Answer.NOTHING
    view = yield "lock job"
    return Answer.NOTHING if view.is_passed_over else view.do(model.prune, before)


# -- What they are told in production


def settled(results: Any) -> Answer:
    """Of a batch of one outcome."""
    (result,) = results
    return Answer(str(result.status))


def number(taken: Any) -> Answer:
    """Of jobs, or how many, that were taken."""
    return Answer.APPLIED if taken else Answer.NOTHING


def swept(report: SweepReport) -> tuple[int, str]:
    """Of a sweep: the workers declared dead, and what became of the job."""
    answer: str = Answer.CONFLICT if report.conflicts else number(report.taken)
    return report.dead_workers, "an error" if report.errors else answer


def heard(beat: Any) -> frozenset[str]:
    """Of a heartbeat: whether the job is to be cancelled, or is lost."""
    told = {"cancel": beat.cancel_requested, "lost": beat.lost}
    return frozenset(word for word, jobs in told.items() if jobs)


def reported(results: list[bool]) -> Answer:
    """Of a batch of one report."""
    return Answer.APPLIED if results == [True] else Answer.CONFLICT


# -- The actors


class Closing:
    """A handler that is to complete its own job, having said how far it came."""

    def last_words(self) -> Report:
        """Return a figure that nobody has written yet."""
        return Report(70, "nearly")

    def committed(self) -> None:
        """Take note of nothing."""

    def refused(self) -> bool:
        """Say that this is news."""
        return True


def complete_in_a_block(part: Part) -> None:
    """Complete as ``context.atomic()`` does."""
    with broker.atomic(part.worker_id, part.job, Closing()) as block:
        block.result = "done"


def take_over(part: Part) -> Any:
    """Take the job from whoever has it, and run it."""
    coordinator.release(1, actor="ann")
    return broker.claim(part.worker_id, 1, start=True)


def beat(*, knows: bool) -> Callable[[Part], Any]:
    """Renew and reconcile; a worker that knows of nothing lost the reply to its claim."""

    def call(part: Part) -> Any:
        held = {1: part.job} if knows and part.job.state in HELD else {}
        return broker.heartbeat(part.worker_id, held)

    return call
