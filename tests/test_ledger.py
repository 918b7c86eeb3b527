"""The conflict ledger: every refused write is an event, a count, a signal and a line of the log."""

from __future__ import annotations

import logging

import pytest
from django.db import connections, transaction

from jobqueue import broker, coordinator, ledger, signals, transitions
from jobqueue.exceptions import TransitionConflict
from jobqueue.ledger import refused_writes
from jobqueue.lifecycle import Completed, Error
from jobqueue.models import Job, JobEvent
from jobqueue.sweep import SweepReport, prune_jobs
from jobqueue.testing.factories import TASK, WorkerFactory
from tests.coordinating import history
from tests.helpers import run_in_thread, wait_until_blocked
from tests.races.scenes import (
    ON_CLAIMED,
    SETTLING,
    delete_raw,
    events,
    hearing,
    job_in,
    kinds,
    row,
    sweep_overtaken,
    take_over,
    write_raw,
)

# Late writes: of which state, the verb's name in the ledger, and the call; of the executor, and of
# others, who name themselves.
BY_ITS_WORKER = {
    **{f"{verb} of a running job": ("running", verb, act) for verb, act in SETTLING.items()},
    **{f"{verb} of a claimed job": ("claimed", verb, act) for verb, act in ON_CLAIMED.items()},
    "progress": ("running", "progress", lambda job: transitions.record_progress(job, 50)),
    "checkpoint": ("running", "checkpoint", lambda job: transitions.checkpoint(job, [])),
}
BY_ANN = {
    "request of a cancellation": (
        "running",
        "request cancel",
        lambda job: transitions.request_cancel(job, actor="ann"),
    ),
    "completion": ("running", "complete", lambda job: transitions.complete(job, actor="ann")),
    "rerun": ("failed", "rerun", lambda job: transitions.rerun(job, actor="ann")),
    "edit": ("waiting", "edit", lambda job: transitions.edit(job, {"priority": 1}, actor="ann")),
    "delete": ("failed", "delete", lambda job: transitions.delete(job, actor="ann")),
}


def overtake(job):
    """Make the job another one than the copy in hand says."""
    if job.state in ("running", "claimed"):
        take_over(job)
    elif job.state == "waiting":
        coordinator.edit(job.pk, priority=9, actor="bob")
    else:
        coordinator.rerun(job.pk, actor="bob")


@pytest.mark.parametrize("case", [*BY_ITS_WORKER, *BY_ANN])
def test_every_refused_write(alias, case, caplog):
    """Who, the verb wanted, what was expected and what was found: once each."""
    state, verb, act = {**BY_ITS_WORKER, **BY_ANN}[case]
    job = job_in(state)
    overtake(job)
    past, count = len(history(job)), refused_writes()
    caplog.clear()
    caplog.set_level(logging.INFO, logger="jobqueue")
    with hearing(signals.write_refused) as heard, pytest.raises(TransitionConflict) as refused:
        act(job)
    found = Job.objects.get(pk=job.pk).fingerprint
    actor = "ann" if case in BY_ANN else job.claimed_by
    message = f"Job {job.pk} moved on: {verb} was decided on {job.fingerprint}; it is now {found}."
    assert str(refused.value) == message
    assert history(job)[past:] == [
        {
            "kind": "conflict",
            "from_state": state,
            "to_state": found.state,
            "actor": actor,
            "message": message,
            "version": job.version,
            "detail": {
                "wanted": verb,
                "expected": job.fingerprint.as_dict(),
                "found": found.as_dict(),
            },
        }
    ]
    assert refused_writes() - count == {(TASK, verb): 1}
    (told,) = heard
    assert (told["job"], told["error"], told["actor"]) == (job, refused.value, actor)
    assert caplog.record_tuples == [
        ("jobqueue", logging.WARNING, f"Refused a write of {actor}: {message}")
    ]


def test_write_about_a_job_that_is_gone(alias):
    """There is nowhere to leave an event; all the rest is as ever."""
    job = job_in("running")
    delete_raw(job)
    count = refused_writes()
    with hearing(signals.write_refused) as heard, pytest.raises(TransitionConflict) as refused:
        transitions.complete(job)
    assert str(refused.value) == (
        f"Job {job.pk} moved on: complete was decided on {job.fingerprint}; it is gone."
    )
    assert (refused.value.found, len(heard)) == (None, 1)
    assert refused_writes() - count == {(TASK, "complete"): 1}
    assert not JobEvent.objects.exists()


def test_job_that_goes_before_its_event_is_left(alias):
    """Its event would be nobody's: there is none, and no error either."""
    job = job_in("running")
    conflict = ledger.conflict_of(job, "complete", job)
    delete_raw(job)
    ledger.record(job, conflict, None, alias)
    assert not JobEvent.objects.exists()


def test_event_of_a_job_that_is_being_deleted(alias):
    """No constraint holds events to jobs: whoever leaves one waits for the row, and finds none."""
    job = job_in("failed")
    with transaction.atomic(using=alias):
        transitions.delete(job, actor="ann")
        late = run_in_thread(transitions.rerun, job, actor="bob")
        wait_until_blocked(alias)
    with pytest.raises(TransitionConflict):
        late.result()
    assert not JobEvent.objects.exists()


def test_deletion_of_a_job_that_is_getting_an_event(alias):
    """It waits for the row; then the job is another one, and stays with what is told of it."""
    job = job_in("failed")
    with transaction.atomic(using=alias):
        transitions.rerun(job, actor="bob")
        late = run_in_thread(transitions.delete, job, actor="ann")
        wait_until_blocked(alias)
    with pytest.raises(TransitionConflict):
        late.result()
    assert kinds(job) == ["rerun", "conflict"]
    assert row(job)["state"] == "waiting"


