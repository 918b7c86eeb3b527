"""Values on their way to the driver and back, at a fraction of what the fields' own way costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, tzinfo
from functools import partial
from typing import Any, Final, TypeVar

from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models.base import ModelState

Row = TypeVar("Row", bound=models.Model)
Values = Mapping[str, Sequence[Any]]

# No text that PostgreSQL takes has one: with it between them, many are escaped at once.
NUL: Final = "\x00"
_decode: Final = json.JSONDecoder().raw_decode


def plain(field: Any, value: Any, connection: BaseDatabaseWrapper) -> Any:
    """Return a value as the driver takes it, without the field's help where that isn't needed."""
    if isinstance(field, models.JSONField):
        if value is not None and field.encoder is None:
            return json.dumps(value)
    elif type(value) in (int, str):
        return value
    return field.get_db_prep_save(value, connection)


def array(values: Sequence[Any]) -> Any:
    """Return an array as the database reads it: for numbers and text the driver is slow at that."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return f"{{{','.join(map(str, values))}}}"
    if kinds == {str}:
        text = NUL.join(values)
        if text.count(NUL) < len(values):  # Else it is for the driver to refuse.
            texts = _escaped(text).replace(NUL, '","')
            return f'{{"{texts}"}}'
    elif kinds <= {str, type(None)}:
        return f"{{{','.join(map(_quoted, values))}}}"
    return values


def _quoted(text: str | None) -> str:
    return "NULL" if text is None else f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def instances(
    model: type[Row],
    fields: Sequence[Any],
    known: Mapping[str, Any],
    rows: Iterable[Sequence[Any]],
    using: str,
) -> Iterator[Row]:
    """Yield what ``Model.from_db`` would make of rows, at a tenth of its cost a row."""
    return maker(model, fields, using)(rows, known)


def maker(
    model: type[Row], fields: Sequence[Any], using: str
) -> Callable[[Iterable[Sequence[Any]], Mapping[str, Any]], Iterator[Row]]:
    """Return what makes instances of rows, again and again, in this thread."""
    names = [field.attname for field in fields]
    converters = [(field.attname, read) for field in fields for read in _readers(field, using)]

    def make(rows: Iterable[Sequence[Any]], known: Mapping[str, Any]) -> Iterator[Row]:
        for row in rows:
            values = dict(known)
            values.update(zip(names, row, strict=False))  # what it is sorted by follows
            for name, read in converters:
                values[name] = read(values[name])
            yield instance(model, values, using)

    return make


def instance(model: type[Row], values: dict[str, Any], using: str | None) -> Row:
    """Return what ``Model(...)`` would make of values, at a tenth of its cost.

    Args:
        values: by attribute all that it has; they become its own.
        using: where it is stored, ``None`` if it isn't.
    """
    values["_state"] = state = ModelState()
    state.adding, state.db = using is None, using
    made = model.__new__(model)
    made.__dict__ = values
    return made


def _readers(field: Any, using: str) -> Iterator[Callable[[Any], Any]]:
    """Yield what turns a value from the database into the field's."""
    if isinstance(field, models.JSONField) and field.decoder is None:
        # Half of what json.loads() takes goes into looking for what may come before and after.
        yield lambda value: value if value is None else _decode(value.lstrip())[0]
        return
    yield from readers_of(field.get_col(field.model._meta.db_table), connections[using])


def readers_of(column: Any, connection: BaseDatabaseWrapper) -> Iterator[Callable[[Any], Any]]:
    """Yield what turns, one after the other, a value from the database into a column's."""
    own = column.get_db_converters(connection)
    for convert in connection.ops.get_db_converters(column) + own:
        yield partial(convert, expression=column, connection=connection)


def epoch_of(column: str) -> str:
    """Return SQL for a time as a number, exact to the microsecond: a tenth of a time's cost."""
    return f"extract(epoch FROM {column})::float8"


def from_epoch(seconds: float, zone: tzinfo | None) -> datetime:
    """Return the time that ``epoch_of`` tells, in the connection's time zone."""
    return datetime.fromtimestamp(seconds, tz=zone)
