"""``run_worker``: what is refused, who runs without a parent, and what it tells."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections, transaction
from django.test import override_settings

from jobqueue import conf, db
from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job, Worker
from jobqueue.testing.factories import JobFactory, WorkerFactory
from jobqueue.worker.link import Inbox, Link
from jobqueue.worker.process import WorkerOptions, WorkerProcess, bury, disconnect
from jobqueue.worker.run import _bury_all
from tests.commands import manage
from tests.helpers import engine, run_in_thread, wait_until, wait_until_blocked
from tests.worker import handlers, poison
from tests.worker.real import alone, parent
from tests.worker.tools import broken_statements, kinds, make_job, troubles

on_sqlite = pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)

# -- What is refused before any job is touched

WRONG = {
    "--processes -1": "argument --processes: '-1' must be an integer from 0 to 1000",
    "--processes 1001": "argument --processes: '1001' must be an integer from 0 to 1000",
    "--processes x": "argument --processes: 'x' must be an integer from 0 to 1000",
    "--max-rss 0": "argument --max-rss: '0' must be an integer from 1 to 2147483648",
    "--reload --burst": "--reload waits for changes, and --burst ends: give one of them.",
    "--reload --processes 2": "--reload runs in one process: leave --processes out.",
    "--health-file nowhere/health": (
        "--health-file nowhere/health: its directory must exist, and be writable."
    ),
    "--health-file /": "--health-file / is there, and no file.",
}


@on_sqlite
@pytest.mark.parametrize("options", WRONG)
def test_wrong_usage_ends_with_status_2_and_is_named(alias: str, options: str) -> None:
    job = JobFactory()
    done = manage("run_worker", *options.split())
    assert (done.status, done.out) == (2, "")
    assert WRONG[options] in done.err
    assert "Traceback" not in done.err
    assert Job.objects.get(pk=job.pk).state == State.WAITING
    assert not Worker.objects.exists()


@on_sqlite
def test_a_parent_is_refused_outside_the_main_thread(alias: str) -> None:
    running = run_in_thread(call_command, "run_worker", processes=1)
    with pytest.raises(CommandError) as refused:
        running.result()
    assert str(refused.value) == "--processes needs the main thread, for it hears signals."
    assert refused.value.returncode == 2


@pytest.mark.parametrize("value", [-1, 1001, 1.0, True, None, "2"])
def test_so_is_a_wrong_setting(value: object) -> None:
    assert conf.read({"PROCESSES": 1000})[0].PROCESSES == 1000
    assert conf.read({"PROCESSES": value})[1] == [
        f"JOBQUEUE['PROCESSES']: the value must be an integer from 0 to 1000, not {value!r}"
    ]


# -- Who runs in this process


@on_sqlite
@pytest.mark.parametrize("processes", [0, 7])
def test_a_burst_runs_here_whatever_the_setting(alias: str, processes: int) -> None:
    """Tests and scripts call it within a process, and perhaps a transaction, of their own."""
    job = JobFactory(task=poison.path(poison.tell_pid))
    with override_settings(JOBQUEUE={"PROCESSES": processes}):
        assert manage("run_worker", "--burst").status == 0
    job.refresh_from_db()
    assert job.result == os.getpid()


@on_sqlite
@pytest.mark.parametrize(("options", "setting"), [(("--processes", "0"), 7), ((), 0)])
def test_without_a_parent_it_ends_after_so_many_jobs(
    alias: str, options: tuple[str, ...], setting: int
) -> None:
    for _ in range(3):
        JobFactory()
    with override_settings(JOBQUEUE={"PROCESSES": setting}):
        done = manage("run_worker", "--max-jobs", "2", *options)
    assert done.status == 0
    assert done.out.endswith("Worker stopped: 2 completed.\n")
    assert Job.objects.filter(state=State.WAITING).count() == 1


@on_sqlite
def test_without_a_parent_it_ends_when_it_is_too_big(alias: str, tmp_path: Path) -> None:
    job = make_job(handlers.wait_for_file, str(tmp_path), "go")
    with alone(tmp_path, "--max-rss", "1") as worker:
        worker.wait_for("begin go")
        wait_until(lambda: "more than 1: it ends" in worker.output.read_text(), "it isn't told")
        (tmp_path / "go").touch()
        status, output = worker.end()
    assert status == 0
    assert output.endswith("Worker stopped: 1 completed.\n")
    assert Job.objects.get(pk=job.pk).state == State.COMPLETED


@on_sqlite
def test_without_a_parent_the_health_file_is_its_own(alias: str, tmp_path: Path) -> None:
    file = tmp_path / "health"
    with alone(tmp_path, "--health-file", str(file)) as worker:
        wait_until(file.exists, "it isn't made")
        file.unlink()
        wait_until(file.exists, "it isn't touched again")
        worker.send(signal.SIGUSR1)
        wait_until(lambda: "/worker/process.py" in worker.output.read_text(), "no stacks are shown")
        worker.send(signal.SIGTERM)
        assert worker.end()[0] == 0
    assert not file.exists()


@on_sqlite
def test_the_health_file_grows_old_when_the_lease_is_not_held(alias: str, tmp_path: Path) -> None:
    """As when the database can't be written: here somebody else has its lock."""
    file = tmp_path / "health"
    with alone(tmp_path, "--health-file", str(file), "--lease", "1") as worker:
        wait_until(file.exists, "it isn't made")
        with connections[alias].cursor() as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            wait_until(lambda: _is_older(file, 3.5), "it is touched without a lease")
            cursor.execute("ROLLBACK")
        file.unlink()
        wait_until(file.exists, "it isn't touched again")
        assert worker.process.poll() is None


