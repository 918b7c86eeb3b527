"""Cancel requests on their way to a running handler, and what becomes of it then."""

from __future__ import annotations

from datetime import timedelta

import pytest

from jobqueue import coordinator, db
from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.worker.contract import Ended
from tests.worker import handlers
from tests.worker.scripted import SpeakingBroker, finish, open_gates, play, playing
from tests.worker.tools import kinds, make_job, running_loop

REQUESTED_THEN_CANCELLED = [EventKind.CANCEL_REQUESTED, EventKind.CANCELLED]


def now(job: Job) -> Job:
    return Job.objects.get(pk=job.pk)


def test_request_reaches_the_handler_with_the_next_heartbeat(alias):
    job = make_job(handlers.hold_until_cancelled)
    with running_loop(SpeakingBroker(alias)) as rig:
        context = handlers.gate().wait_until_entered()
        coordinator.cancel(job.pk, actor="ann")
        rig.let_tick()
        assert not context.cancelled
        rig.beat()
        assert (context.cancelled, context.lost) == (True, False)
        finish(rig)
        assert rig.loop.settled == {"cancelled": 1}
    assert now(job).state == State.CANCELLED
    assert kinds(job) == REQUESTED_THEN_CANCELLED


def test_request_reaches_its_own_job_only(alias):
    with playing(alias, lambda context: handlers.hold("mine"), slots=2) as (rig, job):
        other = make_job(handlers.hold, "other")
        mine, others = (handlers.gate(name).wait_until_entered() for name in ("mine", "other"))
        coordinator.cancel(job.pk, actor="ann")
        rig.beat()
        assert (mine.cancelled, others.cancelled) == (True, False)
        open_gates("mine", "other")
        finish(rig, 2)
    assert now(other).state == State.COMPLETED


def test_raise_if_cancelled_ends_the_job(alias):
    """And does nothing before anybody asked."""

    def script(context):
        context.raise_if_cancelled()
        handlers.hold()
        context.raise_if_cancelled()
        handlers.note("went on")

    with playing(alias, script) as (rig, job):
        handlers.gate().wait_until_entered()
        coordinator.cancel(job.pk, actor="ann", reason="too dear")
        rig.beat()
        open_gates("gate")
        finish(rig)
    assert (now(job).state, handlers.seen) == (State.CANCELLED, [])
    assert kinds(job) == REQUESTED_THEN_CANCELLED
    messages = JobEvent.objects.filter(job=job).order_by("pk").values_list("message", flat=True)
    assert list(messages) == ["too dear", "cancelled as requested"]


# -- Whether or not the handler has heard of it


def test_success_after_a_request_is_success(alias):
    with playing(alias, lambda context: handlers.hold(result="done")) as (rig, job):
        handlers.gate().wait_until_entered()
        coordinator.cancel(job.pk, actor="ann")
        rig.beat()
        open_gates("gate")
        finish(rig)
    assert (now(job).state, now(job).result) == (State.COMPLETED, "done")
    assert kinds(job) == [EventKind.CANCEL_REQUESTED]


@pytest.mark.parametrize("hears", [True, False])
@pytest.mark.parametrize("end", ["ValueError", "Retry in 7", "Snooze", "Fail", "Cancel"])
def test_setback_after_a_request_is_the_end(alias, end, hears):
    """No further attempt, whatever the handler wanted."""
    with playing(alias, lambda context: handlers.hold(raises=end)) as (rig, job):
        handlers.gate().wait_until_entered()
        coordinator.cancel(job.pk, actor="ann")
        if hears:
            rig.beat()
        open_gates("gate")
        finish(rig)
        assert rig.loop.settled == {"cancelled": 1}
    assert (now(job).state, now(job).attempt) == (State.CANCELLED, 1)
    assert kinds(job) == REQUESTED_THEN_CANCELLED


