"""Signals at the worst moments, the first process of a container, and development's reloads."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from jobqueue.lifecycle import State
from jobqueue.models import Job, Worker
from jobqueue.testing.factories import JobFactory
from tests.helpers import engine, other_connection, wait_until, wait_until_blocked
from tests.worker import handlers, poison
from tests.worker.real import alone, is_gone, parent
from tests.worker.tools import make_job

on_sqlite = pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)
on_postgresql = pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)

# -- In the middle of COMMIT

WAIT_AT_COMMIT = """
CREATE FUNCTION wait_at_commit() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER wait_at_commit AFTER UPDATE ON jobqueue_job
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
WHEN (OLD.state = 'waiting' AND NEW.state <> 'waiting') EXECUTE FUNCTION wait_at_commit();
"""


@contextmanager
def claims_held_at_commit(alias: str) -> Iterator[BaseDatabaseWrapper]:
    """Make each COMMIT of a claim wait until the connection that is yielded is closed."""
    with connections[alias].cursor() as cursor:
        cursor.execute(WAIT_AT_COMMIT)
    try:
        with other_connection(alias) as gate, gate.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(4711)")
            yield gate
    finally:
        with connections[alias].cursor() as cursor:
            cursor.execute("DROP FUNCTION wait_at_commit CASCADE")


@on_postgresql
@pytest.mark.parametrize(
    ("grace", "state", "counts"),
    [("1h", State.COMPLETED, {"completed": 1}), ("0.2", State.WAITING, {"released": 1})],
)
def test_a_claim_that_is_being_committed_is_not_lost(alias, tmp_path, grace, state, counts):
    """Within the grace its job is run; after it, the job is handed back."""
    with parent(tmp_path, "--grace", grace) as crew, claims_held_at_commit(alias) as gate:
        crew.wait_until_up()
        job = make_job(handlers.wait_for_file, str(tmp_path), "go", max_attempts=1)
        wait_until_blocked(alias)
        crew.send(signal.SIGTERM)
        crew.wait_for_event("stopping")
        if state == State.COMPLETED:
            (tmp_path / "go").touch()
        else:
            overdue = time.monotonic() + 0.5
            wait_until(lambda: time.monotonic() > overdue, "")
        gate.close()
        status, output = crew.end()
    assert status == 0, output
    assert crew.events()[-1]["settled"] == counts
    job.refresh_from_db()
    assert (job.state, job.attempt - job.excused) == (state, 1 if state == "completed" else 0)
    assert Worker.objects.get().state == Worker.State.STOPPED


@on_postgresql
def test_a_wedged_orphan_ends_all_the_same(alias, tmp_path):
    """Its own stop can't end it, for the database does not answer; and nobody else is left to."""
    with claims_held_at_commit(alias), parent(tmp_path, "--grace", "0.2") as crew:
        (pid,) = crew.wait_until_up()
        make_job(handlers.give)
        wait_until_blocked(alias)
        crew.send(signal.SIGKILL)
        wait_until(lambda: is_gone(pid), "it lives on")


# -- As the first process of a container

IN_CONTAINER = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")


def can_unshare() -> bool:
    try:
        tried = subprocess.run([*IN_CONTAINER, "true"], check=False, capture_output=True)
    except OSError:
        return False
    return tried.returncode == 0


in_container = pytest.mark.skipif(not can_unshare(), reason="needs process namespaces")


def first_process(pid: int) -> psutil.Process:
    """Return the first process of the container that ``unshare`` has made."""
    found = wait_until(lambda: psutil.Process(pid).children(), "there is no container")
    return found[0]


@in_container
@on_sqlite
def test_the_first_process_of_a_container_reaps_orphans_and_stops(alias, tmp_path):
    job = JobFactory(task=poison.path(poison.leave_an_orphan), args=[str(tmp_path)])
    with parent(tmp_path, before=IN_CONTAINER) as crew:
        crew.wait_until_up()
        first = first_process(crew.process.pid)
        wait_until(lambda: Job.objects.get(pk=job.pk).state == "completed", "the job isn't run")
        assert (tmp_path / "orphan").exists()
        wait_until(lambda: len(first.children()) == 1, "the orphan is not reaped")
        assert crew.events("worker_started")[0]["pid"] != 1
        first.send_signal(signal.SIGTERM)
        status, output = crew.end()
    assert status == 0, output
    assert crew.events("stopping")[0]["pid"] == 1


@in_container
@on_sqlite
@pytest.mark.parametrize("run", [alone, parent])
def test_a_second_signal_ends_the_first_process_of_a_container(alias, tmp_path, run):
    """Where the kernel does not let a signal's default action end it."""
    make_job(handlers.hang, str(tmp_path))
    with run(tmp_path, "--grace", "1h", before=IN_CONTAINER) as worker:
        wait_until(lambda: worker.log.exists(), "nothing is run")
        first = first_process(worker.process.pid)

        def ended() -> bool:
            if first.is_running():
                first.send_signal(signal.SIGTERM)
            return worker.process.poll() is not None

        wait_until(ended, "it waits for its grace")
        assert worker.end()[0] == 128 + signal.SIGTERM


# -- In development


@on_sqlite
def test_changed_code_is_loaded_and_a_running_job_finished(alias, tmp_path):
    module = tmp_path / "changing.py"
    write_module(module, "old")
    first = JobFactory(task="changing.handler")
    with alone_reloading(tmp_path) as worker:
        wait_until(lambda: Job.objects.get(pk=first.pk).state == "completed", "no job is run")
        running = make_job(handlers.wait_for_file, str(tmp_path), "go")
        wait_until(worker.log.exists, "it isn't started")
        write_module(module, "new")

        def noticed() -> bool:
            os.utime(module)  # The reloader may not have seen the module before this.
            return "Stopping." in worker.output.read_text()

        wait_until(noticed, "it isn't noticed")
        (tmp_path / "go").touch()
        second = JobFactory(task="changing.handler")
        wait_until(lambda: Job.objects.get(pk=second.pk).state == "completed", "it isn't reloaded")
    results = Job.objects.order_by("pk").values_list("result", "attempt")
    assert list(results) == [("old", 1), ("go", 1), ("new", 1)]
    assert running.pk < second.pk


def write_module(path: Path, result: str) -> None:
    path.write_text(f"def handler():\n    return {result!r}\n")


@contextmanager
def alone_reloading(directory: Path) -> Iterator:
    path = os.pathsep.join([str(directory), str(Path(__file__).parents[2])])
    variables = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    with alone(directory, "--reload", "--grace", "10", **variables) as worker:
        yield worker