def _is_older(file: Path, seconds: float) -> bool:
    then = file.stat().st_mtime
    os.utime(file.parent)  # the same clock
    return file.parent.stat().st_mtime - then > seconds


# -- JSON


@on_sqlite
def test_json_is_told_by_a_burst_as_well(alias: str) -> None:
    JobFactory()
    with override_settings(JOBQUEUE={"QUEUES": ["mail"]}):
        done = manage("run_worker", "--burst", "--json", "--queue", "default")
    assert (done.status, done.err) == (0, "")
    unknown, started, stopped = map(json.loads, done.out.splitlines())
    assert (unknown["event"], unknown["queue"], unknown["known"]) == (
        "unknown_queue",
        "default",
        ["mail"],
    )
    assert started["event"] == "worker_started"
    assert (stopped["event"], stopped["settled"]) == ("stopped", {"completed": 1})


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_trouble_is_told_and_survived(alias: str, tmp_path: Path) -> None:
    with parent(tmp_path, "--threads", "1") as crew:
        crew.wait_until_up()
        with connections[alias].cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        event = crew.wait_for_event("trouble")
        assert event["worker"] == Worker.objects.get().pk
        assert event["doing"] in ("claim", "look ahead")
        job = make_job(handlers.give)
        wait_until(lambda: Job.objects.get(pk=job.pk).state == "completed", "it does not go on")
        crew.send(signal.SIGTERM)
        assert crew.end()[0] == 0


# -- Burials and forks


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_a_burial_that_has_to_wait_holds_up_nobody(alias: str, tmp_path: Path) -> None:
    """Whoever has locked the dead worker's row may take his time."""
    with parent(tmp_path) as crew:
        (pid,) = crew.wait_until_up()
        with transaction.atomic(alias):
            dead = Worker.objects.select_for_update().get()
            os.kill(pid, signal.SIGKILL)
            crew.wait_until_up(2)
            wait_until_blocked(alias)
        wait_until(lambda: Worker.objects.get(pk=dead.pk).state == "dead", "it isn't buried")


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_a_burst_waits_for_what_a_crash_has_left(alias: str, tmp_path: Path) -> None:
    """Or the queue would seem to be drained, as long as the burial waits."""
    job = JobFactory(task=poison.path(poison.leave_once), args=[str(tmp_path)], backoff={"base": 0})
    with parent(tmp_path, "--burst", "--processes", "1", "--lease", "1h") as crew:
        crew.wait_for("begin leave")
        with transaction.atomic(alias):
            Worker.objects.select_for_update().get()
            (tmp_path / "leave").touch()
            wait_until_blocked(alias)
            drained = time.monotonic() + 1
            wait_until(lambda: time.monotonic() > drained, "")
        status, output = crew.end()
    assert status == 0, output
    job.refresh_from_db()
    assert (job.state, job.attempt) == (State.COMPLETED, 2)
    assert crew.events()[-1]["settled"] == {"completed": 1}


def test_a_burial_frees_the_jobs_of_the_dead_and_nobody_elses(alias: str) -> None:
    """The lease has not run out: only who has reaped the process may say so.

    riverqueue/river#1258: whatever their tasks and queues, which nobody may know any more.
    """
    dead, lives = WorkerFactory(), WorkerFactory()
    its = JobFactory(running=True, claimed_by=dead.pk, backoff={"base": 0}, task="gone.away")
    claimed = JobFactory(claimed=True, claimed_by=dead.pk, queue="unserved")
    other = JobFactory(running=True, claimed_by=lives.pk)
    bury(dead.pk, alias)
    for job in (its, claimed, other):
        job.refresh_from_db()
    assert (its.state, kinds(its)) == (State.WAITING, [EventKind.RESCUED])
    assert claimed.state == State.WAITING
    assert (other.state, kinds(other)) == (State.RUNNING, [])
    dead.refresh_from_db()
    lives.refresh_from_db()
    assert (dead.state, lives.state) == (Worker.State.DEAD, Worker.State.ALIVE)


