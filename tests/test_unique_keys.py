"""At most one unfinished job has a key; whoever asks for it again is given that one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections, transaction

from jobqueue import db, transitions
from jobqueue.claim import claim_jobs
from jobqueue.enqueue import enqueue
from jobqueue.exceptions import InvalidJob
from jobqueue.lifecycle import State
from jobqueue.models import Job
from jobqueue.testing.factories import TASK, JobFactory, WorkerFactory
from tests.asserting import (
    exactly,
    fresh_connection,
    never_wait_for_locks,
    open_elsewhere,
    run,
    stored,
)
from tests.helpers import (
    engine,
    pause_at,
    run_in_thread,
    statement,
    wait_until_blocked,
)


def keyed(**options: Any) -> Job:
    return enqueue(TASK, unique_key="k", **options)


def test_twenty_at_once_get_one_job(alias: str) -> None:
    """oban-bg/oban#1505, bensheldon/good_job#378: one row, and its id for everybody."""
    start = threading.Barrier(20)

    def producer() -> int:
        connections[alias].ensure_connection()
        start.wait(timeout=20)
        return keyed().pk

    producers = [run_in_thread(producer) for _ in range(20)]
    ids = {producer.result() for producer in producers}

    assert list(Job.objects.values_list("pk", flat=True)) == list(ids)


@pytest.mark.parametrize("state", ["scheduled", "waiting", "claimed", "running"])
def test_the_live_row_is_returned_and_never_touched(alias: str, state: str) -> None:
    """TkTech/chancy#51: enqueuing again must not reset a job that runs, and claims get nothing."""
    job = JobFactory(**({} if state == "waiting" else {state: True}), unique_key="k")
    before = stored(job)

    for _ in range(50):
        again = keyed(args=[1], queue="other", priority=9, run_after=60)
        assert (again.pk, again.state) == (job.pk, state)

    WorkerFactory(id="w")
    assert claim_jobs("w", ["other"], 10) == []
    assert stored(job) == before
    assert Job.objects.count() == 1


FINISHES: dict[str, Callable[[Job], Job]] = {
    "completed": transitions.complete,
    "failed": transitions.fail,
    "cancelled": transitions.cancel,
}


@pytest.mark.parametrize("state", FINISHES)
def test_a_final_state_frees_the_key(alias: str, state: str) -> None:
    first = keyed()
    WorkerFactory(id="w")
    (running,) = claim_jobs("w", ["default"], 1, start=True)

    FINISHES[state](running)
    second = keyed()

    assert second.pk != first.pk
    assert [stored(job)["state"] for job in (first, second)] == [state, "waiting"]
    assert stored(first)["unique_key"] is None


def test_a_retry_keeps_the_key(alias: str) -> None:
    job = JobFactory(running=True, unique_key="k")
    transitions.retry(job, "no")
    assert keyed().pk == job.pk


def test_who_comes_second_waits_for_the_first_and_is_given_its_job(alias: str) -> None:
    with transaction.atomic(using=alias):
        first = keyed()
        second = run_in_thread(keyed)
        wait_until_blocked(alias)
    assert second.result().pk == first.pk


def test_who_comes_second_is_first_when_the_first_rolls_back(alias: str) -> None:
    with transaction.atomic(using=alias):
        keyed(args=["first"])
        second = run_in_thread(keyed, args=["second"])
        wait_until_blocked(alias)
        transaction.set_rollback(True, using=alias)
    job = second.result()
    assert Job.objects.get().pk == job.pk
    assert job.args == ["second"]


def test_the_caller_s_transaction_outlives_a_key_that_is_taken(alias: str) -> None:
    first = keyed()
    with transaction.atomic(using=alias):
        before = enqueue(TASK)
        assert keyed().pk == first.pk
        after = enqueue(TASK)
    assert set(Job.objects.values_list("pk", flat=True)) == {first.pk, before.pk, after.pk}


def test_a_holder_that_finishes_meanwhile_makes_room(alias: str) -> None:
    """Between the INSERT that failed and the look at who has the key."""
    first = JobFactory(running=True, unique_key="k")
    with pause_at(alias, statement("SELECT", "jobqueue_job")) as pause:
        second = run_in_thread(keyed)
        pause.wait_until_reached()
        transitions.complete(first)
        pause.release()
        job = second.result()
    assert job.pk != first.pk
    assert stored(job)["unique_key"] == "k"


def test_a_passing_trouble_is_tried_again(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer is not told of a lock that was gone a moment later."""
    with fresh_connection(alias), open_elsewhere(alias, lambda: keyed(args=[1])) as roll_back:
        never_wait_for_locks(alias)
        monkeypatch.setattr(db.trouble.time, "sleep", lambda wait: roll_back())
        job = keyed(args=[2])
    assert (Job.objects.get().pk, job.args) == (job.pk, [2])


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_a_holder_that_can_t_be_seen_is_told(alias: str) -> None:
    """At REPEATABLE READ a job may hold the key that was born after the snapshot."""
    with transaction.atomic(using=alias):
        run(alias, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert not Job.objects.exists()
        with fresh_connection(alias):
            keyed()
        message = "unique_key 'k' is taken by a job that this transaction can't see"
        with pytest.raises(InvalidJob, match=exactly(message)):
            keyed()
    assert Job.objects.count() == 1


@pytest.mark.parametrize("other", ["K", "ḱ", "k "], ids=["case", "accent", "trailing space"])
def test_keys_that_look_alike_are_different_keys(alias: str, other: str) -> None:
    """Or the second job would never be stored, and its caller never told."""
    first = keyed()
    second = enqueue(TASK, unique_key=other)
    assert second.pk != first.pk
    assert [job.state for job in (first, second)] == [State.WAITING] * 2
