"""Passing troubles: which errors another try may get past, and how long to wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Final, TypeVar

from django.db import DatabaseError, connections, transaction

from jobqueue.backoff import Backoff

Result = TypeVar("Result")

# SQLSTATE: serialization_failure, deadlock_detected, lock_not_available.
_TRANSIENT_SQLSTATES: Final = frozenset({"40001", "40P01", "55P03"})
# MySQL and MariaDB: lock wait timeout, deadlock, record changed since last read (snapshot mode),
# lock not available at once.
_TRANSIENT_ERRNOS: Final = frozenset({1205, 1213, 1020, 3572})
# The part of them that says: somebody else has the lock, and waiting is over or wasn't wanted.
_LOCK_REFUSED: Final = frozenset({"55P03", 1205, 3572})
_SQLITE_LOCKED: Final = ("database is locked", "database table is locked")

TRIES: Final = 6
FIRST_WAIT: Final = 0.05
LONGEST_WAIT: Final = 2.0


def is_transient(error: BaseException) -> bool:
    """Say whether running the same transaction again may well succeed."""
    cause = error.__cause__ or error
    if getattr(cause, "sqlstate", None) in _TRANSIENT_SQLSTATES:
        return True
    code = cause.args[0] if cause.args else None
    return code in _TRANSIENT_ERRNOS or (isinstance(code, str) and code.startswith(_SQLITE_LOCKED))


def is_lock_refused(error: BaseException) -> bool:
    """Say whether the error is just that somebody else has a row's lock."""
    cause = error.__cause__ or error
    code = cause.args[0] if cause.args else None
    return getattr(cause, "sqlstate", None) in _LOCK_REFUSED or code in _LOCK_REFUSED


def can_go_on(using: str) -> bool:
    """Say whether, after an error, another transaction can be tried on this connection."""
    connection = connections[using]
    if connection.in_atomic_block:
        return False
    try:
        connection.ensure_connection()
    except DatabaseError:
        return False
    return connection.is_usable()


def waits(first: float = FIRST_WAIT, longest: float = LONGEST_WAIT) -> Iterator[float]:
    """Yield growing waits in seconds, without end: doubled each time, spread by up to a half."""
    policy = Backoff(base=first, cap=longest, jitter=0.5)
    for failures in count(1):
        yield policy.delay(failures).total_seconds()


def is_in_transaction(using: str) -> bool:
    """Say whether what is written now is committed with what else the caller writes."""
    connection = connections[using]
    return connection.in_atomic_block or not connection.get_autocommit()


def retry_transient(using: str, work: Callable[[], Result]) -> Result:
    """Return ``work()``, run again after a deadlock, a lock timeout or a locked database.

    Inside a caller's transaction it runs once: only the whole of that can be run again.

    Raises:
        DatabaseError: anything else, or the last of 6 transient errors.
    """
    pauses = waits()
    for left in range(TRIES - 1, -1, -1):
        try:
            return work()
        except DatabaseError as error:
            if not left or connections[using].in_atomic_block or not is_transient(error):
                raise
            time.sleep(next(pauses))
    raise AssertionError("unreachable")  # pragma: no cover


def in_transaction(using: str, work: Callable[[], Result]) -> Result:
    """Run ``work`` in a transaction of its own (or a savepoint of the caller's); see above."""

    def attempt() -> Result:
        with transaction.atomic(using=using):
            return work()

    return retry_transient(using, attempt)
