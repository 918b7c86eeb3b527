"""The verbs that only coordinators have: rerun, edit, delete, and the way to a state."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from jobqueue import coordinator, db, transitions
from jobqueue.claim import claim_jobs
from jobqueue.enqueue import enqueue
from jobqueue.exceptions import InvalidJob, TransitionNotAllowed
from jobqueue.lifecycle import Completed, Error, Failed, State
from jobqueue.models import Job, JobEvent
from jobqueue.testing.factories import TASK, JobEventFactory, WorkerFactory
from tests.asserting import exactly
from tests.coordinating import history
from tests.races.scenes import changed, events, job_in, kinds, row, settle_all

YEARS_AWAY = datetime(2099, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
BY = {"actor": "ann", "reason": "because"}


def ready(job):
    """Return the ids of the jobs that a worker of the job's queue is given."""
    worker = WorkerFactory(queues=[job.queue])
    return [claimed.pk for claimed in claim_jobs(worker.pk, [job.queue], 9, start=True)]


# -- rerun


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_rerun_clears_what_the_last_run_left(alias, state):
    """All but the numbers of its history; a checkpoint is of use to all but a completed job."""
    left = {
        "result": {"pages": 3},
        "progress": 60,
        "progress_note": "page 6",
        "checkpoint": {"page": 6},
        "cancel_requested_at": db.now(alias),
        "settled_version": 2,
        "run_after": YEARS_AWAY,
    }
    job = job_in(state, **left)
    before = row(job)
    coordinator.rerun(job.pk, **BY)
    written = changed(before, job)
    assert job.finished_at <= written.pop("run_after") <= db.now(alias)
    assert written == {
        "state": "waiting",
        "version": job.version + 1,
        "claimed_by": None,
        "claimed_at": None,
        "finished_at": None,
        "result": None,
        "progress": 0,
        "progress_note": "",
        "cancel_requested_at": None,
        "settled_version": None,
        **({"checkpoint": None} if state == "completed" else {}),
    }
    assert history(job)[0]["detail"] == {"settled_version": 2}
    assert ready(job) == [job.pk]


def test_rerun_raises_a_spent_budget_by_one_attempt(alias):
    """What was excused isn't counted."""
    # By executions started, excused and allowed: how many are allowed afterwards.
    cases = {(3, 0, 3): 4, (5, 2, 3): 4, (9, 0, 3): 10, (2, 0, 3): 3, (3, 1, 3): 3, (0, 0, 1): 1}
    for (attempt, excused, budget), raised_to in cases.items():
        job = job_in("cancelled", attempt=attempt, excused=excused, max_attempts=budget)
        assert coordinator.rerun(job.pk, **BY).max_attempts == raised_to
        assert row(job)["max_attempts"] == raised_to


def test_rerun_of_a_spent_budget_allows_one_more_failure(alias):
    job = job_in("failed", attempt=3, max_attempts=3)
    coordinator.rerun(job.pk, **BY)
    ready(job)
    running = Job.objects.get(pk=job.pk)
    assert (running.state, running.attempt) == ("running", 4)
    assert transitions.retry(running, "no").state == "failed"


def test_rerun_leaves_the_unique_key_to_whoever_has_it_now(alias):
    """A final state gave it up, and somebody may have taken it since."""
    job = enqueue(TASK, unique_key="invoice-7")
    ready(job)
    transitions.complete(Job.objects.get(pk=job.pk))
    successor = enqueue(TASK, unique_key="invoice-7")
    assert coordinator.rerun(job.pk, **BY).unique_key is None
    assert (row(job)["unique_key"], row(successor)["unique_key"]) == (None, "invoice-7")


@pytest.mark.parametrize("runs_again", [False, True])
@pytest.mark.parametrize("outcome", [Completed({"pages": 3}), "fail"], ids=["complete", "fail"])
def test_owner_whose_commit_reply_was_lost_before_the_rerun(alias, outcome, runs_again):
    """airflow#63183: it is told that its outcome was applied, and nothing happens again."""
    outcome = Failed(Error("no")) if outcome == "fail" else outcome
    job = job_in("running")
    assert settle_all([job], outcome) == ["applied"]
    coordinator.rerun(job.pk, **BY)
    if runs_again:
        ready(job)
        transitions.complete(Job.objects.get(pk=job.pk), "by another")
    before = (row(job), events(job))
    assert settle_all([job], outcome) == ["already applied"]
    assert (row(job), events(job)) == before


