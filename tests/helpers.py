"""Tools for races with a chosen winner: second connections, threads, pause points, no sleeps.

Every wait has a deadline, and a wait that misses it fails the test.

Hold the lock, let the loser block, change the row, commit::

    with transaction.atomic(using=alias):
        Job.objects.select_for_update().get(pk=job.pk)
        loser = run_in_thread(transitions.complete, job)
        wait_until_blocked(alias)
        ...  # change the row
    with pytest.raises(TransitionConflict):
        loser.result()

Stop the loser between its read and its write::

    with pause_at(alias, statement("UPDATE", "jobqueue_job")) as pause:
        loser = run_in_thread(sweep_stale_jobs)
        pause.wait_until_reached()
        ...  # the winner acts
        pause.release()
    report = loser.result()
"""

from __future__ import annotations

import copy
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import pytest
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from tests import servers

P = ParamSpec("P")
T = TypeVar("T")

# Long enough for a machine that is busy with something else, short enough to be waited for.
TIMEOUT = 20.0

# By name, in the order in which tests run; the value is the database's alias.
ENGINES = {"sqlite": "default", "postgresql": "postgresql", "mariadb": "mariadb"}


def engine(name: str) -> Any:
    """Return the parameter that runs a test on one engine.

    For a test that makes sense on some engines only::

        @pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
    """
    missing = servers.missing_engines()
    if name in missing:
        return pytest.param(ENGINES[name], id=name, marks=pytest.mark.skip(reason=missing[name]))
    marker = pytest.mark.django_db(transaction=True, databases=[ENGINES[name]])
    return pytest.param(ENGINES[name], id=name, marks=marker)


def child_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a child process that works on this session's databases."""
    checkout = str(Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PYTHONPATH": os.pathsep.join([checkout, inherited] if inherited else [checkout]),
        **variables,
    }


def wait_until(condition: Callable[[], T], message: str, *, timeout: float = TIMEOUT) -> T:
    """Poll ``condition`` until it is true and return its value; fail with ``message`` otherwise."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"{message} (waited {timeout:g} s)")
        time.sleep(0.01)
    return value


# -- connections ----------------------------------------------------------------------------------


@contextmanager
def other_connection(alias: str, **options: Any) -> Iterator[BaseDatabaseWrapper]:
    """Open a second connection to the test database of ``alias``, for use in this thread.

    ``options`` go into its OPTIONS: ``timeout=0`` makes SQLite give up at once.
    """
    connection = connections.create_connection(alias)
    connection.settings_dict = copy.deepcopy(connections[alias].settings_dict)
    connection.settings_dict["OPTIONS"].update(options)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def use_connection(connection: BaseDatabaseWrapper) -> Iterator[None]:
    """Make this thread's ORM calls go through ``connection`` instead of its usual one.

    So one thread can act as two: a transaction begun inside goes on while the block is left.
    """
    usual = connections[connection.alias]
    connections[connection.alias] = connection
    try:
        yield
    finally:
        connections[connection.alias] = usual


# -- threads --------------------------------------------------------------------------------------


class Running(Generic[T]):
    """A call in another thread."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    @property
    def done(self) -> bool:
        """Whether the call has ended."""
        return self._future.done()

    def result(self, timeout: float = TIMEOUT) -> T:
        """Return what the call returned, or raise what it raised."""
        self.thread.join(timeout)
        if self.thread.is_alive():
            pytest.fail(f"the other thread has not ended (waited {timeout:g} s)")
        return self._future.result()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._future.set_result(call())
        except BaseException as error:
            self._future.set_exception(error)
        finally:
            connections.close_all()


_started: list[threading.Thread] = []


