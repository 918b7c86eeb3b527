"""A whole worker: its threads, one lease after another, and signals."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connections
from django.test import override_settings

from jobqueue import db
from jobqueue.exceptions import InvalidJob
from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job, Worker
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.testing.factories import JobFactory
from jobqueue.worker.loop import Loop, LoopOptions
from jobqueue.worker.process import WorkerOptions, WorkerProcess, stopping_on_signals
from tests.helpers import engine, run_in_thread, wait_until
from tests.worker import handlers
from tests.worker.tools import (
    broken_statements,
    kinds,
    make_job,
    running_worker,
    troubles,
    work_off,
)

DOWN = OperationalError("the server is shutting down")


def wait_for_state(job: Job, state: State) -> None:
    wait_until(lambda: Job.objects.get(pk=job.pk).state == state, f"the job did not become {state}")


def writes_worker(verb: str) -> Any:
    # A claim's UPDATE names that table as well, but not first.
    return lambda sql, params: sql.startswith(verb) and "jobqueue_worker" in sql[:30]


def declare_dead(alias: str) -> None:
    """Do what a sweep does to a worker that was silent for too long."""
    long_ago = db.now(alias) - timedelta(hours=1)

    def fenced() -> bool:
        Worker.objects.alive().update(last_seen_at=long_ago)
        return sweep_stale_jobs().dead_workers == 1

    wait_until(fenced, "the worker renewed its lease each time")


# -- From start to end


def test_settings_fill_in_what_was_not_asked_for():
    with override_settings(JOBQUEUE={"THREADS": 7, "POLL": 3, "LEASE": 9, "GRACE": 5}):
        assert WorkerOptions().loop_options() == LoopOptions(slots=7, poll=3, lease=9, grace=5)
        asked = WorkerOptions(threads=1, poll=2, lease=4, grace=0.5, burst=True, max_jobs=6)
        assert asked.loop_options() == LoopOptions(1, 2, 4, 0.5, burst=True, max_jobs=6)


@pytest.mark.parametrize(("queues", "served"), [((), ["a", "b"]), (("b",), ["b"])])
def test_a_worker_registers_works_and_leaves(alias, queues, served):
    job = make_job(handlers.give, "done", queue="b")
    started: list[str] = []
    with override_settings(JOBQUEUE={"QUEUES": ["a", "b"]}):
        process = WorkerProcess(
            WorkerOptions(queues=queues, threads=3, lease=12, burst=True, using=alias)
        )
        run_in_thread(process.run, started.append).result()
    worker = Worker.objects.get()
    assert [worker.pk] == started
    assert (worker.queues, worker.concurrency) == (served, 3)
    assert (worker.lease, worker.state) == (timedelta(seconds=12), Worker.State.STOPPED)
    assert process.settled == {"completed": 1}
    assert Job.objects.get(pk=job.pk).result == "done"


def test_a_worker_told_to_stop_before_its_start_claims_nothing(alias):
    make_job(handlers.give)
    process = WorkerProcess(WorkerOptions(using=alias))
    process.stop()
    run_in_thread(process.run).result()
    assert not Worker.objects.exists()


def test_a_worker_told_to_stop_while_it_starts_claims_nothing(alias):
    job = make_job(handlers.give)
    process = WorkerProcess(WorkerOptions(using=alias))
    run_in_thread(process.run, lambda worker_id: process.stop()).result()
    assert Worker.objects.get().state == Worker.State.STOPPED
    assert Job.objects.get(pk=job.pk).state == State.WAITING


def test_deploys_cost_no_attempt(alias):
    """AlexsLemonade/refinebio#708: five of them, with a budget of three."""
    job = make_job(handlers.hold_until_lost, max_attempts=3)
    for _ in range(5):
        handlers.reset()
        with running_worker(alias, grace=0.02) as process:
            handlers.gate().wait_until_entered()
        assert process.settled == {"released": 1}
    job.refresh_from_db()
    assert (job.state, job.attempt, job.failures) == (State.WAITING, 5, 0)
    assert kinds(job) == [EventKind.RELEASED] * 5


