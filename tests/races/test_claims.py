"""Claims that meet each other, a promotion, or a sweep of the claimer."""

from __future__ import annotations

import threading

import pytest
from django.db import connections, transaction

from jobqueue import broker, db, dispatch, transitions
from jobqueue.claim import claim_jobs
from jobqueue.exceptions import LeaseLost, TransitionConflict
from jobqueue.models import Job
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.testing.factories import JobFactory, WorkerFactory
from tests.asserting import set_clock
from tests.helpers import pause_at, run_in_thread, wait_until_blocked
from tests.races.scenes import choosing, job_in, kinds, row, update_of_job


def skips_locked(alias):
    return connections[alias].features.has_select_for_update_skip_locked


def ids(jobs):
    return [job.pk for job in jobs]


def claim_in_a_transaction(alias, worker_id, limit, **options):
    """Claim, and keep what is locked until there was time to look at it."""
    with transaction.atomic(using=alias):
        return claim_jobs(worker_id, ["default"], limit, **options)


@pytest.mark.parametrize("start", [False, True])
def test_second_claimer_passes_over_what_the_first_has_locked(alias, start):
    """No row goes to two claimers; where rows can be skipped nobody waits."""
    jobs = JobFactory.create_batch(4)
    first, second = WorkerFactory(), WorkerFactory()
    with pause_at(alias, update_of_job, after=True) as pause:
        one = run_in_thread(claim_in_a_transaction, alias, first.pk, 2, start=start)
        pause.wait_until_reached()
        two = run_in_thread(claim_jobs, second.pk, ["default"], 10, start=start)
        if skips_locked(alias):
            two.result()
        else:
            wait_until_blocked(alias)
        assert not one.done
        pause.release()
        assert ids(one.result()) == ids(jobs[:2])
    assert ids(two.result()) == ids(jobs[2:])
    owners = [row(job)["claimed_by"] for job in jobs]
    assert owners == [first.pk, first.pk, second.pk, second.pk]


def these(jobs):
    """Return a query that chooses these jobs, whatever has become of them."""
    return Job.objects.filter(pk__in=ids(jobs)).order_by("-priority", "run_after", "pk")


@pytest.mark.parametrize("start", [False, True])
def test_two_claimers_that_chose_the_same_rows(alias, start, monkeypatch):
    """django-q#234, django-ox#16: one gets them, even when both claim in the same instant."""
    jobs = JobFactory.create_batch(2)
    for worker_id in ("winner:1:1", "loser:2:2"):
        WorkerFactory(id=worker_id)
    now = db.now(alias)
    set_clock(monkeypatch, lambda using: now)

    def claim(worker_id):
        with transaction.atomic(using=alias):
            return dispatch.claim("default", worker_id, now, 9, start=start, using=alias)

    with choosing(these(jobs)):
        with transaction.atomic(using=alias):
            won = claim("winner:1:1")
            loser = run_in_thread(claim, "loser:2:2")
            if skips_locked(alias):
                assert loser.result() == []
            else:
                wait_until_blocked(alias)
        assert loser.result() == []
    assert ids(won) == ids(jobs)
    assert [row(job)["claimed_by"] for job in jobs] == ["winner:1:1"] * 2
    assert [row(job)["version"] for job in jobs] == [1, 1]


def test_claim_reads_back_what_it_wrote(alias):
    """A row that moved on between a claimer's look and its write is not handed out."""
    taken, cancelled, first, second = JobFactory.create_batch(4)
    worker = WorkerFactory()
    (other,) = claim_jobs(worker.pk, ["default"], 1)
    assert other.pk == taken.pk
    transitions.cancel(cancelled, actor="operator")
    with choosing(these([second, taken, cancelled, first])):
        got = dispatch.claim("default", worker.pk, db.now(alias), 9, start=False, using=alias)
    assert ids(got) == ids([first, second])


def test_threads_of_one_worker(alias):
    """good_job#1599: the same worker's id on five threads does not make a row theirs five times."""
    jobs = JobFactory.create_batch(12)
    worker = WorkerFactory()
    together = threading.Barrier(5)

    def claim():
        connections[alias].ensure_connection()
        together.wait(10)
        return ids(claim_jobs(worker.pk, ["default"], 3, start=True))

    claims = [run_in_thread(claim) for _ in range(5)]
    got = [pk for each in claims for pk in each.result()]
    assert sorted(got) == ids(jobs)
    assert {row(job)["attempt"] for job in jobs} == {1}


