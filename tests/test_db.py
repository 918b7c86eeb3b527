"""What each engine can do: its clock, its locks and its passing troubles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db import DatabaseError, DataError, IntegrityError, connections, transaction
from django.test import override_settings

from jobqueue import db, transitions
from jobqueue.claim import claim_jobs
from jobqueue.db.convert import array
from jobqueue.enqueue import enqueue
from jobqueue.models import Job, Queue
from jobqueue.testing.factories import TASK, JobFactory, QueueFactory, WorkerFactory
from tests.asserting import (
    HostAhead,
    fresh_connection,
    never_wait_for_locks,
    open_elsewhere,
    run,
    servers_only,
)
from tests.helpers import (
    engine,
    other_connection,
    run_in_thread,
    use_connection,
    wait_until_blocked,
)
from tests.races.scenes import failing, job_in


def pause(name: str) -> int:
    return Queue.objects.filter(name=name).update(paused_at=None)


# -- statements whose SQL is made once


WRITES: dict[str, tuple[bool, Callable[[], Callable[[], object]]]] = {
    "start": (False, lambda: partial(transitions.start, job_in("claimed"))),
    "enqueue": (False, lambda: partial(enqueue, TASK)),
    "claim": (True, lambda: partial(claim_jobs, WorkerFactory().pk, ["default"], 1)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_fails_breaks_the_caller_s_transaction(alias: str, write: str) -> None:
    """Else its hooks would run, though nothing was committed; a claim has a savepoint."""
    can_go_on, prepare = WRITES[write]
    JobFactory()
    call = prepare()
    with transaction.atomic(using=alias):
        with (
            failing(alias, lambda sql, _: sql.startswith(("UPDATE", "INSERT")), DataError("no")),
            pytest.raises(DataError),
        ):
            call()
        assert connections[alias].needs_rollback is not can_go_on
        transaction.set_rollback(True, using=alias)


def test_a_statement_is_filled_in_and_read_as_its_columns_are(alias: str) -> None:
    """Each time with other values, in whatever thread."""
    jobs = JobFactory.create_batch(2, args=[1, "two"], timeout=timedelta(minutes=5))
    rows = Job.objects.using(alias).filter(pk=db.Blank(Job, "id"))
    select = db.Select(rows.values_list("pk", "args", "timeout", "run_after"))
    for job in jobs:
        found = run_in_thread(select, id=job.pk).result()
        assert found == [(job.pk, [1, "two"], job.timeout, job.run_after)]
    assert select(id=jobs[-1].pk + 1) == []


# -- the clock


def test_now_is_aware_and_in_utc(alias: str) -> None:
    assert db.now(alias).tzinfo is UTC
    assert abs(db.now(alias) - datetime.now(UTC)) < timedelta(seconds=5)


def test_now_goes_on_within_a_transaction(alias: str) -> None:
    with transaction.atomic(using=alias):
        first = db.now(alias)
        assert db.now(alias) > first


@servers_only
def test_the_host_s_clock_is_not_asked(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    HostAhead.install(monkeypatch)
    assert abs(db.now(alias) - datetime.now(UTC)) < timedelta(seconds=5)


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/Los_Angeles", "UTC"])
def test_now_is_naive_and_local_without_use_tz(alias: str, zone: str) -> None:
    """oxpull/django-ox#16 (USE_TZ): the columns hold naive local time."""
    with override_settings(USE_TZ=False, TIME_ZONE=zone):
        now = db.now(alias)
    local = datetime.now(ZoneInfo(zone)).replace(tzinfo=None)
    assert now.tzinfo is None
    assert abs(now - local) < timedelta(seconds=5)


SESSION_ZONES = {
    "sqlite": "SELECT 1",
    "postgresql": "SET TIME ZONE 'Asia/Tokyo'",
    "mysql": "SET time_zone = '+09:00'",
}