# -- The lease


def test_a_job_far_longer_than_the_lease_is_never_taken_while_heartbeats_arrive(alias):
    """hexpm/hexpm#1825, agno-agi/agno#9512, Koed00/django-q#307: sweeps all the time."""
    job = make_job(handlers.hold)
    with running_worker(alias, lease=0.4) as process:
        handlers.gate().wait_until_entered()
        until = time.monotonic() + 1.2
        while time.monotonic() < until:
            assert sweep_stale_jobs().taken == 0
            time.sleep(0.02)
        handlers.gate().open()
        wait_for_state(job, State.COMPLETED)
    job.refresh_from_db()
    assert job.attempt == 1
    assert kinds(job) == []
    assert process.settled == {"completed": 1}
    assert Worker.objects.count() == 1


def test_a_lost_lease_is_followed_by_a_new_one(alias):
    """kagkarlsson/db-scheduler#402: told so, refused, and back at work."""
    job = make_job(handlers.hold)
    with running_worker(alias, lease=0.6) as process:
        context = handlers.gate().wait_until_entered()
        declare_dead(alias)
        wait_until(lambda: context.lost, "the handler was not told")
        handlers.gate().open()
        wait_for_state(job, State.COMPLETED)
    assert process.settled == {"conflict": 1, "completed": 1}
    assert kinds(job) == [EventKind.RESCUED, EventKind.CONFLICT]
    assert sorted(Worker.objects.values_list("state", flat=True)) == ["dead", "stopped"]


def test_heartbeats_that_fail_for_longer_than_the_lease_are_followed_by_a_new_one(alias):
    """rails/solid_queue#778: the process does not live on unseen."""
    make_job(handlers.hold_until_lost, max_attempts=1)
    failing = broken_statements(alias, writes_worker("UPDATE"), DOWN, thread="jobqueue-heartbeat")
    with troubles() as heard, failing, running_worker(alias, lease=0.3):
        context = handlers.gate().wait_until_entered()
        wait_until(lambda: context.lost, "the handler was not told")
        wait_until(lambda: Worker.objects.count() > 1, "there is no new lease")
    assert "renew its lease" in heard


def test_a_new_lease_has_all_its_slots_though_handlers_hang(alias):
    make_job(handlers.hold, max_attempts=1)
    with running_worker(alias, lease=0.6, grace=0.02) as process:
        handlers.gate().wait_until_entered()
        declare_dead(alias)
        wait_for_state(make_job(handlers.give), State.COMPLETED)
        assert process.abandoned == 1


def test_max_jobs_counts_over_all_leases(alias):
    for number in range(4):
        make_job(handlers.hold, str(number), max_attempts=1)
    with running_worker(alias, lease=0.6, max_jobs=2) as process:
        handlers.gate("0").wait_until_entered()
        declare_dead(alias)
        for number in range(4):
            handlers.gate(str(number)).open()
        wait_until(lambda: process.settled.total() == 2, "it did not take up its work again")
    assert process.claimed == 2
    assert Job.objects.filter(state=State.WAITING).count() == 2


def test_the_lease_is_reckoned_from_before_the_registration(alias):
    """Printing the greeting into a full pipe may take long, and the database's clock goes on."""
    process = WorkerProcess(WorkerOptions(burst=True, lease=30, using=alias))
    started: list[float] = []

    def on_start(worker_id: str) -> None:
        started.append(time.monotonic())
        wait_until(lambda: time.monotonic() > started[0] + 0.05, "")

    run_in_thread(process.run, on_start).result()
    assert process._loop is not None
    assert process._loop.lease_until <= started[0] + 30


