"""What the tests of verbs, sweeps and races have in common: rows, raw writes, ears and troubles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import OperationalError, connections, router, transaction
from django.dispatch import Signal

from jobqueue import broker, claim, db, dispatch, fence, groups, transitions
from jobqueue.claim import claim_jobs
from jobqueue.lifecycle import Outcome, State
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.querysets import JobQuerySet
from jobqueue.sweep import SweepReport, sweep_stale_jobs
from jobqueue.testing.factories import JobFactory, WorkerFactory
from tests.helpers import pause_at, run_in_thread, statement, wait_until_blocked

# What an executor can do with a job that it runs, and with one that it has only claimed; with an
# ``actor``, what somebody else does in its stead.
SETTLING: dict[str, Callable[..., Any]] = {
    "complete": lambda job, **by: transitions.complete(job, {"by": "this write"}, **by),
    "fail": lambda job, **by: transitions.fail(job, "an error", **by),
    "retry": lambda job, **by: transitions.retry(job, "an error", **by),
    "snooze": lambda job, **by: transitions.snooze(job, 60, **by),
    "release": transitions.release,
    "cancel": transitions.cancel,
}
ON_RUNNING = SETTLING | {"progress": lambda job: transitions.record_progress(job, 50)}
ON_CLAIMED = {name: SETTLING[name] for name in ("release", "cancel")} | {"start": transitions.start}

update_of_job = statement("UPDATE", "jobqueue_job")


# -- statements whose SQL is made once


@contextmanager
def statements_made_anew() -> Iterator[None]:
    """Have the block, which patches their parts, and what comes after it, make their own."""
    made = (
        *(broker._later, claim._looking, dispatch._claiming),
        *(fence._updating, groups._updating),
    )
    for each in made:
        each.cache_clear()
    try:
        yield
    finally:
        for each in made:
            each.cache_clear()


@contextmanager
def choosing(rows: JobQuerySet) -> Iterator[None]:
    """Have claims choose these rows, whatever has become of them."""
    with pytest.MonkeyPatch.context() as patch, statements_made_anew():
        patch.setattr(JobQuerySet, "claimable", lambda self, queue, now: rows)
        yield


# -- rows


def job_in(state: str, **columns: Any) -> Job:
    """Return a job in ``state``, with what the verbs would have left."""
    trait = {} if state == State.WAITING else {state: True}
    return JobFactory(**trait, **columns)


def row(job: Job) -> dict[str, Any] | None:
    """Return every column of the job as it is stored, None if it is gone."""
    return Job.objects.filter(pk=job.pk).values().first()


def changed(before: dict[str, Any], job: Job) -> dict[str, Any]:
    """Return the columns that differ from ``before``, as they are now."""
    after = row(job)
    return {name: value for name, value in after.items() if value != before[name]}


def events(job: Job) -> list[tuple[str, str, str, str]]:
    """Return the job's history: kind, states and actor of each event."""
    found = JobEvent.objects.filter(job_id=job.pk).order_by("pk")
    return list(found.values_list("kind", "from_state", "to_state", "actor"))


def kinds(job: Job) -> list[str]:
    """Return the kinds of the job's events, oldest first."""
    return [kind for kind, *_ in events(job)]


def conflict_of(job: Job) -> JobEvent:
    """Return the one event of a rejected write."""
    return JobEvent.objects.get(job_id=job.pk, kind=EventKind.CONFLICT)


def take_over(job: Job, worker_id: str = "other:2:2", *, start: bool = True) -> Job:
    """Give a held job to another worker, as an operator's release and a claim do."""
    transitions.release(job, actor="operator")
    if not Worker.objects.filter(pk=worker_id).exists():
        WorkerFactory(id=worker_id)
    (taken,) = claim_jobs(worker_id, [job.queue], 1, start=start)
    assert taken.pk == job.pk
    return taken


# -- writers outside the rules


def write_raw(job: Job, **columns: Any) -> None:
    """Write columns with SQL of our own: no fence, no new version."""
    connection = connections[router.db_for_write(Job)]
    values = [
        Job._meta.get_field(name).get_db_prep_save(value, connection)
        for name, value in columns.items()
    ]
    places = ", ".join(f"{name} = %s" for name in columns)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE jobqueue_job SET {places} WHERE id = %s", [*values, job.pk])
        assert cursor.rowcount == 1