def test_the_session_s_time_zone_is_of_no_account(alias: str) -> None:
    """oxpull/django-ox#16 (USE_TZ): nor is it for the default of a column."""
    with fresh_connection(alias):
        run(alias, SESSION_ZONES[connections[alias].vendor])
        now = db.now(alias)
        run(
            alias,
            "INSERT INTO jobqueue_job (queue, task, args, kwargs, priority, state, attempt,"
            " max_attempts, excused, backoff, version, progress, progress_note, workspace,"
            f" metadata) VALUES ('default', '{TASK}', '[]', '{{}}', 0, 'waiting', 0, 1, 0, '{{}}',"
            " 0, 0, '', '', '{}')",
        )
    job = Job.objects.get()
    assert abs(now - datetime.now(UTC)) < timedelta(seconds=5)
    assert abs(job.run_after - now) < timedelta(seconds=5)
    assert abs(job.enqueued_at - now) < timedelta(seconds=5)


# -- locks


def test_locked_rows_are_waited_for(alias: str) -> None:
    QueueFactory(name="a")
    with transaction.atomic(using=alias):
        list(db.lock_rows(Queue.objects.all()))
        other = run_in_thread(pause, "a")
        wait_until_blocked(alias)
        assert not other.done
    assert other.result() == 1


@servers_only
def test_locked_rows_are_skipped_on_demand(alias: str) -> None:
    for name in "ab":
        QueueFactory(name=name)
    with transaction.atomic(using=alias):
        list(db.lock_rows(Queue.objects.filter(name="a")))
        with fresh_connection(alias), transaction.atomic(using=alias):
            free = db.lock_rows(Queue.objects.order_by("name"), skip_locked=True)
            assert [queue.name for queue in free] == ["b"]


# -- passing troubles


