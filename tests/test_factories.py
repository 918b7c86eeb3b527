"""The factories, which are for users' tests as well: rows as the verbs would have left them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from jobqueue import db, transitions
from jobqueue.claim import claim_jobs
from jobqueue.lifecycle import FINAL, HELD, State
from jobqueue.models import Job, JobEvent, Queue, Worker
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.testing import tasks
from jobqueue.testing.factories import (
    TASK,
    JobEventFactory,
    JobFactory,
    QueueFactory,
    WorkerFactory,
)
from tests.asserting import stored


@pytest.mark.parametrize("state", State)
def test_a_trait_is_a_state_that_the_verbs_leave(alias: str, state: State) -> None:
    """The same columns are set, and the same are not, as when a job has really come there."""
    made = stored(JobFactory(**({} if state is State.WAITING else {state.value: True})))
    lived = stored(lead_to(state))

    differing = {"id", "backoff", "result", "max_attempts", "settled_version"}
    assert made["state"] == lived["state"] == state
    for name in made.keys() - differing:
        assert (made[name] is None) == (lived[name] is None), name
    for name in ("attempt", "excused", "version", "progress"):
        assert made[name] == lived[name], name


def lead_to(state: State) -> Job:
    """Return a job that came to ``state`` by the verbs."""
    worker = WorkerFactory()
    job = JobFactory(scheduled=True) if state is State.SCHEDULED else JobFactory(queue="lived")
    if state in HELD | FINAL:
        (job,) = claim_jobs(worker.pk, ["lived"], 1)
    if state in {State.RUNNING} | FINAL:
        job = transitions.start(job)
    finish: dict[State, Any] = {
        State.COMPLETED: transitions.complete,
        State.FAILED: transitions.fail,
        State.CANCELLED: transitions.cancel,
    }
    return finish[state](job) if state in finish else job


def test_what_is_given_wins(alias: str) -> None:
    job = JobFactory(running=True, attempt=7, claimed_by="me", queue="mail")
    assert (job.attempt, job.claimed_by, job.queue) == (7, "me", "mail")


def test_times_are_the_database_s(alias: str) -> None:
    job = JobFactory(running=True)
    assert abs((db.now(alias) - job.claimed_at).total_seconds()) < 5
    assert JobFactory(scheduled=True).run_after > db.now(alias) > JobFactory().run_after


def test_using_names_the_database(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the router says."""
    monkeypatch.setenv("JOBQUEUE_TEST_ALIAS", "nowhere")
    job = JobFactory(using=alias, running=True)
    worker = WorkerFactory(using=alias, silent=True)
    event = JobEventFactory(using=alias, job=job)
    queue = QueueFactory(using=alias, paused=True)
    for row in (job, worker, event, queue):
        assert row._state.db == alias
        assert type(row)._default_manager.using(alias).filter(pk=row.pk).exists()


def test_workers_live_unless_said_otherwise(alias: str) -> None:
    alive, silent, dead = WorkerFactory(), WorkerFactory(silent=True), WorkerFactory(dead=True)
    assert Worker.objects.alive_ids([alive.pk, silent.pk, dead.pk]) == {alive.pk, silent.pk}
    assert sweep_stale_jobs().dead_workers == 1
    assert Worker.objects.get(pk=silent.pk).state == "dead"


def test_queues_are_open_unless_said_otherwise(alias: str) -> None:
    QueueFactory()
    paused = QueueFactory(paused=True)
    assert Queue.objects.get(paused_at__isnull=False) == paused


def test_an_event_is_of_a_running_job(alias: str) -> None:
    event = JobEventFactory()
    assert JobEvent.objects.get() == event
    assert (event.job.state, event.attempt, event.version) == ("running", 1, 2)
    assert event.actor == event.job.claimed_by


def test_the_tasks_do_what_they_are_named_for() -> None:
    module, _, name = TASK.rpartition(".")
    assert getattr(import_module(module), name) is tasks.succeed
    assert tasks.succeed(1, a=2) == {"args": [1], "kwargs": {"a": 2}}
    with pytest.raises(RuntimeError, match=r"^failed on purpose$"):
        tasks.fail()