def test_claim_while_a_promotion_runs(alias):
    """What is being promoted is passed over or waited for, and goes to one claimer."""
    due = job_in("scheduled", run_after=db.now(alias))
    waiting = JobFactory()
    worker = WorkerFactory()
    with pause_at(alias, update_of_job, after=True) as pause:
        promotion = run_in_thread(dispatch.promote_due, None, 10, using=alias)
        pause.wait_until_reached()
        claim = run_in_thread(claim_jobs, worker.pk, ["default"], 10)
        if skips_locked(alias):
            assert ids(claim.result()) == [waiting.pk]
        else:
            wait_until_blocked(alias)
        pause.release()
        assert promotion.result() == 1
    got = ids(claim.result()) + ids(claim_jobs(worker.pk, ["default"], 10))
    assert sorted(got) == ids([due, waiting])
    assert row(due)["version"] == 2  # promoted once, claimed once


def test_two_promotions_at_once(alias):
    """A job is promoted once, and neither counts what the other did."""
    jobs = [job_in("scheduled", run_after=db.now(alias)) for _ in range(3)]
    with pause_at(alias, update_of_job, after=True) as pause:
        first = run_in_thread(dispatch.promote_due, None, 2, using=alias)
        pause.wait_until_reached()
        second = run_in_thread(dispatch.promote_due, None, 10, using=alias)
        if skips_locked(alias):
            second.result()
        else:
            wait_until_blocked(alias)
        pause.release()
        assert first.result() == 2
    # MariaDB may have locked, and so passed over, more rows than it took.
    assert second.result() + dispatch.promote_due(None, 10, using=alias) == 1
    assert [(row(job)["state"], row(job)["version"]) for job in jobs] == [("waiting", 1)] * 3


def test_promotion_against_cancel(alias):
    """A scheduled job that is cancelled while a promotion runs stays cancelled."""
    job = job_in("scheduled", run_after=db.now(alias))
    with transaction.atomic(using=alias):
        transitions.cancel(job, actor="operator")
        promotion = run_in_thread(dispatch.promote_due, None, 10, using=alias)
        if skips_locked(alias):
            promotion.result()
        else:
            wait_until_blocked(alias)
    assert promotion.result() == 0
    assert row(job)["state"] == "cancelled"


@pytest.mark.parametrize("start", [False, True])
def test_claim_before_a_sweep_of_the_claimer(alias, start):
    """The sweep waits for the claim to commit, then takes what was claimed."""
    worker = WorkerFactory(silent=True)
    job = JobFactory()
    with pause_at(alias, update_of_job, after=True) as pause:
        claim = run_in_thread(claim_in_a_transaction, alias, worker.pk, 1, start=start)
        pause.wait_until_reached()
        sweep = run_in_thread(sweep_stale_jobs)
        wait_until_blocked(alias)
        pause.release()
        (claimed,) = claim.result()
    report = sweep.result()
    assert (report.dead_workers, report.taken) == (1, 1)
    assert row(job)["claimed_by"] is None
    assert kinds(job) == ["rescued"]
    with pytest.raises(TransitionConflict):
        (transitions.complete if start else transitions.start)(claimed)


def test_claim_after_a_sweep_of_the_claimer(alias):
    """The claim waits for the sweep to commit, and gets nothing; the next one learns why."""
    worker = WorkerFactory(silent=True)
    job = JobFactory()
    with transaction.atomic(using=alias):
        assert sweep_stale_jobs().dead_workers == 1
        claim = run_in_thread(claim_jobs, worker.pk, ["default"], 1)
        wait_until_blocked(alias)
    assert claim.result() == []
    assert row(job)["state"] == "waiting"
    with pytest.raises(LeaseLost, match=f"Worker {worker.pk} holds no live lease."):
        claim_jobs(worker.pk, ["default"], 1)


def test_claim_against_leaving(alias):
    """A worker that leaves while it claims holds nothing that others must wait for."""
    worker = WorkerFactory()
    job = JobFactory()
    with transaction.atomic(using=alias):
        broker.leave(worker.pk)
        claim = run_in_thread(broker.claim, worker.pk, 1)
        wait_until_blocked(alias)
    assert claim.result() == []
    assert row(job)["state"] == "waiting"
