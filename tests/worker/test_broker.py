"""The verbs that a worker needs, on each database."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
from django.db import DataError, InterfaceError, OperationalError, connections

from jobqueue import broker, coordinator, db, transitions
from jobqueue.exceptions import InvalidJob, LeaseLost
from jobqueue.lifecycle import Completed, Heartbeat, Settled, Snoozed, State
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.testing.factories import JobFactory, WorkerFactory
from tests.helpers import engine, run_in_thread
from tests.worker.handlers import kill_session
from tests.worker.tools import broken_statements, conflicts, kinds


@pytest.fixture
def worker(alias: str) -> Worker:
    """A worker of the queue ``default``."""
    return broker.register(["default"], using=alias)


def held(*jobs: Job) -> dict[int, Job]:
    return {job.pk: job for job in jobs}


# -- Registering


def test_a_worker_is_registered_with_an_id_of_its_own(alias):
    """oban-bg/oban#862: a restarted host is not the worker that it was."""
    first = broker.register(["b", "a"], 12, 3, using=alias)
    second = broker.register(["b", "a"], timedelta(seconds=12), using=alias)
    prefix = f"{socket.gethostname()}:{os.getpid()}:"
    assert first.pk.startswith(prefix)
    assert second.pk.startswith(prefix)
    assert first.pk != second.pk
    stored = Worker.objects.get(pk=first.pk)
    assert (stored.queues, stored.concurrency, stored.state) == (["b", "a"], 3, "alive")
    assert stored.lease == second.lease == timedelta(seconds=12)
    assert abs(stored.last_seen_at - db.now(alias)) < timedelta(seconds=10)


@pytest.mark.parametrize(
    ("queues", "lease", "message"),
    [
        (
            ["no good"],
            30,
            "queue must be 1 to 100 letters, digits or any of _ . : -, not 'no good'",
        ),
        (["default"], 0, "lease must be more than zero, not 0 seconds"),
        (["default"], "5", "lease must be seconds or a timedelta, not '5'"),
    ],
)
def test_a_malformed_registration_is_refused(alias, queues, lease, message):
    with pytest.raises(InvalidJob) as caught:
        broker.register(queues, lease, using=alias)
    assert str(caught.value) == message
    assert not Worker.objects.exists()


# -- Claiming


def test_a_claim_looks_through_the_registered_queues_in_their_order(alias):
    worker = broker.register(["b", "a"], using=alias)
    for name in ("a", "b", "c"):
        JobFactory(queue=name)
    jobs = broker.claim(worker.pk, 5, using=alias)
    assert [(job.queue, job.state, job.attempt) for job in jobs] == [
        ("b", State.RUNNING, 1),
        ("a", State.RUNNING, 1),
    ]


@pytest.mark.parametrize("state", ["dead", "stopped", "no row"])
@pytest.mark.parametrize("verb", ["claim", "heartbeat"])
def test_who_holds_no_lease_gets_nothing(alias, verb, state):
    job = JobFactory()
    if state != "no row":
        WorkerFactory(id="w", state=state)
    call = {
        "claim": lambda: broker.claim("w", 1, using=alias),
        "heartbeat": lambda: broker.heartbeat("w", {}, using=alias),
    }[verb]
    with pytest.raises(LeaseLost, match=r"^Worker w holds no live lease\.$"):
        call()
    job.refresh_from_db()
    assert job.state == State.WAITING


# -- Heartbeats


def test_a_heartbeat_renews_the_lease(alias):
    worker = WorkerFactory(silent=True)
    assert broker.heartbeat(worker.pk, {}, using=alias) == Heartbeat()
    seen_at = Worker.objects.get(pk=worker.pk).last_seen_at
    assert db.now(alias) - seen_at < timedelta(seconds=10)


@pytest.mark.parametrize("start", [True, False], ids=["running", "claimed"])
def test_a_claim_that_the_worker_never_learned_of_is_released(alias, worker, start):
    JobFactory()
    (job,) = broker.claim(worker.pk, 1, start=start, using=alias)
    assert broker.heartbeat(worker.pk, {}, using=alias) == Heartbeat()
    after = Job.objects.get(pk=job.pk)
    assert (after.state, after.claimed_by) == (State.WAITING, None)
    assert after.failures == 0
    event = JobEvent.objects.get(job=job)
    assert event.kind == EventKind.RELEASED
    assert event.actor == worker.pk
    assert event.message == "its worker never learned of this claim"


def test_who_cannot_say_what_it_holds_is_not_compared(alias, worker):
    JobFactory()
    (job,) = broker.claim(worker.pk, 1, using=alias)
    assert broker.heartbeat(worker.pk, None, using=alias) == Heartbeat()
    assert Job.objects.get(pk=job.pk).fingerprint == job.fingerprint


@pytest.mark.parametrize("back", [False, True], ids=["gone", "claimed again"])
def test_a_job_taken_from_a_live_worker_is_lost(alias, worker, back):
    JobFactory.create_batch(2)
    job, other = broker.claim(worker.pk, 2, using=alias)
    coordinator.release(job.pk, actor="operator", using=alias)
    if back:
        (again,) = broker.claim(worker.pk, 1, using=alias)
        assert again.pk == job.pk
    heard = broker.heartbeat(worker.pk, held(job, other), using=alias)
    assert heard == Heartbeat(lost=frozenset({job.pk}))
    released = [EventKind.RELEASED] * (2 if back else 1)  # nobody knows of the new claim
    assert kinds(job) == [*released, EventKind.CONFLICT]
    conflict = JobEvent.objects.get(job=job, kind=EventKind.CONFLICT)
    assert conflict.actor == worker.pk
    assert conflict.detail["wanted"] == "hold"


