"""Every verb from every state: what it writes, column by column, and what it refuses."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from jobqueue import db, dispatch, signals, transitions
from jobqueue.exceptions import InvalidJob, TransitionConflict, TransitionNotAllowed
from jobqueue.lifecycle import HELD, QUEUED, Error, State, Verb
from jobqueue.models import Job, JobEvent
from tests.asserting import exactly
from tests.races.scenes import (
    changed,
    conflict_of,
    events,
    hearing,
    job_in,
    kinds,
    row,
    take_over,
    write_raw,
)

MINUTE = timedelta(minutes=1)
FREE = {"claimed_by": None, "claimed_at": None}
RUNNING = {State.RUNNING}
BACKOFF = {"base": 60, "factor": 1, "cap": 60, "jitter": 0}

# A verb, the states from which it is allowed, and what it writes beside the version. NOW, LATER and
# OWN stand for what is known only once it has happened.
NOW, LATER, OWN = "now", "in a minute", "the version decided on"
VERBS = {
    "start": (
        lambda job: transitions.start(job),
        {State.CLAIMED},
        {"state": "running", "attempt": 1, "attempted_at": NOW},
    ),
    "complete": (
        lambda job: transitions.complete(job, {"n": [1]}),
        RUNNING,
        {"state": "completed", "result": {"n": [1]}, "finished_at": NOW, "settled_version": OWN},
    ),
    "fail": (
        lambda job: transitions.fail(job, Error("no", "Traceback")),
        RUNNING,
        {"state": "failed", "finished_at": NOW, "settled_version": OWN},
    ),
    "retry": (
        lambda job: transitions.retry(job, "no"),
        RUNNING,
        {"state": "scheduled", "run_after": LATER, "settled_version": OWN, **FREE},
    ),
    "retry at once": (
        lambda job: transitions.retry(job, "no", 0),
        RUNNING,
        {"state": "waiting", "run_after": NOW, "settled_version": OWN, **FREE},
    ),
    "snooze": (
        lambda job: transitions.snooze(job, MINUTE),
        RUNNING,
        {"state": "scheduled", "run_after": LATER, "excused": 1, "settled_version": OWN, **FREE},
    ),
    "release": (
        lambda job: transitions.release(job, "stopped"),
        HELD,
        {"state": "waiting", "settled_version": OWN, **FREE},
    ),
    "cancel": (
        lambda job: transitions.cancel(job, "not wanted"),
        QUEUED | HELD,
        {"state": "cancelled", "finished_at": NOW, "settled_version": OWN},
    ),
    "progress": (
        lambda job: transitions.record_progress(job, 40, "page 4"),
        RUNNING,
        {"progress": 40, "progress_note": "page 4"},
    ),
    "request cancel": (
        lambda job: transitions.request_cancel(job, actor="operator"),
        RUNNING,
        {"cancel_requested_at": NOW},
    ),
}
OPENING_NO_VERSION = {"progress", "request cancel"}
ALLOWED = [(name, state) for name, (_, states, _) in VERBS.items() for state in sorted(states)]
KINDS = {
    "fail": "failed",
    "retry": "retried",
    "retry at once": "retried",
    "snooze": "snoozed",
    "release": "released",
    "cancel": "cancelled",
}


def written(name, job, before, after):
    """Return what the table says, with the times between ``before`` and ``after`` filled in."""
    columns = dict(VERBS[name][2])
    if name == "release" and job.state == "running":
        columns["excused"] = 1
    if name not in OPENING_NO_VERSION:
        columns["version"] = job.version + 1
    now = row(job)
    for column, value in columns.items():
        if value in (NOW, LATER):
            wait = MINUTE if value == LATER else timedelta(0)
            assert before <= now[column] - wait <= after
            columns[column] = now[column]
        elif value == OWN:
            columns[column] = job.version
    return columns


@pytest.mark.parametrize(("name", "state"), ALLOWED)
def test_verb_writes_what_the_table_says(alias, name, state):
    """Exactly these columns, a version more, and the times of the database's clock."""
    job = job_in(state, unique_key="k", backoff=BACKOFF, progress=10)
    unheld = row(job)
    before = db.now(alias)
    after = VERBS[name][0](job)
    expected = written(name, job, before, db.now(alias))
    if expected.get("state") in ("completed", "failed", "cancelled"):
        expected["unique_key"] = None
    assert changed(unheld, job) == expected
    if name not in OPENING_NO_VERSION:
        assert {column: getattr(after, column) for column in row(job)} == row(job)
    assert {column: getattr(job, column) for column in unheld} == unheld  # the copy in hand


