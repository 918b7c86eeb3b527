"""The demo: its parts, and whole runs with real processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from django.db import connections, transaction

from example_project.crew import Crew, DemoError
from example_project.files import recompute
from example_project.scenario import Run, can_lock, pace_for
from jobqueue import broker, coordinator, db, transitions
from jobqueue.lifecycle import Completed
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.testing.factories import JobFactory, WorkerFactory
from tests import servers
from tests.helpers import child_environment, engine, other_connection, use_connection, wait_until

MANAGE = str(Path(__file__).resolve().parent.parent / "manage.py")

# -- A run's jobs


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """A small tree."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(24):
        (tree / f"{number:02}.txt").write_text(f"{number}\n" * number)
    return sorted(tree.iterdir())


def test_one_job_per_file_earlier_files_first(alias, files):
    """A job that comes back from a rescue so comes before those of later files."""
    run = Run.enqueue(files, alias)
    jobs = list(Job.objects.order_by("-priority", "pk"))
    assert [job.args for job in jobs] == [[str(file)] for file in files]
    assert (jobs[0].priority, jobs[-1].priority) == (100, -91)
    assert {(job.queue, job.workspace) for job in jobs} == {(run.name, run.name)}
    assert {job.kwargs["pace"] for job in jobs} == {run.pace}


@pytest.mark.parametrize(("files", "pace"), [(1, 1.0), (192, 1.0), (1920, 0.1), (192_000, 0.001)])
def test_pace_keeps_workers_busy_for_a_while_and_no_longer(files, pace):
    assert pace_for(files) == pace


def test_what_is_called_off_is_this_run_alone(alias, files):
    """Also where the ids of two runs interleave."""
    other, run = Run.enqueue(files[:2], alias), Run.enqueue(files[:3], alias)
    run = replace(run, ids=(other.ids[0], run.ids[1]))
    worker = broker.register([run.name], using=alias)
    _, done = broker.claim(worker.pk, 2)
    transitions.complete(done)
    run.call_off()
    states = [job.state for job in run.jobs().order_by("pk")]
    assert states == ["cancelled", "completed", "cancelled"]
    assert {job.state for job in other.jobs()} == {"waiting"}
    assert [event.actor for event in run.events()] == ["demo", "demo"]
    assert not other.events()
    assert other.unfinished()
    assert not run.unfinished()


def test_only_writes_count_as_refused(alias, files):
    """A heartbeat that finds a job lost leaves a conflict as well, but it wrote nothing."""
    run = Run.enqueue(files[:2], alias)
    worker = broker.register([run.name], using=alias)
    first, second = broker.claim(worker.pk, 2)
    for job in (first, second):
        coordinator.release(job.pk, actor="me")
    broker.heartbeat(worker.pk, {first.pk: first})
    broker.settle(worker.pk, [(second, Completed())])
    assert run.events().filter(kind=EventKind.CONFLICT).count() == 2
    assert [event.job_id for event in run.refusals()] == [second.pk]


@pytest.mark.parametrize("locked", [Worker, Job])
def test_worker_frozen_within_a_transaction_is_found_out(alias, locked):
    """It would keep everybody else out for as long as it stands still."""
    worker = WorkerFactory()
    JobFactory(running=True, claimed_by=worker.pk)
    assert can_lock(worker.pk, alias)
    with (
        other_connection(alias) as frozen,
        use_connection(frozen),
        transaction.atomic(using=alias),
    ):
        list(db.lock_rows(locked.objects.all()))
        assert not can_lock(worker.pk, alias)
    wait_until(lambda: can_lock(worker.pk, alias), "the lock was not given back")


# -- Worker processes


def test_worker_that_ends_by_itself_ends_the_demo_and_its_words_are_shown(tmp_path):
    with Crew(["--queue", "no name"], tmp_path) as crew:
        crew.start(1)
        (pid,) = crew.pids
        with pytest.raises(DemoError) as caught:
            wait_until(crew.check, "the worker did not end")
    message = str(caught.value)
    assert message.startswith(
        f"Worker process {pid} ended by itself, with status 2. What the workers wrote:\n"
        "worker-1.log:\n"
    )
    assert "argument --queue: queue must be" in message


@pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)
def test_crew_ends_its_workers_also_one_that_is_frozen(alias, tmp_path):
    with Crew(["--queue", "demo"], tmp_path) as crew:
        crew.start(2)
        first, second = wait_for_workers(2)
        crew.freeze(first.pid)
        assert first.status() == psutil.STATUS_STOPPED
    assert not first.is_running()
    assert not second.is_running()


OWNER = """
import pathlib, sys
from example_project.crew import Crew
with Crew(["--queue", "demo"], pathlib.Path(sys.argv[1])) as crew:
    crew.start(2)
    sys.stdin.read()
"""


@pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)
def test_workers_end_with_a_demo_that_is_killed(alias, tmp_path):
    """It has no chance to clean up; the guard does."""
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    owner = subprocess.Popen(command, env=child_environment(), stdin=subprocess.PIPE)
    workers: list[psutil.Process] = []
    try:
        workers = wait_for_workers(2)
        owner.kill()
        wait_until(lambda: not any(map(is_alive, workers)), "a worker was left behind")
    finally:
        owner.kill()
        owner.communicate()
        for worker in filter(is_alive, workers):
            worker.kill()


def wait_for_workers(count: int) -> list[psutil.Process]:
    """Return the processes of the workers, once they have registered."""
    pids = Worker.objects.values_list("pid", flat=True)
    wait_until(lambda: len(pids.all()) == count, "the workers did not register")
    return [psutil.Process(pid) for pid in pids.all()]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- Whole runs


