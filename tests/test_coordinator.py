"""Transitions by someone who holds no claim: what each verb writes, and what it refuses."""

from __future__ import annotations

import pytest
from django.db import transaction

from jobqueue import broker, coordinator, db, signals, transitions
from jobqueue.exceptions import (
    InvalidJob,
    JobNotFound,
    TransitionConflict,
    TransitionNotAllowed,
)
from jobqueue.lifecycle import State
from jobqueue.models import Job
from jobqueue.testing.factories import WorkerFactory
from tests.asserting import exactly
from tests.coordinating import CALLS, FROM, history
from tests.races.scenes import changed, events, hearing, job_in, kinds, row
from tests.routers import ALIAS_VARIABLE

# By verb, the states that it may be used in, each with the one that it leads to.
LEADS_TO = {
    "complete": {"running": "completed"},
    "fail": {"running": "failed"},
    "cancel": {
        "scheduled": "cancelled",
        "waiting": "cancelled",
        "claimed": "cancelled",
        "running": "running",  # asked, no more
    },
    "force cancel": dict.fromkeys(("scheduled", "waiting", "claimed", "running"), "cancelled"),
    "release": {"claimed": "waiting", "running": "waiting"},
    "rerun": {"completed": "waiting", "failed": "waiting", "cancelled": "waiting"},
    "edit": {"scheduled": "scheduled", "waiting": "waiting"},
    "delete": dict.fromkeys(("completed", "failed", "cancelled")),
}
EVENTS = {
    "complete": "completed",
    "fail": "failed",
    "cancel": "cancelled",
    "force cancel": "cancelled",
    "release": "released",
    "rerun": "rerun",
    "edit": "edited",
}


@pytest.mark.parametrize("verb", CALLS)
def test_verb_from_every_state(alias, verb):
    """pg-boss#346, Hangfire.Mongo#380: allowed pairs work, each other is a typed refusal."""
    for state in State:
        job = job_in(state, unique_key=None)
        before = row(job)
        if state in LEADS_TO[verb]:
            assert_applied(verb, job)
            continue
        with pytest.raises(TransitionNotAllowed) as refused:
            CALLS[verb](job, actor="ann")
        word = verb.removeprefix("force ")
        assert str(refused.value) == f"Job {job.pk} is {state}: {word} is not allowed."
        assert (row(job), events(job)) == (before, [])


def assert_applied(verb, job):
    """Use the verb; see the state, the version, the event and the copy that is returned."""
    target = LEADS_TO[verb][job.state]
    with hearing(signals.job_transitioned) as heard:
        after = CALLS[verb](job, actor="ann", reason="because")
    if target is None:
        assert (after, row(job), events(job)) == (None, None, [])
        return
    is_request = job.state == target == "running"
    stored = Job.objects.get(pk=job.pk)
    assert (stored.state, stored.version) == (target, job.version + (not is_request))
    assert (after.pk, after.fingerprint) == (job.pk, stored.fingerprint)
    kind = "cancel requested" if is_request else EVENTS[verb]
    assert events(job) == [(kind, job.state, target, "ann")]
    assert history(job)[0]["message"] == "because"
    assert history(job)[0]["version"] == job.version
    told = [(told["job"].pk, told["from_state"], told["actor"]) for told in heard]
    assert told == ([] if is_request else [(job.pk, job.state, "ann")])


# -- What each writes


def test_complete_gives_the_result_and_ends_the_job(alias):
    job = job_in("running", progress=40, unique_key="k")
    before = row(job)
    after = coordinator.complete(job.pk, {"pages": [1, 2]}, actor="ann")
    written = changed(before, job)
    assert after.finished_at == written.pop("finished_at") <= db.now(alias)
    assert written == {
        "state": "completed",
        "result": {"pages": [1, 2]},
        "unique_key": None,
        "version": job.version + 1,
    }


