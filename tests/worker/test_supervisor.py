"""A parent and its worker processes: stopped, killed, crashed, replaced, and told of."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.db import transaction

from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.testing.factories import JobFactory
from jobqueue.worker.supervisor import RECYCLE
from tests.helpers import engine, wait_until
from tests.worker import handlers, poison
from tests.worker.real import Parent, is_gone, parent
from tests.worker.tools import AT_ONCE, kinds, make_job

on_sqlite = pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)
on_servers = pytest.mark.parametrize(
    "alias", [engine("postgresql"), engine("mariadb")], indirect=True
)


def states() -> list[str]:
    return sorted(Worker.objects.values_list("state", flat=True))


def poison_job(handler: Any, *args: Any, **columns: Any) -> Job:
    columns = {"backoff": AT_ONCE, **columns}
    return JobFactory(task=poison.path(handler), args=list(args), **columns)


def state_of(job: Job) -> str:
    return str(Job.objects.get(pk=job.pk).state)


# -- Signals


def test_the_first_sigterm_stops_all_processes_within_the_grace(alias, tmp_path):
    """What ends in time is settled, what hangs is handed back, and the counts are added up."""
    quick = make_job(handlers.wait_for_file, str(tmp_path), "go")
    hung = make_job(handlers.hang, str(tmp_path), max_attempts=1)
    with parent(tmp_path, "--processes", "2", "--threads", "1", "--grace", "1") as crew:
        crew.wait_for("begin go")
        crew.wait_for("begin hang")
        later = make_job(handlers.give)
        crew.send(signal.SIGTERM)
        crew.wait_for_event("stopping")
        (tmp_path / "go").touch()
        status, output = crew.end()
    assert status == 0, output
    assert crew.events()[-1]["settled"] == {"completed": 1, "released": 1}
    assert (state_of(quick), state_of(hung), state_of(later)) == ("completed", "waiting", "waiting")
    hung.refresh_from_db()
    assert (hung.attempt, hung.failures, kinds(hung)) == (1, 0, [EventKind.RELEASED])
    assert states() == ["stopped", "stopped"]


@on_sqlite
def test_a_signal_to_the_whole_group_is_one_signal(alias, tmp_path):
    """A service manager, and a terminal's Ctrl-C, tell the children what the parent tells them."""
    job = make_job(handlers.wait_for_file, str(tmp_path), "go")
    with parent(tmp_path) as crew:
        crew.wait_for("begin go")
        os.killpg(crew.process.pid, signal.SIGTERM)
        crew.wait_for_event("stopping")
        (tmp_path / "go").touch()
        status, output = crew.end()
    assert status == 0, output
    assert state_of(job) == "completed"
    assert states() == ["stopped"]


@on_sqlite
def test_a_second_signal_ends_all_at_once(alias, tmp_path):
    """Their jobs are left to a sweep."""
    make_job(handlers.hang, str(tmp_path))
    with parent(tmp_path, "--grace", "1h", "--processes", "2") as crew:
        crew.wait_for("begin hang")
        pids = crew.wait_until_up(2)
        crew.send(signal.SIGTERM)
        crew.wait_for_event("stopping")
        crew.send(signal.SIGTERM)
        status, output = crew.end()
        assert status == 128 + signal.SIGTERM, output
        assert not any(map(psutil.pid_exists, pids))
    assert "alive" in states()


@on_sqlite
def test_sighup_replaces_the_processes_one_after_another(alias, tmp_path):
    with parent(tmp_path, "--processes", "2") as crew:
        before = crew.wait_until_up(2)
        crew.send(signal.SIGHUP)
        after = crew.wait_until_up(4)
        assert not set(before) & set(after[2:])
        crew.wait_for_event("recycled", 2)
        order = [event["event"] for event in crew.events("recycled", "worker_started")][2:]
        assert order == ["recycled", "worker_started"] * 2
        crew.send(signal.SIGTERM)
        assert crew.end()[0] == 0
    assert states() == ["stopped"] * 4


@on_sqlite
def test_sigusr1_tells_where_every_thread_is(alias, tmp_path):
    make_job(handlers.hang, str(tmp_path))
    with parent(tmp_path) as crew:
        crew.wait_for("begin hang")
        crew.send(signal.SIGUSR1)
        wait_until(lambda: "in hang" in crew.output.read_text(), "the handler isn't shown")
        wait_until(lambda: "in _supervise" in crew.output.read_text(), "nor is the parent")
        assert crew.process.poll() is None
        assert len(crew.children) == 1


@on_sqlite
def test_a_process_that_an_operator_stops_is_replaced_at_once(alias, tmp_path):
    with parent(tmp_path) as crew:
        (first,) = crew.wait_until_up()
        os.kill(first, signal.SIGTERM)
        _, second = crew.wait_until_up(2)
        assert second != first
        assert crew.events("crashed") == []


# -- Processes that die


def test_a_job_that_kills_its_process_fails_and_takes_nobody_with_it(alias, tmp_path):
    """collectiveidea/delayed_job#415, RealOrangeOne/django-tasks#46: as the OOM killer does.

    The parent knows of the death: nobody waits for the lease, which is an hour.
    """
    assert_poison_is_contained(signal.SIGKILL, tmp_path)


