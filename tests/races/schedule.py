"""Two calls, one order: the first stands still at a chosen statement while the second runs.

A schedule is one line, and running it again gives the same race::

    postgresql: running | worker.complete @3 / operator.force-cancel

The worker's call stands still before its third statement (COMMIT counts as one, and so does
SQLite's BEGIN); then the operator's runs whole. Where that comes to wait for a lock of the first,
the first goes on to the end of its transaction, stands still again until the second is done, and
then ends. So no two statements ever run at the same time, but for one that waits for a lock.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from tests.helpers import TIMEOUT, other_connection

FIRST, SECOND = "first", "second"
COMMIT, ROLLBACK = "commit", "rollback"
# When to look for the first time whether the second waits for a lock, in seconds.
PATIENCE = 0.001

_LINE = re.compile(r"(\w+): (.+) \| (\S+) @(\d+) / (\S+)")
_TABLE = re.compile(r"\b(?:FROM|UPDATE|INTO) [`\"]jobqueue_(\w+)[`\"]")
# What can come to wait for a lock.
_WAITING = ("begin", "insert", "update", "delete", "lock")
_ACTIONS = {"SELECT": "read", "UPDATE": "update", "INSERT": "insert", "DELETE": "delete"}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who stands still where, and who runs meanwhile."""

    engine: str
    state: str
    first: str
    point: int
    second: str

    def __str__(self) -> str:
        return f"{self.engine}: {self.state} | {self.first} @{self.point} / {self.second}"

    @classmethod
    def parse(cls, line: str) -> Schedule:
        """Return the schedule that was printed as ``line``."""
        if not (match := _LINE.fullmatch(line.strip())):
            raise ValueError(
                f"{line!r} is no schedule; one looks like this: "
                "sqlite: running | worker.complete @2 / operator.fail"
            )
        engine, state, first, point, second = match.groups()
        return cls(engine, state, first, int(point), second)


@dataclass(frozen=True, slots=True)
class Entry:
    """One statement or end of a transaction, in the order in which they took effect.

    ``kind`` is what was done to which table, "update job"; a row that is read so that nobody else
    can change it until the transaction ends is locked: "lock job".
    """

    who: str
    kind: str
    sql: str
    params: tuple[Any, ...] = ()
    rows: int = 0
    error: Exception | None = None
    in_transaction: bool = False

    @property
    def outline(self) -> tuple[str, str, int, str]:
        """What is the same each time."""
        return self.who, self.kind, self.rows, type(self.error).__name__

    def __str__(self) -> str:
        tail = f" -> {type(self.error).__name__}" if self.error else f" -> {self.rows} row(s)"
        place = "in a transaction" if self.in_transaction else "alone"
        return f"{self.who:6} {self.kind:16} {place}{tail}: {self.sql:.600}"


@dataclass(slots=True)
class Ended:
    """What a call returned or raised."""

    value: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class Run:
    """What happened: the log of both, and how each call ended."""

    log: list[Entry] = field(default_factory=list)
    ended: dict[str, Ended] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(f"    {entry}" for entry in self.log)


class Stuck(AssertionError):
    """Somebody waited for nobody, or didn't come where the schedule wants it."""


