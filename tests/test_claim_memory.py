"""What a claim remembers of the ones before it: fewer round trips, and no dead entries walked."""

from __future__ import annotations

import re
from datetime import timedelta
from itertools import chain
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from jobqueue import claim, db, transitions
from jobqueue.claim import claim_jobs
from jobqueue.testing.factories import JobFactory, QueueFactory, WorkerFactory
from tests.asserting import stored
from tests.helpers import engine, wait_until

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def worker(alias: str) -> None:
    """A worker that is alive."""
    WorkerFactory(id="w", queues=["default"])


def take(*queues: str, limit: int = 100, **options: Any) -> list[int]:
    return [job.pk for job in claim_jobs("w", queues or ["default"], limit, **options)]


# -- looks


def statements(alias: str, limit: int = 1) -> list[str]:
    """Claim, and say of each statement whether it looks at the worker, the clock, or takes jobs."""
    with CaptureQueriesContext(connections[alias]) as queries:
        claim_jobs("w", None, limit)
    kinds = {"SELECT": "look", "UPDATE": "take"}
    return [kinds[query["sql"].split()[0]] for query in queries]


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
class TestLooks:
    """Round trips are what a woken worker waits for."""

    @pytest.fixture(autouse=True)
    def made(self, alias: str) -> None:
        """Have the statements been made."""
        claim_jobs("w", None, 1)
        claim._known.clear()

    def test_the_first_claim_looks_at_the_lease_and_the_second_takes_at_once(
        self, alias: str
    ) -> None:
        JobFactory.create_batch(2)
        assert statements(alias) == ["look", "take"]
        assert statements(alias) == ["take"]

    def test_one_that_finds_nothing_looks_and_takes_what_has_fallen_due(self, alias: str) -> None:
        assert statements(alias) == ["look", "take"]
        assert statements(alias) == ["take", "look"]
        job = JobFactory(scheduled=True, run_after=db.now(alias) - HOUR)
        assert [claimed.pk for claimed in claim_jobs("w", None, 1)] == [job.pk]


def test_jobs_that_come_in_all_the_time_hide_no_scheduled_one_for_long(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first look has told is old, and so the third claim looks again."""
    first, second, third = JobFactory.create_batch(3)
    assert take(limit=1) == [first.pk]
    urgent = JobFactory(scheduled=True, run_after=db.now(alias) - HOUR, priority=9)
    monkeypatch.setattr(claim, "RELY", 0.0)
    assert take(limit=1) == [second.pk]
    assert take(limit=2) == [urgent.pk, third.pk]


def test_a_claim_that_knows_when_a_job_falls_due_promotes_it_then(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = JobFactory(scheduled=True, run_after=db.now(alias) + SECOND, priority=9)
    first, second = JobFactory.create_batch(2)
    assert take(limit=1) == [first.pk]
    wait_until(lambda: db.now(alias) > soon.run_after, "it is not due")
    assert take(limit=2) == [soon.pk, second.pk]


def test_a_worker_that_was_paused_meanwhile_takes_nothing(alias: str) -> None:
    first, second = JobFactory.create_batch(2)
    assert take(limit=1) == [first.pk]
    QueueFactory(name="default", paused=True)
    assert take(limit=1) == []
    assert stored(second)["state"] == "waiting"


# -- where a large claim ends, the next begins


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "LARGE", 2)


def test_the_order_is_kept_from_claim_to_claim(alias: str) -> None:
    """Also where many have one ``run_after``, as all that are enqueued at once."""
    now = db.now(alias)
    jobs = [JobFactory(run_after=now - SECOND, priority=1).pk for _ in range(5)]
    jobs += [JobFactory(run_after=now - HOUR).pk for _ in range(4)]
    claims = list(iter(lambda: take(limit=2), []))
    assert list(chain.from_iterable(claims)) == jobs


def test_a_higher_priority_comes_first_wherever_the_last_claim_ended(alias: str) -> None:
    first = JobFactory.create_batch(6)[2]
    take(limit=2)
    urgent = JobFactory(priority=1)
    assert take(limit=2) == [urgent.pk, first.pk]


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_a_claim_enters_the_index_where_the_last_one_ended(alias: str) -> None:
    """It would walk the entries of all that have passed, while an old snapshot keeps them."""
    JobFactory.create_batch(4)
    take(limit=2)
    with CaptureQueriesContext(connections[alias]) as queries:
        take(limit=2)
    (query,) = queries
    with connections[alias].cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(f"EXPLAIN {query['sql']}")
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert re.search(r"Index Cond: .*ROW\(run_after, id\) > ROW\(", plan)


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_what_comes_back_before_that_is_found_when_nothing_comes_after(alias: str) -> None:
    jobs = JobFactory.create_batch(5)
    pks = [job.pk for job in jobs]
    transitions.release(claim_jobs("w", ["default"], 2)[0])
    claims = [take(limit=2) for _ in range(4)]
    assert claims == [pks[2:4], pks[4:], pks[:1], []]


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_it_is_found_soon_when_others_come_all_the_time(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as what a look has told is relied on, and no longer."""
    first, *_, last = JobFactory.create_batch(6)
    transitions.release(claim_jobs("w", ["default"], 2)[0])
    monkeypatch.setattr(claim, "RELY", 0.0)
    assert first.pk not in take(limit=2)
    assert take(limit=2) == [first.pk, last.pk - 1]


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_it_is_found_before_the_next_queue_is_looked_at(alias: str) -> None:
    jobs = [job.pk for job in JobFactory.create_batch(3)]
    other = JobFactory(queue="other")
    transitions.release(claim_jobs("w", ["default", "other"], 2)[0])
    claims = [take("default", "other", limit=2) for _ in range(2)]
    assert claims == [jobs[2:], [jobs[0], other.pk]]