@on_sqlite
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_so_does_one_that_crashes_it(alias, tmp_path, number):
    assert_poison_is_contained(number, tmp_path)


def assert_poison_is_contained(number: signal.Signals, tmp_path: Path) -> None:
    """Run a job that kills its process twice, and one beside it that does no harm."""
    bad = poison_job(poison.die, str(tmp_path), int(number), max_attempts=2)
    innocent = make_job(handlers.wait_for_file, str(tmp_path), "go", max_attempts=3)
    with parent(tmp_path, "--threads", "2", "--lease", "1h") as crew:
        crew.wait_for("begin die")
        crew.wait_for("begin go")
        (tmp_path / "die").touch()
        wait_until(lambda: state_of(bad) == State.FAILED, "it does not fail")
        (tmp_path / "go").touch()
        wait_until(lambda: state_of(innocent) == State.COMPLETED, "the innocent is lost")
        crashes = crew.events("crashed")
        crew.send(signal.SIGTERM)
        status, output = crew.end()
    assert status == 0, output
    bad.refresh_from_db()
    innocent.refresh_from_db()
    assert (bad.attempt, kinds(bad)) == (2, [EventKind.RESCUED, EventKind.FAILED])
    assert innocent.attempt == 3
    assert [(c["status"], c["signal"]) for c in crashes] == [(-number, number.name)] * 2
    first, second = (crash["wait"] for crash in crashes)
    assert 0.25 <= first <= 0.5 <= second <= 1
    messages = JobEvent.objects.filter(job=bad).values_list("message", flat=True)
    assert list(messages) == [f"its worker {crash['worker']} is gone" for crash in crashes]
    assert states() == ["dead", "dead", "stopped"]


@on_sqlite
@pytest.mark.parametrize("status", [0, RECYCLE])
def test_a_job_that_ends_its_process_has_crashed_it_whatever_the_status(alias, tmp_path, status):
    """Nobody takes that for the worker's own end."""
    bad = poison_job(poison.leave, str(tmp_path), status, max_attempts=1)
    with parent(tmp_path, "--threads", "1", "--lease", "1h") as crew:
        assert crew.wait_for_event("crashed")["status"] == status
        wait_until(lambda: state_of(bad) == State.FAILED, "it waits for the lease")
    assert crew.events("recycled") == []


def test_children_end_by_themselves_when_their_parent_is_killed(alias, tmp_path):
    """No orphans; and what they had in hand is handed back."""
    hung = make_job(handlers.hang, str(tmp_path), max_attempts=1)
    with parent(tmp_path, "--processes", "2", "--grace", "0.3") as crew:
        pids = crew.wait_until_up(2)
        crew.wait_for("begin hang")
        crew.send(signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, pids)), "the children live on")
    assert state_of(hung) == State.WAITING
    assert kinds(hung) == [EventKind.RELEASED]
    assert states() == ["stopped", "stopped"]


@on_sqlite
def test_a_process_that_hangs_is_killed_and_its_job_counted(alias, tmp_path):
    """A handler that keeps the interpreter for itself stops the heartbeat too."""
    bad = poison_job(poison.hold_the_interpreter, str(tmp_path), max_attempts=1)
    with parent(tmp_path, "--threads", "1", "--lease", "0.5") as crew:
        crew.wait_for("begin hold")
        crew.wait_for_event("silent")
        assert crew.wait_for_event("crashed")["signal"] == "SIGKILL"
        wait_until(lambda: state_of(bad) == State.FAILED, "it does not fail")


# -- Processes that are replaced


@on_sqlite
def test_a_process_is_replaced_after_so_many_jobs(alias, tmp_path):
    jobs = [poison_job(poison.tell_pid) for _ in range(5)]
    options = ("--burst", "--processes", "1", "--threads", "1", "--max-jobs", "2")
    with parent(tmp_path, *options) as crew:
        status, output = crew.end()
    assert status == 0, output
    pids = list(Job.objects.order_by("id").values_list("result", flat=True))
    assert len(jobs) == len(pids)
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]
    assert [event["status"] for event in crew.events("recycled")] == [RECYCLE] * 2
    assert crew.events()[-1]["settled"] == {"completed": 5}


@on_sqlite
def test_not_all_processes_are_replaced_after_the_same_number_of_jobs(alias, tmp_path):
    """Or they would all be at their last jobs, and claim nothing, at the same time."""
    with transaction.atomic(alias):
        for _ in range(400):
            poison_job(poison.tell_pid)
    with parent(tmp_path, "--burst", "--processes", "1", "--max-jobs", "40") as crew:
        status, output = crew.end()
    assert status == 0, output
    pids = list(Job.objects.order_by("id").values_list("result", flat=True))
    *counts, _ = Counter(pids).values()
    assert all(36 <= count <= 40 for count in counts)
    assert set(counts) != {40}