def test_owner_who_wants_something_else_after_the_rerun_is_refused(alias):
    job = job_in("running")
    transitions.complete(job, {"pages": 3})
    coordinator.rerun(job.pk, **BY)
    before = row(job)
    assert settle_all([job], Failed(Error("no"))) == ["conflict"]
    assert row(job) == before
    assert kinds(job) == ["rerun", "conflict"]


# -- edit


@pytest.mark.parametrize("state", ["scheduled", "waiting"])
def test_edit_of_one_column_changes_that_one(alias, state):
    """qiskit-serverless#956: no other is written, and the history says what it was."""
    for column, old, new in [
        ("queue", "default", "mail"),
        ("priority", 3, -100),
        ("priority", 3, 0),
        ("max_attempts", 3, 10_000),
        ("run_after", datetime(2999, 1, 1, tzinfo=UTC), YEARS_AWAY),
    ]:
        job = job_in(state, **{column: old})
        before = row(job)
        after = coordinator.edit(job.pk, **{column: new}, **BY)
        assert getattr(after, column) == new
        assert changed(before, job) == {column: new, "version": job.version + 1}
        assert history(job)[0]["detail"] == {column: f"{old} -> {new}"}


def test_edit_of_all_columns_at_once(alias):
    job = job_in("waiting")
    before = row(job)
    new = {"queue": "mail", "priority": 1, "max_attempts": 1, "run_after": YEARS_AWAY}
    coordinator.edit(job.pk, **new, **BY)
    assert changed(before, job) == {**new, "version": job.version + 1}
    assert set(history(job)[0]["detail"]) == set(new)


def test_edit_of_the_time_by_a_delay_counts_from_now(alias):
    job = job_in("scheduled")
    for delay in (90, 90.0, timedelta(seconds=90)):
        earliest = db.now(alias) + timedelta(seconds=90)
        after = coordinator.edit(job.pk, run_after=delay, **BY)
        assert earliest <= after.run_after <= db.now(alias) + timedelta(seconds=90)
        assert row(job)["run_after"] == after.run_after


def test_waiting_job_that_is_put_off_stays_waiting_and_is_not_claimed_before(alias):
    job = job_in("waiting")
    assert coordinator.edit(job.pk, run_after=YEARS_AWAY, **BY).state == "waiting"
    assert ready(job) == []
    coordinator.edit(job.pk, run_after=0, **BY)
    assert ready(job) == [job.pk]


def test_scheduled_job_that_is_made_due_is_claimed(alias):
    job = job_in("scheduled")
    assert coordinator.edit(job.pk, run_after=0, **BY).state == "scheduled"
    assert ready(job) == [job.pk]


def test_job_that_is_moved_is_claimed_from_its_new_queue_only(alias):
    job = job_in("waiting")
    moved = coordinator.edit(job.pk, queue="mail", **BY)
    assert ready(job) == []
    assert ready(moved) == [job.pk]


BAD_EDITS = [
    ({}, "there is nothing to edit"),
    (
        {"queue": "a b"},
        "queue must be 1 to 100 letters, digits or any of _ . : -, not 'a b'",
    ),
    ({"queue": ""}, "queue must be 1 to 100 letters, digits or any of _ . : -, not ''"),
    ({"priority": 101}, "priority must be an integer from -100 to 100, not 101"),
    ({"priority": "high"}, "priority must be an integer from -100 to 100, not 'high'"),
    ({"priority": True}, "priority must be an integer from -100 to 100, not True"),
    ({"max_attempts": 0}, "max_attempts must be an integer from 1 to 10000, not 0"),
    ({"run_after": -1}, "run_after must be zero or more, not -1 seconds"),
    ({"run_after": "soon"}, "run_after must be a datetime, seconds or a timedelta, not 'soon'"),
    (
        {"run_after": 10**13},
        "run_after must be at most 36,500 days, not 115740740 days, 17:46:40",
    ),
    (
        {"run_after": float("nan")},
        "run_after must be a finite number of seconds, not nan",
    ),
    (
        {"run_after": datetime(2999, 1, 1)},
        "run_after must have a time zone, since USE_TZ: 2999-01-01T00:00:00",
    ),
    (
        {"priority": 1, "max_attempts": -1},
        "max_attempts must be an integer from 1 to 10000, not -1",
    ),
]


