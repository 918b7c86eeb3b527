"""The table of all that take part in the races of pairs, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from jobqueue import broker, coordinator, dispatch, transitions
from jobqueue.lifecycle import (
    FINAL,
    HELD,
    RULES,
    Cancelled,
    Completed,
    Error,
    Failed,
    Outcome,
    Released,
    Report,
    Retry,
    Snoozed,
    State,
    Verb,
)
from jobqueue.sweep import prune_jobs, sweep_stale_jobs
from tests.explorer import model
from tests.explorer.model import Row, World
from tests.races import actors
from tests.races.actors import LATER, NEVER, OVERDUE, Actor, Part

ERROR: Final = Error("an error")
DELAY: Final = timedelta(seconds=LATER)
RUNNING: Final = frozenset({State.RUNNING})
BY: Final = {"actor": "ann"}


def _owner(verb: Verb, outcome: Outcome, call: Callable[[Part], Any], **more: Any) -> Actor:
    more = {"settles": True, "is_vague": True} | more
    return Actor(verb, RULES[verb].sources, call, actors.settling(outcome), **more)


def _within(verb: str, call: Callable[[Part], Any], percent: int, **more: Any) -> Actor:
    program = actors.in_one_write(model.record_progress, percent)
    return Actor(verb, RUNNING, call, program, **more)


def _operator(
    verb: Verb, call: Callable[[], Any], write: Callable[[World, Row], Any], **more: Any
) -> Actor:
    more = {"sources": RULES[verb].sources} | more
    return Actor(verb, call=lambda part: call(), program=actors.coordinating(write), **more)


def _settle(outcome: Outcome) -> Callable[[World, Row], Any]:
    return lambda world, row: model.settle(world, row, outcome, "ann")


def _ask(world: World, row: Row) -> Any:
    if row.state == State.RUNNING:
        return model.request_cancel(world, row, "ann")
    return model.settle(world, row, Cancelled(), "ann")


def _to_waiting(world: World, row: Row) -> Any:
    if row.state in HELD:
        return model.settle(world, row, Released(), "ann")
    return model.rerun(world, row, "ann")


def _sweep(sources: frozenset[State], claimed_after: int, running_after: int | None) -> Actor:
    def call(part: Part) -> Any:
        return sweep_stale_jobs(claimed_after=claimed_after, running_after=running_after)

    program = actors.sweeping(claimed_after, running_after)
    fences = claimed_after == NEVER and running_after is None
    return Actor("sweep", sources, call, program, actors.swept, fences=fences, counts=True)


WORKERS: Final[Mapping[str, Actor]] = {
    "worker.start": Actor(
        Verb.START,
        RULES[Verb.START].sources,
        lambda part: transitions.start(part.job),
        actors.in_one_write(model.start),
    ),
    "worker.complete": _owner(
        Verb.COMPLETE, Completed("done"), lambda part: transitions.complete(part.job, "done")
    ),
    "worker.fail": _owner(Verb.FAIL, Failed(ERROR), lambda part: transitions.fail(part.job, ERROR)),
    "worker.retry": _owner(
        Verb.RETRY,
        Retry(ERROR, DELAY),
        lambda part: transitions.retry(part.job, ERROR, DELAY),
        counts=True,
    ),
    "worker.snooze": _owner(
        Verb.SNOOZE, Snoozed(DELAY), lambda part: transitions.snooze(part.job, DELAY)
    ),
    "worker.release": _owner(Verb.RELEASE, Released(), lambda part: transitions.release(part.job)),
    "worker.cancel": _owner(Verb.CANCEL, Cancelled(), lambda part: transitions.cancel(part.job)),
    "worker.settle": _owner(
        Verb.COMPLETE,
        Completed("done"),
        lambda part: broker.settle(part.job.claimed_by, [(part.job, Completed("done"))]),
        told=actors.settled,
        is_vague=False,
        is_twin=True,
    ),
    "worker.atomic": Actor(Verb.COMPLETE, RUNNING, actors.complete_in_a_block, actors.in_a_block),
    "worker.progress": _within(
        "progress", lambda part: transitions.record_progress(part.job, 50), 50
    ),
    "worker.checkpoint": _within(
        "checkpoint", lambda part: transitions.checkpoint(part.job, {"page": 3}), 0, is_twin=True
    ),
    "worker.report": _within(
        "progress",
        lambda part: broker.report(part.worker_id, [(part.job, Report(60))]),
        60,
        told=actors.reported,
    ),
    "worker.claim": Actor(
        Verb.CLAIM,
        frozenset({State.SCHEDULED, State.WAITING}),
        lambda part: broker.claim(part.worker_id, 1, start=False),
        actors.claiming(start=False),
        actors.number,
    ),
    "worker.claim-to-running": Actor(
        Verb.CLAIM,
        frozenset({State.SCHEDULED, State.WAITING}),
        lambda part: broker.claim(part.worker_id, 1, start=True),
        actors.claiming(start=True),
        actors.number,
    ),
    "worker.heartbeat": Actor(
        "heartbeat", HELD, actors.beat(knows=True), actors.beating(knows=True), actors.heard
    ),
    "worker.heartbeat-unaware": Actor(
        "heartbeat", HELD, actors.beat(knows=False), actors.beating(knows=False), actors.heard
    ),
}

OPERATORS: Final[Mapping[str, Actor]] = {
    "operator.complete": _operator(
        Verb.COMPLETE, lambda: coordinator.complete(1, "given", **BY), _settle(Completed("given"))
    ),
    "operator.fail": _operator(
        Verb.FAIL, lambda: coordinator.fail(1, **BY), _settle(Failed(ERROR))
    ),
    "operator.cancel": _operator(Verb.CANCEL, lambda: coordinator.cancel(1, **BY), _ask),
    "operator.force-cancel": _operator(
        Verb.CANCEL, lambda: coordinator.cancel(1, force=True, **BY), _settle(Cancelled())
    ),
    "operator.release": _operator(
        Verb.RELEASE, lambda: coordinator.release(1, **BY), _settle(Released())
    ),
    "operator.rerun": _operator(
        Verb.RERUN,
        lambda: coordinator.rerun(1, **BY),
        lambda world, row: model.rerun(world, row, "ann"),
        counts=True,
    ),
    "operator.edit": _operator(
        Verb.EDIT,
        lambda: coordinator.edit(1, max_attempts=9, **BY),
        lambda world, row: model.edit(world, row, "ann", max_attempts=9),
    ),
    "operator.delete": _operator(
        Verb.DELETE,
        lambda: coordinator.delete(1, **BY),
        lambda world, row: model.delete(world, row, "ann"),
    ),
    "operator.to-waiting": _operator(
        Verb.RELEASE,
        lambda: coordinator.transition(1, "waiting", **BY),
        _to_waiting,
        sources=HELD | FINAL,
        counts=True,
        is_twin=True,
    ),
    "operator.cancel-unlocked": Actor(
        Verb.CANCEL,
        RULES[Verb.CANCEL].sources,
        lambda part: coordinator.cancel(
            1, force=True, expected_version=part.job.version, lock=False, **BY
        ),
        actors.on_a_page,
    ),
}

OTHERS: Final[Mapping[str, Actor]] = {
    "sweep.dead-worker": _sweep(HELD | {State.SCHEDULED}, NEVER, None),
    "sweep.overdue-claimed": _sweep(frozenset({State.CLAIMED}), OVERDUE, None),
    "sweep.overdue-running": _sweep(RUNNING, NEVER, OVERDUE),
    "another.take-over": Actor(
        Verb.CLAIM, HELD, actors.take_over, actors.taking_over, actors.number
    ),
    "another.delete": Actor(
        Verb.DELETE,
        FINAL,
        lambda part: transitions.delete(part.job, **BY),
        actors.in_one_write(model.delete, "ann", kind="lock job"),
    ),
    "promote": Actor(
        Verb.PROMOTE,
        RULES[Verb.PROMOTE].sources,
        lambda part: dispatch.promote_due(None, 10, using=part.alias),
        actors.promoting,
        actors.number,
    ),
    "prune": Actor(
        Verb.DELETE,
        FINAL,
        lambda part: prune_jobs(OVERDUE),
        actors.pruning,
        lambda report: actors.number(report.jobs),
    ),
}

ACTORS: Final[Mapping[str, Actor]] = {**WORKERS, **OPERATORS, **OTHERS}