@on_sqlite
def test_several_processes_drain_the_queue_together(alias, tmp_path):
    first = make_job(handlers.wait_for_file, str(tmp_path), "go")
    second = make_job(handlers.wait_for_file, str(tmp_path), "go")
    with parent(tmp_path, "--burst", "--processes", "2", "--threads", "1") as crew:
        wait_until(lambda: crew.lines() == ["begin go"] * 2, "they do not work side by side")
        (tmp_path / "go").touch()
        status, output = crew.end()
    assert status == 0, output
    assert (state_of(first), state_of(second)) == ("completed", "completed")
    assert crew.events()[-1]["settled"] == {"completed": 2}


@on_sqlite
def test_a_process_that_takes_up_too_much_memory_finishes_its_job_and_is_replaced(alias, tmp_path):
    job = poison_job(poison.grow, str(tmp_path), 300)
    with parent(tmp_path, "--threads", "2", "--max-rss", "250", "--grace", "0.1") as crew:
        (pid,) = crew.wait_until_up()
        crew.wait_for("begin grown")
        told = crew.wait_for_event("too_big")
        assert (told["pid"], told["limit"]) == (pid, 250)
        assert told["rss"] > 300
        later = make_job(handlers.give)
        overdue = time.monotonic() + 0.5
        wait_until(lambda: time.monotonic() > overdue, "")
        assert crew.events("recycled") == []  # whatever the grace is
        (tmp_path / "grown").touch()
        crew.wait_for_event("recycled")
        wait_until(lambda: state_of(later) == State.COMPLETED, "the next one does not work")
        crew.wait_until_up(2)
    job.refresh_from_db()
    assert (job.state, job.attempt) == (State.COMPLETED, 1)
    assert len(crew.events("too_big")) == 1


# -- What the parent is, and tells


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@on_servers
def test_the_parent_has_no_connection_and_no_second_thread(alias, tmp_path):
    """So that it may fork whenever a process has to be replaced."""
    with parent(tmp_path) as crew:
        (pid,) = crew.wait_until_up()
        assert sockets(pid) > 0
        assert sockets(crew.process.pid) == 0
        assert psutil.Process(crew.process.pid).num_threads() == 1


def sockets(pid: int) -> int:
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(fd.readlink().name)
        except OSError:
            continue
    return sum(link.startswith("socket:") for link in links)


@on_sqlite
def test_the_health_file_is_fresh_while_all_processes_are_well(alias, tmp_path):
    file = tmp_path / "health"
    file.touch()
    os.utime(file, (0, 0))
    options = ("--processes", "2", "--lease", "1h", "--health-file", str(file))
    with parent(tmp_path, *options) as crew:
        frozen, _ = crew.wait_until_up(2)
        wait_until(lambda: is_fresh(file), "it isn't made")
        os.kill(frozen, signal.SIGSTOP)
        wait_until(lambda: rests(file), "it is touched though a process hangs")
        os.kill(frozen, signal.SIGCONT)
        wait_until(file.exists, "it isn't touched though all is well")
        crew.send(signal.SIGTERM)
        assert crew.end()[0] == 0
    assert not file.exists()


def is_fresh(file: Path) -> bool:
    return file.exists() and file.stat().st_mtime > 0


def rests(file: Path) -> bool:
    """Whether the file is not touched for longer than it should be at most."""
    file.unlink(missing_ok=True)
    ends = time.monotonic() + 2.5
    while time.monotonic() < ends:
        if file.exists():
            return False
    return True


def told(crew: Parent) -> list[str]:
    return [event["event"] for event in crew.events()]


@on_sqlite
def test_every_event_is_an_object_on_a_line(alias, tmp_path):
    make_job(handlers.give)
    with parent(tmp_path, "--queue", "default") as crew:
        crew.wait_until_up()
        wait_until(lambda: not Job.objects.exclude(state="completed").exists(), "no work is done")
        crew.send(signal.SIGTERM)
        _, output = crew.end()
        assert told(crew) == ["worker_started", "stopping", "worker_stopped", "stopped"], output
        assert len(output.splitlines()) == 4
        started, stopping, ended, last = crew.events()
        worker = Worker.objects.get().pk
        for event in (started, stopping, ended, last):
            assert event.keys() >= {"event", "time", "pid", "message"}
        assert started["message"] == f"Worker {worker} serves default with 4 thread(s)."
        assert (started["worker"], ended["worker"]) == (worker, worker)
        assert started["pid"] == ended["pid"] != crew.process.pid
        assert stopping["pid"] == last["pid"] == crew.process.pid
        assert stopping["signal"] == "SIGTERM"
        assert ended["message"] == f"Process {ended['pid']} stopped: 1 completed."
        assert last["message"] == "Worker stopped: 1 completed."
        assert ended["settled"] == last["settled"] == {"completed": 1}


@on_sqlite
def test_a_lost_lease_is_told_and_the_process_goes_on(alias, tmp_path):
    with parent(tmp_path, "--lease", "0.6") as crew:
        (pid,) = crew.wait_until_up()
        worker = crew.events("worker_started")[0]["worker"]
        Worker.objects.filter(pk=worker).update(state=Worker.State.DEAD)
        assert crew.wait_for_event("lease_lost")["worker"] == worker
        assert crew.wait_until_up(2) == [pid, pid]
