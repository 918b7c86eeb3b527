"""What must fail once a guard is gone, where an old copy of the row is enough to show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import TestCase

import pytest
from django.db import transaction

from jobqueue import broker, coordinator, db, dispatch, transitions
from jobqueue.claim import claim_jobs
from jobqueue.exceptions import LeaseLost, TransitionConflict, TransitionNotAllowed
from jobqueue.lifecycle import Completed, Error, Heartbeat, Retry, Verb
from jobqueue.models import Job
from jobqueue.sweep import SweepReport, sweep_stale_jobs
from jobqueue.testing.conformance import ConformanceMixin
from jobqueue.testing.factories import WorkerFactory
from tests.asserting import set_clock
from tests.mutation.gate import Killer
from tests.races.scenes import (
    SETTLING,
    choosing,
    job_in,
    row,
    settle_all,
    take_over,
    write_raw,
)

HOUR = timedelta(hours=1)
MICROSECOND = timedelta(microseconds=1)


# -- The fence


def conformance(name: str) -> Killer:
    """Return one test of the public suite as a killer."""

    def killer(alias: str) -> None:
        case = type("Conforms", (ConformanceMixin, TestCase), {"using": alias})(name)
        try:
            case.setUp()
            getattr(case, name)()
        finally:
            case.doCleanups()

    return named(killer, f"conformance: {name}")


def named(killer: Killer, name: str) -> Killer:
    """Give a killer the name under which the table has it."""
    killer.__name__ = name
    return killer


def stale_page_edits_nothing(alias: str) -> None:
    """Two edits from the same page: nothing but the version tells that the first one came."""
    seen = job_in("waiting")
    transitions.edit(seen, {"priority": 1}, actor="ann")
    with pytest.raises(TransitionConflict):
        transitions.edit(seen, {"priority": 2}, actor="bob")
    assert row(seen)["priority"] == 1


def claim_at_the_same_instant_is_another(alias: str) -> None:
    """The same worker claims, lets go and claims again before the clock ticks: ABA."""
    job_in("waiting")
    worker = WorkerFactory()
    with clock_standing_still(alias):
        (first,) = claim_jobs(worker.pk, ["default"], 1)
        transitions.release(first)
        (again,) = claim_jobs(worker.pk, ["default"], 1)
    with pytest.raises(TransitionConflict):
        transitions.start(first)
    assert row(again)["version"] == again.version


@contextmanager
def clock_standing_still(alias: str) -> Iterator[None]:
    """Let the database's clock show the same time until the block ends."""
    moment = db.now(alias)
    with pytest.MonkeyPatch.context() as patch:
        set_clock(patch, lambda using: moment)
        yield


def claim_and_promotion_raise_the_version(alias: str) -> None:
    """As every other verb does."""
    job = job_in("scheduled", run_after=db.now(alias) - HOUR)
    (claimed,) = claim_jobs(WorkerFactory().pk, ["default"], 1)
    assert row(claimed)["version"] == job.version + 2


def stale_page_of_a_coordinator_does_nothing(alias: str) -> None:
    """The verb would be right for the state, but somebody else has been there."""
    seen = job_in("waiting")
    now = coordinator.edit(seen.pk, priority=1, actor="ann")
    with pytest.raises(TransitionConflict):
        coordinator.cancel(seen.pk, actor="bob", expected_version=seen.version)
    assert row(seen)["version"] == now.version


# -- The table of verbs

# For each verb a state in which the table doesn't have it, though no constraint of the database
# stands in its way.
MISUSES: dict[Verb, tuple[str, Callable[[Job], Any]]] = {
    Verb.START: ("running", transitions.start),
    Verb.COMPLETE: ("claimed", SETTLING["complete"]),
    Verb.FAIL: ("claimed", SETTLING["fail"]),
    Verb.RETRY: ("claimed", SETTLING["retry"]),
    Verb.SNOOZE: ("claimed", SETTLING["snooze"]),
    Verb.RELEASE: ("scheduled", SETTLING["release"]),
    Verb.CANCEL: ("completed", SETTLING["cancel"]),
    Verb.RERUN: ("running", lambda job: transitions.rerun(job, actor="ann")),
    Verb.EDIT: ("running", lambda job: transitions.edit(job, {"priority": 1}, actor="ann")),
    Verb.DELETE: ("running", lambda job: transitions.delete(job, actor="ann")),
}


def misused(verb: Verb) -> Killer:
    """Return the killer that tries a verb in a state that isn't one of its sources."""
    state, write = MISUSES[verb]

    def killer(alias: str) -> None:
        job = job_in(state, attempt=1)
        before = row(job)
        with pytest.raises(TransitionNotAllowed):
            write(job)
        assert row(job) == before

    return named(killer, f"{verb}_of_a_{state}_job_is_not_allowed")