@pytest.mark.parametrize(
    ("lease_left", "since_tick", "is_healthy"),
    [(20, 0, True), (1, 29, True), (-1, 0, False), (20, 31, False)],
)
def test_a_process_is_well_while_its_lease_is_held_and_its_loop_ticks(
    lease_left, since_tick, is_healthy
):
    process = WorkerProcess(WorkerOptions(lease=30))
    assert not process.is_healthy  # It has no lease yet.
    process._loop = loop = Loop(None, "w", process.options.loop_options())
    now = time.monotonic()
    loop.lease_until, loop.ticked = now + lease_left, now - since_tick
    assert process.is_healthy == is_healthy


# -- Trouble


def test_a_database_that_cannot_be_reached_is_waited_for(alias, caplog):
    job = make_job(handlers.give)
    with troubles() as heard, broken_statements(alias, writes_worker("INSERT"), DOWN, times=2):
        work_off(alias)
    assert heard == ["register"] * 2
    assert caplog.messages[0] == f"A worker could not register: {DOWN}"
    assert Job.objects.get(pk=job.pk).state == State.COMPLETED


def test_a_worker_that_cannot_leave_ends_all_the_same(alias):
    with troubles() as heard, broken_statements(alias, writes_worker("UPDATE"), DOWN):
        work_off(alias)
    assert heard == ["leave"]
    assert Worker.objects.get().state == Worker.State.ALIVE


def test_malformed_options_are_raised_and_not_tried_again(alias):
    process = WorkerProcess(WorkerOptions(queues=["no good"], using=alias))
    running = run_in_thread(process.run)
    try:
        with pytest.raises(InvalidJob, match="not 'no good'"):
            running.result(5)
    finally:
        process.stop()


@pytest.mark.parametrize("alias", [engine("postgresql"), engine("mariadb")], indirect=True)
def test_a_worker_that_loses_all_its_connections_goes_on(alias):
    """bensheldon/good_job#90, RealOrangeOne/django-tasks-db#49: as in a restart of the server."""
    job, after = make_job(handlers.hold, "gate", "", "kept"), make_job(handlers.give)
    with running_worker(alias, lease=1.5) as process, troubles():
        handlers.gate().wait_until_entered()
        kill_other_sessions(alias)
        handlers.gate().open()
        wait_for_state(after, State.COMPLETED)
    job.refresh_from_db()
    assert (job.state, job.result, job.attempt) == (State.COMPLETED, "kept", 1)
    assert kinds(job) == []
    assert process.settled == {"completed": 2}


def kill_other_sessions(alias: str) -> None:
    with connections[alias].cursor() as cursor:
        if connections[alias].vendor == "postgresql":
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            return
        cursor.execute(
            "SELECT id FROM information_schema.processlist "
            "WHERE db = DATABASE() AND id <> CONNECTION_ID()"
        )
        for (session,) in cursor.fetchall():
            cursor.execute("KILL %s", [session])


# -- Sweeps


@override_settings(JOBQUEUE={"SWEEP_INTERVAL": 0.05})
def test_each_worker_sweeps(alias):
    job = JobFactory(running=True, backoff={"base": 0})
    fails_once = broken_statements(alias, lambda sql, params: True, DOWN, thread="jobqueue-sw")
    with troubles() as heard, running_worker(alias):
        wait_for_state(job, State.COMPLETED)
        assert heard == []
    with troubles() as heard, fails_once, running_worker(alias):
        wait_until(lambda: len(heard) > 1, "a sweep that fails is not told of, or the last")
    assert set(heard) == {"sweep"}


# -- Signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_stops_the_worker_and_the_second_would_end_it(number):
    process = WorkerProcess(WorkerOptions())
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(each) for each in numbers]
    with stopping_on_signals(process):
        assert not process._stopping
        os.kill(os.getpid(), number)
        wait_until(lambda: process._stopping, "the signal was not heard")
        assert [signal.getsignal(each) for each in numbers] == [signal.SIG_DFL] * 2
    assert [signal.getsignal(each) for each in numbers] == before


def test_a_worker_in_another_thread_leaves_signals_alone():
    def use() -> list[Any]:
        with stopping_on_signals(WorkerProcess(WorkerOptions())):
            return [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]

    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    assert run_in_thread(use).result() == before
