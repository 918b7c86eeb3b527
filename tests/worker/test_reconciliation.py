"""With each beat: what the worker holds against what the database gives it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from jobqueue import coordinator, transitions
from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job, JobEvent
from jobqueue.worker.contract import Ended
from tests.helpers import TIMEOUT, run_in_thread, wait_until
from tests.worker import handlers
from tests.worker.tools import (
    FailingBroker,
    LocalBroker,
    RecordingBroker,
    kinds,
    make_job,
    running_loop,
)


def row(job: Job) -> dict[str, Any]:
    return Job.objects.filter(pk=job.pk).values().get()


@pytest.mark.parametrize("raises", ["", "ValueError", "Snooze"])
def test_a_job_taken_from_a_live_worker_reaches_its_handler_with_the_next_beat(alias, raises):
    """apache/airflow#45925, OptimalBits/bull#1416: told once, and no word more about it."""
    job = make_job(handlers.hold, "gate", raises)
    with running_loop(LocalBroker(alias)) as rig:
        context = handlers.gate().wait_until_entered()
        released = coordinator.release(job.pk, actor="operator", using=alias)
        transitions.cancel(released, actor="operator", using=alias)
        before = row(job)
        assert not context.lost
        rig.beat()
        assert context.lost
        rig.beat()
        handlers.gate().open()
        wait_until(lambda: rig.loop.settled.total(), "the handler's end was not noticed")
        assert rig.loop.settled == {"conflict": 1}
        assert rig.stop() is Ended.STOPPED
    assert row(job) == before
    assert kinds(job) == [EventKind.RELEASED, EventKind.CANCELLED, EventKind.CONFLICT]


def test_a_lost_job_takes_its_slot_until_its_handler_has_ended(alias):
    """Its thread is taken: what is claimed meanwhile could not be run."""
    job = make_job(handlers.hold)
    local = RecordingBroker(alias)
    with running_loop(local) as rig:
        handlers.gate().wait_until_entered()
        coordinator.release(job.pk, actor="operator", using=alias)
        rig.beat()
        claims = len(local.calls)
        rig.let_tick()
        assert len(local.calls) == claims
        assert row(job)["state"] == State.WAITING
        handlers.gate().open()
        wait_until(lambda: rig.loop.settled["completed"], "the job was not run again")
    job.refresh_from_db()
    assert (job.state, job.attempt, job.excused) == (State.COMPLETED, 2, 1)
    assert kinds(job) == [EventKind.RELEASED, EventKind.CONFLICT]


@pytest.mark.parametrize("seen_by_beat_first", [True, False])
def test_a_lost_job_may_come_back_before_its_handler_has_ended(alias, seen_by_beat_first):
    """The two executions are told apart; the older one's outcome is dropped."""
    job = make_job(handlers.hold)
    with running_loop(LocalBroker(alias), slots=2) as rig:
        first = handlers.gate().wait_until_entered()
        with rig.loop.turns.take(TIMEOUT):  # so that the loop can't claim it at once
            coordinator.release(job.pk, actor="operator", using=alias)
            if seen_by_beat_first:
                rig.loop.hand.hear(rig.loop.broker.heartbeat(rig.worker.pk, rig.loop.hand.judged()))
        wait_until(lambda: len(handlers.gate().contexts) == 2, "it did not come back")
        second = handlers.gate().contexts[1]
        rig.beat()
        assert (first.lost, second.lost) == (True, False)
        assert second.fencing_token > first.fencing_token
        handlers.gate().open()
        wait_until(lambda: rig.loop.settled.total() == 2, "not both have ended")
        assert rig.loop.settled == {"completed": 1, "conflict": 1}
    assert Job.objects.get(pk=job.pk).state == State.COMPLETED
    assert kinds(job) == [EventKind.RELEASED, EventKind.CONFLICT]


def test_a_claim_whose_reply_was_lost_is_released_while_the_worker_is_busy(alias):
    """quartznet/quartznet#1726: excused, and run after all."""
    busy = make_job(handlers.hold, "busy")
    with running_loop(local := FailingBroker(alias, late=True), slots=2) as rig:
        handlers.gate("busy").wait_until_entered()
        local.failures["claim"] = 1
        job = make_job(handlers.hold, "lost")
        wait_until(lambda: ("claim", "failed") in local.calls, "it was not claimed")
        assert Job.objects.get(pk=job.pk).state == State.RUNNING
        rig.beat()
        handlers.gate("lost").wait_until_entered()
        for name in ("busy", "lost"):
            handlers.gate(name).open()
        wait_until(lambda: rig.loop.settled["completed"] == 2, "not both have completed")
    job.refresh_from_db()
    assert (job.attempt, job.excused) == (2, 1)
    event = JobEvent.objects.get(job=job)
    assert event.message == "its worker never learned of this claim"
    assert kinds(busy) == []


def test_a_claim_in_flight_is_not_taken_for_one_that_nobody_knows_of(alias):
    """The heartbeat comes between the claim's COMMIT and its reply."""
    committed, replied = threading.Event(), threading.Event()

    class SlowBroker(LocalBroker):
        def claim(self, worker_id: str, limit: int) -> Any:
            jobs = super().claim(worker_id, limit)
            if jobs:
                committed.set()
                assert replied.wait(TIMEOUT)
            return jobs

    job = make_job(handlers.give)
    with running_loop(SlowBroker(alias), lease=0.6) as rig:
        assert committed.wait(TIMEOUT)
        run_in_thread(rig.beat).result()  # gives up waiting for its turn, and renews all the same
        assert Job.objects.get(pk=job.pk).state == State.RUNNING
        waiting = run_in_thread(rig.beat)
        wait_until(rig.loop.turns._door.locked, "the heartbeat doesn't wait for its turn")
        replied.set()
        waiting.result()
        wait_until(lambda: rig.loop.settled["completed"], "the job was not completed")
    assert kinds(job) == []


def test_a_cancel_request_reaches_the_handler(alias):
    """SamSaffron/term-llm#918: the runner is signalled."""
    job = make_job(handlers.hold_until_cancelled)
    with running_loop(LocalBroker(alias)) as rig:
        context = handlers.gate().wait_until_entered()
        running = Job.objects.get(pk=job.pk)
        transitions.request_cancel(running, actor="operator", using=alias)
        assert not context.cancelled
        rig.beat()
        assert (context.cancelled, context.lost) == (True, False)
        wait_until(lambda: rig.loop.settled["cancelled"], "the handler did not end")
    assert Job.objects.get(pk=job.pk).state == State.CANCELLED


@pytest.mark.parametrize(
    ("raises", "state"),
    [
        ("", State.COMPLETED),
        ("ValueError", State.CANCELLED),
        ("Snooze", State.CANCELLED),
        ("Fail", State.CANCELLED),
    ],
)
def test_after_a_cancel_request_there_is_no_further_attempt(alias, raises, state):
    """SamSaffron/term-llm#790: work that was done counts, everything else ends as cancelled."""
    job = make_job(handlers.hold, "gate", raises)
    with running_loop(LocalBroker(alias)) as rig:
        handlers.gate().wait_until_entered()
        running = Job.objects.get(pk=job.pk)
        transitions.request_cancel(running, actor="operator", using=alias)
        handlers.gate().open()
        wait_until(lambda: rig.loop.settled.total(), "the handler did not end")
        rig.stop()
    job.refresh_from_db()
    assert (job.state, job.attempt) == (state, 1)
