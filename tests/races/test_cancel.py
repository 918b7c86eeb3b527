"""Cancellation against whatever else can happen to a job, in every order.

Two promises: an acknowledged request never leads to another attempt, and a job that was said to be
cancelled never becomes anything else without a rerun.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
from django.db import connections

from jobqueue import broker, coordinator, dispatch, transitions
from jobqueue.claim import claim_jobs
from jobqueue.exceptions import JobBusy, TransitionConflict, TransitionNotAllowed
from jobqueue.models import Job
from jobqueue.sweep import SweepReport, sweep_stale_jobs
from jobqueue.testing.factories import JobFactory, WorkerFactory
from tests.asserting import exactly
from tests.coordinating import impatient, pausing, rival
from tests.helpers import run_in_thread, wait_until_blocked
from tests.races.scenes import (
    ON_CLAIMED,
    ON_RUNNING,
    SETTLING,
    job_in,
    kinds,
    row,
    sweep_overtaken,
)

WORKER = "worker:1:1"


@pytest.fixture(autouse=True)
def worker(alias):
    """One that lives, and has no part in what the other one does."""
    return WorkerFactory(id=WORKER)


def cancel(job, **by):
    return coordinator.cancel(job.pk, actor="ann", reason="too dear", **by)


def claim(job, *, start=False):
    return [claimed.pk for claimed in claim_jobs(WORKER, ["default"], 9, start=start)]


def rescue(job):
    """Sweep: the job's holder has no row."""
    return sweep_stale_jobs()


def promote(job):
    return dispatch.promote_due(None, 9, using=job._state.db)


def job_for(contender):
    state = CONTENDERS[contender][0]
    due = {"run_after": JobFactory.build().run_after} if state == "scheduled" else {}
    return job_in(state, **due)


def assert_over(job):
    """Let everybody try what they can with a cancelled job: it stays what it is.

    ``job`` is the copy that its last executor has in hand.
    """
    before, past = row(job), kinds(job)
    assert before["state"] == "cancelled"
    for act in LATE.get(job.state, ()):
        with suppress(TransitionConflict):
            act(job)
    for verb in (coordinator.complete, coordinator.fail, coordinator.release, coordinator.cancel):
        message = f"Job {job.pk} is cancelled: {verb.__name__} is not allowed."
        with pytest.raises(TransitionNotAllowed, match=exactly(message)):
            verb(job.pk, actor="bob")
    assert (promote(job), claim(job), rescue(job).taken) == (0, [], 0)
    assert row(job) == before
    assert set(kinds(job)[len(past) :]) <= {"conflict"}


LATE = {
    "claimed": [ON_CLAIMED["start"], ON_CLAIMED["release"]],
    "running": [ON_RUNNING[verb] for verb in ("complete", "retry", "snooze", "progress")],
}
# What else happens, from which state; and what a cancellation then comes to: "cancelled", "asked",
# or the final state in which it is refused.
CONTENDERS = {
    "promote": ("scheduled", promote, "cancelled"),
    "claim": ("waiting", claim, "cancelled"),
    "claim and start": ("waiting", partial(claim, start=True), "asked"),
    "edit": ("waiting", lambda job: coordinator.edit(job.pk, priority=1, actor="bob"), "cancelled"),
    "start": ("claimed", transitions.start, "asked"),
    "release of a claim": ("claimed", transitions.release, "cancelled"),
    "rescue of a claim": ("claimed", rescue, "cancelled"),
    "complete": ("running", SETTLING["complete"], "completed"),
    "fail": ("running", SETTLING["fail"], "failed"),
    "retry": ("running", SETTLING["retry"], "cancelled"),
    "retry at once": ("running", lambda job: transitions.retry(job, "no", 0), "cancelled"),
    "snooze": ("running", SETTLING["snooze"], "cancelled"),
    "release": ("running", SETTLING["release"], "cancelled"),
    "rescue": ("running", rescue, "cancelled"),
    "cancel": ("waiting", cancel, "cancelled already"),
    "cancel of a running one": ("running", cancel, "asked"),
    "cancel by force": ("running", partial(cancel, force=True), "cancelled already"),
}


