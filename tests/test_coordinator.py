"""Transitions by someone who holds no claim."""

from __future__ import annotations

import pytest
from django.db import transaction

from jobqueue import coordinator, transitions
from jobqueue.exceptions import JobNotFound, TransitionConflict, TransitionNotAllowed
from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job
from jobqueue.testing.factories import JobFactory
from tests.helpers import run_in_thread, wait_until_blocked


def test_release_of_a_claimed_job_makes_it_wait_again(alias: str) -> None:
    job = JobFactory(claimed=True)

    released = coordinator.release(job.pk, actor="ann", reason="stuck")

    row = Job.objects.get(pk=job.pk)
    assert released.fingerprint == row.fingerprint
    assert (row.state, row.claimed_by, row.claimed_at) == (State.WAITING, None, None)
    assert (row.version, row.excused) == (job.version + 1, 0)
    event = row.events.get()
    assert (event.kind, event.actor, event.message) == (EventKind.RELEASED, "ann", "stuck")
    assert (event.from_state, event.to_state) == (State.CLAIMED, State.WAITING)


def test_release_of_a_running_job_excuses_its_attempt(alias: str) -> None:
    job = JobFactory(running=True, attempt=2)

    released = coordinator.release(job.pk, actor="ann")

    assert (released.state, released.attempt, released.excused) == (State.WAITING, 2, 1)


def test_release_of_a_running_job_whose_cancellation_was_asked_for_cancels_it(alias: str) -> None:
    job = JobFactory(running=True)
    transitions.request_cancel(job, actor="bob")

    released = coordinator.release(job.pk, actor="ann")

    assert released.state == State.CANCELLED


@pytest.mark.parametrize("state", ["scheduled", "completed", "failed", "cancelled", None])
def test_release_is_refused_of_a_job_that_nobody_holds(alias: str, state: str | None) -> None:
    job = JobFactory(**({state: True} if state else {}))

    with pytest.raises(TransitionNotAllowed) as refused:
        coordinator.release(job.pk, actor="ann")

    assert str(refused.value) == f"Job {job.pk} is {state or 'waiting'}: release is not allowed."
    assert Job.objects.get(pk=job.pk).version == job.version


def test_release_is_refused_when_the_caller_saw_another_version(alias: str) -> None:
    """statianzo/que-web#28: the page was loaded before the job moved on."""
    job = JobFactory(running=True)

    with pytest.raises(TransitionConflict) as refused:
        coordinator.release(job.pk, actor="ann", expected_version=job.version - 1)

    assert (refused.value.expected, refused.value.found) == (job.version - 1, job.fingerprint)
    assert str(refused.value).startswith(
        f"Job {job.pk} moved on: release was decided on version 1; it is now running by"
    )
    assert Job.objects.get(pk=job.pk).fingerprint == job.fingerprint


def test_release_of_an_unknown_job_names_it(alias: str) -> None:
    with pytest.raises(JobNotFound, match=r"^There is no job 4711\.$"):
        coordinator.release(4711, actor="ann")


def test_the_executor_of_a_released_job_is_fenced_out(alias: str) -> None:
    job = JobFactory(running=True)
    coordinator.release(job.pk, actor="ann")

    with pytest.raises(TransitionConflict):
        transitions.complete(job, "late")

    assert Job.objects.get(pk=job.pk).state == State.WAITING


def test_release_waits_for_an_outcome_on_its_way_and_then_leaves_it_alone(alias: str) -> None:
    job = JobFactory(running=True)

    with transaction.atomic(using=alias):
        transitions.complete(job, "done")
        loser = run_in_thread(coordinator.release, job.pk, actor="ann")
        wait_until_blocked(alias)

    with pytest.raises(TransitionNotAllowed):
        loser.result()
    row = Job.objects.get(pk=job.pk)
    assert (row.state, row.result, row.events.count()) == (State.COMPLETED, "done", 0)


def test_a_release_that_the_caller_rolls_back_leaves_nothing(alias: str) -> None:
    job = JobFactory(claimed=True)

    with transaction.atomic(using=alias):
        coordinator.release(job.pk, actor="ann")
        transaction.set_rollback(True, using=alias)

    row = Job.objects.get(pk=job.pk)
    assert (row.fingerprint, row.events.count()) == (job.fingerprint, 0)
