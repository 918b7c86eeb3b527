"""Handlers' database connections: as in Django's request cycle, and clean for the next job."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import OperationalError, connections
from django.test import override_settings

from jobqueue.lifecycle import State
from jobqueue.models import JobEvent
from jobqueue.worker.context import JobContext
from jobqueue.worker.execute import execute
from tests.helpers import TIMEOUT, engine, other_connection, run_in_thread, use_connection
from tests.worker import handlers
from tests.worker.handlers import path
from tests.worker.tools import made_connections, make_job, work_off

CLEAN = {"autocommit": True, "in_atomic_block": False, "groups": 0}


@pytest.fixture(params=[0, None], ids=["closed", "kept"])
def max_age(request, alias, monkeypatch):
    """``CONN_MAX_AGE`` of the threads' connections: closed after each job, or kept."""
    monkeypatch.setitem(connections.settings[alias], "CONN_MAX_AGE", request.param)
    return request.param


def is_closed(raw: Any) -> bool:
    """Say whether a connection of whatever driver is closed."""
    try:
        raw.cursor().execute("SELECT 1")
    except Exception:
        return True
    return False


def can_write_group(alias: str) -> bool:
    """Say whether nobody's open transaction keeps a group's unique name, or SQLite's lock."""
    options = {"timeout": 0} if connections[alias].vendor == "sqlite" else {}
    with other_connection(alias, **options) as other, use_connection(other):
        if other.vendor != "sqlite":
            wait = {"postgresql": "lock_timeout = 100", "mysql": "innodb_lock_wait_timeout = 1"}
            with other.cursor() as cursor:
                cursor.execute(f"SET {wait[other.vendor]}")
        try:
            Group.objects.create(name="uncommitted").delete()
        except OperationalError:
            return False
        return True


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (handlers.leave_block_open, "ValueError: no"),
        (handlers.break_transaction, "IntegrityError: "),
        (handlers.leave_autocommit_off, "ValueError: no"),
    ],
)
def test_a_failure_is_recorded_and_the_next_job_gets_a_clean_connection(
    alias, max_age, handler, message
):
    """django-background-tasks/django-background-tasks#158."""
    broken, after = make_job(handler, max_attempts=1), make_job(handlers.tell_connection)
    process = work_off(alias)
    assert process.settled == {"failed": 1, "completed": 1}
    broken.refresh_from_db()
    after.refresh_from_db()
    assert broken.state == State.FAILED
    event = JobEvent.objects.get(job=broken)
    assert event.message.startswith(message)
    assert f"in {handler.__name__}" in event.detail["traceback"]
    assert after.result == CLEAN
    assert not Group.objects.exists()


def test_a_job_that_leaves_its_writes_uncommitted_has_not_completed(alias):
    job = make_job(handlers.leave_block_open_and_return, max_attempts=1)
    work_off(alias)
    job.refresh_from_db()
    assert (job.state, job.result) == (State.FAILED, None)
    message = f"the handler left a transaction open on {alias}; it was rolled back"
    assert JobEvent.objects.get(job=job).message == message
    assert not Group.objects.exists()


@pytest.mark.parametrize("alias", [engine("postgresql"), engine("mariadb")], indirect=True)
def test_a_connection_that_a_job_found_broken_is_not_given_to_the_next(alias, max_age):
    make_job(handlers.break_connection, max_attempts=1)
    after = make_job(handlers.tell_connection)
    work_off(alias)
    after.refresh_from_db()
    assert after.result == CLEAN


def test_a_transaction_begun_behind_djangos_back_ends_with_its_job(alias, max_age):
    """A kept connection would take the next job into it, and keep SQLite's one write lock.

    django-background-tasks/django-background-tasks#158.
    """
    executed, looked = threading.Event(), threading.Event()

    def run_job() -> Any:
        job = SimpleNamespace(pk=1, task=path(handlers.leave_raw_transaction), args=[], kwargs={})
        outcome = execute(job, JobContext(1, job.task, 1, 1))
        executed.set()
        looked.wait(TIMEOUT)
        return outcome.error.message, Group.objects.count()

    running = run_in_thread(run_job)
    try:
        assert executed.wait(TIMEOUT)
        writable = can_write_group(alias)
    finally:
        looked.set()
    assert running.result() == ("ValueError: no", 0)
    assert writable


def test_connections_live_as_long_as_the_setting_says(alias, max_age):
    make_job(handlers.tell_connection)
    make_job(handlers.tell_connection)
    work_off(alias)
    first, second = handlers.seen
    assert (first is second) == (max_age is None)
    assert is_closed(first)
    assert is_closed(second)


def test_the_async_orm_uses_the_connection_of_the_thread_that_runs_the_job(alias, max_age):
    jobs = [make_job(handlers.create_group_async, name) for name in "ab"]
    work_off(alias)
    for job in jobs:
        job.refresh_from_db()
    assert [job.result for job in jobs] == [1, 2]
    first, second = handlers.seen
    assert (first is second) == (max_age is None)
    assert is_closed(second)


def test_a_connection_that_breaks_at_being_closed_does_not_cost_the_result(alias):
    job, after = make_job(handlers.make_closing_fail), make_job(handlers.tell_connection)
    work_off(alias)
    job.refresh_from_db()
    after.refresh_from_db()
    assert (job.state, job.result) == (State.COMPLETED, "done")
    assert after.result == CLEAN


@override_settings(JOBQUEUE={"SWEEP_INTERVAL": 0.02})
def test_all_threads_of_a_worker_close_their_connections(alias):
    """Those that run jobs, the one that beats and the one that sweeps."""
    with made_connections(alias) as made:
        for _ in range(4):
            make_job(handlers.tell_connection_slowly)
        work_off(alias, lease=0.15, threads=2)
    assert {name.rstrip("0123456789") for name in made.values()} >= {
        "jobqueue-",
        "jobqueue-heartbeat",
        "jobqueue-sweep",
    }
    assert [connection for connection in made if connection.connection] == []
