"""What a claim remembers of the ones before it: fewer round trips, and no dead entries walked."""

from __future__ import annotations

import re
from datetime import timedelta
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from jobqueue import claim, db, dispatch, transitions
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


@pytest.fixture(autouse=True)
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a test takes, nothing is forgotten by itself."""
    monkeypatch.setattr(claim, "RELY", 60.0)


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
        assert statements(alias) == ["take", "look", "take"]
        job = JobFactory(scheduled=True, run_after=db.now(alias) - HOUR)
        assert [claimed.pk for claimed in claim_jobs("w", None, 1)] == [job.pk]


def test_what_a_look_has_told_is_not_relied_on_for_long(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by jobs that come in all the time, nor after one that took long."""
    monkeypatch.setattr(claim, "RELY", 0.0)
    first, second = JobFactory.create_batch(2)
    assert take(limit=1) == [first.pk]
    urgent = JobFactory(scheduled=True, run_after=db.now(alias) - HOUR, priority=9)
    assert take(limit=2) == [urgent.pk, second.pk]


def test_what_another_promotes_beside_a_look_is_taken(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told of a promotion."""
    assert take() == []
    job = JobFactory(scheduled=True, run_after=db.now(alias) - HOUR)
    look = claim._look

    def look_later(*args: Any) -> claim.Known:
        assert dispatch.promote_due(None, 1, using=alias) == 1
        return look(*args)

    monkeypatch.setattr(claim, "_look", look_later)
    assert take() == [job.pk]


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
class TestEnds:
    """PostgreSQL would walk the entries of all that passed, while an old snapshot keeps them."""

    def test_the_index_is_entered_where_the_last_claim_ended(self, alias: str) -> None:
        JobFactory.create_batch(4)
        take(limit=2)
        with CaptureQueriesContext(connections[alias]) as queries:
            take(limit=2)
        (update,) = (query["sql"] for query in queries if query["sql"].startswith("UPDATE"))
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            cursor.execute("SET LOCAL enable_seqscan = off")
            cursor.execute(f"EXPLAIN {update}")
            plan = "\n".join(line for (line,) in cursor.fetchall())
        assert re.search(r"Index Cond: .*ROW\(run_after, id\) > ROW\(", plan)

    def test_what_comes_back_before_it_is_found_when_too_few_come_after(self, alias: str) -> None:
        jobs = [job.pk for job in JobFactory.create_batch(5)]
        transitions.release(claim_jobs("w", ["default"], 2)[0])
        claims = [take(limit=2) for _ in range(3)]
        assert claims == [jobs[2:4], [jobs[4], jobs[0]], []]

    def test_and_soon_when_others_come_all_the_time(
        self, alias: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(claim, "RELY", 0.0)
        jobs = [job.pk for job in JobFactory.create_batch(5)]
        transitions.release(claim_jobs("w", ["default"], 2)[0])
        assert take(limit=2) == [jobs[0], jobs[2]]

    def test_a_queue_is_emptied_before_the_next_is_looked_at(self, alias: str) -> None:
        jobs = [job.pk for job in JobFactory.create_batch(3)]
        others = [job.pk for job in JobFactory.create_batch(3, queue="other")]
        transitions.release(claim_jobs("w", ["default", "other"], 2)[0])
        assert take("default", "other", limit=9) == [jobs[2], jobs[0], *others]

    def test_lower_priorities_fill_up_what_comes_after_it(self, alias: str) -> None:
        jobs = [job.pk for job in JobFactory.create_batch(3)]
        low = JobFactory(priority=-1)
        take(limit=2)
        assert take(limit=2) == [jobs[2], low.pk]

    def test_a_claim_that_is_rolled_back_leaves_none(self, alias: str) -> None:
        jobs = [job.pk for job in JobFactory.create_batch(4)]
        with transaction.atomic(using=alias):
            take(limit=2)
            transaction.set_rollback(True, using=alias)
        assert take(limit=2) == jobs[:2]

    @pytest.mark.parametrize("queues", [["default"], ["default", "other"]])
    def test_trouble_at_the_second_statement_loses_nothing_of_the_first(
        self, alias: str, queues: list[str]
    ) -> None:
        """It is committed and told; or undone, where more was to come in the same transaction."""
        jobs = JobFactory.create_batch(3)
        take(*queues, limit=2)
        met: list[str] = []

        def break_at_second(execute: Any, sql: str, *rest: Any) -> Any:
            if sql.startswith("UPDATE"):
                met.append(sql)
                if len(met) == 2:
                    raise OperationalError("no more")
            return execute(sql, *rest)

        with connections[alias].execute_wrapper(break_at_second):
            if len(queues) == 1:
                assert take(*queues, limit=2) == [jobs[2].pk]
            else:
                with pytest.raises(OperationalError, match="no more"):
                    take(*queues, limit=2)
                assert stored(jobs[2])["state"] == "waiting"
        assert len(met) == 2

    def test_it_is_kept_for_a_while_after_a_long_claim_from_the_front(
        self, alias: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else those that need it most, beside very many dead entries, would have none."""
        now = [0.0]
        monkeypatch.setattr(claim, "RELY", 0.1)
        monkeypatch.setattr(claim, "time", SimpleNamespace(monotonic=lambda: now[0]))
        ends, real = [], dispatch.claim

        def slow(*args: Any, after: Any = None, **options: Any) -> Any:
            ends.append(after)
            now[0] += 0.01 if after else 1.0
            return real(*args, after=after, **options)

        monkeypatch.setattr(dispatch, "claim", slow)
        JobFactory.create_batch(8)
        for _ in range(3):
            take(limit=2)
        assert [bool(end) for end in ends] == [False, True, True]