@pytest.mark.parametrize("name", VERBS)
def test_verb_that_does_not_fit_the_state_asks_no_database(alias, name):
    """pg-boss#346, airflow#21908: the full matrix; nothing but the state in hand is looked at."""
    verb, allowed, _ = VERBS[name]
    jobs = [job_in(state) for state in State if state not in allowed]
    before = [row(job) for job in jobs]
    with CaptureQueriesContext(connections[alias]) as queries:
        for job in jobs:
            with pytest.raises(TransitionNotAllowed) as caught:
                verb(job)
            called = name.removesuffix(" at once")
            assert str(caught.value) == f"Job {job.pk} is {job.state}: {called} is not allowed."
    assert [query["sql"] for query in queries] == []
    assert [row(job) for job in jobs] == before


@pytest.mark.parametrize("actor", [None, "operator"])
@pytest.mark.parametrize("name", KINDS)
def test_setback_leaves_one_event(alias, name, actor):
    """Who, when, which attempt, from where to where, why: enough to tell the story."""
    verbs = {
        "fail": lambda job: transitions.fail(job, Error("no", "Traceback"), actor=actor),
        "retry": lambda job: transitions.retry(job, "no", actor=actor),
        "retry at once": lambda job: transitions.retry(job, "no", 0, actor=actor),
        "snooze": lambda job: transitions.snooze(job, MINUTE, actor=actor),
        "release": lambda job: transitions.release(job, "no", actor=actor),
        "cancel": lambda job: transitions.cancel(job, "no", actor=actor),
    }
    job = job_in("running", attempt=3, excused=1)
    before = db.now(alias)
    after = verbs[name](job)
    event = JobEvent.objects.get()
    assert (event.kind, event.attempt, event.version) == (KINDS[name], 3, job.version)
    assert (event.from_state, event.to_state) == ("running", after.state)
    assert event.actor == (actor or job.claimed_by)
    assert event.message == ("for 0:01:00" if name == "snooze" else "no")
    assert event.detail == ({"traceback": "Traceback"} if name == "fail" else {})
    assert before - timedelta(milliseconds=1) <= event.at <= db.now(alias)  # SQLite cuts it there
    assert after.settled_version == (None if actor else job.version)


@pytest.mark.parametrize("name", ["start", "complete", "progress"])
def test_hot_path_leaves_no_event(alias, name):
    job = job_in("claimed" if name == "start" else "running")
    VERBS[name][0](job)
    assert events(job) == []


def test_event_is_cleaned_and_cut(alias):
    """What a handler raises is anything; the event must never be what fails the write."""
    job = job_in("running")
    transitions.fail(job, Error("\x00\ud800" + "m" * 2000, "t" * 30_000 + "the end"))
    event = JobEvent.objects.get()
    assert event.message.startswith("\\x00\\ud800mmm")
    assert (len(event.message), len(event.detail["traceback"])) == (1000, 20_000)
    assert event.detail["traceback"].endswith("the end")


def test_start_uses_up_an_attempt(alias):
    """Also of a job that has a life behind it."""
    job = job_in("claimed", attempt=4, excused=2, attempted_at=db.now(alias) - MINUTE)
    running = transitions.start(job)
    assert (running.attempt, running.failures) == (5, 3)
    assert running.attempted_at > job.attempted_at


def test_budget_is_spent_by_what_is_not_excused(alias):
    """vercel#3992: a release at shutdown is free; the third failure of three is the last."""
    job = job_in("running", attempt=5, excused=3)
    assert transitions.retry(job, "no", 0).state == "waiting"
    write_raw(job, state="running", claimed_by="w", claimed_at=job.claimed_at, attempt=6)
    assert transitions.retry(Job.objects.get(), "no", 0).state == "failed"
    assert kinds(job) == ["retried", "failed"]


# -- progress


@pytest.mark.parametrize(
    ("percent", "note", "why"),
    [
        (-1, "", "progress must be an integer from 0 to 100, not -1"),
        (101, "", "progress must be an integer from 0 to 100, not 101"),
        (0.5, "", "progress must be an integer from 0 to 100, not 0.5"),
        (True, "", "progress must be an integer from 0 to 100, not True"),
        ("5", "", "progress must be an integer from 0 to 100, not '5'"),
        (None, "", "progress must be an integer from 0 to 100, not None"),
        (5, "a\x00", "the progress note contains a NUL character"),
        (5, "\ud800", "the progress note contains a lone surrogate, which is not Unicode text"),
        (5, "x" * 1001, "the progress note has 1,001 of 1,000 characters"),
    ],
)
def test_progress_that_cant_be_stored(alias, percent, note, why):
    """Refused by name, the same on every engine, and nothing is written."""
    job = job_in("running")
    before = row(job)
    with pytest.raises(InvalidJob, match=exactly(f"Job {job.pk}: {why}")):
        transitions.record_progress(job, percent, note)
    assert row(job) == before


@pytest.mark.parametrize(
    ("percent", "stored", "note"),
    [(0, 30, "before"), (30, 30, "now"), (31, 31, "now"), (100, 100, "now")],
)
def test_progress_is_the_highest_reported(alias, percent, stored, note):
    """harmony#191: the figure never falls, and the note is that of the highest."""
    job = job_in("running", progress=30, progress_note="before")
    transitions.record_progress(job, percent, "now")
    assert (row(job)["progress"], row(job)["progress_note"]) == (stored, note)


