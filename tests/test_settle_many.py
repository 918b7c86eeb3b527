"""Many outcomes in one transaction: each is applied, already applied or in conflict."""

from __future__ import annotations

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from jobqueue import signals, transitions
from jobqueue.exceptions import InvalidJob, TransitionNotAllowed
from jobqueue.lifecycle import Completed, Error, Failed, Retry, Settled
from jobqueue.models import EventKind, Job, JobEvent
from jobqueue.testing.factories import JobFactory
from tests.races.scenes import (
    hearing,
    job_in,
    row,
)


def test_empty_batch(alias):
    with CaptureQueriesContext(connections[alias]) as queries:
        assert transitions.settle_many([]) == []
    assert len(queries) == 0


def test_results_come_in_the_order_of_the_items(alias):
    """Whatever the order of ids; each with the job as it now is, or the conflict."""
    jobs = JobFactory.create_batch(5, running=True)
    transitions.complete(jobs[1], "once")
    transitions.cancel(jobs[3], actor="operator")
    items = [(job, Completed("once")) for job in reversed(jobs)]
    results = transitions.settle_many(iter(items))
    assert [result.job_id for result in results] == [job.pk for job, _ in items]
    assert [result.status for result in results] == [
        Settled.APPLIED,
        Settled.CONFLICT,
        Settled.APPLIED,
        Settled.ALREADY_APPLIED,
        Settled.APPLIED,
    ]
    for result in results:
        if result.status == Settled.CONFLICT:
            assert (result.job, result.conflict.verb) == (None, "complete")
        else:
            assert (result.job.state, result.conflict) == ("completed", None)
            assert result.job.fingerprint == Job.objects.get(pk=result.job_id).fingerprint


def test_one_job_twice_in_a_batch(alias):
    """The first of its outcomes counts."""
    job = job_in("running")
    results = transitions.settle_many([(job, Failed(Error("a"))), (job, Completed())])
    assert [result.status for result in results] == ["applied", "conflict"]
    assert row(job)["state"] == "failed"


@pytest.mark.parametrize("bad", [Completed({"a": float("nan")}), "wrong state"])
def test_one_bad_item_keeps_the_whole_batch_out(alias, bad):
    """It is found before the first write, so that none of the others is half told."""
    job = job_in("running")
    item = (job_in("completed"), Completed()) if bad == "wrong state" else (job_in("running"), bad)
    with (
        CaptureQueriesContext(connections[alias]) as queries,
        pytest.raises(TransitionNotAllowed if bad == "wrong state" else InvalidJob),
    ):
        transitions.settle_many([(job, Completed()), item])
    assert not [q for q in queries if q["sql"].startswith(("UPDATE", "INSERT"))]
    assert row(job)["state"] == "running"


def test_events_of_a_batch_are_written_in_one_statement(alias):
    """And its updates in one transaction."""
    jobs = JobFactory.create_batch(20, running=True)
    with CaptureQueriesContext(connections[alias]) as queries:
        transitions.settle_many([(job, Retry(Error("no"))) for job in jobs])
    inserts = [q for q in queries if q["sql"].startswith("INSERT")]
    assert (len(inserts), JobEvent.objects.filter(kind=EventKind.RETRIED).count()) == (1, 20)


def test_batch_in_a_callers_transaction_ends_with_it(alias):
    """Rolled back with the rest, and told only once it is committed."""
    jobs = JobFactory.create_batch(2, running=True)
    items = [(job, Completed()) for job in jobs]
    with hearing(signals.job_transitioned) as heard:
        with transaction.atomic(using=alias):
            transitions.settle_many(items)
            transaction.set_rollback(True, using=alias)
        assert {row(job)["state"] for job in jobs} == {"running"}
        assert heard == []
        with transaction.atomic(using=alias):
            transitions.settle_many(items)
            assert heard == []
    assert len(heard) == 2


def test_a_job_that_is_there_twice_is_settled_once(alias):
    """Also where the batch is one statement: the second is told that it comes too late."""
    job = JobFactory(running=True)
    items = [(job, Completed("first")), (job, Failed(Error("second")))]
    results = transitions.settle_many(items)
    assert [result.status for result in results] == [Settled.APPLIED, Settled.CONFLICT]
    job.refresh_from_db()
    assert (job.result, job.version) == ("first", results[0].job.version)
