"""``sweep_stale_jobs``: what it says, when it ends and how; and the progress bar."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import termios
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections

from jobqueue import transitions
from jobqueue.management import base
from jobqueue.models import Job
from jobqueue.testing.factories import JobFactory, WorkerFactory
from tests.asserting import stored, stubborn, unmigrated
from tests.commands import child, manage
from tests.helpers import TIMEOUT, pause_at, run_in_thread, statement, wait_until

NOTHING = {
    "examined": 0,
    "dead_workers": 0,
    "released": 0,
    "retried": 0,
    "failed": 0,
    "cancelled": 0,
    "conflicts": 0,
    "errors": 0,
}
OLD = timedelta(hours=1)


# -- one sweep


def test_a_sweep_reports_to_people_and_to_programs(alias: str) -> None:
    WorkerFactory(silent=True, id="silent")
    JobFactory(claimed=True, claimed_by="silent")
    JobFactory(running=True)
    JobFactory(running=True, attempt=3)

    done = manage("sweep_stale_jobs", "--dry-run")
    assert done.out == (
        "3 examined, 1 dead workers, 1 released, 1 retried, 1 failed, 0 cancelled, 0 conflicts, "
        "0 errors\n"
    )
    assert (done.status, done.err) == (0, "")
    assert Job.objects.filter(state__in=["claimed", "running"]).count() == 3

    done = manage("sweep_stale_jobs", "--json")
    counts = {"examined": 3, "dead_workers": 1, "released": 1, "retried": 1, "failed": 1}
    assert done.report == NOTHING | counts
    assert manage("sweep_stale_jobs", "--json").report == NOTHING


def test_only_these_queues_are_swept(alias: str) -> None:
    for queue in "abc":
        JobFactory(claimed=True, queue=queue)
    report = manage("sweep_stale_jobs", "--json", "--queue", "a", "--queue", "c").report
    assert (report["examined"], report["released"]) == (2, 2)
    assert Job.objects.get(state="claimed").queue == "b"


def test_no_more_than_the_limit_are_taken(alias: str) -> None:
    JobFactory.create_batch(5, claimed=True)
    report = manage("sweep_stale_jobs", "--json", "--limit", "3", "--batch-size", "2").report
    assert (report["examined"], report["released"]) == (4, 3)


@pytest.mark.parametrize(
    ("flag", "state", "column"),
    [("--claimed-after", "claimed", "claimed_at"), ("--running-after", "running", "attempted_at")],
)
def test_from_when_on_a_job_is_stale_can_be_said(
    alias: str, flag: str, state: str, column: str
) -> None:
    """Also of a worker that lives."""
    WorkerFactory(id="alive")
    job = JobFactory(**{state: True}, claimed_by="alive")
    Job.objects.filter(pk=job.pk).update(**{column: stored(job)[column] - OLD})

    assert manage("sweep_stale_jobs", "--json", flag, "2h").report["examined"] == 1
    assert stored(job)["state"] == state
    manage("sweep_stale_jobs", "--json", flag, "30m")
    assert stored(job)["state"] != state


def test_one_row_s_error_stops_no_other_and_is_in_the_exit_status(alias: str) -> None:
    jobs = JobFactory.create_batch(3, claimed=True)
    with stubborn(alias, jobs[1]):
        done = manage("sweep_stale_jobs", "--json")
    assert done.status == 1
    assert json.loads(done.out) == NOTHING | {"examined": 3, "released": 2, "errors": 1}
    assert "1 job(s) could not be settled; see the log." in done.err
    assert [stored(job)["state"] for job in jobs] == ["waiting", "claimed", "waiting"]


def test_a_database_that_fails_is_in_the_exit_status(alias: str) -> None:
    with unmigrated(alias):
        done = manage("sweep_stale_jobs", "--json")
    assert (done.status, done.out) == (1, "")
    assert "jobqueue_" in done.err


def looked_whose_holders_live(sql: str) -> bool:
    """Match the last question of a sweep before it writes."""
    return statement("SELECT", "jobqueue_worker")(sql) and "last_seen_at" not in sql


def test_a_lost_race_is_no_error(alias: str) -> None:
    job = JobFactory(running=True)
    with pause_at(connections[alias], looked_whose_holders_live, after=True) as pause:

        def win() -> None:
            pause.wait_until_reached()
            transitions.complete(job, "done")
            pause.release()

        winner = run_in_thread(win)
        done = manage("sweep_stale_jobs", "--json")
        winner.result()
    assert (done.status, done.report) == (0, NOTHING | {"examined": 1, "conflicts": 1})
    assert stored(job)["result"] == "done"


# -- sweep_stale_jobs --interval


def line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout
    return dict(json.loads(run_in_thread(process.stdout.readline).result()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_repeated_sweep_ends_at_once_when_told_to(alias: str, number: signal.Signals) -> None:
    job = JobFactory(claimed=True)
    with child("sweep_stale_jobs", "--json", "--interval", "1h") as sweep:
        assert line(sweep)["released"] == 1
        assert stored(job)["state"] == "waiting"
        sweep.send_signal(number)
        out, err = sweep.communicate(timeout=TIMEOUT)
    assert (sweep.returncode, out, err) == (0, "", "")


def test_a_repeated_sweep_outlives_an_error_and_ends_well_if_the_last_pass_did(alias: str) -> None:
    with child("sweep_stale_jobs", "--json", "--interval", "0.05") as sweep:
        assert line(sweep) == NOTHING
        with unmigrated(alias):
            assert sweep.stderr
            told = run_in_thread(sweep.stderr.readline).result()
            assert told.startswith("This sweep failed: ")
        JobFactory(claimed=True)
        wait_until(lambda: Job.objects.filter(state="waiting").exists(), "no sweep came by")
        sweep.send_signal(signal.SIGTERM)
        sweep.communicate(timeout=TIMEOUT)
    assert sweep.returncode == 0


def test_a_repeated_sweep_ends_badly_if_the_last_pass_failed(alias: str) -> None:
    with unmigrated(alias), child("sweep_stale_jobs", "--json", "--interval", "1h") as sweep:
        assert sweep.stderr
        assert "This sweep failed" in run_in_thread(sweep.stderr.readline).result()
        sweep.send_signal(signal.SIGTERM)
        _, err = sweep.communicate(timeout=TIMEOUT)
    assert sweep.returncode == 1
    assert "This sweep failed" in err


# -- progress


def on_terminal(*argv: str) -> tuple[str, str]:
    """Run a command whose stderr is a terminal; return its stdout and what the terminal showed."""
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))

    def watch() -> str:
        shown = b""
        try:
            while read := os.read(controller, 4096):
                shown += read
        except OSError:  # nobody has the terminal open any more
            pass
        return shown.decode()

    with child(*argv, stderr=terminal) as process:
        os.close(terminal)
        watching = run_in_thread(watch)
        out, _ = process.communicate(timeout=TIMEOUT)
    shown = watching.result()
    os.close(controller)
    assert process.returncode == 0, shown
    return out, shown


@pytest.mark.parametrize("jobs", [0, 3])
@pytest.mark.parametrize("command", ["sweep_stale_jobs", "prune_jobs --older-than 0"])
def test_a_bar_is_shown_on_a_terminal_and_only_there(alias: str, command: str, jobs: int) -> None:
    JobFactory.create_batch(jobs, claimed=True)
    JobFactory.create_batch(jobs, completed=True)

    out, shown = on_terminal(*command.split(), "--json")

    assert "job/s]" in shown
    assert out == json.dumps(json.loads(out)) + "\n"
    assert jobs in json.loads(out).values()
    assert manage(*command.split()).err == ""


def test_the_bar_is_optional(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm is an extra."""
    monkeypatch.setattr(base, "tqdm", None)
    done = manage("sweep_stale_jobs", terminal=True)
    assert (done.status, done.err) == (0, "")