@pytest.mark.parametrize("contender", CONTENDERS)
def test_cancel_that_comes_second(alias, contender):
    """term-llm#918, dagster#3323: it meets the other's write on its way, and then what came of it.

    A request is followed by a setback, after which the job is cancelled, too.
    """
    _, act, verdict = CONTENDERS[contender]
    job = job_for(contender)
    with rival(alias) as other, pausing(other.commit) as waits, impatient(alias):
        other.do(act, job)
        if verdict in ("cancelled", "asked"):
            assert cancel(job).state == {"asked": "running"}.get(verdict, verdict)
        else:
            state = verdict.removesuffix(" already")
            message = f"Job {job.pk} is {state}: cancel is not allowed."
            with pytest.raises(TransitionNotAllowed, match=exactly(message)):
                cancel(job)
    assert len(waits) == 1
    attempt = row(job)["attempt"]
    if verdict == "asked":
        transitions.retry(Job.objects.get(pk=job.pk), "no", 0)
    if verdict in ("completed", "failed"):
        assert row(job)["state"] == verdict
        return
    assert_over(job)
    assert row(job)["attempt"] == attempt


@pytest.mark.parametrize(
    ("contender", "force"),
    [
        (name, force)
        for name, (state, *_) in CONTENDERS.items()
        for force in (False, True)
        if not name.startswith(("cancel", "edit")) and (state == "running" or not force)
    ],
)
def test_cancel_that_comes_first(alias, contender, force):
    """rq#2160, prefect#16429: the other waits, or looks elsewhere, and then has no job to do.

    Only success counts after a request; by force, nothing does.
    """
    state, act, _ = CONTENDERS[contender]
    job = job_for(contender)
    passes_over = contender.startswith(("claim", "promote"))
    with rival(alias) as other:
        said = other.do(cancel, job, force=force).state
        running = run_in_thread(act, job)
        if passes_over and connections[alias].features.has_select_for_update_skip_locked:
            assert not running.result()
        else:
            wait_until_blocked(alias)
        other.commit()
        outcome = outcome_of(running)
    assert said == ("running" if state == "running" and not force else "cancelled")
    if said == "running":
        assert outcome != "refused"
        assert row(job)["version"] == job.version + 1
    else:
        assert outcome in ("refused", [], 0, SweepReport(examined=1, conflicts=1), SweepReport())
    if contender == "complete" and not force:
        assert (row(job)["state"], row(job)["result"]) == ("completed", {"by": "this write"})
        return
    assert_over(job)
    assert row(job)["attempt"] == job.attempt


def outcome_of(running):
    try:
        return running.result()
    except TransitionConflict:
        return "refused"


# -- An acknowledged request, and what its executor makes of it


SETBACKS = {
    "an error": SETTLING["retry"],
    "an error, and no delay": lambda job: transitions.retry(job, "no", 0),
    "the last error that its budget allows": SETTLING["retry"],
    "a failure for good": SETTLING["fail"],
    "a snooze": SETTLING["snooze"],
    "a shutdown": SETTLING["release"],
    "its own cancellation": SETTLING["cancel"],
    "the loss of its worker": rescue,
    "an operator's release": lambda job: coordinator.release(job.pk, actor="bob"),
    "an operator's verdict": lambda job: coordinator.fail(job.pk, actor="bob"),
}


@pytest.mark.parametrize("setback", SETBACKS)
def test_setback_after_an_acknowledged_request(alias, setback):
    """term-llm#790, pulpcore#3407: cancelled, and nothing is scheduled; the copy in hand is old."""
    job = job_in("running", max_attempts=1 if setback.startswith("the last") else 9)
    cancel(job)
    SETBACKS[setback](job)
    assert kinds(job) == ["cancel requested", "cancelled"]
    assert row(job)["version"] == job.version + 1
    assert_over(job)


