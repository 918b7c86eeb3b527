"""Coordinators against each other, against executors, and against whoever holds the row.

One of two wins; the other is refused, told what the job is now, and changes nothing.
"""

from __future__ import annotations

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from jobqueue import coordinator, transitions
from jobqueue.claim import claim_jobs
from jobqueue.exceptions import JobBusy, TransitionConflict, TransitionNotAllowed
from jobqueue.models import Job
from jobqueue.testing.factories import WorkerFactory
from tests.coordinating import CALLS, FENCE, FROM, WANTED, history, impatient, pausing, rival
from tests.helpers import engine, pause_at, run_in_thread
from tests.races.scenes import events, job_in, kinds, row, take_over


def rerun(job):
    coordinator.rerun(job.pk, actor="bob")


def claim(job):
    claim_jobs(WorkerFactory().pk, [job.queue], 1)


def edit(job):
    coordinator.edit(job.pk, priority=1, actor="bob")


def retake(job):
    take_over(job, job.claimed_by)


def now_is(job):
    """Return how a conflict's message ends."""
    return f"it is now {Job.objects.get(pk=job.pk).fingerprint}."


# -- Two who decided from the same read


@pytest.mark.parametrize("expects", [False, True], ids=["any version", "the version read"])
@pytest.mark.parametrize("loser", ["complete", "fail", "release"])
@pytest.mark.parametrize("winner", ["complete", "fail"])
def test_second_of_two_coordinators_is_refused(alias, winner, loser, expects):
    """Only the first applies: its result, its end and its event stand, and are the only ones."""
    job = job_in("running")
    seen = {"expected_version": job.version} if expects else {}
    with rival(alias) as other, pausing(other.commit) as waits, impatient(alias):
        other.do(CALLS[winner], job, actor="ann")
        with pytest.raises((TransitionConflict, TransitionNotAllowed)) as refused:
            CALLS[loser](job, actor="bob", **seen)
    stored = Job.objects.get(pk=job.pk)
    state, result = {"complete": ("completed", {"by": "ann"}), "fail": ("failed", None)}[winner]
    assert (stored.state, stored.result, stored.version) == (state, result, job.version + 1)
    assert len(waits) == 1
    verb = loser.removeprefix("force ")
    if expects:
        assert str(refused.value) == (
            f"Job {job.pk} moved on: {verb} was decided on version {job.version}; {now_is(job)}"
        )
        assert kinds(job) == [state, "conflict"]
    else:
        assert str(refused.value) == f"Job {job.pk} is {state}: {verb} is not allowed."
        assert kinds(job) == [state]


def test_one_of_many_coordinators_at_once_gives_the_result(alias):
    """Eight threads with a result each: one is stored, its giver alone is told so."""
    job = job_in("running")
    callers = {
        name: run_in_thread(coordinator.complete, job.pk, name, actor=name) for name in "abcdefgh"
    }
    winners = []
    for name, caller in callers.items():
        try:
            caller.result()
            winners.append(name)
        except (TransitionNotAllowed, JobBusy):
            pass
    stored = Job.objects.get(pk=job.pk)
    assert ([stored.result], stored.version) == (winners, job.version + 1)
    assert [actor for *_, actor in events(job)] == winners


def test_executor_that_is_ahead_wins(alias):
    """solid_queue, que-web#28: its outcome is on its way; the release then leaves it alone."""
    job = job_in("running")
    with rival(alias) as other, pausing(other.commit), impatient(alias):
        other.do(transitions.complete, job, "done")
        with pytest.raises(TransitionNotAllowed):
            coordinator.release(job.pk, actor="ann")
    stored = Job.objects.get(pk=job.pk)
    assert (stored.state, stored.result, events(job)) == ("completed", "done", [])


# -- A page that shows what was


PAGES = {
    "rerun of one that just succeeded": ("running", transitions.complete, "rerun"),
    "rerun of one that was just rerun": ("failed", rerun, "rerun"),
    "edit of one that was just claimed": ("waiting", claim, "edit"),
    "edit of one that was just edited": ("waiting", edit, "edit"),
    "delete of one that was just rerun": ("failed", rerun, "delete"),
    "release of one that another worker runs": ("running", take_over, "release"),
    "release of one that its worker runs again": ("running", retake, "release"),
    "cancel of one that was released and run again": ("running", retake, "force cancel"),
}


@pytest.mark.parametrize("case", PAGES)
def test_action_from_a_page_that_shows_what_was(alias, case):
    """que-web#28: refused, and told what the job is now; a state that came back is no excuse.

    With a lock or without: nobody tries again.
    """
    state, change, verb = PAGES[case]
    job = job_in(state)
    change(job)
    before, past = row(job), events(job)
    for lock in (True, False):
        with pausing() as waits, pytest.raises(TransitionConflict) as refused:
            CALLS[verb](job, actor="ann", expected_version=job.version, lock=lock)
        assert str(refused.value) == (
            f"Job {job.pk} moved on: {verb.removeprefix('force ')} was decided on "
            f"version {job.version}; {now_is(job)}"
        )
        assert (refused.value.tries, waits) == (1, [])
        assert row(job) == before
    assert events(job) == [*past, *[("conflict", before["state"], before["state"], "ann")] * 2]


# -- Without a lock


@pytest.mark.parametrize("alias", [engine("postgresql"), engine("mariadb")], indirect=True)
@pytest.mark.parametrize("verb", CALLS)
def test_optimistic_writer_who_is_overtaken_is_told_at_once(alias, verb):
    """The version was right when it looked: the write itself finds that it no longer is."""
    job = job_in(FROM[verb])
    with pausing() as waits, pause_at(alias, FENCE.search) as pause:
        loser = run_in_thread(
            CALLS[verb], job, actor="ann", expected_version=job.version, lock=False
        )
        pause.wait_until_reached()
        CALLS[verb](job, actor="bob") if verb != "cancel" else retake(job)
        before = row(job)
        pause.release()
        with pytest.raises(TransitionConflict) as refused:
            loser.result()
    now = f"it is now {Job.objects.get(pk=job.pk).fingerprint}" if before else "it is gone"
    assert str(refused.value) == (
        f"Job {job.pk} moved on: {WANTED[verb]} was decided on {job.fingerprint}; {now}."
    )
    assert (refused.value.tries, waits, row(job)) == (1, [], before)


@pytest.mark.parametrize("verb", CALLS)
def test_optimistic_writer_whom_nobody_overtakes(alias, verb):
    """Writes as the others do, and reads without a lock."""
    job = job_in(FROM[verb])
    with CaptureQueriesContext(connections[alias]) as queries:
        CALLS[verb](job, actor="ann", expected_version=job.version, lock=False)
    assert row(job) is None or history(job)[0]["actor"] == "ann"
    looks = [query["sql"] for query in queries if "jobqueue_job" in query["sql"]]
    assert "FOR UPDATE" not in looks[0]
