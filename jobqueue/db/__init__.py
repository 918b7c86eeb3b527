"""What each engine can do, and its clock: all vendor knowledge is in this package."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from django.conf import settings
from django.db import (
    DatabaseError,
    connections,
    models,
    transaction,
)
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.backends.signals import connection_created
from django.db.models import F, Func, Index, Lookup, Q, QuerySet, UniqueConstraint, Value
from django.db.models.functions import Concat, Now
from django.db.models.lookups import In
from django.db.models.sql.compiler import SQLCompiler
from django.dispatch import receiver
from django.utils import timezone

from jobqueue.db.alike import Alike as Alike
from jobqueue.db.alike import drawn_between as drawn_between
from jobqueue.db.alike import pages_alike as pages_alike
from jobqueue.db.batch import Companions as Companions
from jobqueue.db.batch import UpdateEach as UpdateEach
from jobqueue.db.batch import has_batches as has_batches
from jobqueue.db.chosen import Choice as Choice
from jobqueue.db.chosen import UpdateChosen as UpdateChosen
from jobqueue.db.convert import instance as instance
from jobqueue.db.horizon import Snapshot as Snapshot
from jobqueue.db.horizon import keeps_old_rows as keeps_old_rows
from jobqueue.db.horizon import oldest_snapshot as oldest_snapshot
from jobqueue.db.insert import insert_columns as insert_columns
from jobqueue.db.insert import insert_row as insert_row
from jobqueue.db.insert import insert_rows as insert_rows
from jobqueue.db.statement import Blank as Blank
from jobqueue.db.statement import Select as Select
from jobqueue.db.statement import Update as Update
from jobqueue.db.trouble import TRIES as TRIES
from jobqueue.db.trouble import can_go_on as can_go_on
from jobqueue.db.trouble import in_transaction as in_transaction
from jobqueue.db.trouble import is_in_transaction as is_in_transaction
from jobqueue.db.trouble import is_lock_refused as is_lock_refused
from jobqueue.db.trouble import is_transient as is_transient
from jobqueue.db.trouble import retry_transient as retry_transient
from jobqueue.db.trouble import waits as waits
from jobqueue.db.wake import Listener as Listener
from jobqueue.db.wake import can_wake as can_wake
from jobqueue.db.wake import wake_after_commit as wake_after_commit

Rows = TypeVar("Rows", bound=QuerySet[Any])

# -- The clock


class DatabaseNow(Now):
    """The database's clock, as Django stores times under ``USE_TZ``: the default of a column.

    Django's own ``Now`` is in the session's time zone on MySQL, which Django doesn't set.
    """

    def as_mysql(
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper, **extra_context: Any
    ) -> Any:
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **extra_context)


_CLOCKS: Final = {
    "postgresql": "SELECT clock_timestamp() AT TIME ZONE 'UTC'",
    "mysql": "SELECT UTC_TIMESTAMP(6)",
}


def now(using: str) -> datetime:
    """Return the time by the clock of database ``using``, in the form that Django stores.

    SQLite lives on one host and uses that host's clock.
    """
    connection = connections[using]
    clock = _CLOCKS.get(connection.vendor)
    if clock is None:
        moment = datetime.now(UTC)
    else:
        with connection.cursor() as cursor:
            cursor.execute(clock)
            moment = cursor.fetchone()[0].replace(tzinfo=UTC)
    if settings.USE_TZ:
        return moment
    return timezone.make_naive(moment, timezone.get_default_timezone())


class Clock:
    """The database's clock as it must be by now, for many times in a row that needn't be exact.

    To ask for each would cost more than what it is asked for.
    """

    def __init__(self, moment: datetime) -> None:
        self._moment = moment
        self._since = time.monotonic()

    def __call__(self) -> datetime:
        return self._moment + timedelta(seconds=time.monotonic() - self._since)


def tells_default_times(using: str) -> bool:
    """Say whether an INSERT can leave times to ``DatabaseNow`` and learn what they became.

    Without ``USE_TZ`` Django stores local time, which no engine's clock tells; and MySQL, unlike
    MariaDB, has no INSERT ... RETURNING.
    """
    return settings.USE_TZ and connections[using].features.can_return_columns_from_insert


def tells_update_time(using: str) -> bool:
    """Say whether ``UpdateChosen`` can write ``DatabaseNow``, and learn what it was."""
    return settings.USE_TZ and has_batches(using)


# -- Text that is compared as it is


class ExactCharField(models.CharField):  # type: ignore[type-arg]
    """Text of which case, accents and trailing spaces count, on MySQL too."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        parameters = super().db_parameters(connection)
        if connection.vendor == "mysql":
            is_mariadb = connection.mysql_is_mariadb  # type: ignore[attr-defined]
            parameters["collation"] = "utf8mb4_nopad_bin" if is_mariadb else "utf8mb4_0900_bin"
        return parameters