def test_timeout_after_an_acknowledged_request(alias):
    """term-llm#790: its worker lives, and the sweep takes what has run for too long."""
    job = job_in("running", claimed_by=WORKER)
    cancel(job)
    assert sweep_stale_jobs(running_after=0) == SweepReport(examined=1, cancelled=1)
    assert_over(job)


def test_success_after_an_acknowledged_request(alias):
    """term-llm#790: the work was done, and the job says so, each time."""
    job = job_in("running")
    cancel(job)
    transitions.complete(job, "done")
    stored = Job.objects.get(pk=job.pk)
    assert (stored.state, stored.result, kinds(job)) == ("completed", "done", ["cancel requested"])
    message = f"Job {job.pk} is completed: cancel is not allowed."
    with pytest.raises(TransitionNotAllowed, match=exactly(message)):
        cancel(job)


def test_request_reaches_the_executor_with_its_next_heartbeat(alias):
    """And force reaches it as a loss."""
    job, kept = JobFactory.create_batch(2, running=True, claimed_by=WORKER)
    held = {job.pk: job, kept.pk: kept}
    cancel(job)
    told = broker.heartbeat(WORKER, held)
    assert (told.cancel_requested, told.lost) == ({job.pk}, set())
    cancel(job, force=True)
    told = broker.heartbeat(WORKER, held)
    assert (told.cancel_requested, told.lost) == (set(), {job.pk})
    assert_over(job)


@pytest.mark.parametrize(
    ("state", "force", "report"),
    [
        ("running", False, SweepReport(examined=1, cancelled=1)),
        ("running", True, SweepReport(examined=1, conflicts=1)),
        ("claimed", False, SweepReport(examined=1, conflicts=1)),
    ],
)
def test_cancel_between_a_sweeps_look_and_its_write(alias, state, force, report):
    """The request is a condition of the sweep's write; a cancelled job is no longer its own."""
    job = job_in(state)
    assert sweep_overtaken(job, lambda: cancel(job, force=force)) == report
    assert_over(job)


# -- Nobody there, or everybody at once


@pytest.mark.parametrize("state", ["scheduled", "waiting"])
def test_job_that_no_worker_has_taken_is_cancelled_at_once(alias, state):
    """pulpcore#2183: it waits for nobody, and is never said to have failed."""
    job = job_in(state, unique_key="k")
    assert cancel(job).state == "cancelled"
    assert (row(job)["finished_at"] is None, row(job)["unique_key"]) == (False, None)
    assert kinds(job) == ["cancelled"]
    assert_over(job)


def test_only_a_rerun_brings_it_back(alias):
    """As if nobody had asked: the old request doesn't cancel the new run."""
    job = job_in("running")
    cancel(job)
    transitions.retry(job, "no")
    coordinator.rerun(job.pk, actor="ann")
    assert claim(job, start=True) == [job.pk]
    again = Job.objects.get(pk=job.pk)
    assert (again.cancel_requested_at, again.attempt) == (None, 2)
    assert transitions.retry(again, "no").state == "scheduled"


def test_cancelling_a_queue_that_is_being_drained(alias):
    """rq#2160: of 40 jobs, whatever was said to be cancelled was never run, nor will be."""
    jobs = JobFactory.create_batch(40)
    ran = []

    def work(number):
        while batch := claim_jobs(f"w:{number}", ["default"], 2, start=number % 2 == 0):
            for job in batch:
                with suppress(TransitionConflict):
                    started = job if job.state == "running" else transitions.start(job)
                    ran.append(job.pk)
                    transitions.complete(started)

    for number in range(4):
        WorkerFactory(id=f"w:{number}")
    workers = [run_in_thread(work, number) for number in range(4)]
    said = {}
    for job in reversed(jobs):
        with suppress(TransitionNotAllowed, JobBusy):
            said[job.pk] = cancel(job).state
    for worker in workers:
        worker.result()
    cancelled = {pk for pk, state in said.items() if state == "cancelled"}
    states = dict(Job.objects.values_list("pk", "state"))
    assert {pk for pk, state in states.items() if state == "cancelled"} == cancelled
    assert sorted(ran) == sorted(set(states) - cancelled)
