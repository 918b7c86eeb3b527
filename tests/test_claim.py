"""Claims: the right jobs in the right order, each for one worker that is alive."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from jobqueue import claim, db
from jobqueue.claim import claim_jobs
from jobqueue.exceptions import InvalidJob, LeaseLost
from jobqueue.lifecycle import State
from jobqueue.models import Job, Worker
from jobqueue.testing.factories import JobFactory, QueueFactory, WorkerFactory
from tests.asserting import HostAhead, exactly, fresh_connection, servers_only, set_clock, stored
from tests.helpers import (
    pause_at,
    run_in_thread,
    statement,
    wait_until_blocked,
)
from tests.races.scenes import statements_made_anew

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)
claim_statement = statement("UPDATE", "jobqueue_job")


@pytest.fixture(autouse=True)
def worker(request: pytest.FixtureRequest) -> None:
    """A worker that is alive."""
    if "alias" in request.fixturenames:
        request.getfixturevalue("alias")
        WorkerFactory(id="w")


def take(*queues: str, limit: int = 100, **options: Any) -> list[int]:
    return [job.pk for job in claim_jobs("w", queues or ["default"], limit, **options)]


# -- what a claim writes


def test_a_claimed_job_is_the_worker_s(alias: str) -> None:
    job = JobFactory(args=[1], kwargs={"a": 2})
    before = stored(job)

    (claimed,) = claim_jobs("w", ["default"], 1)

    row = stored(job)
    assert {name for name in row if row[name] != before[name]} == {
        "state",
        "claimed_by",
        "claimed_at",
        "version",
    }
    assert (row["state"], row["claimed_by"], row["version"]) == ("claimed", "w", 1)
    assert abs(row["claimed_at"] - db.now(alias)) < timedelta(seconds=5)
    assert {name: getattr(claimed, name) for name in row} == row


def test_a_job_can_be_started_with_the_same_write(alias: str) -> None:
    job = JobFactory(attempt=2)

    with CaptureQueriesContext(connections[alias]) as queries:
        (running,) = claim_jobs("w", ["default"], 1, start=True)

    row = stored(job)
    assert (row["state"], row["claimed_by"], row["attempt"]) == ("running", "w", 3)
    assert row["attempted_at"] == row["claimed_at"]
    assert row["version"] == 1
    assert running.fingerprint == Job.objects.get().fingerprint
    assert len([query for query in queries if query["sql"].startswith("UPDATE")]) == 1


def test_the_number_of_queries_does_not_grow_with_the_jobs(alias: str) -> None:
    counts = []
    for number in (1, 50):
        JobFactory.create_batch(number)
        claim._known.clear()
        with CaptureQueriesContext(connections[alias]) as queries:
            jobs = claim_jobs("w", ["default"], 50, start=True)
            assert [job.args for job in jobs] == [[]] * number
        counts.append(len(queries))
    assert counts[0] == counts[1]


# -- order


def test_priority_comes_first_then_time_then_id(alias: str) -> None:
    now = db.now(alias)
    times = {"old": now - HOUR, "new": now - timedelta(minutes=1)}
    jobs = {
        name: JobFactory(priority=priority, run_after=times[when]).pk
        for name, priority, when in [
            ("low", -5, "old"),
            ("normal, new", 0, "new"),
            ("normal, old", 0, "old"),
            ("normal, old, again", 0, "old"),
            ("high", 5, "new"),
        ]
    }
    order = ["high", "normal, old", "normal, old, again", "normal, new", "low"]
    assert take(limit=1) == [jobs["high"]]
    assert take() == [jobs[name] for name in order[1:]]


def test_a_queue_is_drained_before_the_next_is_looked_at(alias: str) -> None:
    """rails/solid_queue#360: the order given is the order kept, whatever the priorities."""
    low = [JobFactory(queue="low", priority=100).pk for _ in range(2)]
    urgent = [JobFactory(queue="urgent", priority=-100).pk for _ in range(2)]
    JobFactory(queue="other", priority=100)

    assert take("urgent", "low", limit=3) == [*urgent, low[0]]
    assert take("low", "urgent", "low") == [low[1]]


def test_the_queues_of_the_worker_s_own_are_looked_at_in_their_order(alias: str) -> None:
    WorkerFactory(id="v", queues=["urgent", "low"])
    JobFactory(queue="other")
    low, urgent = JobFactory(queue="low", priority=9), JobFactory(queue="urgent")
    assert [job.pk for job in claim_jobs("v", None, 9)] == [urgent.pk, low.pk]