# -- Indexes that are partial where the engine can


class StateIndex(Index):
    """An index of the rows in some states: partial, or whole with ``state`` in front.

    Its states are not an ``Index.condition``, which MySQL would meet with a warning and no index.
    """

    def __init__(self, *expressions: Any, states: Any = (), **kwargs: Any) -> None:
        super().__init__(*expressions, **kwargs)
        self.states = tuple(map(str, states))

    def deconstruct(self) -> Any:
        path, args, kwargs = super().deconstruct()
        return path, args, {**kwargs, "states": self.states}

    def create_sql(
        self,
        model: type[models.Model],
        schema_editor: BaseDatabaseSchemaEditor,
        using: str = "",
        **kwargs: Any,
    ) -> Any:
        if schema_editor.connection.features.supports_partial_indexes:
            index = Index(fields=self.fields, name=self.name, condition=Q(state__in=self.states))
        else:
            rest = [field for field in self.fields if field.lstrip("-") != "state"]
            index = Index(fields=["state", *rest], name=self.name)
        return index.create_sql(model, schema_editor, using=using, **kwargs)


class ArrivalIndex(Index):
    """An index of when rows came, for questions about the latest of a table that grows at its end.

    Where the engine can it holds but the times between which each range of pages is: a tree costs
    a row that is inserted as much as the row's place in the table.
    """

    def create_sql(
        self,
        model: type[models.Model],
        schema_editor: BaseDatabaseSchemaEditor,
        using: str = "",
        **kwargs: Any,
    ) -> Any:
        if schema_editor.connection.vendor != "postgresql":
            return super().create_sql(model, schema_editor, using=using, **kwargs)
        statement: Any = super().create_sql(model, schema_editor, using=" USING brin", **kwargs)
        # A range of which there is no summary yet is read whole.
        statement.parts["extra"] = " WITH (autosummarize = on)"
        return statement


class UniqueWhenSet(UniqueConstraint):
    """Unique among the rows where the column isn't NULL, kept out of the index where it can be."""

    def _for(self, schema_editor: BaseDatabaseSchemaEditor | None) -> UniqueConstraint:
        partial = (
            schema_editor is not None and schema_editor.connection.features.supports_partial_indexes
        )
        set_only = Q(**{f"{self.fields[0]}__isnull": False})
        return UniqueConstraint(
            fields=self.fields, name=self.name, condition=set_only if partial else None
        )

    def constraint_sql(self, model: Any, schema_editor: Any) -> Any:
        return self._for(schema_editor).constraint_sql(model, schema_editor)

    def create_sql(self, model: Any, schema_editor: Any) -> Any:
        return self._for(schema_editor).create_sql(model, schema_editor)

    def remove_sql(self, model: Any, schema_editor: Any) -> Any:
        return self._for(schema_editor).remove_sql(model, schema_editor)


def state_is(*states: str) -> Lookup[Any]:
    """Return the condition that a row is in one of ``states``, for rows chosen by their ids.

    The column stands there in a form that no index has, since an index that knows of states would
    be preferred to the primary key for ``id = 7 AND state = 'running'``. PostgreSQL, believing that
    nobody is running, would read all of the partial one, and walk the dead entries of the whole
    run. MySQL, whose indexes are whole, would lock the entry of one first and the row second, while
    whoever changes the state does the reverse: a deadlock.
    """
    return In(Concat(F("state"), Value("")), sorted(map(str, states)))


def comes_after(columns: Sequence[str], values: Sequence[Any]) -> Func:
    """Return the condition that a row comes after another in the order of ``columns``, ascending.

    As one comparison, with which an index is entered at its place.
    """
    sides = [
        Func(*side, template="(%(expressions)s)", output_field=models.BooleanField())
        for side in (map(F, columns), values)
    ]
    return Func(
        *sides, template="%(expressions)s", arg_joiner=" > ", output_field=models.BooleanField()
    )


def columns_without_microseconds(using: str, table: str) -> list[str]:
    """Name the columns of ``table`` that would cut off a part of the times written to them."""
    connection = connections[using]
    if connection.vendor != "mysql":
        return []
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = DATABASE() "
            "AND table_name = %s AND data_type = 'datetime' AND datetime_precision < 6 "
            "ORDER BY ordinal_position",
            [table],
        )
        return [name for (name,) in cursor.fetchall()]


# -- Locks


