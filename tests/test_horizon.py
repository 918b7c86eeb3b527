"""Who keeps an old snapshot is named: to an operator, and in the worker's log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import DatabaseError, transaction

from jobqueue import db, status
from jobqueue.status import queue_status
from jobqueue.worker import process as processes
from tests.helpers import engine, other_connection, wait_until
from tests.races.scenes import failing
from tests.worker.tools import running_worker

on_postgresql = pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
NAME = "nightly export"


@contextmanager
def keeping_a_snapshot(alias: str) -> Iterator[None]:
    """Read in a repeatable transaction of another session, and leave it open."""
    with other_connection(alias) as other, other.cursor() as cursor:
        cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        cursor.execute(f"SET LOCAL application_name = '{NAME}'")
        cursor.execute("SELECT count(*) FROM jobqueue_job")
        cursor.fetchall()
        yield
        cursor.execute("ROLLBACK")


@on_postgresql
def test_the_session_that_keeps_the_oldest_snapshot_is_named(alias):
    with keeping_a_snapshot(alias):
        first = db.oldest_snapshot(alias)
        wait_until(lambda: db.oldest_snapshot(alias).age > first.age, "it does not age")
    assert NAME in first.holder
    assert "idle in transaction" in first.holder
    assert str(db.Snapshot("session 7 (x)", 61.4)) == "session 7 (x) has kept a snapshot for 61 s"


@on_postgresql
def test_a_prepared_transaction_is_named_as_well(alias):
    """It has no session, and is forgotten for months."""
    with other_connection(alias) as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT pg_current_xact_id()")
        cursor.execute("PREPARE TRANSACTION 'payment 17'")
        try:
            assert "prepared transaction payment 17" in db.oldest_snapshot(alias).holder
        finally:
            cursor.execute("ROLLBACK PREPARED 'payment 17'")


def test_nobody_keeps_one(alias):
    """And other engines don't tell."""
    snapshot = db.oldest_snapshot(alias)
    assert snapshot is None or NAME not in snapshot.holder


@on_postgresql
def test_one_who_may_not_look_is_told_nothing(alias):
    refused = failing(alias, lambda sql, params: "pg_stat_activity" in sql, DatabaseError("no"))
    with refused as met, transaction.atomic(using=alias):
        assert db.oldest_snapshot(alias) is None
        assert queue_status().snapshot is None
    assert len(met) == 2


@on_postgresql
def test_queue_status_names_the_holder_once_it_is_old(alias, monkeypatch):
    out = StringIO()
    with keeping_a_snapshot(alias):
        assert queue_status().snapshot is None
        monkeypatch.setattr(status, "OLD_SNAPSHOT", 0.0)
        call_command("queue_status", stdout=out)
    (line,) = [line for line in out.getvalue().splitlines() if "snapshot" in line]
    assert line.startswith("Claims grow slower: session ")
    assert NAME in line


@on_postgresql
def test_the_worker_logs_the_holder_with_each_sweep(alias, monkeypatch, settings, caplog):
    monkeypatch.setattr(processes, "OLD_SNAPSHOT", 0.0)
    settings.JOBQUEUE = {**settings.JOBQUEUE, "SWEEP_INTERVAL": 0.05}
    caplog.set_level(logging.WARNING, "jobqueue")
    with keeping_a_snapshot(alias), running_worker(alias):
        wait_until(lambda: NAME in caplog.text, "it is not logged")
    assert "Claims of worker " in caplog.text