def claim_chosen(job: Job, worker_id: str, alias: str) -> list[Job]:
    """Have a new worker claim a row that was chosen by its id alone."""
    WorkerFactory(id=worker_id)
    with choosing(Job.objects.using(alias).filter(pk=job.pk)), transaction.atomic(using=alias):
        return dispatch.claim(job.queue, worker_id, db.now(alias), 1, start=True, using=alias)


def chosen_job_that_is_held_is_not_claimed(alias: str) -> None:
    """Whoever chose it didn't look at its state: the write looks itself."""
    job = job_in("claimed")
    assert claim_chosen(job, "another:2:2", alias) == []
    assert row(job)["claimed_by"] == job.claimed_by


def held_job_is_not_claimed(alias: str) -> None:
    """Not by a claimer that looks for jobs."""
    job = job_in("claimed")
    assert claim_jobs(WorkerFactory().pk, ["default"], 1) == []
    assert row(job)["claimed_by"] == job.claimed_by


def waiting_job_is_not_promoted(alias: str) -> None:
    """It has been; its version says so."""
    job = job_in("waiting")
    assert dispatch.promote_due(None, 9, using=alias) == 0
    assert row(job)["version"] == job.version


# -- The due time


def job_is_not_claimed_early(alias: str) -> None:
    """A waiting job that was given a later time isn't looked at before."""
    job_in("waiting", run_after=db.now(alias) + HOUR)
    assert claim_jobs(WorkerFactory().pk, ["default"], 1) == []


def chosen_job_is_not_claimed_early(alias: str) -> None:
    """Nor is one that somebody chose without a look at its time: the write looks itself."""
    job = job_in("waiting", run_after=db.now(alias) + HOUR)
    assert claim_chosen(job, "w", alias) == []
    assert row(job)["state"] == "waiting"


def job_is_not_promoted_early(alias: str) -> None:
    """A scheduled job stays so until its time has come."""
    job = job_in("scheduled", run_after=db.now(alias) + HOUR)
    assert dispatch.promote_due(None, 9, using=alias) == 0
    assert row(job)["state"] == "scheduled"


# -- The lease


def silent_worker_is_fenced(alias: str) -> None:
    """Its jobs were taken: it must learn that before it does anything else."""
    worker = WorkerFactory(silent=True)
    job_in("running", claimed_by=worker.pk)
    assert sweep_stale_jobs().taken == 1
    with pytest.raises(LeaseLost):
        broker.heartbeat(worker.pk)


def dead_worker_claims_nothing(alias: str) -> None:
    """What it claimed would be taken at once."""
    job_in("waiting")
    with pytest.raises(LeaseLost):
        claim_jobs(WorkerFactory(dead=True).pk, ["default"], 1)


def dead_worker_renews_nothing(alias: str) -> None:
    """Death is for ever: its jobs may be somebody else's."""
    worker = WorkerFactory(dead=True)
    with pytest.raises(LeaseLost):
        broker.heartbeat(worker.pk)


def jobs_of_a_dead_worker_are_taken(alias: str) -> None:
    """Nobody else would ever free them."""
    job = job_in("running", claimed_by=WorkerFactory(dead=True).pk)
    assert sweep_stale_jobs() == SweepReport(examined=1, retried=1)
    assert row(job)["state"] == "scheduled"


def jobs_of_a_live_worker_are_left_alone(alias: str) -> None:
    """However long they run: there is no timeout."""
    worker = WorkerFactory()
    long_ago = db.now(alias) - 1000 * HOUR
    job = job_in("running", claimed_by=worker.pk, claimed_at=long_ago, attempted_at=long_ago)
    assert sweep_stale_jobs() == SweepReport(examined=1)
    assert row(job)["state"] == "running"


# -- The rule of the settled version


def operators_completion_is_not_the_owners(alias: str) -> None:
    """The result is the same, and yet its executor was fenced out."""
    job = job_in("running")
    SETTLING["complete"](job, actor="operator")
    assert settle_all([job], Completed({"by": "this write"})) == ["conflict"]


def completion_in_another_history_is_not_this_ones(alias: str) -> None:
    """A failover lost the last commits; the same worker claimed the job again, and completed it."""
    job = job_in("running")
    write_raw(job, claimed_at=job.claimed_at + MICROSECOND)
    SETTLING["complete"](Job.objects.get(pk=job.pk))
    assert settle_all([job], Completed({"by": "this write"})) == ["conflict"]


def own_completion_is_recognised(alias: str) -> None:
    """The reply to the first was lost: it is told as done, and not as a conflict."""
    job = job_in("running")
    SETTLING["complete"](job)
    assert settle_all([job], Completed({"by": "this write"})) == ["already applied"]


def own_failure_that_was_rerun_is_no_completion(alias: str) -> None:
    """The rerun's event keeps the version and the state that it left."""
    job = job_in("running")
    transitions.rerun(SETTLING["fail"](job), actor="operator")
    assert settle_all([job], Completed({"by": "this write"})) == ["conflict"]


