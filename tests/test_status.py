"""How the queue is doing: each figure, and the command that prints them."""

from __future__ import annotations

import json
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import call_command

from jobqueue import coordinator, db, transitions
from jobqueue.exceptions import TransitionConflict
from jobqueue.status import QueueStatus, queue_status
from jobqueue.testing.factories import (
    TASK,
    JobEventFactory,
    JobFactory,
    QueueFactory,
    WorkerFactory,
)
from tests.helpers import pause_at, run_in_thread
from tests.races.scenes import job_in
from tests.routers import ALIAS_VARIABLE

HOUR = timedelta(hours=1)
EMPTY = {
    "queues": {},
    "workers": {},
    "silent_workers": 0,
    "finished": {},
    "events": {},
    "refused": [],
    "snapshot": None,
}


def refuse(*, task=TASK, verb="complete", at=None):
    """Have a late write refused, at a time that is told."""
    job = job_in("running", task=task)
    coordinator.cancel(job.pk, force=True, actor="ann")
    with pytest.raises(TransitionConflict):
        getattr(transitions, verb)(job)
    if at:
        job.events.update(at=at)


def test_nothing_at_all(alias):
    assert queue_status().as_dict() == EMPTY


def test_jobs_by_queue_and_state(alias):
    """What is over is not among them, nor is a queue that has nothing else."""
    JobFactory.create_batch(3, run_after=db.now(alias) + HOUR)
    for state in ("scheduled", "claimed", "claimed", "running", "completed"):
        job_in(state)
    job_in("running", queue="mail")
    job_in("failed", queue="over")
    assert queue_status().queues == {
        "default": QueueStatus(scheduled=1, waiting=3, claimed=2, running=1),
        "mail": QueueStatus(running=1),
    }


def test_how_long_the_oldest_has_waited(alias):
    """Since it was due; one that isn't yet has not waited, whatever its priority."""
    now = db.now(alias)
    job_in("waiting", run_after=now - timedelta(seconds=90))
    job_in("waiting", run_after=now - timedelta(seconds=30), priority=9)
    job_in("waiting", run_after=now + HOUR, queue="later")
    job_in("scheduled", run_after=now - HOUR, queue="unpromoted")
    queues = queue_status().queues
    assert 90 <= queues["default"].oldest_waiting < 120
    assert queues["later"].oldest_waiting is None
    assert queues["unpromoted"].oldest_waiting is None


def test_paused_queues(alias):
    """Also one that has no jobs; a row without a pause is nothing to tell."""
    QueueFactory(name="default", paused=True)
    QueueFactory(name="empty", paused=True)
    QueueFactory(name="open")
    job_in("running")
    assert queue_status().queues == {
        "default": QueueStatus(running=1, paused=True),
        "empty": QueueStatus(paused=True),
    }


def test_queue_whose_first_job_comes_between_two_looks(alias):
    """It is told of, or not, but it breaks nothing."""
    with pause_at(alias, lambda sql: "MIN(" in sql) as pause:
        looking = run_in_thread(queue_status)
        pause.wait_until_reached()
        job_in("waiting", queue="new", run_after=db.now(alias) - HOUR)
        pause.release()
        queues = looking.result().queues
    assert set(queues) == {"new"}


def test_workers_by_queue(alias):
    """Those that are dead, or left, are not there; one that is silent may not be, either."""
    WorkerFactory(queues=["default", "mail"])
    WorkerFactory(queues=["mail"])
    WorkerFactory(queues=["mail"], silent=True)
    WorkerFactory(queues=["mail"], dead=True)
    WorkerFactory(queues=["mail"], state="stopped", silent=True)
    # Silent for a while that its own lease allows.
    patient = db.now(alias) - timedelta(seconds=90)
    WorkerFactory(queues=["post"], lease=HOUR, last_seen_at=patient)
    status = queue_status()
    assert status.workers == {"default": 1, "mail": 2, "post": 1}
    assert status.silent_workers == 1


