"""Statements on many rows at once, where the engine has them; one row at a time elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from django.db import connections, models
from django.db.models import QuerySet
from django.db.models.base import ModelState
from django.db.models.expressions import RawSQL
from django.db.models.sql.subqueries import UpdateQuery

Row = TypeVar("Row", bound=models.Model)
Values = Mapping[str, Sequence[Any]]


def has_batches(using: str) -> bool:
    """Say whether ``update_each`` and ``update_chosen`` are to be had on this database."""
    return connections[using].vendor == "postgresql"


def update_each(
    rows: QuerySet[Any], match: Values, changes: Mapping[str, Any], each: Values
) -> set[int]:
    """Update many rows in one statement, each with values of its own; return the ids of those met.

    Args:
        rows: what all of the rows must be.
        match: by column, what each one must be, ``id`` among them.
        changes: by column, the value or expression that all of them get.
        each: by column, the values that they get one by one.
    """
    connection = connections[rows.db]
    model = rows.model
    quote = connection.ops.quote_name
    table = quote(model._meta.db_table)
    arrays = {name: (f"new_{name}" if name in each else name) for name in [*match, *each]}
    own = {name: RawSQL(f"batch.{quote(arrays[name])}", ()) for name in each}
    head, head_params, where, where_params = _update(rows, {**changes, **own})
    types, values = [], []
    for name, column in {**match, **each}.items():
        field = model._meta.get_field(name)
        types.append(f"%s::{field.db_type(connection)}[]")
        values.append([field.get_db_prep_save(value, connection) for value in column])
    columns = ", ".join(map(quote, arrays.values()))
    met = [f"{table}.{quote(name)} = batch.{quote(name)}" for name in match]
    sql = (
        f"{head} FROM unnest({', '.join(types)}) AS batch ({columns}) "
        f"WHERE {' AND '.join([*met, *where])} RETURNING {table}.{quote('id')}"
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, [*head_params, *values, *where_params])
        return {pk for (pk,) in cursor.fetchall()}


def update_chosen(
    chosen: QuerySet[Row],
    still: QuerySet[Row],
    changes: Mapping[str, Any],
    columns: Sequence[str],
) -> list[Row]:
    """Update the rows that a query chooses and locks, in one statement, and return them.

    Args:
        chosen: which rows: locked past those that others have, ordered, and limited.
        still: what they must be, compared once more by the UPDATE itself.
        changes: by column, the value or expression that all of them get.
        columns: what to read back; the rest is read when it is first asked for.

    Returns:
        The rows in no order, as they are after the write.
    """
    using = chosen.db
    connection = connections[using]
    model = chosen.model
    quote = connection.ops.quote_name
    table = quote(model._meta.db_table)
    head, head_params, where, where_params = _update(still, changes)
    ids, id_params = chosen.values("pk").query.get_compiler(using).as_sql()
    # Evaluated once, as an array; of IN (SELECT ...) more rows could be locked than were asked for.
    choice = f"{table}.{quote('id')} = ANY(ARRAY({ids}))"
    fields: list[Any] = [model._meta.get_field(name) for name in columns]
    returned = ", ".join(f"{table}.{quote(field.column)}" for field in fields)
    sql = f"{head} WHERE {' AND '.join([choice, *where])} RETURNING {returned}"
    with connection.cursor() as cursor:
        cursor.execute(sql, [*head_params, *id_params, *where_params])
        return list(_instances(model, fields, cursor.fetchall(), using))


def _instances(
    model: type[Row], fields: Sequence[Any], rows: Iterable[Sequence[Any]], using: str
) -> Iterator[Row]:
    """Yield what ``Model.from_db`` would make of rows, at a tenth of its cost a row."""
    connection = connections[using]
    names = [field.attname for field in fields]
    converters = []
    for field in fields:
        column = field.get_col(model._meta.db_table)
        for converter in [
            *connection.ops.get_db_converters(column),
            *field.get_db_converters(connection),
        ]:
            converters.append((field.attname, converter, column))
    for row in rows:
        instance = model.__new__(model)
        values = dict(zip(names, row, strict=True))
        for name, converter, column in converters:
            values[name] = converter(values[name], column, connection)
        state = ModelState()
        state.adding, state.db = False, using
        instance.__dict__.update(values, _state=state)
        yield instance


def _update(
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
