"""New rows, many in one statement where the engine can."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import tzinfo
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

from django.db import connections, models
from django.db.models.expressions import DatabaseDefault

from jobqueue.db.batch import has_batches
from jobqueue.db.convert import Values, array, epoch_of, from_epoch, plain
from jobqueue.db.statement import writing


def insert_rows(rows: Sequence[models.Model], using: str) -> None:
    """Insert new rows of one model, in few statements, and set what the database gave them."""
    if not has_batches(using):
        type(rows[0])._base_manager.using(using).bulk_create(rows)
        return
    groups: dict[tuple[str, ...], list[models.Model]] = {}
    for row in rows:
        left = (name for name, value in row.__dict__.items() if type(value) is DatabaseDefault)
        groups.setdefault(tuple(left), []).append(row)
    for left_to_database, group in groups.items():
        _insert_group(group, left_to_database, using)


def _insert_group(rows: Sequence[models.Model], left: Sequence[str], using: str) -> None:
    connection = connections[using]
    meta: Any = rows[0]._meta
    same, each = {}, {}
    for field in meta.concrete_fields:
        name = field.attname
        if field is meta.pk or name in left:
            continue
        column = [row.__dict__[name] for row in rows]
        if all(value is column[0] for value in column):
            same[name] = plain(field, column[0], connection)
        else:
            each[name] = [plain(field, value, connection) for value in column]
    if len(rows) == 1:
        given = {name: [value] for name, value in insert_row(type(rows[0]), using, same).items()}
    else:
        if not each:
            name, value = same.popitem()
            each[name] = [value] * len(rows)
        given = insert_columns(type(rows[0]), using, same, each)
    for row, values in zip(rows, zip(*given.values(), strict=True), strict=True):
        row.__dict__.update(zip(given, values, strict=True))
        row._state.adding, row._state.db = False, using


def insert_row(model: type[models.Model], using: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Insert a row; what isn't given is as the model or the database has it.

    Args:
        columns: what it has, as the driver takes it: JSON as text.

    Returns:
        By column, what the database gave it: its id and defaults.
    """
    columns = _unusual(model, using, columns)
    with writing(using) as cursor:
        sql, readers = _insertion(model, tuple(columns), (), using, cursor.db.timezone)
        cursor.execute(sql, list(columns.values()))
        row = cursor.fetchone()
    return {
        name: read(value)
        for (names, read), value in zip(readers, row, strict=True)
        for name in names
    }


def insert_columns(
    model: type[models.Model], using: str, same: Mapping[str, Any], each: Values
) -> dict[str, list[Any]]:
    """Insert many rows in one statement; see ``insert_row``.

    Args:
        same: by column, what all of them have.
        each: by column, what they have one by one.

    Returns:
        By column, in the order of the rows, what the database gave them.
    """
    same = _unusual(model, using, same)
    with writing(using) as cursor:
        sql, readers = _insertion(model, tuple(same), tuple(each), using, cursor.db.timezone)
        cursor.execute(sql, [*same.values(), *map(array, each.values())])
        rows = cursor.fetchall()
    rows.sort(key=itemgetter(0))  # ids are given in order
    columns = zip(*rows, strict=True)
    return {
        name: list(map(read, column))
        for (names, read), column in zip(readers, columns, strict=True)
        for name in names
    }


def _unusual(model: type[models.Model], using: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return those columns that aren't as the model has them by default."""
    usual = _usual(model, using)
    return {name: v for name, v in columns.items() if name not in usual or v != usual[name]}


@lru_cache(maxsize=8)
def _usual(model: type[models.Model], using: str) -> dict[str, Any]:
    """Return what a row has by the model's defaults, as the driver takes it."""
    return {
        field.attname: plain(field, field.get_default(), connections[using])
        for field in model._meta.concrete_fields
        if not field.primary_key and not field.has_db_default()
    }


@lru_cache(maxsize=64)
def _insertion(
    model: type[models.Model],
    same: tuple[str, ...],
    each: tuple[str, ...],
    using: str,
    time_zone: tzinfo | None,
) -> tuple[str, list[tuple[list[str], Callable[[Any], Any]]]]:
    """Return an INSERT; and for each value that it returns, the names it has and its reader."""
    connection: Any = connections[using]
    quote = connection.ops.quote_name
    fields: dict[str, Any] = {field.attname: field for field in model._meta.concrete_fields}
    types = {name: field.db_type(connection) for name, field in fields.items()}
    given = {*same, *each}
    sources = {name: f"%s::{types[name]}" if each else "%s" for name in same}
    sources |= {name: f"batch.{quote(name)}" for name in each}
    for name, value in _usual(model, using).items():
        # Values that hardly ever differ are dearer as parameters than all the rest.
        if name not in given and value is not None:
            sources[name] = connection.ops.compose_sql("%s", [value]).replace("%", "%%")
    rows = f"VALUES ({', '.join(sources.values())})"
    if each:
        arrays = ", ".join(f"%s::{types[name]}[]" for name in each)
        names = ", ".join(map(quote, each))
        rows = f"SELECT {', '.join(sources.values())} FROM unnest({arrays}) AS batch ({names})"
    left = [field for name, field in fields.items() if name not in {*given, *_usual(model, using)}]
    returned = _returned(left, connection, time_zone)
    sql = (
        f"INSERT INTO {quote(model._meta.db_table)} "
        f"({', '.join(quote(fields[name].column) for name in sources)}) {rows} "
        f"RETURNING {', '.join(returned)}"
    )
    return sql, list(returned.values())


def _returned(
    fields: Iterable[Any], connection: Any, time_zone: tzinfo | None
) -> dict[str, tuple[list[str], Callable[[Any], Any]]]:
    """Return how to ask for what the database gave, which columns have it, and how to read it."""
    returned: dict[str, tuple[list[str], Callable[[Any], Any]]] = {}
    times = []
    for field in fields:
        if isinstance(field, models.DateTimeField) and time_zone:
            times.append(field)
        else:
            returned[connection.ops.quote_name(field.column)] = [field.attname], _unchanged
    if times:
        # A statement has one time, whichever column it is the default of.
        number = epoch_of(connection.ops.quote_name(times[0].column))
        returned[number] = [field.attname for field in times], partial(from_epoch, zone=time_zone)
    return returned


def _unchanged(value: Any) -> Any:
    return value
