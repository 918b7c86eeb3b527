"""The commands: arguments are checked, reports are exact, and the exit status tells."""

from __future__ import annotations

import argparse
from datetime import timedelta

import pytest
from django.test import override_settings

from jobqueue.management.base import duration
from jobqueue.models import Job, JobEvent, Worker
from jobqueue.testing.factories import JobEventFactory, JobFactory, WorkerFactory
from tests.asserting import stored, unmigrated
from tests.commands import Done, manage

# -- arguments


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("1.5", 1.5), ("90s", 90), ("2m", 120), ("1h", 3600), (" 2d ", 172_800)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == timedelta(seconds=seconds)
    assert duration("4w") == timedelta(weeks=4)


NO_DURATION = "is not a duration: give seconds, or a number with s, m, h, d or w"
BAD_DURATIONS = {
    "": f"'' {NO_DURATION}",
    "soon": f"'soon' {NO_DURATION}",
    "-5": f"'-5' {NO_DURATION}",
    "1h30m": f"'1h30m' {NO_DURATION}",
    "1e3": f"'1e3' {NO_DURATION}",
    "nan": f"'nan' {NO_DURATION}",
    "40000d": "'40000d' must be at most 36,500 days, not 40000 days, 0:00:00",
    "9" * 400: f"'{'9' * 400}' must be a finite number of seconds, not inf",
}