def run_in_thread(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Running[T]:
    """Call in a thread with connections of its own, which it closes at the end."""
    running = Running(lambda: call(*args, **kwargs))
    _started.append(running.thread)
    return running


def assert_threads_done() -> None:
    """Fail if a thread of ``run_in_thread`` outlives its test; the ``alias`` fixture calls this."""
    while _started:
        thread = _started.pop()
        thread.join(TIMEOUT)
        assert not thread.is_alive(), "the test ended, but a thread that it started did not"


# -- pause points ---------------------------------------------------------------------------------


def statement(verb: str, table: str) -> Callable[[str], bool]:
    """Return a predicate for ``pause_at``: SQL that begins with ``verb`` and names ``table``."""
    return lambda sql: first_part(sql).upper().startswith(verb.upper()) and table in sql


def first_part(sql: str) -> str:
    """Return SQL without the head of a WITH clause: an update may insert its events as well."""
    return re.sub(r"^WITH \w+ \([^)]*\) AS \(", "", sql.lstrip())


class Pause:
    """Where a thread stands still; the first statement that matches does, later ones pass."""

    def __init__(self, matches: Callable[[str], bool], *, after: bool) -> None:
        self._matches = matches
        self._after = after
        self._turn = threading.Lock()
        self._reached = threading.Event()
        self._released = threading.Event()

    def wait_until_reached(self) -> None:
        """Wait until the chosen statement is about to run, or has run when pausing after it."""
        if not self._reached.wait(TIMEOUT):
            pytest.fail(f"nobody came to the pause point (waited {TIMEOUT:g} s)")

    def release(self) -> None:
        """Let the statement go on."""
        self._released.set()

    def __call__(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        """Execute, as a wrapper for ``connection.execute_wrapper``."""
        if not self._matches(sql) or not self._turn.acquire(blocking=False):
            return execute(sql, params, many, context)
        if self._after:
            result = execute(sql, params, many, context)
            self._stand_still(sql)
            return result
        self._stand_still(sql)
        return execute(sql, params, many, context)

    def _stand_still(self, sql: str) -> None:
        self._reached.set()
        if not self._released.wait(TIMEOUT):
            raise AssertionError(f"nobody released the pause (waited {TIMEOUT:g} s) at: {sql}")


@contextmanager
def pause_at(
    where: str | BaseDatabaseWrapper, matches: Callable[[str], bool], *, after: bool = False
) -> Iterator[Pause]:
    """Stop the first statement that matches before it runs, or ``after`` it has, until released.

    ``where`` is a connection, or an alias: then any connection to it that *another* thread opens
    while the block lasts. The end of the block releases the pause, and switches it off.
    """
    pause = Pause(matches, after=after)
    wrap = _new_connections if isinstance(where, str) else BaseDatabaseWrapper.execute_wrapper
    with wrap(where, pause):
        try:
            yield pause
        finally:
            pause.release()


@contextmanager
def _new_connections(alias: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    here = threading.current_thread()

    def wrap(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
        if connection.alias == alias and threading.current_thread() is not here:
            _wrap_once(connection, wrapper)

    connection_created.connect(wrap)
    try:
        yield
    finally:
        connection_created.disconnect(wrap)


def _wrap_once(connection: BaseDatabaseWrapper, wrapper: Callable[..., Any]) -> None:
    """Wrap a connection for its life; one that reconnects is already wrapped."""
    if wrapper not in connection.execute_wrappers:
        connection.execute_wrappers.append(wrapper)


# -- locks ----------------------------------------------------------------------------------------


def wait_until_blocked(
    alias: str, count: int = 1, *, unless: Callable[[], bool] = lambda: False
) -> None:
    """Wait until ``count`` sessions wait for a lock, which the caller must be holding.

    ``unless`` says that none will: it needed no lock, which is for the test to judge.
    """
    with other_connection(alias) as monitor:
        wait_until(
            lambda: unless() or _blocked(monitor) >= count,
            f"no {count} session(s) came to wait for a lock on {alias}",
        )


def _blocked(monitor: BaseDatabaseWrapper) -> int:
    if monitor.vendor == "sqlite":
        return _sqlite_writes.running
    with monitor.cursor() as cursor:
        if monitor.vendor == "postgresql":
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            return int(cursor.fetchone()[0])
        # Not information_schema.innodb_trx: reading it more often than every 100 ms gives the
        # answer of the first time, for ever.
        cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
        return int(cursor.fetchone()[1])


class _WritesInFlight:
    """Counts the writes that have begun and not ended.

    SQLite can't tell who waits. But while one connection holds the write lock nobody else's write
    can end, so whoever has begun one is waiting.
    """

    def __init__(self) -> None:
        self.running = 0
        self._lock = threading.Lock()

    def __call__(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        if not first_part(sql).upper().startswith(("BEGIN", "INSERT", "UPDATE", "DELETE")):
            return execute(sql, params, many, context)
        self._count(+1)
        try:
            return execute(sql, params, many, context)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            self.running += change


_sqlite_writes = _WritesInFlight()


def _count_sqlite_writes(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    if connection.vendor == "sqlite":
        _wrap_once(connection, _sqlite_writes)


connection_created.connect(_count_sqlite_writes)
