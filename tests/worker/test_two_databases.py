"""Two databases with a queue each, by alias: with the same ids and queue names, at one time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.contrib.auth.models import Group
from django.db import router, transaction
from django.test import override_settings

from jobqueue import coordinator, db
from jobqueue.db import wake
from jobqueue.enqueue import enqueue
from jobqueue.exceptions import JobQueueError
from jobqueue.lifecycle import State
from jobqueue.models import Job, JobEvent, Queue, Worker
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.testing.factories import JobFactory, WorkerFactory
from jobqueue.worker.context import JobContext, current_context
from jobqueue.worker.process import WorkerProcess
from tests import routers
from tests.commands import manage
from tests.documentation import DOCS, blocks, importable
from tests.helpers import ENGINES, assert_threads_done, wait_until
from tests.servers import missing_engines
from tests.test_wake import listening
from tests.worker import handlers
from tests.worker.real import alone
from tests.worker.scripted import Script
from tests.worker.tools import AT_ONCE, running_worker, work_off


class Pair(NamedTuple):
    """Two aliases: ``here`` is where the routers send everything, ``there`` is asked for."""

    here: str
    there: str


def pair_of(here: str, there: str) -> Any:
    """Return the parameter for two engines by name."""
    aliases = [ENGINES[here], ENGINES[there]]
    missing = {name: why for name, why in missing_engines().items() if name in (here, there)}
    marks = [pytest.mark.django_db(transaction=True, databases=aliases)]
    if missing:
        marks.append(pytest.mark.skip(reason="; ".join(missing.values())))
    return pytest.param(Pair(*aliases), id=f"{here}-{there}", marks=marks)


SQLITE_HERE = pair_of("sqlite", "postgresql")
SERVERS = pair_of("postgresql", "mariadb")


@pytest.fixture(params=[SQLITE_HERE, pair_of("postgresql", "sqlite"), SERVERS])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with routers.use_alias(request.param.here):
        yield request.param
    assert_threads_done()


def job_on(alias: str, handler: Callable[..., Any], *args: Any) -> Job:
    return enqueue(handlers.path(handler), list(args), backoff=AT_ONCE, using=alias)


def scripted_on(alias: str, script: Script) -> Job:
    handlers.scripts["script"] = script
    return job_on(alias, handlers.play, "script")


def stored(job: Job) -> Job:
    return Job.objects.using(job._state.db).get(pk=job.pk)


def groups(alias: str) -> list[str]:
    return list(Group.objects.using(alias).values_list("name", flat=True))


# -- Whose jobs they are


def test_each_worker_process_runs_the_jobs_of_its_own_database(pair: Pair, tmp_path: Path) -> None:
    """Two real workers side by side; ids and queues are the same in both."""
    directories = {alias: tmp_path / alias for alias in pair}
    jobs: dict[str, list[Job]] = {}
    for alias, directory in directories.items():
        directory.mkdir()
        names = [f"{alias}-{number}" for number in range(3)]
        jobs[alias] = [job_on(alias, handlers.wait_for_file, str(directory), n) for n in names]
    with ExitStack() as stack:
        children = {
            alias: stack.enter_context(alone(directory, "--database", alias, "--threads", "3"))
            for alias, directory in directories.items()
        }
        for alias, child in children.items():  # all six run at the same time
            for number in range(3):
                child.wait_for(f"begin {alias}-{number}")
        for alias, directory in directories.items():
            for number in range(3):
                (directory / f"{alias}-{number}").touch()
        for alias in pair:
            wait_until(
                lambda alias=alias: all(stored(j).state == State.COMPLETED for j in jobs[alias]),
                f"not all jobs of {alias} are completed",
            )
    for alias in pair:
        (worker,) = Worker.objects.using(alias).values_list("pk", flat=True)
        for number, job in enumerate(map(stored, jobs[alias])):
            assert (job.claimed_by, job.result) == (worker, f"{alias}-{number}")
            assert (job.attempt, job.version) == (1, 2)
        assert not JobEvent.objects.using(alias).exists()


def test_a_worker_leaves_the_other_database_alone(pair: Pair) -> None:
    """Its queue is drained; where nobody works, not a column of a job has changed."""
    for mine, other in (pair, pair[::-1]):
        run = job_on(mine, handlers.give, "mine")
        left = job_on(other, handlers.give, "other")
        before = Job.objects.using(other).filter(pk=left.pk).values().get()
        assert work_off(mine).settled == {"completed": 1}
        assert stored(run).result == "mine"
        assert Job.objects.using(other).filter(pk=left.pk).values().get() == before
        assert not Worker.objects.using(other).exists()
        Job.objects.using(other).all().delete()
        Worker.objects.using(mine).all().delete()


def test_two_workers_of_one_process_keep_their_jobs_apart(pair: Pair) -> None:
    """A heartbeat or a sweep of the one finds nothing to take from the other."""
    lost: list[bool] = []

    def script(context: JobContext) -> None:
        handlers.hold(f"gate-{context.job_id}-{len(lost)}")
        lost.append(context.lost)

    # The ids differ, so that a job that was looked for in the wrong database is missed.
    JobFactory(using=pair.there, completed=True)
    jobs = [scripted_on(alias, script) for alias in pair]
    with running_worker(pair.here, lease=1), running_worker(pair.there, lease=1):
        for job in jobs:
            handlers.gate(f"gate-{job.pk}-0").wait_until_entered()
        seen = {a: Worker.objects.using(a).get().last_seen_at for a in pair}
        wait_until(
            lambda: all(Worker.objects.using(a).get().last_seen_at > seen[a] for a in pair),
            "nobody renews its lease",
        )
        for alias in pair:
            assert sweep_stale_jobs(using=alias).taken == 0
        for gate in handlers.gates.values():
            gate.open()
        for job in jobs:
            wait_until(lambda job=job: stored(job).state == State.COMPLETED, "it isn't completed")
    assert lost == [False, False]


def test_a_sweep_takes_what_is_stale_in_its_own_database(pair: Pair) -> None:
    jobs = {}
    for alias in pair:
        dead = WorkerFactory(using=alias, silent=True)
        jobs[alias] = JobFactory(using=alias, running=True, claimed_by=dead.pk)
    assert manage("sweep_stale_jobs", "--database", pair.there).status == 0
    assert stored(jobs[pair.here]).state == State.RUNNING
    assert stored(jobs[pair.there]).state != State.RUNNING


def test_a_pause_and_a_unique_key_hold_in_their_own_database(pair: Pair) -> None:
    Queue.objects.using(pair.here).create(name="default", paused_at="2026-01-01T00:00:00Z")
    task = handlers.path(handlers.give)
    jobs = [enqueue(task, unique_key="one", using=alias) for alias in pair]
    for alias in pair:
        work_off(alias)
    assert [stored(job).state for job in jobs] == [State.WAITING, State.COMPLETED]


def test_a_wake_up_reaches_the_worker_of_that_database(pair: Pair, settings: Any) -> None:
    """The queues have one name; a database that wakes nobody doesn't mind."""
    settings.JOBQUEUE = {**settings.JOBQUEUE, "NOTIFY": True}
    wake._last_sent.clear()
    wakes, silent = sorted(pair, key=lambda alias: not db.can_wake(alias))
    for alias in pair:
        JobFactory(using=alias, scheduled=True)
    patient = {"poll": 3600, "lease": 7200}
    with running_worker(wakes, **patient) as first, running_worker(silent, **patient) as second:
        for process in (first, second):
            wait_until(lambda process=process: is_idle(process), "a worker does not look ahead")
        wait_until(lambda: listening(wakes), "nobody listens")
        jobs = [job_on(alias, handlers.note, alias) for alias in (silent, wakes)]
        wait_until(lambda: handlers.seen == [wakes], "the worker sleeps on")
    assert stored(jobs[0]).attempt == 0


