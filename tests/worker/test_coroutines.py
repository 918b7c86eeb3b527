"""Async handlers run many at once on one event loop, and can be cancelled there."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest
from django.contrib.auth.models import Group
from django.db import connections

from jobqueue import coordinator, transitions
from jobqueue.exceptions import Snooze
from jobqueue.lifecycle import State
from jobqueue.models import Job
from jobqueue.worker import loop as loops
from jobqueue.worker.context import current_context
from jobqueue.worker.contract import Ended
from tests.helpers import engine, wait_until
from tests.worker import handlers
from tests.worker.tools import (
    RecordingBroker,
    declare_dead,
    kinds,
    make_job,
    running_loop,
    work_off,
)

UNSTORABLE = "ValueError: result is a set, which JSON can't hold: {1}"

met: dict[str, object] = {}


@pytest.fixture(autouse=True)
def nobody_met():
    met.clear()


async def meet(others: int) -> int:
    """Wait until so many of these run at once."""
    count = met["running"] = met.get("running", 0) + 1
    while met["running"] < others:
        await asyncio.sleep(0.005)
    return count


async def block() -> None:
    """Keep the loop to itself."""
    handlers.hold()


async def tell_thread() -> str:
    return threading.current_thread().name


async def wait_for_ever() -> None:
    met["context"] = current_context()
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        met["cancelled"] = True
        raise


async def swallow() -> str:
    """Go on although it was cancelled."""
    try:
        await wait_for_ever()
    except asyncio.CancelledError:
        return "finished all the same"


async def snooze() -> None:
    raise Snooze(60)


async def fail() -> None:
    raise ValueError("no")


async def give_set() -> set[int]:
    return {1}


async def cancel_itself() -> None:
    raise asyncio.CancelledError


def test_async_handlers_run_at_once_on_one_thread(alias):
    """More of them than there are threads."""
    for _ in range(20):
        make_job(meet, 20)
    process = work_off(alias, coroutines=20)
    assert process.settled == {"completed": 20}
    assert sorted(Job.objects.values_list("result", flat=True)) == list(range(1, 21))


def test_they_have_a_thread_of_their_own_and_others_have_theirs(alias):
    job = make_job(tell_thread)
    make_job(handlers.note, "sync")
    work_off(alias, coroutines=5)
    job.refresh_from_db()
    assert job.result == "jobqueue-coroutines"
    assert handlers.seen == ["sync"]


def test_without_them_an_async_handler_runs_in_a_thread(alias):
    job = make_job(tell_thread)
    work_off(alias)
    job.refresh_from_db()
    assert job.state == State.COMPLETED
    assert job.result != "jobqueue-coroutines"


@pytest.mark.parametrize(
    ("handler", "state", "kind", "message"),
    [
        (snooze, State.SCHEDULED, "snoozed", "for 0:01:00"),
        (fail, State.FAILED, "failed", "ValueError: no"),
        (give_set, State.FAILED, "failed", UNSTORABLE),
        (cancel_itself, State.FAILED, "failed", "CancelledError"),
    ],
)
def test_what_becomes_of_an_async_handler(alias, handler, state, kind, message):
    job = make_job(handler, max_attempts=1)
    work_off(alias, coroutines=2)
    job.refresh_from_db()
    event = job.events.get()
    assert (job.state, event.kind, event.message) == (state, kind, message)


def test_a_task_that_cannot_be_imported_is_a_failed_attempt(alias):
    job = make_job(fail, max_attempts=1)
    Job.objects.filter(pk=job.pk).update(task="tests.worker.nowhere.gone")
    work_off(alias, coroutines=2)
    job.refresh_from_db()
    assert job.state == State.FAILED


def test_a_coroutine_is_cancelled_when_its_time_is_up(alias):
    job = make_job(wait_for_ever, timeout=timedelta(seconds=0.05), max_attempts=1)
    work_off(alias, coroutines=2)
    job.refresh_from_db()
    assert met["cancelled"]
    assert (job.state, job.events.get().message) == (State.FAILED, "TimeoutError")


def test_a_coroutine_is_cancelled_when_somebody_asks(alias):
    job = make_job(wait_for_ever)
    with running_loop(RecordingBroker(alias), coroutines=2) as rig:
        wait_until(lambda: "context" in met, "it does not start")
        coordinator.cancel(job.pk, actor="operator")
        rig.beat()
        wait_until(lambda: rig.loop.settled["cancelled"] == 1, "it is not cancelled")
    assert kinds(job) == ["cancel requested", "cancelled"]


def test_a_coroutine_is_cancelled_when_its_job_is_taken_away(alias):
    job = make_job(wait_for_ever)
    with running_loop(RecordingBroker(alias), coroutines=2) as rig:
        wait_until(lambda: "context" in met, "it does not start")
        held = Job.objects.get(pk=job.pk)
        transitions.cancel(held, actor="operator")
        rig.beat()
        wait_until(lambda: rig.loop.settled["conflict"] == 1, "it goes on")
    assert met["cancelled"]
    assert Job.objects.get(pk=job.pk).state == State.CANCELLED


@pytest.mark.parametrize("first", ["worker", "sweep"])
def test_one_that_a_lost_lease_cuts_short_has_used_an_attempt_whoever_is_first(alias, first):
    """It may be the one that wedged the worker, and must not come back for ever."""
    job = make_job(wait_for_ever, max_attempts=2)
    for attempt, state in {1: State.WAITING, 2: State.FAILED}.items():
        met.clear()
        with running_loop(RecordingBroker(alias), coroutines=2) as rig:
            wait_until(lambda: "context" in met, "it does not start")
            rig.loop.lose_lease() if first == "worker" else declare_dead(rig)
            rig.beat()
            assert rig.running.result() is Ended.LEASE_LOST
        job.refresh_from_db()
        assert met["cancelled"]
        assert (job.state, job.attempt, job.excused) == (state, attempt, 0)


@pytest.mark.parametrize("end", ["lost", "stopped"])
def test_those_that_the_loop_has_not_begun_are_handed_back(alias, end):
    """One that blocks it costs no others an attempt, as with jobs that no thread has begun."""
    make_job(block)
    with running_loop(RecordingBroker(alias), coroutines=2) as rig:
        handlers.gate().wait_until_entered()
        job = make_job(tell_thread, max_attempts=1)
        wait_until(lambda: rig.loop.claimed == 2, "it is not claimed")
        rig.loop.lose_lease() if end == "lost" else rig.loop.stop()
        wait_until(lambda: rig.loop.settled["released"] == 1, "it is not handed back")
        handlers.gate().open()
        rig.running.result()
    job.refresh_from_db()
    assert (job.state, job.attempt, job.excused) == (State.WAITING, 1, 1)


def test_and_when_another_keeps_the_loop_for_too_long(alias, monkeypatch):
    make_job(block)
    with running_loop(RecordingBroker(alias), coroutines=2) as rig:
        handlers.gate().wait_until_entered()
        monkeypatch.setattr(loops, "STALL", 0.0)
        job = make_job(tell_thread, max_attempts=1)
        wait_until(lambda: rig.loop.settled["released"], "it is not handed back")
        handlers.gate().open()
        wait_until(lambda: rig.loop.settled["completed"] == 2, "it is not run")
        rig.stop()
    job.refresh_from_db()
    assert (job.state, job.failures) == (State.COMPLETED, 1)


def test_a_coroutine_that_finishes_all_the_same_is_completed(alias):
    job = make_job(swallow)
    with running_loop(RecordingBroker(alias), coroutines=2) as rig:
        wait_until(lambda: "context" in met, "it does not start")
        coordinator.cancel(job.pk, actor="operator")
        rig.beat()
        wait_until(lambda: rig.loop.settled["completed"] == 1, "it does not end")
    assert Job.objects.get(pk=job.pk).result == "finished all the same"


def test_a_coroutine_that_does_not_end_in_the_grace_is_handed_back(alias):
    job = make_job(wait_for_ever)
    with running_loop(RecordingBroker(alias), coroutines=2, grace=0.05) as rig:
        wait_until(lambda: "context" in met, "it does not start")
        rig.stop()
        assert Job.objects.get(pk=job.pk).state == State.WAITING
        assert rig.loop.abandoned == 1


async def count_users() -> int:
    return await Group.objects.acount()


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_a_connection_that_broke_costs_one_attempt_and_not_all(alias):
    """As a restarted server breaks it; the thread of the ORM's async calls opens another."""
    make_job(count_users)
    with running_loop(RecordingBroker(alias), coroutines=2) as rig:
        wait_until(lambda: rig.loop.settled["completed"] == 1, "it is not completed")
        with connections[alias].cursor() as cursor:
            cursor.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        for _ in range(5):
            make_job(count_users, max_attempts=2)
        wait_until(lambda: rig.loop.settled["completed"] == 6, "they are not completed")
    assert rig.loop.settled["failed"] == 0


def test_jobs_for_threads_and_for_the_loop_do_not_keep_each_other_out(alias):
    """One that runs in a thread, among many that don't."""
    with running_loop(RecordingBroker(alias), slots=2, coroutines=20) as rig:
        for _ in range(6):
            make_job(meet, 12)
        wait_until(lambda: met.get("running") == 6, "not all have begun")
        make_job(handlers.note, "sync")
        wait_until(lambda: handlers.seen == ["sync"], "the thread idles")
        for _ in range(6):
            make_job(meet, 12)
        wait_until(lambda: rig.loop.settled["completed"] == 13, "the others are kept out")


def test_a_crowd_of_coroutines_never_asks_for_more_than_can_be_claimed(alias):
    local = RecordingBroker(alias)
    make_job(tell_thread)
    with running_loop(local, coroutines=10_000, batch=500) as rig:
        wait_until(lambda: rig.loop.settled["completed"] == 1, "it is not completed")
        rig.let_tick()
    assert max(call[1] for call in local.calls if call[0] == "claim") <= 500
