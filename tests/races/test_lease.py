"""The worker's row is the lease: renewals, sweeps and reconciliation meet on it."""

from __future__ import annotations

import pytest
from django.db import connections, transaction

from jobqueue import broker, coordinator, db, signals, transitions
from jobqueue.exceptions import LeaseLost, TransitionConflict
from jobqueue.lifecycle import Heartbeat
from jobqueue.models import Job, Worker
from jobqueue.sweep import SweepReport, sweep_stale_jobs
from jobqueue.testing.factories import WorkerFactory
from tests.asserting import servers_only
from tests.helpers import pause_at, run_in_thread, statement, wait_until_blocked
from tests.races.scenes import (
    conflict_of,
    delete_raw,
    hearing,
    job_in,
    kinds,
    row,
    take_over,
)

update_of_worker = statement("UPDATE", "jobqueue_worker")


def jobs_of(worker):
    return [job_in("running", claimed_by=worker.pk), job_in("claimed", claimed_by=worker.pk)]


def read_of_jobs(sql):
    return sql.startswith("SELECT") and "jobqueue_job" in sql


def test_renewal_between_look_and_write(alias):
    """queue-jobs-worker#6: a lease renewed in time is not taken, and neither are its jobs."""
    worker = WorkerFactory(silent=True)
    jobs = jobs_of(worker)
    before = [row(job) for job in jobs]
    with pause_at(alias, update_of_worker) as pause:
        sweep = run_in_thread(sweep_stale_jobs)
        pause.wait_until_reached()
        broker.heartbeat(worker.pk)
        pause.release()
        assert sweep.result() == SweepReport(examined=2)
    assert [row(job) for job in jobs] == before
    assert Worker.objects.get().state == "alive"


def test_renewal_while_the_sweep_waits(alias):
    """The sweep's write sees the renewal that it waited for."""
    worker = WorkerFactory(silent=True)
    jobs_of(worker)
    with transaction.atomic(using=alias):
        broker.heartbeat(worker.pk)
        sweep = run_in_thread(sweep_stale_jobs)
        wait_until_blocked(alias)
    assert sweep.result() == SweepReport(examined=2)


def test_sweep_while_the_renewal_waits(alias):
    """The renewal comes too late, and the worker is told so."""
    worker = WorkerFactory(silent=True)
    jobs = jobs_of(worker)
    with transaction.atomic(using=alias):
        report = sweep_stale_jobs()
        beat = run_in_thread(broker.heartbeat, worker.pk, {job.pk: job for job in jobs})
        wait_until_blocked(alias)
    assert report == SweepReport(examined=2, dead_workers=1, retried=1, released=1)
    with pytest.raises(LeaseLost, match=f"Worker {worker.pk} holds no live lease."):
        beat.result()


def test_two_sweeps_declare_one_worker_dead_once(alias):
    """One of the two counts it, and it is told once."""
    worker = WorkerFactory(silent=True)
    with hearing(signals.worker_declared_dead) as heard:
        with transaction.atomic(using=alias):
            assert sweep_stale_jobs().dead_workers == 1
            second = run_in_thread(sweep_stale_jobs)
            wait_until_blocked(alias)
        assert second.result().dead_workers == 0
    assert [told["worker_id"] for told in heard] == [worker.pk]


def test_longer_lease_between_look_and_write(alias):
    """The sweep's verdict rests on the lease that it read, so that stands in its write too."""
    worker = WorkerFactory(silent=True)
    with pause_at(alias, update_of_worker) as pause:
        sweep = run_in_thread(sweep_stale_jobs)
        pause.wait_until_reached()
        Worker.objects.update(lease=worker.lease * 1000)
        pause.release()
        assert sweep.result().dead_workers == 0


def test_two_renewals_within_one_tick_of_the_clock(alias, monkeypatch):
    """stacks#2639: the row matches and no value changes, which is no lost lease."""
    worker = WorkerFactory()
    moment = db.now(alias)
    monkeypatch.setattr(db, "now", lambda using: moment)
    for _ in range(2):
        assert broker.heartbeat(worker.pk) == Heartbeat()


TAKEN = {
    "claimed by another": lambda job: take_over(job, start=False),
    "running at another": take_over,
    "waiting again": lambda job: coordinator.release(job.pk, actor="operator"),
    "finished by an operator": lambda job: transitions.cancel(job, actor="operator"),
    "running here, as a newer execution": lambda job: take_over(job, job.claimed_by),
}


