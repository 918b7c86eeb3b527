"""Many rows updated in one statement, where the engine can; one at a time elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet
from django.db.models.expressions import RawSQL

from jobqueue.db.convert import Values, array, plain
from jobqueue.db.statement import update_parts


@cache
def has_batches(using: str) -> bool:
    """Say whether this database has ``update_each``, and ``UpdateChosen`` in one statement."""
    return connections[using].vendor == "postgresql"


@dataclass(frozen=True, slots=True)
class Companions:
    """Rows of another table, of which each row that is updated gets one.

    Attributes:
        model: their table.
        key: the column with the id of the row that was updated.
        common: by column, what all of them have.
        each: by column, what each of them has, in the order of the rows to be updated.
    """

    model: type[models.Model]
    key: str
    common: Mapping[str, Any]
    each: Values


def update_each(
    rows: QuerySet[Any],
    match: Values,
    changes: Mapping[str, Any],
    each: Values,
    companions: Companions | None = None,
) -> set[int]:
    """Update many rows in one statement, each with values of its own; return the ids of those met.

    Args:
        rows: what all of the rows must be.
        match: by column, what each one must be, ``id`` among them.
        changes: by column, the value or expression that all of them get.
        each: by column, the values that they get one by one.
        companions: what the same statement inserts for those that are met.
    """
    connection = connections[rows.db]
    quote = connection.ops.quote_name
    table = quote(rows.model._meta.db_table)
    batch = _Batch(connection)
    if each or len(match) > 1 or (companions and companions.each):
        batch.add(rows.model, match)
        batch.add(rows.model, each, "new_")
        if companions:
            batch.add(companions.model, companions.each, "own_")
    own = {name: RawSQL(batch.place("new_" + name), ()) for name in each}
    head, head_params, where, where_params = update_parts(rows, {**changes, **own})
    # The ids once more, by themselves: a join alone may be made by reading the whole table.
    conditions = [f"{table}.{quote('id')} = ANY(%s::bigint[])"]
    if batch.names:
        conditions += [f"{table}.{quote(name)} = {batch.place(name)}" for name in match]
        # Statistics say that hardly a row is like these. Believing it, the planner would compare
        # each row with each of the batch; it doesn't look into a CASE.
        where = [f"CASE WHEN {condition} THEN true ELSE false END" for condition in where]
    returned = [f"{table}.{quote('id')}"]
    if companions:
        returned += [batch.place("own_" + name) for name in companions.each]
    sql = (
        f"{head} {batch.sql()}"
        f"WHERE {' AND '.join([*conditions, *where])} RETURNING {', '.join(returned)}"
    )
    params = [*head_params, *batch.params, array(match["id"]), *where_params]
    if companions:
        sql, own_params = _with_companions(sql, companions, connection)
        params += own_params
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        return {pk for (pk,) in cursor.fetchall()}


class _Batch:
    """What differs from row to row: a table of arrays that a statement joins by the ids."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._connection = connection
        self.names: list[str] = []
        self._types: list[str] = []
        self.params: list[Any] = []

    def add(self, model: type[models.Model], columns: Values, prefix: str = "") -> None:
        for name, column in columns.items():
            field: Any = model._meta.get_field(name)
            self.names.append(self._connection.ops.quote_name(prefix + name))
            self._types.append(f"%s::{field.db_type(self._connection)}[]")
            values = [plain(field, value, self._connection) for value in column]
            self.params.append(array(values))

    def place(self, name: str) -> str:
        return f"batch.{self._connection.ops.quote_name(name)}"

    def sql(self) -> str:
        if not self.names:
            return ""
        return f"FROM unnest({', '.join(self._types)}) AS batch ({', '.join(self.names)}) "


def _with_companions(
    update: str, rows: Companions, connection: BaseDatabaseWrapper
) -> tuple[str, list[Any]]:
    """Return the statement that does an update and inserts what goes with it; and its parameters.

    The update returns the id and the columns that differ.
    """
    quote = connection.ops.quote_name
    meta: Any = rows.model._meta
    names = [rows.key, *rows.each, *rows.common]
    columns = ", ".join(quote(meta.get_field(name).column) for name in names)
    met = ", ".join(quote(name) for name in (rows.key, *rows.each))
    fields = {name: meta.get_field(name) for name in rows.common}
    given = "".join(f", %s::{field.db_type(connection)}" for field in fields.values())
    sql = (
        f"WITH met ({met}) AS ({update}), told AS ("
        f"INSERT INTO {quote(meta.db_table)} ({columns}) SELECT {met}{given} FROM met) "
        f"SELECT {quote(rows.key)} FROM met"
    )
    return sql, [plain(fields[name], value, connection) for name, value in rows.common.items()]
