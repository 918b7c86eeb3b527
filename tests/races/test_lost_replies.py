"""A COMMIT took effect and its reply was lost: whoever asks again is told the truth."""

from __future__ import annotations

import pytest
from django.db import OperationalError

from jobqueue import broker, db, signals, transitions
from jobqueue.claim import claim_jobs
from jobqueue.exceptions import TransitionConflict
from jobqueue.lifecycle import Completed, Error, Failed, Heartbeat, Retry
from jobqueue.models import Job
from jobqueue.sweep import SweepReport, sweep_stale_jobs
from jobqueue.testing.factories import JobFactory, WorkerFactory
from tests.races.scenes import (
    SETTLING,
    events,
    hearing,
    job_in,
    kinds,
    lost_commit_reply,
    lost_update_reply,
    row,
    take_over,
    write_raw,
)

# Verbs after which another worker may run the job at once.
HANDING_BACK = {
    "retry": lambda job: transitions.retry(job, "an error", 0),
    "snooze": lambda job: transitions.snooze(job, 0),
    "release": transitions.release,
}


def lose_reply(alias, call, *args, lost=lost_commit_reply, **kwargs):
    with lost(alias), pytest.raises(OperationalError, match="connection was lost"):
        call(*args, **kwargs)


@pytest.mark.parametrize("verb", SETTLING)
def test_same_write_again_is_already_applied(alias, verb):
    """airflow#63183: asked again it is reported as done, and nothing is done twice."""
    job = job_in("running")
    lose_reply(alias, SETTLING[verb], job)
    written, history = row(job), events(job)
    assert written["version"] == job.version + 1
    with hearing(signals.job_transitioned) as heard, hearing(signals.write_refused) as refused:
        assert SETTLING[verb](job).fingerprint == Job.objects.get().fingerprint
    assert (row(job), events(job)) == (written, history)
    assert heard == refused == []


@pytest.mark.parametrize("verb", HANDING_BACK)
def test_already_applied_though_the_job_went_on(alias, verb):
    """The write's own event tells, when the row has become another execution's."""
    job = job_in("running")
    lose_reply(alias, HANDING_BACK[verb], job)
    (newer,) = claim_jobs(WorkerFactory().pk, ["default"], 1, start=True)
    written, history = row(job), events(job)
    assert HANDING_BACK[verb](job).fingerprint == newer.fingerprint
    assert (row(job), events(job)) == (written, history)


OTHER_OUTCOMES = {
    "completed, then another result": ("complete", lambda job: transitions.complete(job, 2)),
    "completed, then failed": ("complete", SETTLING["fail"]),
    "completed, then retried": ("complete", SETTLING["retry"]),
    "failed, then completed": ("fail", SETTLING["complete"]),
    "failed, then cancelled": ("fail", SETTLING["cancel"]),
    "retried, then snoozed": ("retry", SETTLING["snooze"]),
    "snoozed, then retried": ("snooze", SETTLING["retry"]),
    "released, then retried at once": ("release", HANDING_BACK["retry"]),
}


@pytest.mark.parametrize("pair", OTHER_OUTCOMES)
def test_another_outcome_is_refused(alias, pair):
    """airflow#63183: one execution has one outcome; another one for it is no lost reply."""
    first, second = OTHER_OUTCOMES[pair]
    job = job_in("running")
    SETTLING[first](job)
    written = row(job)
    with pytest.raises(TransitionConflict):
        second(job)
    assert row(job) == written
    assert kinds(job)[-1] == "conflict"


@pytest.mark.parametrize("verb", SETTLING)
def test_same_outcome_of_another_execution_is_refused(alias, verb):
    """What the newer execution wrote is not taken for the older one's own write."""
    job = job_in("running")
    newer = take_over(job)
    SETTLING[verb](newer)
    written = row(job)
    with pytest.raises(TransitionConflict):
        SETTLING[verb](job)
    assert row(job) == written


@pytest.mark.parametrize("verb", SETTLING)
def test_same_outcome_written_by_somebody_else_is_refused(alias, verb):
    """A sweep or an operator ended the execution likewise: its executor lost it all the same."""
    job = job_in("running")
    SETTLING[verb](job, actor="operator")
    with pytest.raises(TransitionConflict):
        SETTLING[verb](job)


@pytest.mark.parametrize("verb", HANDING_BACK)
def test_same_outcome_of_the_workers_own_earlier_execution_is_refused(alias, verb):
    """The event of what it wrote then is not taken for what it wants to write now."""
    job = job_in("running")
    HANDING_BACK[verb](job)
    WorkerFactory(id=job.claimed_by)
    (again,) = claim_jobs(job.claimed_by, ["default"], 1, start=True)
    transitions.cancel(again, actor="operator")
    with pytest.raises(TransitionConflict):
        HANDING_BACK[verb](again)