@pytest.mark.parametrize("take", TAKEN)
def test_taken_job_is_reported_lost_once(alias, take):
    """db-scheduler#402, DotNetWorkQueue#294: told with the next heartbeat, with one event."""
    worker = WorkerFactory()
    job, other = job_in("running", claimed_by=worker.pk), job_in("running", claimed_by=worker.pk)
    TAKEN[take](job)
    held = {each.pk: each for each in (job, other)}
    assert broker.heartbeat(worker.pk, held) == Heartbeat(lost=frozenset({job.pk}))
    event = conflict_of(job)
    assert (event.actor, event.detail["wanted"]) == (worker.pk, "hold")
    assert event.detail["expected"] == job.fingerprint.as_dict()
    assert broker.heartbeat(worker.pk, {other.pk: other}) == Heartbeat()
    assert kinds(job).count("conflict") == 1


def test_deleted_job_is_reported_lost(alias):
    worker = WorkerFactory()
    job = job_in("running", claimed_by=worker.pk)
    delete_raw(job)
    assert broker.heartbeat(worker.pk, {job.pk: job}) == Heartbeat(lost=frozenset({job.pk}))


def test_newer_execution_that_the_worker_does_not_know_is_handed_back(alias):
    """Its claim's reply was lost while the old execution still runs in the same process."""
    worker = WorkerFactory()
    job = job_in("running", claimed_by=worker.pk)
    take_over(job, worker.pk)
    broker.heartbeat(worker.pk, {job.pk: job})
    after = row(job)
    assert (after["state"], after["attempt"], after["excused"]) == ("waiting", 2, 2)


@pytest.mark.parametrize("state", ["claimed", "running"])
def test_unknown_job_that_moves_on_while_it_is_handed_back(alias, state):
    """Handing back is fenced: whoever got the job meanwhile keeps it."""
    worker = WorkerFactory()
    job = job_in(state, claimed_by=worker.pk)
    with pause_at(alias, read_of_jobs, after=True) as pause:
        beat = run_in_thread(broker.heartbeat, worker.pk, {})
        pause.wait_until_reached()
        taken = take_over(job)
        pause.release()
        assert beat.result() == Heartbeat()
    assert row(job)["claimed_by"] == taken.claimed_by
    assert row(job)["version"] == taken.version


def test_job_that_is_settled_while_its_loss_is_recorded(alias):
    """The event waits for a short while; the row is what the other made of it."""
    worker = WorkerFactory()
    job = job_in("running", claimed_by=worker.pk)
    taken = take_over(job)
    with (
        pause_at(alias, lambda sql: "FOR UPDATE" in sql) as pause,
        transaction.atomic(using=alias),
    ):
        transitions.complete(taken, 7)
        beat = run_in_thread(broker.heartbeat, worker.pk, {job.pk: job})
        if connections[alias].features.has_select_for_update:
            pause.wait_until_reached()
        else:
            wait_until_blocked(alias)
    assert beat.result().lost == {job.pk}
    assert (row(job)["state"], row(job)["result"]) == ("completed", 7)
    assert kinds(job).count("conflict") == 1


@servers_only
def test_loss_of_a_job_that_stays_locked_is_told_without_its_event(alias):
    """Somebody who sits idle in a transaction holds up no heartbeat."""
    worker = WorkerFactory()
    job = job_in("running", claimed_by=worker.pk)
    taken = take_over(job)
    before = kinds(job)
    with hearing(signals.write_refused) as refused, transaction.atomic(using=alias):
        Job.objects.select_for_update().get(pk=taken.pk)
        assert run_in_thread(broker.heartbeat, worker.pk, {job.pk: job}).result().lost == {job.pk}
    assert [told["error"].job_id for told in refused] == [job.pk]
    assert kinds(job) == before


def test_cancel_request_reaches_the_executor(alias):
    """Once asked the handler is told; the request opens no new version, so its success counts."""
    worker = WorkerFactory()
    job = job_in("running", claimed_by=worker.pk)
    transitions.request_cancel(job, actor="operator")
    heard = broker.heartbeat(worker.pk, {job.pk: job})
    assert heard == Heartbeat(cancel_requested=frozenset({job.pk}))
    assert transitions.complete(job).state == "completed"


def test_deletion_while_a_conflict_is_recorded(alias):
    """The row goes between the refused write and its event: a conflict, and no other error."""
    job = job_in("running")
    transitions.cancel(job, actor="operator")
    with pause_at(alias, read_of_jobs, after=True) as pause:
        late = run_in_thread(transitions.complete, job)
        pause.wait_until_reached()
        delete_raw(job)
        pause.release()
        with pytest.raises(TransitionConflict, match="it is now cancelled"):
            late.result()
    assert kinds(job) == []