class Seat:
    """A thread with a connection of its own, in which one call after another is made."""

    def __init__(self, who: str, alias: str) -> None:
        self.who = who
        self.alias = alias
        self.in_transaction = False
        self.executing = ""
        self.session = 0
        self._log: list[Entry] = []
        self._points = 0
        self._stop_at: int | None = None
        self._stop_after_transaction = False
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._news: SimpleQueue[Ended | None] = SimpleQueue()
        self._go: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.news()

    # -- For whoever conducts

    def begin(self, call: Callable[[], Any], log: list[Entry], stop_at: int | None = None) -> None:
        """Make the call; stand still before the statement of that number, from 1."""
        self._log, self._points, self._stop_at = log, 0, stop_at
        self._calls.put(call)

    def news(self, timeout: float = TIMEOUT) -> Ended | None:
        """Wait for the call to end, or to stand still: ``None``."""
        try:
            return self._news.get(timeout=timeout)
        except Empty:
            raise Stuck(f"the {self.who} neither ended nor stood still: {self.executing}") from None

    def news_unless(self, is_blocked: Callable[[], bool]) -> Ended | None:
        """Wait for the call to end, ``None`` once it waits for a lock."""
        deadline, patience = time.monotonic() + TIMEOUT, PATIENCE
        while time.monotonic() < deadline:
            try:
                return self._news.get(timeout=patience)
            except Empty:
                if is_blocked():
                    return None
            patience *= 2  # Looking costs the time of whom it looks at, on a busy machine.
        raise Stuck(f"the {self.who} neither ended nor waits for a lock: {self.executing}")

    def go(self, *, to_end_of_transaction: bool = False) -> None:
        """Let a call that stands still go on."""
        self._stop_after_transaction = to_end_of_transaction
        self._go.put(None)

    def leave(self) -> None:
        """End the thread and close its connection; one that still stands goes on."""
        self._go.put(None)
        self._calls.put(None)
        self._thread.join(TIMEOUT)
        if self._thread.is_alive():
            raise Stuck(f"the {self.who} has not left: {self.executing}")

    # -- In the thread

    def _serve(self) -> None:
        connection = connections[self.alias]
        connection.ensure_connection()
        self.session = _session(connection)
        connection.execute_wrappers.append(self._execute)
        connection._commit = self._ending(COMMIT, connection._commit)
        connection._rollback = self._ending(ROLLBACK, connection._rollback)
        self._news.put(None)
        try:
            while call := self._calls.get():
                try:
                    self._news.put(Ended(call()))
                except Exception as error:
                    self._news.put(Ended(error=error))
        finally:
            connection.close()

    def _execute(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        connection, cursor = context["connection"], context["cursor"]
        self._point()
        within = connection.in_atomic_block
        self.executing = sql
        rows, failure = 0, None
        try:
            result = execute(sql, params, many, context)
            rows = cursor.rowcount
            return result
        except Exception as error:
            failure = error
            raise
        finally:
            self.executing = ""
            self.in_transaction = within or sql.startswith("BEGIN")
            locks = within and connection.vendor == "sqlite"
            kind = _kind(sql, locks=locks)
            self._log.append(Entry(self.who, kind, sql, tuple(params or ()), rows, failure, within))

    def _ending(self, kind: str, end: Callable[[], Any]) -> Callable[[], None]:
        def hook() -> None:
            if kind == COMMIT:
                self._point()
            # Before the end itself, for whoever waits for it goes on at once.
            self._log.append(Entry(self.who, kind, kind.upper(), in_transaction=True))
            end()
            self.in_transaction = False
            if self._stop_after_transaction:
                self._stop_after_transaction = False
                self._stand_still()

        return hook

    def _point(self) -> None:
        self._points += 1
        if self._points == self._stop_at:
            self._stand_still()

    def _stand_still(self) -> None:
        self._news.put(None)
        self._go.get(timeout=TIMEOUT)


def _session(connection: BaseDatabaseWrapper) -> int:
    if connection.vendor == "postgresql":
        return int(connection.connection.info.backend_pid)
    return 0


def _kind(sql: str, *, locks: bool) -> str:
    word = sql.split(maxsplit=1)[0].upper()
    table = _TABLE.search(_without_subqueries(sql)) or _TABLE.search(sql)
    if not table or word not in _ACTIONS:
        return word.lower()
    action = _ACTIONS[word]
    if action == "read" and (locks or " FOR UPDATE" in sql):
        action = "lock"
    return f"{action} {table[1]}"


def _without_subqueries(sql: str) -> str:
    """Leave out whatever stands in parentheses."""
    before = ""
    while before != sql:
        before, sql = sql, re.sub(r"\([^()]*\)", "", sql)
    return sql


class Stage:
    """Two seats on one engine, and a third connection that sees who waits for a lock."""

    def __init__(self, alias: str, monitor: BaseDatabaseWrapper) -> None:
        self._monitor = monitor
        self.first = Seat(FIRST, alias)
        self.second = Seat(SECOND, alias)

    def alone(self, call: Callable[[], Any]) -> Run:
        """Let the first call run with nobody beside it: what are its pause points?"""
        run = Run()
        self.first.begin(call, run.log)
        run.ended[FIRST] = self._ended(self.first)
        return run

    def race(self, first: Callable[[], Any], point: int, second: Callable[[], Any]) -> Run:
        """Let the first stand still at its pause point, and the second run meanwhile."""
        run = Run()
        self.first.begin(first, run.log, stop_at=point)
        if self.first.news() is not None:
            raise Stuck(f"the first ended without coming to its pause point {point}")
        self.second.begin(second, run.log)
        ended = self._try_to_end_second()
        if ended is None:
            self.first.go(to_end_of_transaction=True)
            if self.first.news() is not None:
                raise Stuck("the first ended without ending the transaction it was waited for")
            ended = self._ended(self.second)
        run.ended[SECOND] = ended
        self.first.go()
        run.ended[FIRST] = self._ended(self.first)
        return run

    def _try_to_end_second(self) -> Ended | None:
        if not self.first.in_transaction:  # Nobody has a lock, so waiting for one is a fault.
            return self._ended(self.second)
        return self.second.news_unless(self._is_second_blocked)

    def _is_second_blocked(self) -> bool:
        vendor = self._monitor.vendor
        waiting = _kind(self.second.executing or "-", locks=False).startswith(_WAITING)
        if vendor == "sqlite" or not waiting:
            return waiting  # There the first has the only write lock, so no write can end.
        with self._monitor.cursor() as cursor:
            if vendor == "postgresql":
                cursor.execute(
                    "SELECT %s = ANY(pg_blocking_pids(%s))",
                    [self.first.session, self.second.session],
                )
                return bool(cursor.fetchone()[0])
            # Not innodb_trx, which gives its first answer for ever if it is read too often.
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
            return int(cursor.fetchone()[1]) > 0

    def _ended(self, seat: Seat) -> Ended:
        ended = seat.news()
        if ended is None:
            raise Stuck(f"the {seat.who} stands still where it should have ended")
        return ended


@contextmanager
def stage(alias: str) -> Iterator[Stage]:
    """Open the seats and the monitor; close them at the end."""
    with other_connection(alias) as monitor:
        opened = Stage(alias, monitor)
        try:
            yield opened
        finally:
            opened.first.leave()
            opened.second.leave()