def lock_rows(queryset: Rows, *, skip_locked: bool = False, nowait: bool = False) -> Rows:
    """Lock the chosen rows until the transaction ends, where the engine has row locks.

    Elsewhere (SQLite) the one writer at a time is the lock. Rows that somebody else has locked are
    waited for, passed over (``skip_locked``), or an error (``nowait``; see ``is_lock_refused``).
    """
    features = connections[queryset.db].features
    if not features.has_select_for_update:
        return queryset
    return queryset.select_for_update(
        skip_locked=skip_locked and features.has_select_for_update_skip_locked,
        nowait=nowait and features.has_select_for_update_nowait,
    )


_HOLDERS: Final = {
    # A row's xmax is the transaction that has locked it, as long as it runs. Where that is a
    # savepoint, which nothing tells once it is released, or a group of several, it is one of the
    # sessions that have locked rows of the table.
    "postgresql": (
        "SELECT string_agg(told, ' or ') FROM (SELECT format('session %%s (%%s)', a.pid, concat_ws("
        "', ', nullif(a.application_name, ''), a.state || ' since ' || a.state_change)) AS told, "
        "x.pid IS NULL AS is_guess, bool_and(x.pid IS NULL) OVER () AS all_are "
        "FROM {table} r CROSS JOIN pg_stat_activity a "
        "LEFT JOIN pg_locks x ON x.pid = a.pid AND x.locktype = 'transactionid' AND x.granted "
        "AND x.transactionid = r.xmax "
        "WHERE r.id = %s AND a.datname = current_database() AND a.pid <> pg_backend_pid() "
        "AND EXISTS (SELECT FROM pg_locks t WHERE t.pid = a.pid AND t.locktype = 'relation' "
        "AND t.relation = r.tableoid AND t.mode IN ('RowShareLock', 'RowExclusiveLock')) "
        "ORDER BY is_guess, a.xact_start LIMIT 5) AS s WHERE is_guess = all_are"
    ),
    "mysql": (
        "SELECT CONCAT('thread ', trx_mysql_thread_id, ', the oldest open transaction, since ', "
        "trx_started) FROM information_schema.innodb_trx "
        "WHERE trx_mysql_thread_id <> CONNECTION_ID() AND %s ORDER BY trx_started LIMIT 1"
    ),
}


def lock_holder(using: str, table: str, row_id: int) -> str:
    """Say in whose hands a row's lock is, as far as the database tells; empty if it doesn't."""
    connection = connections[using]
    query = _HOLDERS.get(connection.vendor)
    if query is None:
        return "another process that is writing to the database file"
    try:
        with transaction.atomic(using=using), connection.cursor() as cursor:
            cursor.execute(query.format(table=connection.ops.quote_name(table)), [row_id])
            row = cursor.fetchone()
    except DatabaseError:  # Some accounts may not look.
        return ""
    return row[0] if row else ""


# -- Connections of the current thread. One that breaks at being closed is closed.


class _Opened(threading.local):
    """The wrappers of the current thread that ever connected.

    To ask ``connections`` for them costs more than a quick job.
    """

    def __init__(self) -> None:
        self.wrappers: list[BaseDatabaseWrapper] = []


_opened = _Opened()


@receiver(connection_created)
def _note_opened(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    if connection not in _opened.wrappers:
        _opened.wrappers.append(connection)


def before_job() -> None:
    """Do what Django does when a request starts: drop connections that are old or broken."""
    for connection in _opened.wrappers:
        with suppress(Exception):
            connection.close_if_unusable_or_obsolete()


def after_job() -> list[str]:
    """Do what Django does when a request ends; end whatever transaction the job left open.

    Returns:
        The aliases on which it had left an ``atomic`` block open. What it wrote there is undone.
    """
    left_open = []
    for connection in list(_opened.wrappers):
        with suppress(Exception):
            if connection.in_atomic_block:
                left_open.append(connection.alias)
                # The wrapper remembers the block that nobody left; the next job gets a new one.
                _opened.wrappers.remove(connection)
                del connections[connection.alias]
                connection.close()
            elif connection.connection is not None:
                # One that was begun behind Django's back.
                with connection.wrap_database_errors:
                    connection.connection.rollback()
                connection.close_if_unusable_or_obsolete()
    return left_open


def revive(using: str) -> None:
    """Close this thread's connection if it broke, so that the next query opens another.

    Unlike ``close_if_unusable_or_obsolete`` it keeps a good one, whatever ``CONN_MAX_AGE`` says.
    """
    connection = connections[using]
    if connection.in_atomic_block or not connection.errors_occurred:
        return
    if connection.connection is not None and connection.is_usable():
        connection.errors_occurred = False
        return
    with suppress(Exception):
        connection.close()


def close_connections() -> None:
    """Close all of this thread's connections, before it ends."""
    for connection in connections.all(initialized_only=True):
        with suppress(Exception):
            connection.close()