def is_idle(process: WorkerProcess) -> bool:
    """Whether it has found nothing to do, and knows when that changes."""
    return process._loop is not None and process._loop._due_at > 0


def test_a_coordinator_names_the_database(pair: Pair) -> None:
    """The id alone would mean the job where the routers send it."""
    jobs = [job_on(alias, handlers.give) for alias in pair]
    coordinator.cancel(jobs[1].pk, actor="operator", using=pair.there)
    assert [stored(job).state for job in jobs] == [State.WAITING, State.CANCELLED]


# -- What handlers do


def test_atomic_completes_a_job_in_its_own_database(pair: Pair) -> None:
    """With the rows that are written there; the other database is another transaction."""

    def script(context: JobContext) -> None:
        with context.atomic() as effects:
            Group.objects.using(pair.there).create(name="effect")
            assert transaction.get_connection(pair.there).in_atomic_block
            assert not transaction.get_connection(pair.here).in_atomic_block
            effects.result = "done"

    job = scripted_on(pair.there, script)
    assert work_off(pair.there).settled == {"completed": 1}
    assert (stored(job).state, stored(job).result) == (State.COMPLETED, "done")
    assert (groups(pair.there), groups(pair.here)) == (["effect"], [])


@pytest.mark.parametrize("pair", [SQLITE_HERE, SERVERS], indirect=True)  # SQLite has one writer
def test_atomic_undoes_there_what_a_superseded_execution_did(pair: Pair) -> None:
    """And only there: what the block wrote elsewhere stays."""

    def script(context: JobContext) -> None:
        with context.atomic():
            Group.objects.using(pair.there).create(name="undone")
            Group.objects.using(pair.here).create(name="stays")
            handlers.hold()

    job = scripted_on(pair.there, script)
    with running_worker(pair.there) as process:
        handlers.gate().wait_until_entered()
        coordinator.cancel(job.pk, force=True, actor="operator", using=pair.there)
        handlers.gate().open()
        wait_until(lambda: process._loop.settled.total(), "the execution doesn't end")
    assert process.settled == {"conflict": 1}
    assert stored(job).state == State.CANCELLED
    assert (groups(pair.there), groups(pair.here)) == ([], ["stays"])