# -- conflicts, as told


def test_executors_conflict_is_told_and_logged_once(alias, caplog):
    """django-ox#16: the dropped write fires nothing else."""
    job = job_in("running")
    newer = take_over(job)
    with hearing(signals.job_transitioned) as done, hearing(signals.write_refused) as refused:
        with pytest.raises(TransitionConflict) as caught:
            transitions.retry(job, "late")
        assert (done, [told["error"] for told in refused]) == ([], [caught.value])
    assert str(caught.value) == (
        f"Job {job.pk} moved on: retry was decided on running by {job.claimed_by}, attempt 1, "
        f"version 2; it is now running by {newer.claimed_by}, attempt 2, version 4."
    )
    (record,) = caplog.records
    assert record.getMessage() == f"Refused a write of {job.claimed_by}: {caught.value}"


@pytest.mark.parametrize("verb", [Verb.CANCEL, "request cancel"])
def test_conflict_of_an_actor_is_told_and_leaves_its_event(alias, verb):
    """Who wanted what, and on what ground."""
    job = job_in("running")
    transitions.complete(job)
    call = transitions.cancel if verb == Verb.CANCEL else transitions.request_cancel
    with hearing(signals.write_refused) as refused, pytest.raises(TransitionConflict):
        call(job, actor="operator")
    assert [(told["actor"], told["error"].verb) for told in refused] == [("operator", verb)]
    assert events(job) == [("conflict", "running", "completed", "operator")]
    assert conflict_of(job).detail["wanted"] == verb


# -- signals


def test_signal_tells_of_the_write(alias):
    """The job as it now is, and who did what to what it was."""
    job = job_in("running")
    with hearing(signals.job_transitioned) as heard:
        after = transitions.snooze(job, MINUTE)
        transitions.cancel(after, actor="operator")
    told = [(h["verb"], h["from_state"], h["job"].state, h["actor"]) for h in heard]
    assert told == [
        ("snooze", "running", "scheduled", job.claimed_by),
        ("cancel", "scheduled", "cancelled", "operator"),
    ]
    assert heard[0]["sender"] is Job


def test_signal_of_a_cancel_request_that_won(alias):
    """What happened is told, not what was asked for."""
    job = job_in("running", cancel_requested_at=db.now(alias))
    with hearing(signals.job_transitioned) as heard:
        assert transitions.retry(job, "no").state == "cancelled"
    assert [told["verb"] for told in heard] == ["cancel"]


def test_receivers_error_does_not_reach_the_executor(alias):
    """The write is committed, and nothing may make it look as if it were not."""
    job = job_in("running")

    def break_down(**kwargs):
        raise ZeroDivisionError

    signals.job_transitioned.connect(break_down)
    try:
        assert transitions.complete(job).state == "completed"
    finally:
        signals.job_transitioned.disconnect(break_down)


# -- promotion


def test_promotion_takes_what_is_due(alias):
    """Oldest first, at most so many, of the queues named; a version more and nothing else."""
    now = db.now(alias)
    old, new, elsewhere = (
        job_in("scheduled", run_after=now - age * MINUTE, queue=queue)
        for age, queue in [(2, "a"), (1, "a"), (3, "b")]
    )
    later = job_in("scheduled", run_after=now + MINUTE, queue="a")
    before = row(old)
    with CaptureQueriesContext(connections[alias]) as queries:
        assert dispatch.promote_due(["a"], 1, using=alias) == 1
    (where,) = [q["sql"].split("WHERE")[1] for q in queries if q["sql"].startswith("UPDATE")]
    assert "state" in where  # all that the choice rested on
    assert "run_after" in where
    assert changed(before, old) == {"state": "waiting", "version": 1}
    assert dispatch.promote_due(None, 10, using=alias) == 2
    assert dispatch.promote_due(None, 10, using=alias) == 0
    states = [row(job)["state"] for job in (old, new, elsewhere, later)]
    assert states == ["waiting", "waiting", "waiting", "scheduled"]


def test_promotion_with_nothing_due_takes_no_lock(alias):
    """Every worker asks all the time: the answer no must cost one read."""
    job_in("scheduled")
    with CaptureQueriesContext(connections[alias]) as queries:
        assert dispatch.promote_due(None, 10, using=alias) == 0
    sent = [q["sql"] for q in queries if "jobqueue_job" in q["sql"]]
    assert len(sent) == 1
    assert "FOR UPDATE" not in sent[0]


def test_job_read_from_a_replica_is_written_where_the_router_says(alias):
    """Reads may go to a database that takes no writes."""
    job = job_in("running")
    job._state.db = "replica"  # There is none: a write to it would raise.
    transitions.complete(job, "done")
    assert row(job)["result"] == "done"
