"""What must fail once a guard is gone, where the guard matters only in a race: chosen winners."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import transaction

from jobqueue import broker, db, dispatch, transitions
from jobqueue.claim import claim_jobs
from jobqueue.exceptions import LeaseLost
from jobqueue.models import Worker
from jobqueue.sweep import PruneReport, SweepReport, prune_jobs, sweep_stale_jobs
from jobqueue.testing.factories import WorkerFactory
from tests.helpers import pause_at, run_in_thread, statement, wait_until_blocked
from tests.mutation.gate import Killer
from tests.mutation.killers import claim_chosen, named
from tests.races.scenes import (
    SETTLING,
    job_in,
    lock,
    row,
    scanned,
    statements_made_anew,
    update_of_job,
)

HOUR = timedelta(hours=1)

update_of_worker = statement("UPDATE", "jobqueue_worker")


# -- Claims and promotions


def second_claimer_of_the_same_rows_gets_none(alias: str) -> None:
    """Both chose the row in the same instant; the second waits for the first to commit.

    Without row locks, that is: with them the second passes the row over.
    """
    job = job_in("waiting")
    with without_row_locks():
        with transaction.atomic(using=alias):
            assert len(claim_chosen(job, "winner:1:1", alias)) == 1
            loser = run_in_thread(claim_chosen, job, "loser:2:2", alias)
            wait_until_blocked(alias)
        assert loser.result() == []
    assert row(job)["claimed_by"] == "winner:1:1"


def second_promoter_of_the_same_rows_promotes_none(alias: str) -> None:
    """Without row locks, that is: they save the wait, and the statement keeps the truth."""
    job = job_in("scheduled", run_after=db.now(alias) - HOUR)
    with without_row_locks(), pause_at(alias, update_of_job) as pause:
        late = run_in_thread(dispatch.promote_due, None, 9, using=alias)
        pause.wait_until_reached()
        assert dispatch.promote_due(None, 9, using=alias) == 1
        pause.release()
        assert late.result() == 0
    assert row(job)["version"] == job.version + 1


def job_put_off_meanwhile_is_not_promoted(alias: str) -> None:
    """Between the choice and the write it was given a later time; again without row locks."""
    job = job_in("scheduled", run_after=db.now(alias) - HOUR)
    with without_row_locks(), pause_at(alias, update_of_job) as pause:
        promotion = run_in_thread(dispatch.promote_due, None, 9, using=alias)
        pause.wait_until_reached()
        transitions.edit(job, {"run_after": db.now(alias) + HOUR}, actor="ann")
        pause.release()
        assert promotion.result() == 0
    assert row(job)["state"] == "scheduled"


@contextmanager
def without_row_locks() -> Iterator[None]:
    """Take the locks away that keep others from rows that were chosen."""
    with pytest.MonkeyPatch.context() as patch, statements_made_anew():
        patch.setattr(db, "lock_rows", lambda rows, **options: rows)
        yield


def worker_that_is_swept_while_it_claims_keeps_nothing(alias: str) -> None:
    """It gets nothing any more, or the sweep waits for it and takes what it got."""
    worker = WorkerFactory(silent=True)
    job = job_in("waiting")
    with pause_at(alias, update_of_job) as pause:
        claim = run_in_thread(claim_jobs, worker.pk, ["default"], 1)
        pause.wait_until_reached()
        sweep = run_in_thread(sweep_stale_jobs)
        wait_until_blocked(alias, unless=lambda: sweep.done)
        pause.release()
        claim.result()
        assert sweep.result().dead_workers == 1
    assert row(job)["state"] == "waiting"


# -- Cancel requests


def asked_while_it_waits(verb: str) -> Killer:
    """Return the killer in which a job is asked to stop while the write of a setback waits."""

    def killer(alias: str) -> None:
        job = job_in("running")
        with transaction.atomic(using=alias):
            lock(job)
            late = run_in_thread(SETTLING[verb], job)
            wait_until_blocked(alias)
            transitions.request_cancel(job, actor="operator")
        late.result()
        assert row(job)["state"] == "cancelled"

    return named(killer, f"{verb}_yields_to_a_request_that_it_waited_for")


# -- Sweeps


def renewed_lease_is_kept(alias: str) -> None:
    """The worker renewed it between the sweep's look and its write."""
    worker = WorkerFactory(silent=True)
    job_in("running", claimed_by=worker.pk)
    with pause_at(alias, update_of_worker) as pause:
        sweep = run_in_thread(sweep_stale_jobs)
        pause.wait_until_reached()
        broker.heartbeat(worker.pk)
        pause.release()
        assert sweep.result() == SweepReport(examined=1)
    assert Worker.objects.get().state == "alive"


def prolonged_lease_is_kept(alias: str) -> None:
    """The sweep reckoned with the shorter lease that it had read."""
    worker = WorkerFactory(silent=True)
    with pause_at(alias, update_of_worker) as pause:
        sweep = run_in_thread(sweep_stale_jobs)
        pause.wait_until_reached()
        Worker.objects.update(lease=worker.lease * 1000)
        pause.release()
        assert sweep.result().dead_workers == 0


def worker_is_fenced_before_its_jobs_are_looked_at(alias: str) -> None:
    """A renewal that comes while the sweep stands before the jobs comes too late."""
    worker = WorkerFactory(silent=True)
    job_in("running", claimed_by=worker.pk)
    with pause_at(alias, scanned, after=True) as pause:
        sweep = run_in_thread(sweep_stale_jobs)
        pause.wait_until_reached()
        with pytest.raises(LeaseLost):
            broker.heartbeat(worker.pk)
        pause.release()
        assert sweep.result().taken == 1


def job_of_a_new_worker_is_left_alone(alias: str) -> None:
    """Its worker was registered, and claimed it, between two looks of the sweep."""
    job_in("running", claimed_by=WorkerFactory().pk)
    job = job_in("waiting")
    with pause_at(alias, read_of_held, after=False) as pause:
        sweep = run_in_thread(sweep_stale_jobs)
        pause.wait_until_reached()
        claim_jobs(WorkerFactory().pk, ["default"], 1, start=True)
        pause.release()
        assert sweep.result() == SweepReport(examined=2)
    assert row(job)["state"] == "running"


def read_of_held(sql: str) -> bool:
    """Match the sweep's look at a page of held jobs."""
    return sql.startswith("SELECT") and "jobqueue_job" in sql and " LIMIT " in sql


# -- Pruning


def job_finished_again_is_not_pruned(alias: str) -> None:
    """It was rerun between the look and the deletion, and is final again, but not since long."""
    job = job_in("completed", finished_at=db.now(alias) - 2 * HOUR)
    with pause_at(alias, choice_of_old, after=True) as pause:
        prune = run_in_thread(prune_jobs, HOUR)
        pause.wait_until_reached()
        transitions.cancel(transitions.rerun(job, actor="ann"), actor="ann")
        pause.release()
        assert prune.result() == PruneReport()
    assert row(job)["state"] == "cancelled"


def choice_of_old(sql: str) -> bool:
    """Match the query that chooses what to delete."""
    return sql.startswith("SELECT") and "jobqueue_job" in sql and "FOR UPDATE" not in sql