def delete_raw(job: Job) -> None:
    """Delete a job, whatever its state, with its events."""
    alias = router.db_for_write(Job)
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute("DELETE FROM jobqueue_jobevent WHERE job_id = %s", [job.pk])
        cursor.execute("DELETE FROM jobqueue_job WHERE id = %s", [job.pk])


# -- ears


@contextmanager
def hearing(signal: Signal) -> Iterator[list[dict[str, Any]]]:
    """Collect what ``signal`` tells while the block lasts, in whatever thread."""
    heard: list[dict[str, Any]] = []

    def hear(**payload: Any) -> None:
        heard.append(payload)

    signal.connect(hear)
    try:
        yield heard
    finally:
        signal.disconnect(hear)


# -- troubles


@contextmanager
def failing(
    alias: str, matches: Callable[[str, Any], bool], error: Exception, *, times: int = 2**31
) -> Iterator[list[str]]:
    """Raise ``error`` instead of running statements of this thread; yield those that met it."""
    met: list[str] = []

    def wrap(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if len(met) < times and matches(sql, params):
            met.append(sql)
            raise error
        return execute(sql, params, many, context)

    with connections[alias].execute_wrapper(wrap):
        yield met


@contextmanager
def noticing_errors(alias: str) -> Iterator[list[Exception]]:
    """Collect the errors that statements of this thread meet, however they are dealt with."""
    met: list[Exception] = []

    def wrap(execute: Any, *args: Any) -> Any:
        try:
            return execute(*args)
        except Exception as error:
            met.append(error)
            raise

    with connections[alias].execute_wrapper(wrap):
        yield met


@contextmanager
def lost_commit_reply(alias: str) -> Iterator[None]:
    """Let the next COMMIT of this thread take effect and its reply be lost."""
    connection = connections[alias]
    commit = connection._commit

    def commit_without_reply() -> None:
        del connection._commit
        commit()
        raise OperationalError("the connection was lost")

    connection._commit = commit_without_reply
    try:
        yield
    finally:
        vars(connection).pop("_commit", None)


@contextmanager
def lost_update_reply(alias: str) -> Iterator[None]:
    """Let the next update of jobs, a transaction by itself, take effect and its reply be lost."""
    connection = connections[alias]
    lost = []

    def execute_without_reply(
        execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        result = execute(sql, params, many, context)
        if update_of_job(sql) and not lost:
            assert not connection.in_atomic_block
            lost.append(sql)
            raise OperationalError("the connection was lost")
        return result

    with connection.execute_wrapper(execute_without_reply):
        yield


# -- sweeps that lose


def scanned(sql: str) -> bool:
    """Match the last query of a sweep's look at one page: which of the holders live."""
    return sql.startswith("SELECT") and "jobqueue_worker" in sql and " IN (" in sql


def sweep_overtaken(job: Job, change: Callable[[], Any], **options: Any) -> SweepReport:
    """Sweep, with ``change`` made between the look and the write."""
    with pause_at(router.db_for_write(Job), scanned, after=True) as pause:
        sweep = run_in_thread(sweep_stale_jobs, **options)
        pause.wait_until_reached()
        change()
        pause.release()
        return sweep.result()


def sweep_blocked(job: Job, change: Callable[[], Any], **options: Any) -> SweepReport:
    """Sweep, with ``change`` made while the sweep's write waits for the row."""
    alias = router.db_for_write(Job)
    with transaction.atomic(using=alias):
        lock(job)
        sweep = run_in_thread(sweep_stale_jobs, **options)
        wait_until_blocked(alias)
        change()
    return sweep.result()


def lock(job: Job) -> None:
    """Hold the job's row until the transaction ends."""
    assert db.lock_rows(Job.objects.filter(pk=job.pk)).first()


def settle_all(jobs: Sequence[Job], outcome: Outcome, **options: Any) -> list[str]:
    """Settle jobs with the same outcome; return what became of each."""
    results = transitions.settle_many([(job, outcome) for job in jobs], **options)
    return [str(result.status) for result in results]