def another_result_is_no_lost_reply(alias: str) -> None:
    """One execution has one outcome: the first."""
    job = job_in("running")
    SETTLING["complete"](job)
    assert settle_all([job], Completed("another")) == ["conflict"]


def own_release_is_no_retry(alias: str) -> None:
    """One execution has one outcome: its event is of another kind."""
    job = job_in("running")
    transitions.release(job)
    assert settle_all([job], Retry(Error("no"))) == ["conflict"]


def operators_retry_is_not_the_owners(alias: str) -> None:
    """Its event is of the same kind and version, but not the owner's."""
    job = job_in("running")
    settle_all([job], Retry(Error("no")), actor="operator")
    assert settle_all([job], Retry(Error("no"))) == ["conflict"]


def own_retry_is_recognised(alias: str) -> None:
    """The reply to the first was lost."""
    job = job_in("running")
    settle_all([job], Retry(Error("no")))
    assert settle_all([job], Retry(Error("no"))) == ["already applied"]


def own_retry_of_an_earlier_execution_is_not_this_ones(alias: str) -> None:
    """Its event is of the same worker and kind, but from another version."""
    job = job_in("running")
    transitions.retry(job, "no", 0)
    WorkerFactory(id=job.claimed_by)
    (again,) = claim_jobs(job.claimed_by, ["default"], 1, start=True)
    transitions.cancel(again, actor="operator")
    with pytest.raises(TransitionConflict):
        transitions.retry(again, "no", 0)


def rerun_of_an_operators_completion_is_not_the_owners(alias: str) -> None:
    """The rerun's event keeps whose completion it cleared."""
    job = job_in("running")
    done = SETTLING["complete"](job, actor="operator")
    transitions.rerun(done, actor="operator")
    assert settle_all([job], Completed({"by": "this write"})) == ["conflict"]


def own_completion_that_was_rerun_is_known(alias: str) -> None:
    """The reply to it was lost, and an operator was quicker than the second try."""
    job = job_in("running")
    transitions.rerun(SETTLING["complete"](job), actor="operator")
    assert settle_all([job], Completed({"by": "this write"})) == ["already applied"]


# -- Reconciliation


def unknown_job_is_handed_back(alias: str) -> None:
    """The reply to its claim was lost; its worker lives, so no sweep would ever take it."""
    worker = WorkerFactory()
    job = job_in("running", claimed_by=worker.pk)
    broker.heartbeat(worker.pk, {})
    assert row(job)["state"] == "waiting"


def job_of_another_history_is_told_lost(alias: str) -> None:
    """A failover lost the last commits; versions come again, times don't."""
    worker = WorkerFactory()
    job = job_in("running", claimed_by=worker.pk)
    write_raw(job, attempted_at=job.attempted_at + MICROSECOND)
    assert broker.heartbeat(worker.pk, {job.pk: job}).lost == {job.pk}


def newer_execution_is_handed_back(alias: str) -> None:
    """The reply to its claim was lost while the worker still runs the older one."""
    worker = WorkerFactory()
    job = job_in("running", claimed_by=worker.pk)
    take_over(job, worker.pk)
    broker.heartbeat(worker.pk, {job.pk: job})
    assert row(job)["state"] == "waiting"


def known_job_is_kept(alias: str) -> None:
    """What the worker does hold isn't taken from it."""
    worker = WorkerFactory()
    job = job_in("running", claimed_by=worker.pk)
    assert broker.heartbeat(worker.pk, {job.pk: job}) == Heartbeat()
    assert row(job)["version"] == job.version


def taken_job_is_told_lost(alias: str) -> None:
    """Also one that the same worker has again, as another execution."""
    worker = WorkerFactory()
    job = job_in("running", claimed_by=worker.pk)
    take_over(job, worker.pk)
    assert broker.heartbeat(worker.pk, {job.pk: job}).lost == {job.pk}


# -- Within an execution


def report_of_a_job_that_does_not_run_is_not_allowed(alias: str) -> None:
    """A figure on a finished job would be read as the next execution's."""
    job = job_in("failed")
    with pytest.raises(TransitionNotAllowed):
        transitions.record_progress(job, 50)
    assert row(job)["progress"] == 0


def request_to_a_job_that_does_not_run_is_not_allowed(alias: str) -> None:
    """A waiting job is cancelled at once; asked, it would begin only to be cancelled."""
    job = job_in("waiting")
    with pytest.raises(TransitionNotAllowed):
        transitions.request_cancel(job, actor="operator")
    assert row(job)["cancel_requested_at"] is None


def late_report_lowers_nothing(alias: str) -> None:
    """Two reports of one execution that overtake each other."""
    job = job_in("running")
    for percent in (80, 50):
        transitions.record_progress(job, percent)
    assert row(job)["progress"] == 80
