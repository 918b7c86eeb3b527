"""Jobs claimed ahead of the threads, and handlers that go on past their time."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.db import connections

from jobqueue.lifecycle import State
from jobqueue.models import Job
from jobqueue.worker import loop as loops
from jobqueue.worker.contract import Ended
from tests.helpers import TIMEOUT, wait_until
from tests.worker import handlers
from tests.worker.scripted import SpeakingBroker, play, scripted_job
from tests.worker.tools import RecordingBroker, kinds, make_job, running_loop, troubles, work_off


def test_quick_jobs_are_claimed_and_settled_in_batches(alias):
    for number in range(60):
        make_job(handlers.note, number)
    with running_loop(local := RecordingBroker(alias), burst=True, batch=500) as rig:
        assert rig.running.result() is Ended.DRAINED
    claims = [call[1] for call in local.calls if call[0] == "claim"]
    assert claims[:2] == [1, 4]
    assert len(claims) < 20
    assert handlers.seen == list(range(60))
    assert rig.loop.settled == {"completed": 60}


def test_what_was_claimed_ahead_is_handed_back_when_the_threads_are_busy(alias, monkeypatch):
    """It waited in vain: others may take it, and no attempt is held against it."""
    monkeypatch.setattr(loops, "STALL", 0.0)
    for number in range(3):
        make_job(handlers.note, number)
    holding = make_job(handlers.hold)
    last = make_job(handlers.note, "last")
    with running_loop(RecordingBroker(alias), batch=500) as rig:
        handlers.gate().wait_until_entered()
        rig.let_tick()
        last.refresh_from_db()
        assert (last.state, last.failures) == (State.WAITING, 0)
        handlers.gate().open()
        wait_until(lambda: handlers.seen[-1] == "last", "the last one is not run")
        rig.stop()
    assert set(kinds(last)) <= {"released"}
    assert Job.objects.get(pk=holding.pk).state == State.COMPLETED


def test_a_worker_that_stops_hands_back_what_it_did_not_begin(alias):
    for number in range(3):
        make_job(handlers.note, number)
    make_job(handlers.hold)
    ahead = [make_job(handlers.note, "never") for _ in range(2)]
    with running_loop(RecordingBroker(alias), batch=500) as rig:
        handlers.gate().wait_until_entered()
        rig.loop.stop()
        wait_until(
            lambda: {Job.objects.get(pk=job.pk).state for job in ahead} == {State.WAITING},
            "they are not handed back",
        )
    assert "never" not in handlers.seen


# -- Time is up


def test_a_handler_sees_how_much_time_it_has(alias):
    left = []
    play(alias, lambda context: left.append(context.time_left), timeout=timedelta(minutes=1))
    play(alias, lambda context: left.append(context.time_left))
    assert 50 < left[0] <= 60
    assert left[1] is None


def test_a_handler_that_looks_gives_up_in_time(alias):
    """A failed attempt like any other."""

    def work(context):
        wait_until(lambda: context.time_left == 0, "time stands still")
        context.raise_if_cancelled()

    _, job = play(alias, work, timeout=timedelta(seconds=0.05), max_attempts=1)
    event = job.events.get()
    assert (job.state, event.kind) == (State.FAILED, "failed")
    assert event.message == "TimeoutError: the job's timeout of 0:00:00.050000 is over"


def test_a_handler_that_hangs_is_given_up_and_its_loop_ends(alias):
    """Its thread can't be ended, and must not hold a slot for ever."""
    entered, gate = threading.Event(), threading.Event()

    def hang(context):
        entered.set()
        gate.wait(TIMEOUT)
        assert context.lost

    job = scripted_job(hang, timeout=timedelta(seconds=0.05), max_attempts=1)
    with running_loop(SpeakingBroker(alias), patience=0.05) as rig:
        assert entered.wait(TIMEOUT)
        assert rig.running.result() is Ended.HUNG
        job.refresh_from_db()
        event = job.events.get()
        assert (job.state, event.kind) == (State.FAILED, "failed")
        assert event.message == "TimeoutError: did not end within its timeout of 0:00:00.050000"
        gate.set()