def test_a_deleted_job_is_lost(alias, worker):
    JobFactory()
    (job,) = broker.claim(worker.pk, 1, using=alias)
    Job.objects.filter(pk=job.pk).delete()
    heard = broker.heartbeat(worker.pk, held(job), using=alias)
    assert heard == Heartbeat(lost=frozenset({job.pk}))


@pytest.mark.parametrize("knows", [True, False], ids=["compared", "not compared"])
def test_cancel_requests_are_delivered(alias, worker, knows):
    JobFactory.create_batch(2)
    job, other = broker.claim(worker.pk, 2, using=alias)
    transitions.request_cancel(job, actor="operator", using=alias)
    heard = broker.heartbeat(worker.pk, held(job, other) if knows else None, using=alias)
    assert heard == Heartbeat(cancel_requested=frozenset({job.pk}))


# -- Settling


def test_nobody_settles_for_another(alias, worker):
    job = JobFactory(running=True)
    with pytest.raises(InvalidJob) as caught:
        broker.settle(worker.pk, [(job, Completed())], using=alias)
    assert str(caught.value) == f"jobs [{job.pk}] are not in the hands of worker {worker.pk}"


def unstorable_result() -> Completed:
    return Completed({"a": float("nan")})


def unstorable_delay() -> Snoozed:
    return Snoozed(timedelta.max)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (unstorable_result(), "result['a'] is nan, which JSON can't hold"),
        (unstorable_delay(), "delay must be at most 36,500 days"),
    ],
    ids=["result", "delay"],
)
def test_an_outcome_that_cannot_be_stored_fails_its_own_attempt_only(
    alias, worker, outcome, reason
):
    """Were it to raise, a worker would try the whole batch again and again, for ever."""
    JobFactory.create_batch(3)
    first, bad, last = broker.claim(worker.pk, 3, using=alias)
    results = broker.settle(
        worker.pk, [(first, Completed(1)), (bad, outcome), (last, Completed(3))], using=alias
    )
    assert [result.status for result in results] == [Settled.APPLIED] * 3
    assert [result.job.state for result in results] == [
        State.COMPLETED,
        State.SCHEDULED,
        State.COMPLETED,
    ]
    message = JobEvent.objects.get(job=bad).message
    assert message.startswith("the outcome can't be stored: ")
    assert reason in message


def test_an_outcome_that_the_database_refuses_fails_its_own_attempt_only(alias, worker):
    JobFactory.create_batch(2)
    good, bad = broker.claim(worker.pk, 2, using=alias)

    def is_poison(sql: str, params: object) -> bool:
        return sql.startswith("UPDATE") and "poison" in repr(params)

    items = [(good, Completed("fine")), (bad, Completed("poison"))]
    with broken_statements(alias, is_poison, DataError("value too long")) as broken:
        results = run_in_thread(broker.settle, worker.pk, items, using=alias).result()
    assert len(broken) == 2
    assert [result.job.state for result in results] == [State.COMPLETED, State.SCHEDULED]
    assert JobEvent.objects.get(job=bad).message == "the outcome can't be stored: value too long"


def test_a_late_outcome_is_refused_and_named(alias, worker):
    JobFactory()
    (job,) = broker.claim(worker.pk, 1, using=alias)
    coordinator.release(job.pk, actor="operator", using=alias)
    (result,) = broker.settle(worker.pk, [(job, Completed())], using=alias)
    assert result.status == Settled.CONFLICT
    assert f"Job {job.pk} moved on: complete was decided on" in str(result.conflict)
    assert conflicts() == 1


# -- Looking ahead


def test_the_next_scheduled_job_of_ones_own_queues(alias, worker):
    """Those of others that come before it are passed over."""
    assert broker.next_due(worker.pk, using=alias) is None
    now = db.now(alias)
    for minutes, queue in ((1, "other"), (2, "default"), (3, "default")):
        JobFactory(scheduled=True, queue=queue, run_after=now + timedelta(minutes=minutes))
    assert 110 < broker.next_due(worker.pk, using=alias) <= 120


def test_behind_many_of_others_one_looks_again_when_they_are_due(alias, worker, monkeypatch):
    monkeypatch.setattr(broker, "LOOK_AHEAD", 3)
    now = db.now(alias)
    for minutes in range(1, 5):
        JobFactory(scheduled=True, queue="other", run_after=now + timedelta(minutes=minutes))
    assert 170 < broker.next_due(worker.pk, using=alias) <= 180


# -- Leaving


def test_who_leaves_is_stopped_and_can_do_nothing_more(alias, worker):
    broker.leave(worker.pk, using=alias)
    assert Worker.objects.get(pk=worker.pk).state == Worker.State.STOPPED
    with pytest.raises(LeaseLost):
        broker.claim(worker.pk, 1, using=alias)


def test_who_was_declared_dead_stays_dead(alias, worker):
    Worker.objects.filter(pk=worker.pk).update(state=Worker.State.DEAD)
    broker.leave(worker.pk, using=alias)
    assert Worker.objects.get(pk=worker.pk).state == Worker.State.DEAD


# -- Connections


@pytest.mark.parametrize("alias", [engine("postgresql"), engine("mariadb")], indirect=True)
def test_a_broken_connection_is_opened_anew_by_the_verb_after(alias):
    def verbs() -> str:
        worker = broker.register(["default"], using=alias)
        kill_session(connections[alias])
        with pytest.raises((OperationalError, InterfaceError)):
            broker.heartbeat(worker.pk, {}, using=alias)
        broker.heartbeat(worker.pk, {}, using=alias)
        return "renewed"

    assert run_in_thread(verbs).result() == "renewed"
