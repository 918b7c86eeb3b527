"""The fence sees writers that break the rules, and nothing that it need not see."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from jobqueue import transitions
from jobqueue.claim import claim_jobs
from jobqueue.exceptions import TransitionConflict
from jobqueue.models import Job
from jobqueue.testing.factories import WorkerFactory
from tests.helpers import engine, run_in_thread, wait_until_blocked
from tests.races.scenes import (
    ON_CLAIMED,
    ON_RUNNING,
    changed,
    delete_raw,
    job_in,
    kinds,
    lock,
    row,
    update_of_job,
    write_raw,
)

MICROSECOND = timedelta(microseconds=1)

# One column of the fingerprint each, by somebody who does not raise the version.
TAMPERED = {
    "state": lambda job: {"state": "claimed"},
    "attempt": lambda job: {"attempt": job.attempt + 1},
    "claimed_by": lambda job: {"claimed_by": "other:2:2"},
    "claimed_at": lambda job: {"claimed_at": job.claimed_at + MICROSECOND},
    "attempted_at": lambda job: {"attempted_at": job.attempted_at + MICROSECOND},
    "version": lambda job: {"version": job.version + 1},
}


@pytest.mark.parametrize("verb", ON_RUNNING)
@pytest.mark.parametrize("column", TAMPERED)
def test_each_column_of_the_fingerprint_counts(alias, column, verb):
    """Raw SQL or an older release changed just one column: whoever decided before is refused."""
    job = job_in("running")
    write_raw(job, **TAMPERED[column](job))
    written = row(job)
    with pytest.raises(TransitionConflict) as caught:
        ON_RUNNING[verb](job)
    assert row(job) == written
    assert getattr(caught.value.found, column) == written[column]
    assert kinds(job) == ["conflict"]


@pytest.mark.parametrize("column", ["claimed_by", "claimed_at", "attempted_at"])
def test_null_in_the_fingerprint_is_compared(alias, column):
    """NULL equals nothing in SQL, yet a column that was NULL when read must still be NULL."""
    job = job_in("cancelled", claimed_by=None, claimed_at=None, attempted_at=None, attempt=0)
    fence = Job.objects.matching(job.pk, job.fingerprint)
    assert fence.count() == 1
    write_raw(job, **{column: "w" if column == "claimed_by" else job.finished_at})
    assert fence.count() == 0


@pytest.mark.parametrize("column", ["progress", "checkpoint", "priority", "cancel_requested_at"])
def test_what_changes_during_an_execution_is_not_compared(alias, column):
    """The executor's own write still applies, and keeps what somebody else wrote meanwhile."""
    job = job_in("running")
    value = {"checkpoint": {"page": 3}, "cancel_requested_at": job.claimed_at}.get(column, 7)
    write_raw(job, **{column: value})
    transitions.complete(job)
    assert (row(job)["state"], row(job)[column]) == ("completed", value)


def test_aba_of_a_rerun(alias):
    """The same worker runs the job again after a rerun: its first execution's writes are late."""
    job = job_in("running")
    transitions.complete(job, actor="operator")
    write_raw(
        job,
        state="waiting",
        finished_at=None,
        claimed_by=None,
        claimed_at=None,
        version=job.version + 2,
    )
    waiting = Job.objects.get()
    WorkerFactory(id=job.claimed_by)
    (again,) = claim_jobs(job.claimed_by, ["default"], 1, start=True)
    written = row(job)
    for late in ON_RUNNING.values():
        with pytest.raises(TransitionConflict):
            late(job)
    with pytest.raises(TransitionConflict):
        transitions.cancel(waiting, actor="operator")
    assert row(job) == written
    transitions.complete(again)


@pytest.mark.parametrize("verb", ON_RUNNING)
def test_deleted_while_it_runs(alias, verb):
    """A conflict with nothing found, not a crash; there is no row to hang an event on."""
    job = job_in("running")
    delete_raw(job)
    with pytest.raises(TransitionConflict) as caught:
        ON_RUNNING[verb](job)
    assert caught.value.found is None
    assert str(caught.value) == (
        f"Job {job.pk} moved on: {caught.value.verb} was decided on "
        f"running by {job.claimed_by}, attempt 1, version 2; it is gone."
    )


@pytest.mark.parametrize("verb", ON_CLAIMED)
def test_deleted_while_the_write_waits(alias, verb):
    job = job_in("claimed")
    with transaction.atomic(using=alias):
        lock(job)
        late = run_in_thread(ON_CLAIMED[verb], job)
        wait_until_blocked(alias)
        delete_raw(job)
    with pytest.raises(TransitionConflict) as caught:
        late.result()
    assert caught.value.found is None


def test_only_changed_columns_are_written(alias):
    """qiskit-serverless#956: a write made from an old copy takes nothing of that copy along."""
    job = job_in("running")
    write_raw(job, metadata={"a": 1}, kwargs={"b": 2}, queue="other", progress=30)
    before = row(job)
    transitions.complete(job, 1)
    assert set(changed(before, job)) == {
        "state",
        "result",
        "finished_at",
        "version",
        "settled_version",
    }


@pytest.mark.parametrize("verb", ON_RUNNING)
def test_one_single_table_update(alias, verb):
    """No subquery: an engine rechecks only the outer WHERE after it waited for a lock."""
    job = job_in("running")
    with CaptureQueriesContext(connections[alias]) as queries:
        ON_RUNNING[verb](job)
    (update,) = [q["sql"] for q in queries if update_of_job(q["sql"])]
    assert update.upper().count("SELECT") == 0
    where = update.partition("WHERE")[2]
    for column in ("id", *TAMPERED):
        assert column in where


@pytest.mark.parametrize("alias", [engine("mariadb")], indirect=True)
@pytest.mark.parametrize("verb", ON_RUNNING)
def test_row_is_reached_by_its_primary_key(alias, verb):
    """solid_queue#240: a way by another index locks that first, and meets others in a deadlock."""
    job = job_in("running")
    with CaptureQueriesContext(connections[alias]) as queries:
        ON_RUNNING[verb](job)
    (update,) = [q["sql"] for q in queries if update_of_job(q["sql"])]
    with connections[alias].cursor() as cursor:
        cursor.execute("EXPLAIN " + update.replace("%", "%%"))
        columns = [column[0] for column in cursor.description]
        plan = dict(zip(columns, cursor.fetchone(), strict=True))
    assert plan["key"] == "PRIMARY"