def test_job_that_is_handed_back_after_a_request_is_cancelled(alias):
    """Its worker is stopped, and can't wait for it."""
    with playing(alias, lambda context: handlers.hold(), grace=0.05) as (rig, job):
        handlers.gate().wait_until_entered()
        coordinator.cancel(job.pk, actor="ann")
        assert rig.stop() is Ended.STOPPED
        assert rig.loop.settled == {"cancelled": 1}
    assert kinds(job) == REQUESTED_THEN_CANCELLED


def test_job_whose_worker_is_lost_after_a_request_is_cancelled(alias):
    """The sweep gives it to nobody; what its executor still says is refused."""
    with playing(alias, lambda context: handlers.hold_until_lost()) as (rig, job):
        handlers.gate().wait_until_entered()
        coordinator.cancel(job.pk, actor="ann")
        Worker.objects.update(last_seen_at=db.now(alias) - timedelta(hours=1))
        assert sweep_stale_jobs().cancelled == 1
        rig.beat()
        assert rig.running.result() is Ended.LEASE_LOST
    assert now(job).state == State.CANCELLED
    assert kinds(job) == [*REQUESTED_THEN_CANCELLED, EventKind.CONFLICT]


def test_job_that_is_released_after_a_request_is_cancelled(alias):
    with playing(alias, lambda context: handlers.hold_until_lost()) as (rig, job):
        handlers.gate().wait_until_entered()
        coordinator.cancel(job.pk, actor="ann")
        coordinator.release(job.pk, actor="ann")
        rig.beat()
        finish(rig)
    assert now(job).state == State.CANCELLED
    assert kinds(job) == [*REQUESTED_THEN_CANCELLED, EventKind.CONFLICT]


# -- By force


@pytest.mark.parametrize("end", ["", "ValueError", "Snooze"])
def test_cancellation_by_force_tells_the_handler_that_its_job_is_lost(alias, end):
    """Its late outcome is refused."""
    with playing(alias, lambda context: handlers.hold(raises=end)) as (rig, job):
        context = handlers.gate().wait_until_entered()
        coordinator.cancel(job.pk, force=True, actor="ann")
        before = Job.objects.filter(pk=job.pk).values().get()
        assert not context.lost
        rig.beat()
        assert (context.lost, context.cancelled) == (True, False)
        open_gates("gate")
        finish(rig)
        assert rig.loop.settled == {"conflict": 1}
    assert Job.objects.filter(pk=job.pk).values().get() == before
    assert before["state"] == State.CANCELLED
    assert kinds(job) == [EventKind.CANCELLED, EventKind.CONFLICT]


# -- Fencing tokens


class Store:
    """A system of somebody else's, which remembers the highest token that it has seen."""

    def __init__(self) -> None:
        self.token = 0
        self.value = ""

    def write(self, token: int, value: str) -> bool:
        if token < self.token:
            return False
        self.token, self.value = token, value
        return True


def test_outside_store_refuses_a_superseded_execution(alias):
    store = Store()

    def script(context):
        value = f"of attempt {context.attempt}"
        if context.attempt == 1:
            handlers.hold()
        handlers.note((context.attempt, store.write(context.fencing_token, value)))

    with playing(alias, script, slots=2) as (rig, job):
        handlers.gate().wait_until_entered()
        coordinator.release(job.pk, actor="ann")
        finish(rig)
        open_gates("gate")
        finish(rig, 2)
    assert handlers.seen == [(2, True), (1, False)]
    assert store.value == "of attempt 2"
    assert now(job).state == State.COMPLETED


def test_token_rises_with_each_execution(alias):
    """After a retry, a snooze and a rerun alike; it is the version that it runs under."""

    def script(context):
        handlers.note(context.fencing_token)
        assert context.fencing_token == Job.objects.get(pk=context.job_id).version
        if context.attempt < 3:
            handlers.fail("ValueError" if context.attempt == 1 else "Snooze 0")

    _, job = play(alias, script)
    coordinator.rerun(job.pk, actor="ann")
    with running_loop(SpeakingBroker(alias), burst=True) as rig:
        rig.running.result()
    assert len(handlers.seen) == 4
    assert handlers.seen == sorted(set(handlers.seen))