def test_edit_to_a_value_that_can_not_be(alias):
    """The message names the value; nothing is written, not even the other columns."""
    job = job_in("waiting")
    before = row(job)
    for values, message in BAD_EDITS:
        with pytest.raises(InvalidJob, match=exactly(message)):
            coordinator.edit(job.pk, **values, **BY)
    assert (row(job), events(job)) == (before, [])


def test_edit_to_a_queue_that_is_not_in_the_settings(alias, settings):
    settings.JOBQUEUE = {"QUEUES": ["default", "mail"]}
    job = job_in("waiting")
    message = "there is no queue 'post' in JOBQUEUE['QUEUES']: default, mail"
    with pytest.raises(InvalidJob, match=exactly(message)):
        coordinator.edit(job.pk, queue="post", **BY)
    assert coordinator.edit(job.pk, queue="mail", **BY).queue == "mail"


# -- delete


def test_delete_takes_the_history_along_and_nobody_elses(alias):
    job, other = job_in("failed"), job_in("failed")
    JobEventFactory.create_batch(2, job=job)
    kept = JobEventFactory(job=other)
    coordinator.delete(job.pk, **BY)
    assert list(Job.objects.values_list("pk", flat=True)) == [other.pk]
    assert list(JobEvent.objects.values_list("pk", flat=True)) == [kept.pk]


# -- transition


# By target and state: where it ends; or the verb that is refused.
WAYS = {
    "completed": {"running": "completed"},
    "failed": {"running": "failed"},
    "cancelled": {
        "scheduled": "cancelled",
        "waiting": "cancelled",
        "claimed": "cancelled",
        "running": "running",
    },
    "waiting": dict.fromkeys(("claimed", "running", "completed", "failed", "cancelled"), "waiting"),
    "scheduled": {},
    "claimed": {},
    "running": {},
}
VERBS = {"completed": "complete", "failed": "fail", "cancelled": "cancel"}


@pytest.mark.parametrize("target", WAYS)
def test_transition_to_every_state_from_every_state(alias, target):
    """By the verb that leads there; where none does it is refused, and the row stays."""
    for state in State:
        job = job_in(state)
        before = row(job)
        if state in WAYS[target]:
            after = coordinator.transition(job.pk, target, result="r", **BY)
            assert after.state == row(job)["state"] == WAYS[target][state]
            assert row(job)["result"] == ("r" if target == "completed" else None)
            assert [(kind, actor) for kind, *_, actor in events(job)] == [
                (KINDS[target, state], "ann")
            ]
            continue
        verb = VERBS.get(target, f"transition to {target}")
        message = f"Job {job.pk} is {state}: {verb} is not allowed."
        with pytest.raises(TransitionNotAllowed, match=exactly(message)):
            coordinator.transition(job.pk, target, result="r", **BY)
        assert (row(job), events(job)) == (before, [])


KINDS = {
    ("completed", "running"): "completed",
    ("failed", "running"): "failed",
    **{("cancelled", state): "cancelled" for state in ("scheduled", "waiting", "claimed")},
    ("cancelled", "running"): "cancel requested",
    **{("waiting", state): "released" for state in ("claimed", "running")},
    **{("waiting", state): "rerun" for state in ("completed", "failed", "cancelled")},
}


def test_transition_takes_a_state_of_the_enumeration_and_force(alias):
    job = job_in("running")
    after = coordinator.transition(job.pk, State.CANCELLED, force=True, **BY)
    assert after.state == row(job)["state"] == "cancelled"


def test_transition_to_what_is_no_state(alias):
    job = job_in("running")
    before = row(job)
    states = "scheduled, waiting, claimed, running, completed, failed, cancelled"
    for target in ("done", "", "RUNNING", None, 3, []):
        message = f"there is no state {target!r}; there are {states}"
        with pytest.raises(InvalidJob, match=exactly(message)):
            coordinator.transition(job.pk, target, **BY)
    assert (row(job), events(job)) == (before, [])
