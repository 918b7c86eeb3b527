"""Pruning: only what is long finished goes, and whatever comes back to life meanwhile stays."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connections, transaction

from jobqueue import db
from jobqueue.exceptions import InvalidJob
from jobqueue.lifecycle import State
from jobqueue.models import Job, JobEvent, Worker
from jobqueue.sweep import PruneReport, prune_jobs
from jobqueue.testing.factories import JobEventFactory, WorkerFactory
from tests.asserting import exactly
from tests.helpers import pause_at, run_in_thread, wait_until_blocked
from tests.races.scenes import job_in, kinds, lock, row, write_raw

HOUR = timedelta(hours=1)


def finished(alias, age=2 * HOUR, state="completed", **columns):
    """Return a job that ended so long ago, with an event."""
    job = job_in(state, finished_at=db.now(alias) - age, **columns)
    JobEventFactory(job=job)
    return job


def rerun(job):
    """Give a finished job another life, as the coordinator's rerun does."""
    write_raw(job, state="waiting", finished_at=None, claimed_by=None, claimed_at=None, version=9)


def chosen(sql):
    """Match the query that chooses what to delete."""
    return sql.startswith("SELECT") and "jobqueue_job" in sql and "FOR UPDATE" not in sql


def test_rerun_between_look_and_delete(alias):
    """jobrunr#773: it stays, with its history; the others go."""
    jobs = [finished(alias) for _ in range(3)]
    with pause_at(alias, chosen, after=True) as pause:
        prune = run_in_thread(prune_jobs, HOUR)
        pause.wait_until_reached()
        rerun(jobs[1])
        pause.release()
        assert prune.result() == PruneReport(jobs=2)
    assert list(Job.objects.values_list("pk", "state")) == [(jobs[1].pk, "waiting")]
    assert kinds(jobs[1]) == ["retried"]


def test_finished_again_between_look_and_delete(alias):
    """It is final, but not since long: its age stands in the DELETE."""
    job = finished(alias)
    with pause_at(alias, chosen, after=True) as pause:
        prune = run_in_thread(prune_jobs, HOUR)
        pause.wait_until_reached()
        write_raw(job, finished_at=db.now(alias), version=9)
        pause.release()
        assert prune.result() == PruneReport()
    assert row(job)["version"] == 9
    assert kinds(job) == ["retried"]


def test_job_that_somebody_has_locked(alias):
    """Whoever reruns a job right now is not waited for, where rows can be skipped."""
    job, other = finished(alias), finished(alias)
    with transaction.atomic(using=alias):
        lock(job)
        prune = run_in_thread(prune_jobs, HOUR)
        if connections[alias].features.has_select_for_update_skip_locked:
            assert prune.result() == PruneReport(jobs=1)
        else:
            wait_until_blocked(alias)
        rerun(job)
    assert prune.result() == PruneReport(jobs=1)
    assert (row(job)["state"], row(other)) == ("waiting", None)


def test_two_prunings_at_once(alias):
    """jobrunr#773: each row is deleted and counted once, and neither ends in an error."""
    for _ in range(6):
        finished(alias)
    with pause_at(alias, chosen, after=True) as pause:
        first = run_in_thread(prune_jobs, HOUR, batch_size=3)
        pause.wait_until_reached()
        second = prune_jobs(HOUR, batch_size=2)
        pause.release()
        assert first.result().jobs + second.jobs == 6
    assert second.jobs == 6
    assert not JobEvent.objects.exists()


@pytest.mark.parametrize("state", State)
def test_only_final_states_are_pruned(alias, state):
    """Nothing that may still run is old enough, whatever its times."""
    final = state in (State.COMPLETED, State.FAILED, State.CANCELLED)
    if final:
        finished(alias, state=state)
    else:
        job_in(state, run_after=db.now(alias) - 999 * HOUR, enqueued_at=db.now(alias) - 999 * HOUR)
    assert prune_jobs(HOUR).jobs == int(final)


def test_age_is_by_the_end(alias):
    """Not by the birth: a job that took a week to come to its turn is not pruned at once."""
    old, new = finished(alias), finished(alias, HOUR / 2, enqueued_at=db.now(alias) - 99 * HOUR)
    assert prune_jobs(3600) == PruneReport(jobs=1)
    assert (row(old), row(new)["state"]) == (None, "completed")
    assert JobEvent.objects.get().job_id == new.pk
    assert prune_jobs(0) == PruneReport(jobs=1)


def test_batches(alias):
    """Of the size asked for, each in a transaction of its own and told."""
    for _ in range(5):
        finished(alias)
    told = []
    assert prune_jobs(HOUR, batch_size=2, on_deleted=told.append) == PruneReport(jobs=5)
    assert told == [2, 2, 1]


def test_workers_that_are_gone(alias):
    """Live ones stay, however silent: they are a sweep's to judge."""
    old = db.now(alias) - 2 * HOUR
    gone = [WorkerFactory(state=state, last_seen_at=old) for state in ("dead", "stopped")]
    kept = [WorkerFactory(last_seen_at=old), WorkerFactory(dead=True)]
    assert prune_jobs(HOUR).as_dict() == {"jobs": 0, "workers": len(gone)}
    assert set(Worker.objects.values_list("pk", flat=True)) == {worker.pk for worker in kept}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"older_than": -1}, "older_than must be zero or more, not -1 seconds"),
        ({"older_than": None}, "older_than must be seconds or a timedelta, not None"),
        ({"older_than": float("inf")}, "older_than must be a finite number of seconds, not inf"),
        (
            {"older_than": 1, "batch_size": 0},
            "batch_size must be an integer from 1 to 10000, not 0",
        ),
    ],
)
def test_bad_argument_is_named_and_nothing_is_deleted(alias, arguments, why):
    finished(alias)
    with pytest.raises(InvalidJob, match=exactly(why)):
        prune_jobs(**arguments)
    assert Job.objects.count() == 1
