"""Worker processes without a parent: told to stop, killed, frozen past their lease and woken."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.sweep import SweepReport, sweep_stale_jobs
from tests.helpers import engine, wait_until
from tests.worker import handlers
from tests.worker.real import alone
from tests.worker.tools import kinds, make_job


def sweep_until_dead() -> SweepReport:
    """Sweep until a silent worker's lease has run out; return what that sweep did."""
    reports: list[SweepReport] = []

    def fenced() -> bool:
        reports.append(sweep_stale_jobs())
        return reports[-1].dead_workers == 1

    wait_until(fenced, "no worker's lease ran out")
    return reports[-1]


def messages(job: Job) -> list[str]:
    return list(JobEvent.objects.filter(job=job).values_list("message", flat=True))


def test_sigterm_stops_the_worker_within_the_grace(alias, tmp_path):
    """What ends in time is settled, what hangs is handed back, and the process ends."""
    assert_stops_on(signal.SIGTERM, tmp_path)


@pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)
def test_sigint_does_the_same(alias, tmp_path):
    assert_stops_on(signal.SIGINT, tmp_path)


def assert_stops_on(number: signal.Signals, tmp_path: Path) -> None:
    """Stop a worker that has a quick job, one that hangs, and one yet to be claimed."""
    quick = make_job(handlers.wait_for_file, str(tmp_path), "go")
    hung = make_job(handlers.hang, str(tmp_path), max_attempts=1)
    with alone(tmp_path, "--threads", "2", "--grace", "0.6") as worker:
        worker.wait_for("begin go")
        worker.wait_for("begin hang")
        later = make_job(handlers.give)
        worker.send(number)
        (tmp_path / "go").touch()
        status, output = worker.end()
    assert status == 0, output
    assert output.endswith("Worker stopped: 1 completed, 1 released.\n")
    for job in (quick, hung, later):
        job.refresh_from_db()
    assert (quick.state, quick.result) == (State.COMPLETED, "go")
    assert (hung.state, hung.attempt, hung.failures) == (State.WAITING, 1, 0)
    assert messages(hung) == ["its worker was stopped"]
    assert (later.state, later.attempt) == (State.WAITING, 0)
    assert Worker.objects.get().state == Worker.State.STOPPED


@pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)
def test_a_second_signal_ends_the_worker_at_once(alias, tmp_path):
    make_job(handlers.hang, str(tmp_path))
    with alone(tmp_path, "--grace", "1h") as worker:
        worker.wait_for("begin hang")

        def ended() -> bool:
            worker.send(signal.SIGTERM)
            return worker.process.poll() is not None

        wait_until(ended, "the worker waits for its grace")
        status, _ = worker.end()
    assert status == -signal.SIGTERM
    assert Worker.objects.get().state == Worker.State.ALIVE


@pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)
def test_a_hung_coroutine_does_not_keep_the_process(alias, tmp_path):
    """Its event loop runs in a thread that the interpreter would wait for."""
    job = make_job(handlers.hang_async, str(tmp_path))
    with alone(tmp_path, "--grace", "0.1") as worker:
        worker.wait_for("begin hang_async")
        worker.send(signal.SIGTERM)
        status, output = worker.end()
    assert status == 0, output
    assert output.endswith("Worker stopped: 1 released.\n")
    assert Job.objects.get(pk=job.pk).state == State.WAITING


def test_a_killed_workers_jobs_are_retried_and_a_poison_job_ends(alias, tmp_path):
    """collectiveidea/delayed_job#415, sidequestjs/sidequest#155, RealOrangeOne/django-tasks#46.

    The attempt is counted when it begins, and each loss leaves its reason.
    """
    innocent = make_job(handlers.wait_for_file, str(tmp_path), "go", priority=9)
    poison = make_job(handlers.kill_worker, str(tmp_path), max_attempts=2, priority=5)
    ids = []
    for threads in ("2", "1"):
        Job.objects.filter(pk=innocent.pk, attempt=1).update(priority=0)
        with alone(tmp_path, "--threads", threads, "--lease", "0.4") as worker:
            status, output = worker.end()
            assert status == -signal.SIGKILL, output
        ids.append(Worker.objects.alive().get().pk)
        report = sweep_until_dead()
    assert (report.failed, report.conflicts, report.errors) == (1, 0, 0)
    poison.refresh_from_db()
    assert (poison.state, poison.attempt) == (State.FAILED, 2)
    assert kinds(poison) == [EventKind.RESCUED, EventKind.FAILED]
    assert messages(poison) == [f"its worker {worker_id} is gone" for worker_id in ids]
    (tmp_path / "go").touch()
    with alone(tmp_path, "--burst") as worker:
        assert worker.end()[0] == 0
    innocent.refresh_from_db()
    assert (innocent.state, innocent.attempt) == (State.COMPLETED, 2)
    assert messages(innocent) == messages(poison)[:1]


def test_a_frozen_workers_late_report_is_refused_and_the_woken_one_goes_on(alias, tmp_path):
    """kagkarlsson/db-scheduler#402, oxpull/django-ox#16."""
    job = make_job(handlers.wait_for_file, str(tmp_path), "go")
    with alone(tmp_path, "--threads", "1", "--lease", "0.5") as frozen:
        frozen.wait_for("begin go")
        frozen.send(signal.SIGSTOP)
        assert sweep_until_dead().taken == 1
        (tmp_path / "go").touch()
        with alone(tmp_path, "--burst") as other:
            assert other.end()[0] == 0
            assert other.lines() == ["begin go", "end go lost=False"]
        done = Job.objects.filter(pk=job.pk).values().get()
        assert (done["state"], done["attempt"]) == (State.COMPLETED, 2)

        frozen.send(signal.SIGCONT)
        wait_until(
            lambda: EventKind.CONFLICT in kinds(job), "the late report left no conflict event"
        )
        after = make_job(handlers.wait_for_file, str(tmp_path), "go")
        wait_until(
            lambda: Job.objects.get(pk=after.pk).state == State.COMPLETED,
            "the woken worker does not go on",
        )
        frozen.send(signal.SIGTERM)
        status, output = frozen.end()
    assert status == 0, output
    assert Job.objects.filter(pk=job.pk).values().get() == done
    assert kinds(job) == [EventKind.RESCUED, EventKind.CONFLICT]
    assert frozen.lines()[-2:] == ["begin go", "end go lost=False"]
    assert "Worker stopped: 1 completed, 1 conflict." in output
    states = Worker.objects.values_list("state", flat=True)
    assert sorted(states) == ["dead", "stopped", "stopped"]