def test_a_burial_that_breaks_off_can_be_done_again(alias: str) -> None:
    """openradx/radis#276: whichever statement is the last, nothing is lost to all sweeps."""
    for survived in range(100):
        dead = WorkerFactory(lease=timedelta(hours=1))
        jobs = [JobFactory(claimed=True, claimed_by=dead.pk) for _ in range(2)]
        executed = count()

        def break_off(execute: Any, *args: Any, n: int = survived, seen: Any = executed) -> Any:
            if next(seen) >= n:
                raise OperationalError("the server closed the connection unexpectedly")
            return execute(*args)

        broke_off = False
        try:
            with connections[alias].execute_wrapper(break_off):
                bury(dead.pk, alias)
        except OperationalError:
            broke_off = True
            bury(dead.pk, alias)
        assert {Job.objects.get(pk=job.pk).state for job in jobs} == {State.WAITING}
        if not broke_off:
            break
    assert survived > 3


class Grave:
    """Three dead workers with a job each, buried as by the process that replaces them."""

    def __init__(self, alias: str) -> None:
        self.dead = [WorkerFactory(lease=timedelta(hours=1)).pk for _ in range(3)]
        for worker_id in self.dead:
            JobFactory(claimed=True, claimed_by=worker_id)
        self._process = WorkerProcess(WorkerOptions(using=alias))

    def bury_all(self) -> bool:
        """Bury them; return whether the parent is told so."""
        inward, outward = os.pipe()
        inbox, link = Inbox(inward, now=0.0), Link(inward, outward)
        run_in_thread(_bury_all, self.dead, self._process, link).result()
        os.close(outward)
        inbox.read(now=1.0)
        inbox.close()
        return inbox.has_buried

    def left(self) -> list[str]:
        """Return who still has a job, and lives as far as the database knows."""
        held = Job.objects.exclude(claimed_by=None).values_list("claimed_by", flat=True)
        alive = Worker.objects.filter(state=Worker.State.ALIVE).values_list("pk", flat=True)
        assert sorted(held) == sorted(alive)
        return sorted(held)


@pytest.mark.parametrize("times", [1, db.TRIES - 1])
def test_a_burial_that_fails_is_tried_again(alias: str, times: int) -> None:
    grave = Grave(alias)
    lost = OperationalError("the server closed the connection unexpectedly")
    with troubles() as heard, breaking(alias, grave.dead[0], lost, times):
        assert grave.bury_all()
    assert (grave.left(), heard) == ([], [])


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_a_burial_goes_on_when_its_connection_is_gone(alias: str) -> None:
    grave = Grave(alias)
    with transaction.atomic(alias):
        list(Worker.objects.select_for_update())
        burial = run_in_thread(grave.bury_all)
        wait_until_blocked(alias)
        with connections[alias].cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
    assert burial.result()
    assert grave.left() == []


def test_one_that_can_not_be_buried_is_named_and_the_others_are_buried(alias: str) -> None:
    """The next process that comes there is told of the dead again, and the lease runs out."""
    grave = Grave(alias)
    with troubles() as heard, breaking(alias, grave.dead[0], OperationalError("no"), math.inf):
        assert not grave.bury_all()
    assert grave.left() == grave.dead[:1]
    assert heard == [f"bury worker {grave.dead[0]} in 6 tries, and leaves its jobs to a sweep"]
    assert grave.bury_all()
    assert grave.left() == []


def breaking(alias: str, worker_id: str, error: Exception, times: float) -> Any:
    """Make declaring that worker dead fail, on connections that the block opens."""

    def matches(sql: str, params: Any) -> bool:
        return sql.startswith("UPDATE") and worker_id in params and Worker.State.DEAD in params

    return broken_statements(alias, matches, error, times=times)


def test_who_has_left_is_not_buried(alias: str) -> None:
    left = WorkerFactory(state=Worker.State.STOPPED, lease=timedelta(hours=1))
    bury(left.pk, alias)
    left.refresh_from_db()
    assert left.state == Worker.State.STOPPED


def test_nothing_is_connected_before_a_fork(alias: str) -> None:
    def look() -> object:
        connections[alias].ensure_connection()
        assert connections[alias].connection is not None
        disconnect()
        return connections[alias].connection

    assert run_in_thread(look).result() is None
