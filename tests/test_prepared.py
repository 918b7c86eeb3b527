"""Everything also works where psycopg prepares statements, as the operator's page advises."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections

from jobqueue import broker, coordinator, db, transitions
from jobqueue.enqueue import enqueue, enqueue_many
from jobqueue.lifecycle import Completed, Error, Failed, Report, Retry, Settled
from jobqueue.models import Job, Worker
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.testing.factories import TASK
from tests.asserting import run, stored
from tests.benchmarks.queues import PREPARING
from tests.helpers import engine, other_connection, use_connection

pytestmark = pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
# A statement is prepared when it is sent once more than this, and after as often again the server
# may keep one plan for it, whatever it is given.
ROUNDS = 2 * PREPARING["prepare_threshold"] + 2


@pytest.fixture(autouse=True)
def preparing(alias: str) -> Iterator[None]:
    """Work on a connection with these options."""
    with other_connection(alias, **PREPARING) as connection, use_connection(connection):
        yield


def prepared(alias: str, begins: str, table: str) -> bool:
    """Say whether such a statement was prepared."""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SELECT FROM pg_prepared_statements WHERE statement LIKE %s AND statement LIKE %s",
            [f"{begins} %", f"%{table}%"],
        )
        return cursor.fetchone() is not None


def test_jobs_are_stored_as_they_are_returned(alias: str) -> None:
    for number in range(ROUNDS):
        options: list[dict[str, Any]] = [
            {},
            {"args": [1, '"\\', None], "kwargs": {"a": 1.5}, "priority": 7, "metadata": {"m": []}},
            {"run_after": 60, "timeout": 1.5, "unique_key": f"k{number}", "backoff": number},
        ]
        jobs = [enqueue(TASK, **given) for given in options]
        jobs += enqueue_many([{"task": TASK, "args": [number, each]} for each in range(3)])
        for job in jobs:
            row = stored(job)
            assert {name: getattr(job, name) for name in row} == row
    assert prepared(alias, "INSERT", "jobqueue_job")


def test_jobs_are_claimed_and_settled(alias: str) -> None:
    worker = broker.register(["default"]).pk
    for number in range(ROUNDS):
        ids = {job.pk for job in enqueue_many([{"args": [n]} for n in range(3)], task=TASK)}
        held = broker.claim(worker, 3)
        assert {job.pk for job in held} == ids
        assert not broker.heartbeat(worker, {job.pk: job for job in held}).lost
        broker.report(worker, [(held[0], Report().with_progress(number, "half"))])
        outcomes = Completed({"n": number}), Failed(Error("no")), Retry(Error("no"), timedelta(9))
        pairs = list(zip(held, outcomes, strict=True))
        assert [result.status for result in broker.settle(worker, pairs)] == [Settled.APPLIED] * 3
        again = broker.settle(worker, [(job, Completed("else")) for job, _ in pairs])
        assert [result.conflict is None for result in again] == [False] * 3
        rows = Job.objects.order_by("pk").filter(pk__in=ids).values_list("state", "result")
        assert list(rows) == [("completed", {"n": number}), ("failed", None), ("scheduled", None)]
    assert prepared(alias, "UPDATE", "jobqueue_job")
    assert prepared(alias, "WITH", "jobqueue_jobevent")


def test_stale_jobs_are_swept(alias: str) -> None:
    for _ in range(ROUNDS):
        worker = broker.register(["default"]).pk
        enqueue_many([{}, {}], task=TASK)
        broker.claim(worker, 2)
        Worker.objects.filter(pk=worker).update(last_seen_at=db.now(alias) - timedelta(hours=1))
        assert sweep_stale_jobs().taken == 2
    assert run(alias, "SELECT count(*) FROM jobqueue_jobevent WHERE kind = 'rescued'") == (
        2 * ROUNDS,
    )


def test_coordinators_and_executors_one_by_one(alias: str) -> None:
    for number in range(ROUNDS):
        job = enqueue(TASK)
        (held,) = broker.claim(broker.register(["default"]).pk, 1, start=False)
        running = transitions.start(held)
        assert transitions.complete(running, {"n": number}).result == {"n": number}
        coordinator.rerun(job.pk, actor="me")
        coordinator.edit(job.pk, priority=number, actor="me")
        coordinator.cancel(job.pk, actor="me")
        row = stored(job)
        assert (row["state"], row["priority"]) == ("cancelled", number)
        coordinator.delete(job.pk, actor="me")
    assert not Job.objects.exists()