def test_fail_ends_the_job_whatever_is_left_of_its_budget(alias):
    job = job_in("running", max_attempts=9)
    before = row(job)
    coordinator.fail(job.pk, actor="ann", reason="wrong input")
    assert {**changed(before, job), "finished_at": None} == {
        "state": "failed",
        "finished_at": None,
        "version": job.version + 1,
    }


def test_release_of_a_running_job_excuses_its_attempt(alias):
    job = job_in("running", attempt=2)
    before = row(job)
    coordinator.release(job.pk, actor="ann", reason="stuck")
    assert changed(before, job) == {
        "state": "waiting",
        "claimed_by": None,
        "claimed_at": None,
        "excused": 1,
        "version": job.version + 1,
    }


def test_release_of_a_claimed_job_excuses_nothing(alias):
    job = job_in("claimed")
    assert coordinator.release(job.pk, actor="ann").excused == 0
    assert row(job)["excused"] == 0


def test_cancel_of_a_running_job_is_a_request_and_opens_no_version(alias):
    """A second request leaves the time of the first."""
    job = job_in("running")
    before = row(job)
    first = coordinator.cancel(job.pk, actor="ann", reason="too dear")
    assert changed(before, job) == {"cancel_requested_at": first.cancel_requested_at}
    second = coordinator.cancel(job.pk, actor="bob", reason="too late")
    assert changed(before, job) == {"cancel_requested_at": second.cancel_requested_at}
    assert second.cancel_requested_at == first.cancel_requested_at
    assert kinds(job) == ["cancel requested", "cancel requested"]


@pytest.mark.parametrize("verb", ["fail", "release"])
def test_a_setback_after_a_cancel_request_cancels(alias, verb):
    """The request wins over whatever would not be the end, and over a failure."""
    job = job_in("running")
    coordinator.cancel(job.pk, actor="ann", reason="too dear")
    assert CALLS[verb](job, actor="bob", reason="stuck").state == "cancelled"
    assert row(job)["state"] == "cancelled"
    assert history(job)[1]["message"] == "cancelled as requested: stuck"


@pytest.mark.parametrize("verb", ["complete", "fail", "force cancel", "release"])
def test_the_executor_is_fenced_out_and_told_with_its_next_heartbeat(alias, verb):
    """airflow#45925, procrastinate#511: the operator's verdict stands."""
    worker = WorkerFactory()
    job = job_in("running", claimed_by=worker.pk)
    CALLS[verb](job, actor="ann")
    before = row(job)
    for late in (transitions.complete, transitions.fail, transitions.record_progress):
        with pytest.raises(TransitionConflict):
            late(job, 50)
    assert broker.heartbeat(worker.pk, {job.pk: job}).lost == {job.pk}
    assert row(job) == before


# -- What they have in common


@pytest.mark.parametrize("verb", CALLS)
def test_expected_version(alias, verb):
    """que-web#28: a page that shows an older version changes nothing and says what is now."""
    job = job_in(FROM[verb], version=7)
    before = row(job)
    with pytest.raises(TransitionConflict) as refused:
        CALLS[verb](job, actor="ann", expected_version=6)
    word = verb.removeprefix("force ")
    now = job.fingerprint
    assert str(refused.value) == (
        f"Job {job.pk} moved on: {word} was decided on version 6; it is now {now}."
    )
    found = (refused.value.expected, refused.value.found, refused.value.tries)
    assert found == (6, now, 1)
    assert row(job) == before
    assert history(job) == [
        {
            "kind": "conflict",
            "from_state": job.state,
            "to_state": job.state,
            "actor": "ann",
            "message": str(refused.value),
            "version": 6,
            "detail": {"wanted": word, "expected": {"version": 6}, "found": now.as_dict()},
        }
    ]
    CALLS[verb](job, actor="ann", expected_version=7)
    assert row(job) != before