@pytest.mark.parametrize("verb", SETTLING)
def test_only_the_owner_is_told_that_it_is_done(alias, verb):
    """Whoever else wanted the same has lost a race, and looks again."""
    job = job_in("running")
    SETTLING[verb](job)
    with pytest.raises(TransitionConflict):
        SETTLING[verb](job, actor="operator")


@pytest.mark.parametrize(
    "result",
    [None, 5.0, -0.0, 0.1, 1e-300, [1.2345678901234567e18], 2**63 - 1, {"b": 1, "a": {"é😀": [0]}}],
    ids=repr,
)
def test_result_is_recognised_however_the_engine_writes_it(alias, result):
    """Engines keep numbers in forms of their own; the executor's result is still the same."""
    job = job_in("running")
    lose_reply(alias, transitions.complete, job, result)
    assert transitions.complete(job, result).state == "completed"
    assert "conflict" not in kinds(job)


def test_batch_whose_reply_was_lost(alias):
    """Its items are already applied; what is new in the next batch is applied beside them."""
    done, failed, new = JobFactory.create_batch(3, running=True)
    batch = [(done, Completed(1)), (failed, Failed(Error("no")))]
    lose_reply(alias, transitions.settle_many, batch)
    written = [row(done), row(failed)]
    results = transitions.settle_many([*batch, (new, Retry(Error("later"), delay=None))])
    assert [result.status for result in results] == ["already applied"] * 2 + ["applied"]
    assert [row(done), row(failed)] == written


def test_sweep_whose_reply_was_lost(alias):
    """It can't tell its own write from another sweep's, and needs not: nothing is taken twice."""
    jobs = JobFactory.create_batch(2, running=True)
    lost = lost_update_reply if db.has_batches(alias) else lost_commit_reply
    with lost(alias):
        assert sweep_stale_jobs() == SweepReport(examined=2, conflicts=2)
    assert [row(job)["version"] for job in jobs] == [job.version + 1 for job in jobs]
    assert [kinds(job) for job in jobs] == [["rescued"]] * 2


@pytest.mark.parametrize("start", [False, True], ids=["claimed", "claimed straight to running"])
def test_claim_whose_reply_was_lost(alias, start):
    """The worker lives, so no sweep would take the job; its next heartbeat finds and frees it."""
    worker = broker.register(["default"])
    held = job_in("running", claimed_by=worker.pk)
    job = JobFactory()
    lost = lost_update_reply if db.has_batches(alias) else lost_commit_reply
    lose_reply(alias, broker.claim, worker.pk, 1, start=start, lost=lost)
    lost = Job.objects.get(pk=job.pk)
    assert lost.claimed_by == worker.pk
    assert sweep_stale_jobs().taken == 0

    assert broker.heartbeat(worker.pk, {held.pk: held}) == Heartbeat()
    after = Job.objects.get(pk=job.pk)
    assert (after.state, after.claimed_by, after.version) == ("waiting", None, lost.version + 1)
    assert (after.attempt, after.excused, after.failures) == (int(start), int(start), 0)
    assert events(job) == [("released", lost.state, "waiting", worker.pk)]
    assert Job.objects.get(pk=held.pk).fingerprint == held.fingerprint
    (again,) = broker.claim(worker.pk, 1)
    assert transitions.complete(again).state == "completed"


def test_unsure_worker_frees_nothing(alias):
    """While a claim may be on its way the worker can't tell what it holds: ``held=None``."""
    worker = WorkerFactory()
    job = job_in("running", claimed_by=worker.pk)
    assert broker.heartbeat(worker.pk, None) == Heartbeat()
    assert Job.objects.get().fingerprint == job.fingerprint


def test_clocks_of_both_tries_may_differ(alias):
    """The second try is made later, with another end: the first one's stands."""
    job = job_in("running")
    lose_reply(alias, transitions.complete, job)
    ended = row(job)["finished_at"]
    assert ended <= db.now(alias)
    transitions.complete(job)
    assert row(job)["finished_at"] == ended


def test_the_mark_of_an_earlier_execution_is_not_taken_for_a_completion(alias):
    """A release leaves it too; who completed later, with the same result, was somebody else."""
    job = job_in("running")
    released = transitions.release(job)
    write_raw(
        job,
        state="completed",
        claimed_by=job.claimed_by,
        claimed_at=job.claimed_at,
        attempted_at=job.attempted_at,
        finished_at=db.now(alias),
        result={"by": "this write"},
        version=released.version + 3,
    )
    with pytest.raises(TransitionConflict):
        transitions.complete(job, {"by": "this write"})