def test_what_else_runs_is_finished_first(alias):
    gate = threading.Event()
    scripted_job(
        lambda context: gate.wait(TIMEOUT), timeout=timedelta(seconds=0.05), max_attempts=1
    )
    other = make_job(handlers.hold, "other")
    with running_loop(SpeakingBroker(alias), slots=2, patience=0.05) as rig:
        handlers.gate("other").wait_until_entered()
        wait_until(lambda: rig.loop.hung, "nobody notices that it hangs")
        handlers.gate("other").open()
        assert rig.running.result() is Ended.HUNG
        gate.set()
    assert Job.objects.get(pk=other.pk).state == State.COMPLETED


def test_what_does_not_end_in_time_beside_it_is_handed_back(alias):
    gate = threading.Event()
    scripted_job(
        lambda context: gate.wait(TIMEOUT), timeout=timedelta(seconds=0.05), max_attempts=1
    )
    other = make_job(handlers.hold, "other")
    with running_loop(SpeakingBroker(alias), slots=2, patience=0.05, grace=0.05) as rig:
        assert rig.running.result() is Ended.HUNG
        gate.set()
    other.refresh_from_db()
    assert (other.state, other.failures) == (State.WAITING, 0)
    assert other.events.get().message == "its worker is replaced, for another handler hangs"


def test_a_worker_goes_on_after_a_handler_that_hung(alias, settings):
    gate = threading.Event()
    settings.JOBQUEUE = {**settings.JOBQUEUE, "TIMEOUT_GRACE": 0.1}
    scripted_job(
        lambda context: gate.wait(TIMEOUT), timeout=timedelta(seconds=0.05), max_attempts=1
    )
    make_job(handlers.note, "after")
    try:
        with troubles():
            process = work_off(alias)
    finally:
        gate.set()
    assert handlers.seen == ["after"]
    assert process.abandoned == 1


@pytest.mark.parametrize("ended", ["in time", "late"])
def test_a_timeout_does_not_undo_what_was_done(alias, ended):
    """A handler that ends between its deadline and the end of patience has done its work."""

    def work(context):
        if ended == "late":
            wait_until(lambda: context.time_left == 0, "time stands still")
        return ended

    _, job = play(alias, work, timeout=timedelta(seconds=0.05 if ended == "late" else 60))
    assert (job.state, job.result) == (State.COMPLETED, ended)


def test_a_handler_that_hangs_where_it_completes_is_given_up_as_well(alias):
    """With something said that nobody else may write meanwhile."""
    gate = threading.Event()

    def hang(context):
        with context.atomic():
            context.progress(90)
            gate.wait(TIMEOUT)

    job = scripted_job(hang, timeout=timedelta(seconds=0.05), max_attempts=1)
    try:
        with running_loop(SpeakingBroker(alias), patience=0.05) as rig:
            if connections[alias].features.has_select_for_update:
                assert rig.running.result() is Ended.HUNG
                job.refresh_from_db()
                assert job.state == State.FAILED
            else:  # its transaction keeps everybody else from writing
                wait_until(lambda: rig.loop.hung, "nobody notices that it hangs")
            gate.set()
    finally:
        gate.set()


# -- Retirement


def test_a_worker_that_retires_claims_no_more_and_is_in_no_trouble(alias):
    for number in range(3):
        make_job(handlers.note, number)
    make_job(handlers.hold)
    with troubles() as heard, running_loop(RecordingBroker(alias)) as rig:
        handlers.gate().wait_until_entered()
        rig.loop.retire()
        make_job(handlers.note, "never")
        rig.let_tick()
        handlers.gate().open()
        assert rig.running.result() is Ended.STOPPED
    assert heard == []
    assert handlers.seen == [0, 1, 2]