def test_pruning_of_a_job_that_is_getting_an_event(alias):
    """It passes the row over, or waits where only one can write."""
    job = job_in("failed")
    with transaction.atomic(using=alias):
        transitions.rerun(job, actor="bob")
        late = run_in_thread(prune_jobs, 0)
        if connections[alias].features.has_select_for_update_skip_locked:
            late.result()
        else:
            wait_until_blocked(alias)
    assert late.result().jobs == 0
    assert kinds(job) == ["rerun"]


def test_conflict_that_a_caller_rolls_back_is_as_if_it_had_not_been(alias):
    job = job_in("running")
    take_over(job)
    past, count = kinds(job), refused_writes()
    with hearing(signals.write_refused) as heard, transaction.atomic(using=alias):
        with pytest.raises(TransitionConflict):
            transitions.complete(job)
        transaction.set_rollback(True, using=alias)
    assert (kinds(job), heard, refused_writes() - count) == (past, [], {})


def test_signal_and_count_wait_for_the_commit(alias):
    job = job_in("running")
    take_over(job)
    count = refused_writes()
    with hearing(signals.write_refused) as heard:
        with transaction.atomic(using=alias):
            with pytest.raises(TransitionConflict):
                transitions.complete(job)
            assert (heard, refused_writes() - count) == ([], {})
        assert (len(heard), refused_writes() - count) == (1, {(TASK, "complete"): 1})


def test_batch_leaves_one_event_for_each_that_is_refused(alias):
    """jobrunr#186: and the others of the batch none."""
    jobs = [job_in("running") for _ in range(4)]
    for job in jobs[:2]:
        coordinator.fail(job.pk, actor="ann")
    count = refused_writes()
    results = transitions.settle_many([(job, Completed()) for job in jobs])
    assert [result.status for result in results] == ["conflict"] * 2 + ["applied"] * 2
    assert [kinds(job) for job in jobs] == [["failed", "conflict"]] * 2 + [[]] * 2
    assert refused_writes() - count == {(TASK, "complete"): 2}


def test_sweep_that_comes_too_late_is_no_conflict(alias):
    """It counts them itself: to be late is its trade."""
    job = job_in("running")
    count = refused_writes()
    with hearing(signals.write_refused) as heard:
        report = sweep_overtaken(job, lambda: transitions.complete(job))
    assert report == SweepReport(examined=1, conflicts=1)
    assert (events(job), heard, refused_writes() - count) == ([], [], {})


def test_job_that_its_worker_lost_is_recorded_with_the_heartbeat(alias):
    """airflow#45925: nothing was written, but the worker is told, and so is the history."""
    worker = WorkerFactory()
    job = job_in("running", claimed_by=worker.pk)
    coordinator.release(job.pk, actor="ann")
    broker.heartbeat(worker.pk, {job.pk: job})
    event = history(job)[-1]
    assert (event["kind"], event["actor"]) == ("conflict", worker.pk)
    assert event["detail"]["wanted"] == "hold"


def test_counts_are_by_task_and_verb_and_are_a_copy(alias):
    count = refused_writes()
    for task, verb in [("a.b", "fail"), ("a.b", "complete"), ("a.c", "fail"), ("a.c", "fail")]:
        job = job_in("running", task=task)
        coordinator.cancel(job.pk, force=True, actor="ann")
        with pytest.raises(TransitionConflict):
            SETTLING[verb](job)
    told = refused_writes()
    assert told - count == {("a.b", "fail"): 1, ("a.b", "complete"): 1, ("a.c", "fail"): 2}
    told.clear()
    assert refused_writes() - count


def test_listener_that_fails_is_not_the_writers_trouble(alias):
    """Nor any other listener's."""
    job = job_in("running")
    take_over(job)

    def fail(**told):
        raise RuntimeError("no")

    signals.write_refused.connect(fail)
    try:
        with hearing(signals.write_refused) as heard, pytest.raises(TransitionConflict):
            transitions.complete(job)
    finally:
        signals.write_refused.disconnect(fail)
    assert len(heard) == 1


# -- What an event can hold


def test_event_is_cut_to_what_its_columns_hold(alias):
    """In the middle: how it began and how it ended is what one wants to know."""
    job = job_in("running")
    traceback = "begin" + "x" * 2**20 + "end"
    transitions.fail(job, Error("m" * 5000, traceback))
    event = job.events.get()
    assert (len(event.message), len(event.detail["traceback"])) == (1000, ledger.MAX_DETAIL)
    assert event.detail["traceback"].startswith("beginxxx")
    assert event.detail["traceback"].endswith("xxxend")
    assert "[... cut ...]" in event.detail["traceback"]


def test_event_holds_what_an_engine_does_not(alias):
    """A NUL or half a character in an error is no reason to lose the error."""
    job = job_in("running")
    transitions.fail(job, Error("bad \x00 byte", "at \ud800"))
    event = job.events.get()
    assert (event.message, event.detail) == ("bad \\x00 byte", {"traceback": "at \\ud800"})


def test_conflict_of_a_writer_outside_the_rules_is_told_by_what_he_changed(alias):
    """Nobody opened a new version; the other five fields give him away."""
    job = job_in("running")
    write_raw(job, attempt=4)
    with pytest.raises(TransitionConflict):
        transitions.complete(job)
    detail = history(job)[0]["detail"]
    differing = {
        name for name in detail["found"] if detail["found"][name] != detail["expected"][name]
    }
    assert differing == {"attempt"}