def test_atomic_on_the_other_database_is_refused(pair: Pair) -> None:
    messages: list[str] = []

    def script(context: JobContext) -> None:
        with pytest.raises(JobQueueError) as caught, context.atomic(using=pair.here):
            raise AssertionError("it must not come to this")
        messages.append(str(caught.value))

    job = scripted_on(pair.there, script)
    work_off(pair.there)
    assert messages == [
        f"context.atomic() works on '{pair.there}', the database of job {job.pk}, "
        f"not on '{pair.here}'"
    ]


def test_what_a_handler_enqueues_goes_where_the_routers_say(pair: Pair) -> None:
    """Unless it names a database; its own job's is nothing special."""

    def script(context: JobContext) -> None:
        assert current_context() is context
        job_on_router = enqueue(handlers.path(handlers.give))
        job_there = enqueue(handlers.path(handlers.give), using=pair.there)
        handlers.note([job_on_router._state.db, job_there._state.db])

    scripted_on(pair.there, script)
    assert work_off(pair.there).settled == {"completed": 2}
    assert handlers.seen == [list(pair)]
    assert [Job.objects.using(alias).count() for alias in pair] == [1, 2]


# -- A router that gives the queue a database of its own


@pytest.fixture
def routed(pair: Pair, tmp_path: Path) -> Iterator[Pair]:
    """All tables of the queue are ``there``, by the router that the operator's page shows."""
    page = DOCS / "how-to/run-in-production.md"
    texts = [block.text for block in blocks(page) if block.text.startswith("# shop/routers.py")]
    assert len(texts) == 1
    with importable(texts, tmp_path):
        from shop.routers import QueueRouter  # type: ignore[import-not-found]

        class Router(QueueRouter):  # type: ignore[misc]
            database = pair.there

        everything_else = "tests.routers.CurrentAliasRouter"
        with override_settings(DATABASE_ROUTERS=[Router(), everything_else]):
            yield pair


def test_a_router_sends_the_queue_elsewhere(routed: Pair) -> None:
    """``enqueue``, the worker, its sweep and the commands go there without being told."""
    job = enqueue(handlers.path(handlers.give), ["routed"])
    dead = WorkerFactory(silent=True)
    stale = JobFactory(running=True, claimed_by=dead.pk, backoff=AT_ONCE)
    assert (job._state.db, stale._state.db) == (routed.there, routed.there)
    assert manage("sweep_stale_jobs").status == 0
    done = manage("run_worker", "--burst", "--threads", "1")
    assert (done.status, done.err) == (0, "")
    assert stored(job).result == "routed"
    assert stored(stale).state == State.COMPLETED
    assert manage("queue_status", "--json").report["finished"] == {"completed": 2}
    for model in (Job, JobEvent, Worker, Queue):
        assert not model.objects.using(routed.here).exists()


def test_a_routed_job_is_no_part_of_a_transaction_elsewhere(routed: Pair) -> None:
    """That is what a queue in another database costs: it is stored though the rest is undone."""

    def enqueue_and_fail(alias: str) -> None:
        with transaction.atomic(using=alias):
            enqueue(handlers.path(handlers.give), [alias])
            raise ZeroDivisionError

    for alias in routed:
        with pytest.raises(ZeroDivisionError):
            enqueue_and_fail(alias)
    assert list(Job.objects.values_list("args", flat=True)) == [[routed.here]]


def test_the_router_migrates_the_queue_there_alone(routed: Pair) -> None:
    allowed = [router.allow_migrate(alias, "jobqueue", model_name="job") for alias in routed]
    assert allowed == [False, True]
    assert all(router.allow_migrate(alias, "auth", model_name="group") for alias in routed)


# -- Bad input


@pytest.mark.parametrize("command", ["run_worker", "queue_status", "sweep_stale_jobs"])
def test_a_database_that_does_not_exist_is_named(pair: Pair, command: str) -> None:
    done = manage(command, "--database", "nowhere")
    assert done.status == 2
    assert "There is no database 'nowhere'; known: default," in done.err
    assert done.out == ""