def run_demo(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = demo(*arguments, **variables)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def demo(*arguments: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a demo."""
    variables = {"DJANGO_SETTINGS_MODULE": "example_project.settings", **variables}
    return [sys.executable, MANAGE, "demo", *arguments], child_environment(**variables)


def url_of(alias: str) -> str:
    """Return the DATABASE_URL of the test database."""
    name = connections[alias].settings_dict["NAME"]
    return servers.session_servers()[alias].url(name) if alias != "default" else f"sqlite:///{name}"


def test_demo_loses_and_doubles_nothing(alias, files):
    """The main job on real files, with a worker killed and another frozen; others' jobs stay."""
    others = JobFactory(queue="mail"), JobFactory(queue="demo-0", workspace="demo-0")
    done = run_demo("--json", "--path", str(files[0].parent), DATABASE_URL=url_of(alias))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rate, rescued, refused = (report.pop(n) for n in ("jobs_per_second", "rescued", "refused"))
    assert report == {
        "enqueued": 24,
        "completed": 24,
        "lost": 0,
        "doubled": 0,
        "engine": {"default": "sqlite"}.get(alias, alias),
    }
    assert rate > 0
    assert rescued >= 2  # one of the killed worker's, one of the frozen one's
    assert refused >= 1

    jobs = Job.objects.exclude(pk__in=[job.pk for job in others])
    assert {job.args[0]: job.result for job in jobs} == {
        str(file): recompute(str(file)) for file in files
    }
    assert Job.objects.filter(pk__in=[job.pk for job in others], state="waiting").count() == 2
    conflicts = JobEvent.objects.filter(kind=EventKind.CONFLICT)
    assert conflicts.count() == refused
    dead = Worker.objects.filter(state=Worker.State.DEAD).values_list("pk", flat=True)
    assert {event.actor for event in conflicts} <= set(dead)


def test_one_file_suffices_and_people_get_a_table(tmp_path):
    """Everything happens to one job then. The database may lie in the tree that is read."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").touch()
    (tree / "new.sqlite3").touch()
    done = run_demo("--path", str(tree), DATABASE_URL=new_database(tree))
    assert done.returncode == 0, done.stderr
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines())
    assert re.fullmatch(r"\d+\.\d   \(paced: each job also sleeps for 1 s\)", rows.pop("jobs/s"))
    assert int(rows.pop("stale writes refused")) >= 1
    assert rows == {
        "engine": "SQLite",
        "jobs enqueued": "1",
        "completed": "1",
        "rescued": "1",
        "lost": "0",
        "doubled": "0",
    }
    assert done.stderr.splitlines()[0] == f"1 file below {tree}, one job each."
    assert done.stderr.splitlines()[-1] == (
        "Every file's checksum was computed again, is right, and was recorded once."
    )


# Executors write whatever has become of their jobs; sweeps are fenced as ever.
UNFENCED = """
import os
from django.apps import AppConfig

class Unfenced(AppConfig):
    name = "unfenced"

    def ready(self):
        from jobqueue import guards
        fenced = guards.unchanged

        def unchanged(fingerprint):
            is_own = f":{os.getpid()}:" in (fingerprint.claimed_by or "")
            return {} if is_own else fenced(fingerprint)

        guards.unchanged = unchanged
"""


def test_demo_of_a_queue_without_a_fence_finds_it_out(tmp_path, files):
    """The figures are measured: the same play, with executors that are not fenced."""
    (tmp_path / "unfenced.py").write_text(UNFENCED)
    (tmp_path / "unfenced_settings.py").write_text(
        "from example_project.settings import *\nINSTALLED_APPS.append('unfenced.Unfenced')\n"
    )
    done = run_demo(
        *("--json", "--path", str(files[0].parent)),
        DATABASE_URL=new_database(tmp_path),
        DJANGO_SETTINGS_MODULE="unfenced_settings",
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["completed"] == 24
    assert report["doubled"] >= 1
    assert report["refused"] == 0
    assert re.search(
        r"CommandError: The demo did not hold what it promises:\n"
        r"- \d+ doubled, with more than one accepted outcome: /.*\n"
        r"- no late write was refused: nothing was shown\n$",
        done.stderr,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_interrupted_demo_cleans_up(alias, files, number):
    """No process is left, and no job that a worker would take later."""
    with striking_demo(files, DATABASE_URL=url_of(alias)) as (process, children):
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.splitlines()[-1] == (
        "CommandError: Interrupted: the workers have been ended, and what was left called off."
    )
    assert not [child for child in children if child.is_running()]
    assert set(Job.objects.values_list("state", flat=True)) <= {"completed", "cancelled"}


@contextmanager
def striking_demo(
    files: list[Path], **variables: str
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Run a demo up to where it has frozen a worker; yield it and the processes that it started."""
    command, environment = demo("--json", "--path", str(files[0].parent), **variables)
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said = next((line for line in process.stderr if line.startswith("Froze ")), None)
        assert said, "the demo ended early"
        children = psutil.Process(process.pid).children()
        assert psutil.STATUS_STOPPED in [child.status() for child in children]
        assert len(children) == 4  # the guard, and the workers but the one that was killed
        yield process, children
    finally:
        process.kill()
        process.communicate()


def new_database(directory: Path) -> str:
    return f"sqlite:///{directory}/new.sqlite3"


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--path", "/no such place"], {}, "There is no directory '/no such place'."),
        (["--path", MANAGE], {}, f"'{MANAGE}' is not a directory."),
        (["--database", "other"], {}, "There is no database 'other'; known: default."),
        (
            ["--path", str(Path(__file__).parent)],
            {"DATABASE_URL": "sqlite:////no such place/db"},
            "Database '/no such place/db' failed: unable to open database file",
        ),
    ],
    ids=["missing tree", "file", "unknown alias", "unreachable database"],
)
def test_bad_input_is_named_on_stderr_alone(tmp_path, arguments, variables, message):
    variables = {"DATABASE_URL": new_database(tmp_path), **variables}
    done = run_demo("--json", *arguments, **variables)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == f"CommandError: {message}"