@pytest.mark.parametrize("verb", CALLS)
def test_job_of_another_workspace_is_not_found(alias, verb):
    """Nor touched, nor told of: not even that its version is another."""
    job = job_in(FROM[verb], workspace="acme")
    before = row(job)
    for workspace in ("emca", ""):
        for version in (None, job.version + 1):
            with pytest.raises(JobNotFound, match=exactly(f"There is no job {job.pk}.")):
                CALLS[verb](job, actor="ann", workspace=workspace, expected_version=version)
    assert (row(job), events(job)) == (before, [])
    CALLS[verb](job, actor="ann", workspace="acme")
    assert row(job) != before


def test_job_without_a_workspace_is_found_as_such(alias):
    job = job_in("waiting")
    assert coordinator.cancel(job.pk, actor="ann", workspace="").state == "cancelled"


@pytest.mark.parametrize("verb", CALLS)
def test_unknown_job(alias, verb):
    """Whatever the number: an engine's integers end somewhere."""
    for job_id in (4711, 0, -1, 2**70):
        with pytest.raises(JobNotFound, match=exactly(f"There is no job {job_id}.")):
            CALLS[verb](Job(pk=job_id), actor="ann")


BAD_CALLERS = [
    ({"actor": ""}, "actor must name who acts, not ''"),
    ({"actor": None}, "actor must name who acts, not None"),
    (
        {"actor": "ann", "expected_version": "2"},
        "expected_version must be an integer from 0 to 9223372036854775807, not '2'",
    ),
    (
        {"actor": "ann", "expected_version": -1},
        "expected_version must be an integer from 0 to 9223372036854775807, not -1",
    ),
    ({"actor": "ann", "lock": False}, "without a lock, expected_version is needed"),
]


def test_caller_who_can_not_be_dealt_with(alias):
    """An event without an actor would read as one of the job's own worker."""
    job = job_in("running")
    before = row(job)
    for caller, message in BAD_CALLERS:
        with pytest.raises(InvalidJob, match=exactly(message)):
            coordinator.release(job.pk, **caller)
    assert (row(job), events(job)) == (before, [])


@pytest.mark.parametrize("verb", CALLS)
def test_using_names_the_database(alias, verb, monkeypatch):
    """It wins over the router, in every statement of the verb."""
    job = job_in(FROM[verb])
    before = row(job)
    monkeypatch.delenv(ALIAS_VARIABLE)
    CALLS[verb](job, actor="ann", using=alias)
    with pytest.raises((TransitionConflict, JobNotFound)):
        CALLS[verb](job, actor="ann", using=alias, expected_version=0)
    monkeypatch.setenv(ALIAS_VARIABLE, alias)
    assert row(job) != before


def test_what_the_caller_rolls_back_leaves_nothing(alias):
    job = job_in("claimed")
    before = row(job)
    with hearing(signals.job_transitioned) as heard:
        with transaction.atomic(using=alias):
            coordinator.release(job.pk, actor="ann")
            transaction.set_rollback(True, using=alias)
        assert (row(job), events(job), heard) == (before, [], [])


@pytest.mark.parametrize("lock", [True, False])
def test_result_that_can_not_be_stored(alias, lock):
    """The message names the value, and the job goes on."""
    job = job_in("running")
    before = row(job)
    message = f"Job {job.pk}: result['ratio'] is nan, which JSON can't hold"
    with pytest.raises(InvalidJob, match=exactly(message)):
        coordinator.complete(
            job.pk,
            {"ratio": float("nan")},
            actor="ann",
            lock=lock,
            expected_version=job.version,
        )
    assert (row(job), events(job)) == (before, [])


def test_reason_and_actor_of_any_length_and_kind_are_kept_as_far_as_they_can_be(alias):
    """A NUL or a megabyte in the reason is no reason not to cancel."""
    job = job_in("waiting")
    coordinator.cancel(job.pk, actor="a\x00nn" * 100, reason="r\x00\ud800" + "x" * 2**20)
    event = job.events.get()
    assert (len(event.actor), len(event.message)) == (200, 1000)
    assert event.message.startswith("r\\x00\\ud800xxx")
