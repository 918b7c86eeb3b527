"""Statements whose SQL is made once: Django takes longer to write one than a server to run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import connections, models, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.models import Expression, QuerySet
from django.db.models.sql.compiler import SQLCompiler
from django.db.models.sql.subqueries import UpdateQuery

from jobqueue.db.convert import readers_of


class Blank(Expression):
    """Stands in a query for a value of a column, to be given each time the statement runs.

    Args:
        model: whose column.
        column: its name.
        name: under which it is given, if not by the column's.
    """

    def __init__(self, model: type[models.Model], column: str, name: str | None = None) -> None:
        field: Any = model._meta.get_field(column)
        super().__init__(output_field=field)
        self.name = name or column

    def as_sql(self, compiler: SQLCompiler, connection: BaseDatabaseWrapper) -> Any:
        return "%s", (self,)


def fill(
    params: Sequence[Any], given: Mapping[str, Any], connection: BaseDatabaseWrapper
) -> list[Any]:
    """Return a statement's parameters with what is given in the place of its blanks."""
    return [
        param.output_field.get_db_prep_save(given[param.name], connection)
        if isinstance(param, Blank)
        else param
        for param in params
    ]


@contextmanager
def writing(using: str) -> Iterator[CursorWrapper]:
    """Give a cursor for a write: as with the ORM, a transaction in which it failed is broken.

    Else Django would send COMMIT, which PostgreSQL answers with a rollback, and run the hooks.
    """
    with transaction.mark_for_rollback_on_error(using), connections[using].cursor() as cursor:
        yield cursor


class Select:
    """A query for rows of values.

    Args:
        rows: a ``values_list()``, with blanks for what is given by their columns' names.
    """

    def __init__(self, rows: QuerySet[Any, Any]) -> None:
        compiler = rows.query.get_compiler(rows.db)
        self._using = rows.db
        self._sql, self._params = compiler.as_sql()
        self._columns = [column for column, *_ in compiler.select]

    def __call__(self, **given: Any) -> list[tuple[Any, ...]]:
        """Return the rows as they are now."""
        connection = connections[self._using]
        with connection.cursor() as cursor:
            cursor.execute(self._sql, fill(self._params, given, connection))
            rows = cursor.fetchall()
        readers = [list(readers_of(column, connection)) for column in self._columns]
        return [tuple(map(_read, row, readers)) for row in rows]


class Update:
    """An UPDATE.

    Args:
        rows: which rows, with blanks.
        changes: by column, the value, expression or blank that they get.
    """

    def __init__(self, rows: QuerySet[Any], changes: Mapping[str, Any]) -> None:
        self._using = rows.db
        head, head_params, where, where_params = update_parts(rows, changes)
        self._sql = f"{head} WHERE {' AND '.join(where)}"
        self._params = [*head_params, *where_params]

    def __call__(self, **given: Any) -> int:
        """Run it, and return how many rows it met."""
        with writing(self._using) as cursor:
            cursor.execute(self._sql, fill(self._params, given, connections[self._using]))
            return int(cursor.rowcount)


def _read(value: Any, readers: Sequence[Callable[[Any], Any]]) -> Any:
    for read in readers:
        value = read(value)
    return value


def update_parts(
    rows: QuerySet[Any], changes: Mapping[str, Any]
) -> tuple[str, Sequence[Any], list[str], Sequence[Any]]:
    """Return ``UPDATE ... SET ...`` and the conditions of ``rows``, each with its parameters."""
    query: Any = rows.query.chain(UpdateQuery)
    query.add_update_values(dict(changes))
    where, query.where = query.where, type(query.where)()
    compiler = query.get_compiler(rows.db)
    head, head_params = compiler.as_sql()
    if not where:
        return head, head_params, [], ()
    sql, params = compiler.compile(where)
    return head, head_params, [f"({sql})"], params
