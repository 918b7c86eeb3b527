"""What the tests of coordinators and of their races have in common.

A coordinator never waits for a lock: it looks, is refused, pauses and looks again. So its races
need no thread. Let a rival hold the row, and act in the pause::

    with rival(alias) as other, pausing(other.commit), impatient(alias):
        other.do(transitions.complete, job)
        coordinator.fail(job.pk, actor="ann")  # refused, pauses, finds the job completed
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from jobqueue import coordinator, db
from jobqueue.models import Job
from tests.helpers import other_connection, use_connection
from tests.races.scenes import write_raw

FENCE = re.compile(r"\bversion\W = \(?%s")

# Every verb of a coordinator, with the arguments that it needs.
CALLS: dict[str, Callable[..., Any]] = {
    "complete": lambda job, **by: coordinator.complete(job.pk, {"by": "ann"}, **by),
    "fail": lambda job, **by: coordinator.fail(job.pk, **by),
    "cancel": lambda job, **by: coordinator.cancel(job.pk, **by),
    "force cancel": lambda job, **by: coordinator.cancel(job.pk, force=True, **by),
    "release": lambda job, **by: coordinator.release(job.pk, **by),
    "rerun": lambda job, **by: coordinator.rerun(job.pk, **by),
    "edit": lambda job, **by: coordinator.edit(job.pk, priority=7, **by),
    "delete": lambda job, **by: coordinator.delete(job.pk, **by),
}
# A state from which each of them may be used.
FROM = {
    **dict.fromkeys(("complete", "fail", "cancel", "force cancel", "release"), "running"),
    **dict.fromkeys(("rerun", "delete"), "failed"),
    "edit": "waiting",
}

# By what name a refused write of theirs is known.
WANTED = {verb: verb for verb in CALLS} | {"cancel": "request cancel", "force cancel": "cancel"}


class Rival:
    """Somebody else in a transaction, on a connection of its own, in this thread."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self.connection = connection
        self._transaction = transaction.atomic(using=connection.alias)
        self._is_open = True
        self.do(self._transaction.__enter__)

    def do(self, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call on the rival's connection."""
        with use_connection(self.connection):
            return act(*args, **kwargs)

    def lock(self, job: Job) -> None:
        """Take the row's lock, as a coordinator does."""
        assert self.do(lambda: db.lock_rows(Job.objects.filter(pk=job.pk)).first())

    def commit(self) -> None:
        """End the transaction; once is enough."""
        if self._is_open:
            self._is_open = False
            self.do(self._transaction.__exit__, None, None, None)

    def session(self) -> int:
        """Return the number by which the server's lists call this session."""
        with self.connection.cursor() as cursor:
            name = {"postgresql": "pg_backend_pid()", "mysql": "connection_id()"}
            cursor.execute(f"SELECT {name[self.connection.vendor]}")
            return int(cursor.fetchone()[0])


@contextmanager
def rival(alias: str) -> Iterator[Rival]:
    """Begin somebody else's transaction; it is committed at the end, if not before."""
    with other_connection(alias) as connection:
        other = Rival(connection)
        try:
            yield other
        finally:
            other.commit()


@contextmanager
def impatient(alias: str, **options: Any) -> Iterator[BaseDatabaseWrapper]:
    """Give this thread a connection that, on SQLite too, is refused a lock at once."""
    if connections[alias].vendor == "sqlite":
        options["timeout"] = 0
    with other_connection(alias, **options) as connection, use_connection(connection):
        yield connection


@contextmanager
def pausing(act: Callable[[], Any] = lambda: None, *, at: int = 1) -> Iterator[list[float]]:
    """Let coordinators not wait between tries, but call ``act`` in the pause of number ``at``.

    Yields the waits that they wanted, in seconds.
    """
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == at:
            act()

    with mock.patch.object(coordinator, "time", SimpleNamespace(sleep=sleep)):
        yield waits


@contextmanager
def at_fenced(act: Callable[[], Any], *, times: int = 2**31) -> Iterator[list[str]]:
    """Call ``act`` just before each statement of this thread that compares a job's version.

    So between a coordinator's look and its write, in its own transaction. Yields the statements.
    """
    met: list[str] = []
    is_acting = False

    def wrap(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal is_acting
        if not is_acting and len(met) < times and FENCE.search(sql):
            met.append(sql)
            is_acting = True
            try:
                act()
            finally:
                is_acting = False
        return execute(sql, params, many, context)

    with connections[router.db_for_write(Job)].execute_wrapper(wrap):
        yield met


def meddling(job: Job, *, times: int = 2**31, **columns: Any) -> Any:
    """Write to the row behind a verb's back, with raw SQL, as somebody outside the rules would.

    The version stays as it is. A try that is rolled back takes this along.
    """
    return at_fenced(lambda: write_raw(job, **columns), times=times)


def assert_growing(waits: list[float], number: int) -> None:
    """Check for waits of 100, 200, 400 ms, each shortened by up to a half."""
    assert len(waits) == number
    for place, wait in enumerate(waits):
        assert 0.05 * 2**place <= wait <= 0.1 * 2**place


def history(job: Job) -> list[dict[str, Any]]:
    """Return what the job's events say, without when."""
    names = ("kind", "from_state", "to_state", "actor", "message", "version", "detail")
    return list(job.events.values(*names))
