"""Many rows updated in one statement, where the engine can; one at a time elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet
from django.db.models.expressions import RawSQL

from jobqueue.db.convert import Values, array, plain
from jobqueue.db.statement import fill, update_parts, writing


@cache
def has_batches(using: str) -> bool:
    """Say whether this database has ``UpdateEach``, and ``UpdateChosen`` in one statement."""
    return connections[using].vendor == "postgresql"


@dataclass(frozen=True, slots=True)
class Companions:
    """Rows of another table, of which each row that is updated gets one.

    Attributes:
        model: their table.
        key: the column with the id of the row that was updated.
        common: by column, the blank for what all of them have.
        each: the columns of which each has its own.
    """

    model: type[models.Model]
    key: str
    common: Mapping[str, Any]
    each: Sequence[str]


class UpdateEach:
    """Updates many rows in one statement, each with values of its own. Its SQL is made once.

    Args:
        rows: what all of the rows must be, with blanks.
        match: the columns by which each is compared as well.
        changes: by column, the value, expression or blank that all of them get.
        each: the columns of which they get values one by one.
        companions: what the same statement inserts for those that are met.
    """

    def __init__(
        self,
        rows: QuerySet[Any],
        match: Sequence[str],
        changes: Mapping[str, Any],
        each: Sequence[str],
        companions: Companions | None = None,
    ) -> None:
        self._using = rows.db
        connection = connections[rows.db]
        quote = connection.ops.quote_name
        row_id = f"{quote(rows.model._meta.db_table)}.{quote('id')}"
        own = companions.each if companions else ()
        self._columns = _columns(rows.model, match, each, companions)
        values = {name: RawSQL(f"batch.{quote('new_' + name)}", ()) for name in each}
        head, head_params, where, where_params = update_parts(rows, {**changes, **values})
        # The ids once more, by themselves: a join alone may be made by reading the whole table.
        conditions, source = [f"{row_id} = ANY(%s::bigint[])"], ""
        if self._columns:
            source = _table_of(self._columns, connection)
            table = quote(rows.model._meta.db_table)
            same = (f"{table}.{name} = batch.{name}" for name in map(quote, ("id", *match)))
            # Statistics say that hardly a row is like these. Believing it, the planner would
            # compare each row with each of the batch; it doesn't look into a CASE.
            where = [*same, *(f"CASE WHEN {one} THEN true ELSE false END" for one in where)]
        returned = ", ".join([row_id, *(f"batch.{quote('own_' + name)}" for name in own)])
        condition = " AND ".join([*conditions, *where])
        self._sql = f"{head} {source}WHERE {condition} RETURNING {returned}"
        self._before, self._after = head_params, where_params
        if companions:
            self._sql = _with_companions(self._sql, companions, connection)
            self._after = [*where_params, *companions.common.values()]

    def __call__(self, ids: Sequence[int], columns: Values, given: Mapping[str, Any]) -> set[int]:
        """Update the rows of these ids, and return the ids of those met.

        Args:
            ids: of all rows.
            columns: in their order, what each must be, by column; what each gets, as ``new_...``;
                and what its companion has, as ``own_...``.
            given: for the blanks.
        """
        connection = connections[self._using]
        columns = {"id": ids, **columns}
        arrays = [
            array([plain(field, value, connection) for value in columns[name]])
            for name, field in self._columns.items()
        ]
        before, after = (fill(each, given, connection) for each in (self._before, self._after))
        with writing(self._using) as cursor:
            cursor.execute(self._sql, [*before, *arrays, array(ids), *after])
            return set(chain.from_iterable(cursor.fetchall()))


def _columns(
    model: Any, match: Sequence[str], each: Sequence[str], companions: Companions | None
) -> dict[str, Any]:
    """Return by name the fields of what differs from row to row, if anything does."""
    fields = {name: model._meta.get_field(name) for name in match}
    fields |= {f"new_{name}": model._meta.get_field(name) for name in each}
    if companions:
        meta: Any = companions.model._meta
        fields |= {f"own_{name}": meta.get_field(name) for name in companions.each}
    return {"id": model._meta.pk, **fields} if fields else {}


def _table_of(columns: Mapping[str, Any], connection: BaseDatabaseWrapper) -> str:
    """Return a table of arrays, which a statement joins by the ids."""
    types = ", ".join(f"%s::{field.db_type(connection)}[]" for field in columns.values())
    names = ", ".join(map(connection.ops.quote_name, columns))
    return f"FROM unnest({types}) AS batch ({names}) "


def _with_companions(update: str, rows: Companions, connection: BaseDatabaseWrapper) -> str:
    """Return the statement that does an update and inserts what goes with it.

    The update returns the id and the columns that differ.
    """
    quote = connection.ops.quote_name
    meta: Any = rows.model._meta
    names = [rows.key, *rows.each, *rows.common]
    columns = ", ".join(quote(meta.get_field(name).column) for name in names)
    met = ", ".join(quote(name) for name in (rows.key, *rows.each))
    types = (meta.get_field(name).db_type(connection) for name in rows.common)
    given = "".join(f", %s::{kind}" for kind in types)
    return (
        f"WITH met ({met}) AS ({update}), told AS ("
        f"INSERT INTO {quote(meta.db_table)} ({columns}) SELECT {met}{given} FROM met) "
        f"SELECT {quote(rows.key)} FROM met"
    )
