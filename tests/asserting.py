"""What the tests of birth, configuration, admin and commands have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction

from jobqueue import db
from jobqueue.models import Job
from tests.helpers import engine, other_connection, use_connection

# For what SQLite, which has no server, does otherwise.
servers_only = pytest.mark.parametrize(
    "alias", [engine("postgresql"), engine("mariadb")], indirect=True
)
IMPATIENCE = {
    "sqlite": "PRAGMA busy_timeout = 0",
    "postgresql": "SET lock_timeout = '1ms'",
    "mysql": "SET SESSION innodb_lock_wait_timeout = 0",
}


def exactly(message: str) -> str:
    """Return the pattern for ``pytest.raises(match=)`` that matches the whole of ``message``."""
    return f"^{re.escape(message)}$"


def stored(job: Job) -> dict[str, Any]:
    """Return every column of a job as it is in the database."""
    return Job.objects.filter(pk=job.pk).values().get()


@contextmanager
def unmigrated(alias: str) -> Iterator[None]:
    """Take the tables of the queue away."""
    call_command("migrate", "jobqueue", "zero", database=alias, verbosity=0)
    try:
        yield
    finally:
        call_command("migrate", "jobqueue", database=alias, verbosity=0)


class HostAhead(datetime):
    """The clock of a host that is an hour ahead."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        """Return a time that hasn't come yet."""
        return datetime.now(tz) + timedelta(hours=1)

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it the clock of Django, and of the only module of ours that asks a host's."""
        monkeypatch.setattr(db, "datetime", cls)
        monkeypatch.setattr("django.utils.timezone.now", lambda: cls.now(UTC))


def set_clock(patch: pytest.MonkeyPatch, now: Callable[[str], datetime]) -> None:
    """Let ``now`` be the clock of each database, also where a statement would tell its own time."""
    patch.setattr(db, "now", now)
    patch.setattr(db, "tells_update_time", lambda using: False)


# -- passing troubles


def run(alias: str, sql: str) -> Any:
    """Execute raw SQL; return the first row, if it is a question."""
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone() if cursor.description else None


@contextmanager
def fresh_connection(alias: str) -> Iterator[None]:
    """Do what may spoil a session on one that is thrown away."""
    with other_connection(alias) as connection, use_connection(connection):
        yield


def never_wait_for_locks(alias: str) -> None:
    """Have this session fail at once where it would wait."""
    run(alias, IMPATIENCE[connections[alias].vendor])


@contextmanager
def open_elsewhere(alias: str, work: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Do ``work`` in another session's transaction; yield what rolls that back, before the end."""
    with other_connection(alias) as other:
        block = transaction.atomic(using=alias)
        with use_connection(other):
            block.__enter__()
            work()

        def roll_back() -> None:
            if other.in_atomic_block:
                with use_connection(other):
                    transaction.set_rollback(True, using=alias)
                    block.__exit__(None, None, None)

        try:
            yield roll_back
        finally:
            roll_back()


REFUSE = {
    "sqlite": (
        "CREATE TRIGGER stubborn BEFORE UPDATE ON jobqueue_job WHEN OLD.id = {} "
        "BEGIN SELECT RAISE(ABORT, 'stubborn'); END",
    ),
    "postgresql": (
        "CREATE OR REPLACE FUNCTION stubborn() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF OLD.id = {} THEN RAISE 'stubborn'; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER stubborn BEFORE UPDATE ON jobqueue_job "
        "FOR EACH ROW EXECUTE FUNCTION stubborn()",
    ),
    "mysql": (
        "CREATE TRIGGER stubborn BEFORE UPDATE ON jobqueue_job FOR EACH ROW BEGIN IF OLD.id = {} "
        "THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'stubborn'; END IF; END",
    ),
}


@contextmanager
def stubborn(alias: str, job: Job) -> Iterator[None]:
    """Have the database itself refuse every change of one row."""
    vendor = connections[alias].vendor
    for sql in REFUSE[vendor]:
        run(alias, sql.format(job.pk))
    try:
        yield
    finally:
        run(alias, "DROP TRIGGER stubborn" + (" ON jobqueue_job" * (vendor == "postgresql")))