def test_what_came_of_one_queue_is_undone_by_trouble_at_the_next(alias: str) -> None:
    """Else nobody would know of it until the next heartbeat."""
    first, second = JobFactory(queue="a"), JobFactory(queue="b")
    updates = []

    def break_at_second(execute: Any, sql: str, *rest: Any) -> Any:
        if claim_statement(sql):
            updates.append(sql)
            if len(updates) == 2:
                raise OperationalError("no more")
        return execute(sql, *rest)

    with (
        connections[alias].execute_wrapper(break_at_second),
        pytest.raises(OperationalError, match="no more"),
    ):
        take("a", "b")

    assert [stored(job)["state"] for job in (first, second)] == ["waiting"] * 2


def test_a_paused_queue_is_passed_over(alias: str) -> None:
    QueueFactory(name="mail", paused=True)
    QueueFactory(name="slow")
    JobFactory(queue="mail", priority=100)
    slow, default = JobFactory(queue="slow"), JobFactory()

    assert take("mail") == []
    assert take("mail", "slow", "default") == [slow.pk, default.pk]


def test_what_falls_due_after_the_claim_has_looked_is_left_scheduled(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it made to wait, and not taken, nobody would be told of it."""
    start = db.now(alias)
    soon, later = (JobFactory(scheduled=True, run_after=start - s * SECOND) for s in (2, 1))
    clock = iter([start - 1.5 * SECOND])
    set_clock(monkeypatch, lambda using: next(clock, start))
    assert take() == [soon.pk]
    assert stored(later)["state"] == "scheduled"


def test_a_claim_reads_all_that_the_fence_compares(alias: str) -> None:
    JobFactory()
    (job,) = claim_jobs("w", ["default"], 1)
    with CaptureQueriesContext(connections[alias]) as queries:
        assert job.fingerprint.attempted_at is None
    assert not queries


# -- what may be claimed


def test_only_jobs_that_wait_and_are_due_are_taken(alias: str) -> None:
    others = [JobFactory(**{state.value: True}) for state in State if state is not State.WAITING]
    others.append(JobFactory(run_after=db.now(alias) + HOUR, priority=100))
    before = [stored(job) for job in others]
    waiting = JobFactory()

    assert take(limit=1) == [waiting.pk]
    assert take() == []
    assert [stored(job) for job in others] == before


def test_a_scheduled_job_is_promoted_and_claimed_when_its_time_has_come(alias: str) -> None:
    past = db.now(alias) - HOUR
    due = JobFactory(scheduled=True, run_after=past)
    elsewhere = JobFactory(scheduled=True, run_after=past, queue="other")
    later = JobFactory(scheduled=True)

    assert take() == [due.pk]

    row = stored(due)
    assert (row["state"], row["version"], row["run_after"]) == ("claimed", 2, past)
    assert [stored(job)["state"] for job in (elsewhere, later)] == ["scheduled"] * 2


@servers_only
def test_what_is_due_is_the_database_s_to_say(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """earendil-works/absurd#122: a host whose clock is ahead must not run jobs early."""
    job = JobFactory(scheduled=True, run_after=db.now(alias) + timedelta(minutes=30))
    HostAhead.install(monkeypatch)
    assert take() == []
    assert stored(job)["state"] == "scheduled"


# -- limits and names


def test_no_more_than_the_limit_are_taken(alias: str) -> None:
    JobFactory.create_batch(3, queue="a")
    JobFactory.create_batch(3, queue="b")
    assert len(take("a", "b", limit=4)) == 4
    assert len(take("a", "b", limit=4)) == 2
    assert take("a", "b", limit=4) == []


def test_no_queues_no_jobs(alias: str) -> None:
    JobFactory()
    assert claim_jobs("w", [], 1) == []


NAME = "queue must be 1 to 100 letters, digits or any of _ . : -, not"


@pytest.mark.parametrize(
    ("queues", "limit", "message"),
    [
        (["default"], 0, "limit must be an integer from 1 to 10000, not 0"),
        (["default"], -1, "limit must be an integer from 1 to 10000, not -1"),
        (["default"], 10_001, "limit must be an integer from 1 to 10000, not 10001"),
        (["default"], "5", "limit must be an integer from 1 to 10000, not '5'"),
        (["default"], True, "limit must be an integer from 1 to 10000, not True"),
        (["default", ""], 1, f"{NAME} ''"),
        (["a b"], 1, f"{NAME} 'a b'"),
        (["a\x00"], 1, f"{NAME} 'a\\x00'"),
        ([None], 1, f"{NAME} None"),
        ([7], 1, f"{NAME} 7"),
        ("default", 1, "queues must be a list of names, not 'default'"),
    ],
)
def test_malformed_arguments_are_refused_by_name(
    alias: str, queues: Any, limit: Any, message: str
) -> None:
    job = JobFactory()
    with pytest.raises(InvalidJob, match=exactly(message)):
        claim_jobs("w", queues, limit)
    assert stored(job)["state"] == "waiting"


# -- the lease


@pytest.mark.parametrize("state", ["dead", "stopped", None])
def test_a_worker_that_is_not_alive_gets_nothing(alias: str, state: str | None) -> None:
    """A sweep may be taking its jobs at this very moment."""
    if state:
        WorkerFactory(id="gone", state=state)
    job = JobFactory()
    before = stored(job)

    with pytest.raises(LeaseLost, match=exactly("Worker gone holds no live lease.")):
        claim_jobs("gone", ["default"], 1)

    assert stored(job) == before


def test_a_silent_worker_is_alive_until_it_is_declared_dead(alias: str) -> None:
    WorkerFactory(id="silent", silent=True)
    job = JobFactory()
    assert [claimed.pk for claimed in claim_jobs("silent", ["default"], 1)] == [job.pk]


def declare_dead() -> int:
    return Worker.objects.filter(pk="w", state="alive").update(state="dead")


@pytest.mark.parametrize("has_looked", [False, True])
def test_a_claim_waits_for_a_sweep_that_is_declaring_the_worker_dead(
    alias: str, has_looked: bool
) -> None:
    if has_looked:
        assert claim_jobs("w", ["default"], 1) == []
    job = JobFactory()
    with transaction.atomic(using=alias):
        declare_dead()
        claimer = run_in_thread(claim_jobs, "w", ["default"], 1)
        wait_until_blocked(alias)
    if has_looked:  # It is told when it looks why there was nothing.
        with pytest.raises(LeaseLost):
            claimer.result()
    else:
        assert claimer.result() == []
    assert stored(job)["state"] == "waiting"
    with pytest.raises(LeaseLost):
        claim_jobs("w", ["default"], 1)


def test_a_sweep_waits_for_a_claim_and_finds_its_jobs(alias: str) -> None:
    """Else it would look for the jobs of a dead worker a moment before there is one more."""
    job = JobFactory()

    def claim_slowly() -> list[Job]:
        with transaction.atomic(using=alias):
            return claim_jobs("w", ["default"], 1)

    with pause_at(alias, claim_statement, after=True) as pause:
        claimer = run_in_thread(claim_slowly)
        pause.wait_until_reached()
        sweep = run_in_thread(declare_dead)
        wait_until_blocked(alias)
        pause.release()
        assert [claimed.pk for claimed in claimer.result()] == [job.pk]
    assert sweep.result() == 1
    assert stored(job)["claimed_by"] == "w"


# -- each job once


@servers_only
def test_a_row_that_another_is_taking_is_passed_over(alias: str) -> None:
    first, second = JobFactory(), JobFactory()
    with transaction.atomic(using=alias):
        list(Job.objects.select_for_update().filter(pk=first.pk))
        with fresh_connection(alias):
            assert take() == [second.pk]


def test_no_job_is_claimed_twice_by_workers_at_once(alias: str) -> None:
    """bensheldon/good_job#1599: nor by threads of one worker."""
    WorkerFactory(id="v")
    jobs = {job.pk for job in JobFactory.create_batch(60)}

    def drain(worker_id: str) -> list[int]:
        mine: list[int] = []
        while claimed := claim_jobs(worker_id, ["default"], 7):
            mine += [job.pk for job in claimed]
        return mine

    drains = [run_in_thread(drain, worker_id) for worker_id in ("v", "v", "w", "w")]
    claimed = [pk for running in drains for pk in running.result()]

    # One that met only rows which others were taking may have ended early.
    claimed += drain("w")
    assert sorted(claimed) == sorted(jobs)


@servers_only
def test_what_another_got_meanwhile_is_not_taken_for_one_s_own(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oxpull/django-ox#16 (claim read-back): on a database that has no row locks."""
    monkeypatch.setattr(claim.db, "lock_rows", lambda rows, **options: rows)
    WorkerFactory(id="v")
    contended, free = JobFactory(), JobFactory()
    with statements_made_anew(), pause_at(alias, claim_statement) as pause:
        loser = run_in_thread(claim_jobs, "w", ["default"], 2)
        pause.wait_until_reached()
        assert [job.pk for job in claim_jobs("v", ["default"], 1)] == [contended.pk]
        pause.release()
        assert [job.pk for job in loser.result()] == [free.pk]
    assert stored(contended)["claimed_by"] == "v"
    assert stored(contended)["version"] == 1


@pytest.mark.parametrize("second", ["v", "w"])
def test_the_clock_need_not_move_between_claims(
    alias: str, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """Koed00/django-q#234: who got a job must not hinge on time."""
    WorkerFactory(id="v")
    first, later = JobFactory(), JobFactory()
    now = db.now(alias)
    set_clock(monkeypatch, lambda using: now)

    assert take(limit=1) == [first.pk]
    assert [job.pk for job in claim_jobs(second, ["default"], 9)] == [later.pk]
    assert claim_jobs(second, ["default"], 9) == []
    assert stored(first)["claimed_by"] == "w"