def test_a_lock_timeout_is_tried_again(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    QueueFactory(name="a")
    with fresh_connection(alias), open_elsewhere(alias, lambda: pause("a")) as release:
        never_wait_for_locks(alias)
        waited: list[float] = []
        monkeypatch.setattr(db.trouble.time, "sleep", lambda wait: (waited.append(wait), release()))
        assert db.in_transaction(alias, lambda: pause("a")) == 1
    assert len(waited) == 1


def test_after_six_tries_the_error_is_raised(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    QueueFactory(name="a")
    waited: list[float] = []
    monkeypatch.setattr(db.trouble.time, "sleep", waited.append)
    with fresh_connection(alias), open_elsewhere(alias, lambda: pause("a")):
        never_wait_for_locks(alias)
        with pytest.raises(DatabaseError) as raised:
            db.retry_transient(alias, lambda: pause("a"))
    assert db.is_transient(raised.value)
    assert len(waited) == db.TRIES - 1


def test_inside_a_transaction_nothing_is_tried_again(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the whole transaction can be run again, and that is its owner's to do."""
    QueueFactory(name="a")
    monkeypatch.setattr(db.trouble.time, "sleep", lambda wait: pytest.fail("tried again"))
    with other_connection(alias) as connection, use_connection(connection):
        if connection.vendor == "sqlite":
            connection.ensure_connection()
            connection.transaction_mode = None  # or the lock would be missed at BEGIN already
        with open_elsewhere(alias, lambda: pause("a")):
            never_wait_for_locks(alias)
            with pytest.raises(DatabaseError), transaction.atomic(using=alias):  # noqa: PT012
                list(Queue.objects.all())
                db.in_transaction(alias, lambda: pause("a"))


@servers_only
def test_a_deadlock_is_tried_again(alias: str) -> None:
    for name in "ab":
        QueueFactory(name=name)
    attempts: list[str] = []

    def crosswise(first: str, second: str) -> None:
        attempts.append(first)
        pause(first)
        if attempts == ["a"]:
            other.append(run_in_thread(db.in_transaction, alias, lambda: crosswise("b", "a")))
            wait_until_blocked(alias)
        pause(second)

    other: list[Any] = []
    db.in_transaction(alias, lambda: crosswise("a", "b"))
    other[0].result()

    assert len(attempts) == 3


def raised_by(work: Callable[[], object]) -> DatabaseError:
    with pytest.raises(DatabaseError) as raised:
        work()
    return raised.value


def test_other_errors_are_raised_at_once(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(db.trouble.time, "sleep", lambda wait: pytest.fail("tried again"))
    QueueFactory(name="a")
    twice = raised_by(lambda: db.in_transaction(alias, lambda: Queue.objects.create(name="a")))
    nonsense = raised_by(lambda: db.retry_transient(alias, lambda: run(alias, "NONSENSE")))
    assert isinstance(twice, IntegrityError)
    assert not db.is_transient(twice)
    assert not db.is_transient(nonsense)
    assert not db.is_transient(ValueError())


def test_waits_double_and_are_spread() -> None:
    bounds = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    for wait, bound in zip(islice(db.waits(), len(bounds)), bounds, strict=True):
        assert bound / 2 <= wait <= bound


# -- broken connections


@contextmanager
def killed_session(alias: str) -> Iterator[None]:
    """Work on a session that an administrator has just ended."""
    own = {"postgresql": "SELECT pg_backend_pid()", "mysql": "SELECT CONNECTION_ID()"}
    kill = {"postgresql": "SELECT pg_terminate_backend({})", "mysql": "KILL {}"}
    with fresh_connection(alias):
        vendor = connections[alias].vendor
        (session,) = run(alias, own[vendor])
        with fresh_connection(alias):
            run(alias, kill[vendor].format(session))
        yield


@servers_only
def test_a_lost_connection_is_no_passing_trouble(alias: str) -> None:
    with killed_session(alias):
        error = raised_by(lambda: db.retry_transient(alias, Queue.objects.exists))
        assert not db.is_transient(error)
        assert not db.can_go_on(alias)


@servers_only
def test_a_broken_connection_is_replaced_by_revive(alias: str) -> None:
    with killed_session(alias):
        raised_by(Queue.objects.exists)
        db.revive(alias)
        assert Queue.objects.exists() is False
        assert db.can_go_on(alias)


def test_a_good_connection_is_kept_by_revive(alias: str) -> None:
    """Whatever CONN_MAX_AGE says: a connection for each query is what makes a worker slow."""
    with fresh_connection(alias):
        raised_by(lambda: run(alias, "NONSENSE"))
        session = connections[alias].connection
        db.revive(alias)
        assert connections[alias].connection is session
        assert not connections[alias].errors_occurred


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_a_text_that_no_array_holds_is_refused(alias: str) -> None:
    """Rather than become two, which would move all that follow."""
    with connections[alias].cursor() as cursor, pytest.raises(DataError, match="NUL"):
        cursor.execute("SELECT %s::text[]", [array(["a\x00b", "c"])])


def test_one_can_go_on_after_an_error_of_one_s_own_only_outside_a_transaction(alias: str) -> None:
    raised_by(lambda: run(alias, "NONSENSE"))
    assert db.can_go_on(alias)
    with transaction.atomic(using=alias):
        assert not db.can_go_on(alias)


def test_a_transaction_that_a_job_left_open_is_given_up(alias: str) -> None:
    def job() -> tuple[bool, bool]:
        transaction.atomic(using=alias).__enter__()
        JobFactory()
        db.after_job()
        return connections[alias].in_atomic_block, Job.objects.exists()

    assert run_in_thread(job).result() == (False, False)


def test_jobs_begin_and_end_as_requests_do(alias: str) -> None:
    def job(max_age: int | None) -> tuple[bool, bool]:
        Queue.objects.exists()
        connection = connections[alias]
        connection.close_at = None if max_age is None else 0
        before = connection.connection
        db.before_job()
        Queue.objects.exists()
        renewed = connection.connection is not before
        connection.close_at = None if max_age is None else 0
        db.after_job()
        return renewed, connection.connection is None

    assert run_in_thread(job, 0).result() == (True, True)
    assert run_in_thread(job, None).result() == (False, False)