def test_finished_in_the_last_hour(alias):
    now = db.now(alias)
    for state, number in {"completed": 3, "failed": 2, "cancelled": 1}.items():
        JobFactory.create_batch(number, **{state: True})
        job_in(state, finished_at=now - HOUR - timedelta(minutes=1))
        job_in(state, finished_at=now - HOUR + timedelta(minutes=1))
    job_in("running")
    assert queue_status().finished == {"cancelled": 2, "completed": 4, "failed": 3}


def test_events_of_the_last_hour_by_kind(alias):
    now = db.now(alias)
    for kind, number in {"retried": 2, "rescued": 1, "cancel requested": 1}.items():
        JobEventFactory.create_batch(number, kind=kind)
        JobEventFactory(kind=kind, at=now - HOUR - timedelta(minutes=1))
    assert queue_status().events == {"cancel requested": 1, "rescued": 1, "retried": 2}


def test_refused_writes_of_the_last_hour_by_task_and_verb(alias):
    """An event that is no conflict is not among them, whatever its detail says."""
    refuse(task="b.task", verb="fail")
    refuse(task="a.task", verb="fail")
    refuse(task="a.task")
    refuse(task="a.task")
    refuse(task="a.task", at=db.now(alias) - HOUR - timedelta(minutes=1))
    job = job_in("running", task="a.task")
    with pytest.raises(TransitionConflict):
        coordinator.cancel(job.pk, actor="ann", expected_version=99)
    JobEventFactory(detail={"wanted": "complete"})
    assert queue_status().refused == [
        {"task": "a.task", "verb": "cancel", "count": 1},
        {"task": "a.task", "verb": "complete", "count": 2},
        {"task": "a.task", "verb": "fail", "count": 1},
        {"task": "b.task", "verb": "fail", "count": 1},
    ]


def test_events_of_a_job_that_is_gone_are_gone(alias):
    job = job_in("failed")
    with pytest.raises(TransitionConflict):
        coordinator.rerun(job.pk, actor="ann", expected_version=99)
    assert len(queue_status().refused) == 1
    coordinator.delete(job.pk, actor="ann")
    assert queue_status().as_dict() == EMPTY


# -- The command


def run(**options):
    out = StringIO()
    call_command("queue_status", stdout=out, **options)
    return out.getvalue()


def test_command_on_an_empty_database(alias):
    assert run() == "Last hour, finished: none\nLast hour, events: none\n"
    assert json.loads(run(as_json=True)) == EMPTY


def busy():
    """Make a queue of which there is something to say everywhere."""
    WorkerFactory(queues=["default", "idle"])
    WorkerFactory(queues=["default"], silent=True)
    QueueFactory(name="mail", paused=True)
    QueueFactory(name="empty", paused=True)
    job_in("running")
    job_in("waiting", queue="mail")
    job_in("completed")
    refuse()
    refuse()


def test_command_prints_a_line_for_each_thing_to_know(alias):
    busy()
    lines = run().splitlines()
    waiting = next(line for line in lines if line.startswith("Queue mail"))
    assert waiting.startswith("Queue mail: 1 waiting, the oldest for ")
    assert waiting.endswith(" s, PAUSED, 0 live worker(s)")
    lines.remove(waiting)
    assert lines == [
        "Queue default: 1 running, 1 live worker(s)",
        "Queue empty: none, PAUSED, 0 live worker(s)",
        "Queue idle: empty, 1 live worker(s)",
        "1 worker(s) silent for longer than their lease",
        "Last hour, finished: 2 cancelled, 1 completed",
        "Last hour, events: 2 cancelled, 2 conflict",
        f"Last hour, refused: complete of {TASK}, 2 time(s)",
    ]


def test_command_prints_one_json_object_and_nothing_else(alias):
    busy()
    printed, told = json.loads(run(as_json=True)), queue_status().as_dict()
    waited = printed["queues"]["mail"].pop("oldest_waiting")
    assert 0 < waited <= told["queues"]["mail"].pop("oldest_waiting") < 60
    assert printed == told


def test_command_takes_a_database(alias, monkeypatch):
    """It wins over the router, in every question."""
    busy()
    monkeypatch.delenv(ALIAS_VARIABLE)
    assert "Queue default: 1 running" in run(database=alias)
    monkeypatch.setenv(ALIAS_VARIABLE, alias)