@pytest.mark.parametrize("text", BAD_DURATIONS)
def test_bad_durations(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        duration(text)
    assert str(refused.value) == BAD_DURATIONS[text]


QUEUE = "queue must be 1 to 100 letters, digits or any of _ . : -, not 'a b'"
BAD_ARGUMENTS = [
    ("run_worker --queue", "a b", f"argument --queue: {QUEUE}"),
    ("run_worker --threads", "0", "argument --threads: '0' must be an integer from 1 to 1000"),
    (
        "run_worker --threads",
        "1001",
        "argument --threads: '1001' must be an integer from 1 to 1000",
    ),
    ("run_worker --threads", "x", "argument --threads: 'x' must be an integer from 1 to 1000"),
    ("run_worker --max-jobs", "0", "--max-jobs: '0' must be an integer from 1 to 2147483648"),
    ("run_worker --lease", "0", "argument --lease: '0' must be more than zero"),
    ("run_worker --lease", "-1", f"argument --lease: '-1' {NO_DURATION}"),
    ("run_worker --poll", "0s", "argument --poll: '0s' must be more than zero"),
    ("run_worker --grace", "soon", f"argument --grace: 'soon' {NO_DURATION}"),
    ("run_worker --poll 30 --lease", "30", "--poll (30 s) must be shorter than --lease (30 s)."),
    ("run_worker --lease", "1", "--poll (1 s) must be shorter than --lease (1 s)."),
    ("run_worker --database", "nowhere", "There is no database 'nowhere'; known: default"),
    ("run_worker --nonsense", "1", "unrecognized arguments: --nonsense 1"),
    ("sweep_stale_jobs --queue", "a b", f"argument --queue: {QUEUE}"),
    ("sweep_stale_jobs --claimed-after", "x", f"argument --claimed-after: 'x' {NO_DURATION}"),
    ("sweep_stale_jobs --running-after", "-1", f"argument --running-after: '-1' {NO_DURATION}"),
    ("sweep_stale_jobs --limit", "0", "--limit: '0' must be an integer from 1 to 2147483648"),
    ("sweep_stale_jobs --batch-size", "0", "--batch-size: '0' must be an integer from 1 to 10000"),
    ("sweep_stale_jobs --interval", "0", "argument --interval: '0' must be more than zero"),
    ("sweep_stale_jobs --database", "nowhere", "There is no database 'nowhere'; known: default"),
    ("prune_jobs --older-than", "x", f"argument --older-than: 'x' {NO_DURATION}"),
    ("prune_jobs --older-than 1d --batch-size", "x", "'x' must be an integer from 1 to 10000"),
    ("prune_jobs --json --database", "x", "the following arguments are required: --older-than"),
    ("prune_jobs --older-than 1d --database", "x", "There is no database 'x'; known: default"),
]


@pytest.mark.parametrize(("command", "value", "message"), BAD_ARGUMENTS)
def test_a_bad_argument_ends_with_status_2_and_is_named(
    alias: str, command: str, value: str, message: str
) -> None:
    done = manage(*command.split(), value)
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert "Traceback" not in done.err
    assert not Worker.objects.exists()


def test_an_unknown_queue_is_named(alias: str) -> None:
    with override_settings(JOBQUEUE={"QUEUES": ["mail"]}):
        done = manage("sweep_stale_jobs", "--queue", "slow")
    assert done.status == 2
    assert "argument --queue: there is no queue 'slow' in JOBQUEUE['QUEUES']: mail" in done.err


def test_a_worker_serves_an_unknown_queue_and_warns_of_it(alias: str) -> None:
    """While a deploy is under way, a queue may be known elsewhere already."""
    job = JobFactory(queue="slow")
    with override_settings(JOBQUEUE={"QUEUES": ["mail", "default"]}):
        done = manage("run_worker", "--burst", "--queue", "slow", "--queue", "mail")
    assert done.status == 0
    assert done.err == "There is no queue 'slow' in JOBQUEUE['QUEUES']: mail, default.\n"
    assert stored(job)["state"] == "completed"


@pytest.mark.parametrize(
    ("argv", "status"), [(["run_worker"], 1), (["sweep_stale_jobs", "--queue", "mail"], 2)]
)
def test_settings_that_are_wrong_are_named(alias: str, argv: list[str], status: int) -> None:
    with override_settings(JOBQUEUE={"THREADS": 0}):
        done = manage(*argv)
    assert done.status == status
    assert "JOBQUEUE['THREADS']: the value must be an integer from 1 to 1000, not 0" in done.err
    assert "Traceback" not in done.err


def test_a_command_can_be_sent_to_another_database(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    JobFactory(claimed=True)
    JobFactory(completed=True, finished_at="2001-01-01T00:00Z")
    monkeypatch.setenv("JOBQUEUE_TEST_ALIAS", "nowhere")
    to = ("--database", alias)
    assert manage("sweep_stale_jobs", "--json", *to).report["released"] == 1
    assert manage("prune_jobs", "--older-than", "1d", "--json", *to).report["jobs"] == 1
    assert manage("run_worker", "--burst", *to).out.endswith("Worker stopped: 1 completed.\n")


# -- run_worker


def test_a_worker_greets_works_and_says_what_it_did(alias: str) -> None:
    JobFactory(queue="mail")
    JobFactory(queue="slow", task="jobqueue.testing.tasks.fail")
    other = JobFactory()

    done = manage(
        "run_worker",
        "--burst",
        "--queue",
        "mail",
        "--queue",
        "slow",
        "--threads",
        "2",
        "--poll",
        "0.1",
    )

    assert (done.status, done.err) == (0, "")
    greeting, farewell = done.out.splitlines()
    worker = Worker.objects.get()
    assert greeting == f"Worker {worker.pk} serves mail, slow with 2 thread(s)."
    assert farewell == "Worker stopped: 1 completed, 1 retried."
    assert worker.state == "stopped"
    assert stored(other)["state"] == "waiting"


def test_a_worker_with_nothing_to_do_says_so(alias: str) -> None:
    done = manage("run_worker", "--burst", "--max-jobs", "5", "--lease", "9", "--grace", "1")
    assert done.status == 0
    assert done.out.endswith(" serves default with 4 thread(s).\nWorker stopped: no jobs.\n")
    assert Worker.objects.get().lease == timedelta(seconds=9)


def test_a_worker_on_a_database_without_the_tables_says_what_to_do(alias: str) -> None:
    with unmigrated(alias):
        done = manage("run_worker")
    assert (done.status, done.out) == (1, "")
    assert f"The queue's tables can't be read on database {alias!r}: " in done.err
    assert "Has `manage.py migrate` been run?" in done.err
    assert "Traceback" not in done.err


# -- prune_jobs


def test_old_finished_jobs_and_workers_are_deleted(alias: str) -> None:
    old = {"finished_at": "2001-01-01T00:00Z"}
    for state in ("completed", "failed", "cancelled"):
        JobEventFactory(job=JobFactory(**{state: True}, **old))
    kept = {JobFactory(completed=True).pk, JobFactory().pk, JobFactory(running=True).pk}
    WorkerFactory(dead=True, last_seen_at="2001-01-01T00:00Z")
    WorkerFactory(dead=True)

    done = manage("prune_jobs", "--older-than", "30d", "--batch-size", "2")

    assert done == Done(0, "3 jobs, 1 workers\n", "")
    assert set(Job.objects.values_list("pk", flat=True)) == kept
    assert not JobEvent.objects.exists()
    report = manage("prune_jobs", "--older-than", "0", "--json").report
    assert report == {"jobs": 1, "workers": 1}
