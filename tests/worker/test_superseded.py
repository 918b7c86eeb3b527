"""``context.atomic()`` of an execution that has lost its job: nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from jobqueue import coordinator, db, signals, transitions
from jobqueue.exceptions import TransitionConflict
from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.worker.context import current_context
from tests.helpers import TIMEOUT, pause_at, run_in_thread, wait_until, wait_until_blocked
from tests.races.scenes import hearing, row, take_over
from tests.worker import handlers
from tests.worker.scripted import SpeakingBroker, effects, finish, open_gates, playing, write
from tests.worker.tools import kinds, make_job, running_loop


def sweep(job: Job) -> None:
    """Take the job from a worker that was silent for too long."""
    long_ago = db.now(job._state.db) - timedelta(hours=1)
    Worker.objects.filter(pk=job.claimed_by).update(last_seen_at=long_ago)
    assert sweep_stale_jobs().retried == 1


ENDS: dict[str, Callable[[Job], Any]] = {
    "released": lambda job: coordinator.release(job.pk, actor="ann"),
    "taken by another": take_over,
    "cancelled by force": lambda job: coordinator.cancel(job.pk, force=True, actor="ann"),
    "completed by another": lambda job: coordinator.complete(job.pk, "hers", actor="ann"),
    "swept": sweep,
}


def is_free(alias: str) -> bool:
    """Say whether others can write while a block is open; SQLite has one writer at a time."""
    return connections[alias].vendor != "sqlite"


def complete(alias: str, gate: str = "gate") -> None:
    """Complete within a block, and wait at a gate as late as others can still write."""
    context = current_context()
    if not is_free(alias):
        handlers.hold(gate)
    with context.atomic() as block:
        write(f"of attempt {context.attempt}")
        transaction.on_commit(lambda: handlers.note(context.attempt), using=alias)
        block.result = context.attempt
        if is_free(alias):
            handlers.hold(gate)


@pytest.mark.parametrize("swallows", [False, True], ids=["passes", "swallows"])
@pytest.mark.parametrize("end", ENDS)
def test_superseded_execution_leaves_nothing(alias, end, swallows):
    """No row, hook or retry, whatever the handler does about it; one event, and work goes on."""

    def script(context):
        with suppress(TransitionConflict) if swallows else nullcontext():
            complete(alias)
        return "all went well"

    with (
        hearing(signals.write_refused) as refused,
        playing(alias, script, max_jobs=2) as (rig, job),
    ):
        context = handlers.gate().wait_until_entered()
        ENDS[end](Job.objects.get(pk=job.pk))
        other = make_job(handlers.give, 5, priority=9)
        before, past = row(job), kinds(job)
        open_gates("gate")
        goes_on = end != "swept"  # else its whole worker was declared dead
        finish(rig, 2 if goes_on else 1)
        rig.beat()
    assert (row(job), effects(), handlers.seen, context.lost) == (before, [], [], True)
    assert kinds(job) == [*past, EventKind.CONFLICT]
    assert JobEvent.objects.get(job=job, kind="conflict").detail["wanted"] == "complete"
    assert [refusal["job"].pk for refusal in refused] == [job.pk]
    assert rig.loop.settled == {"conflict": 1} | ({"completed": 1} if goes_on else {})
    assert Job.objects.get(pk=other.pk).state == ("completed" if goes_on else "waiting")


def test_loss_that_is_known_already_is_told_once(alias):
    """A heartbeat found out before the block; the block is refused all the same."""

    def script(context):
        handlers.hold()
        complete(alias, "open")

    open_gates("open")
    with playing(alias, script, max_jobs=1) as (rig, job):
        handlers.gate().wait_until_entered()
        coordinator.release(job.pk, actor="ann")
        rig.beat()
        open_gates("gate")
        finish(rig)
    assert (effects(), rig.loop.settled) == ([], {"conflict": 1})
    assert kinds(job) == [EventKind.RELEASED, EventKind.CONFLICT]


def test_what_a_superseded_execution_said_is_dropped_with_the_rest(alias):
    def script(context):
        handlers.hold()
        context.progress(90)
        context.save_checkpoint("mine")
        complete(alias, "open")

    open_gates("open")
    with playing(alias, script, max_jobs=1) as (rig, job):
        handlers.gate().wait_until_entered()
        with rig.loop.turns.take(TIMEOUT):  # so that the loop doesn't say it first
            coordinator.release(job.pk, actor="ann")
            open_gates("gate")
            wait_until(rig.loop.turns._door.locked, "nobody wants a turn")
        finish(rig)
    job.refresh_from_db()
    assert (job.progress, job.checkpoint, effects()) == (0, None, [])
    assert kinds(job) == [EventKind.RELEASED, EventKind.CONFLICT]


# -- The proof: both write, and one effect remains


@pytest.mark.parametrize("first_to_end", ["superseded", "successor"])
def test_superseded_execution_and_its_successor_both_write(alias, first_to_end):
    """Two workers, two open blocks of one job: what the successor writes is there, and it alone."""

    def script(context):
        complete(alias, f"attempt {context.attempt}")

    order = ["attempt 1", "attempt 2"]
    if first_to_end == "successor":
        order.reverse()
    with playing(alias, script, max_jobs=1) as (old, job):
        handlers.gate("attempt 1").wait_until_entered()
        with running_loop(SpeakingBroker(alias), max_jobs=1) as new:
            coordinator.release(job.pk, actor="ann")
            handlers.gate("attempt 2").wait_until_entered()
            for gate in order:
                open_gates(gate)
                finish(old if gate == "attempt 1" else new)
    job.refresh_from_db()
    assert (job.state, job.result, job.claimed_by) == (State.COMPLETED, 2, new.worker.pk)
    assert (effects(), handlers.seen) == (["of attempt 2"], [2])
    assert kinds(job) == [EventKind.RELEASED, EventKind.CONFLICT]
    assert (old.loop.settled, new.loop.settled) == ({"conflict": 1}, {"completed": 1})


def completion(sql: str) -> bool:
    """Match what a block ends with."""
    return sql.startswith("UPDATE") and "jobqueue_job" in sql and "settled_version" in sql


def test_completion_wins_over_a_release_that_meets_it_at_the_row(alias):
    """Whoever would supersede it waits for the row, and finds the job completed."""
    open_gates("gate")
    with (
        pause_at(alias, completion, after=True) as pause,
        playing(alias, lambda context: complete(alias), max_jobs=1) as (rig, job),
    ):
        pause.wait_until_reached()
        running = Job.objects.get(pk=job.pk)
        release = run_in_thread(transitions.release, running, actor="ann")
        wait_until_blocked(alias)
        pause.release()
        with pytest.raises(TransitionConflict):
            release.result()
        finish(rig)
    assert (Job.objects.get(pk=job.pk).state, effects()) == (State.COMPLETED, ["of attempt 1"])
    assert kinds(job) == [EventKind.CONFLICT]
    assert rig.loop.settled == {"completed": 1}


def test_release_wins_over_a_completion_that_meets_it_at_the_row(alias):
    """The block waits for the row, and finds that the job has been taken from it."""
    open_gates("gate")

    def script(context):
        handlers.hold("begin")
        complete(alias)

    with playing(alias, script, max_jobs=1) as (rig, job):
        handlers.gate("begin").wait_until_entered()
        with transaction.atomic(using=alias):
            transitions.release(Job.objects.get(pk=job.pk), actor="ann")
            open_gates("begin")
            wait_until_blocked(alias)
        finish(rig)
    assert (Job.objects.get(pk=job.pk).state, effects()) == (State.WAITING, [])
    assert kinds(job) == [EventKind.RELEASED, EventKind.CONFLICT]
    assert rig.loop.settled == {"conflict": 1}
