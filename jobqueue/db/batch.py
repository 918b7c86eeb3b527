"""Statements on many rows at once, where the engine has them; one row at a time elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

from django.db import connections, models, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Exists, QuerySet
from django.db.models.base import ModelState
from django.db.models.expressions import DatabaseDefault, RawSQL
from django.db.models.sql.subqueries import UpdateQuery

from jobqueue.db.statement import Blank, fill, readers_of

Row = TypeVar("Row", bound=models.Model)
Values = Mapping[str, Sequence[Any]]


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
    head, head_params, where, where_params = _update(rows, {**changes, **own})
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
    params = [*head_params, *batch.params, _array(match["id"]), *where_params]
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
            values = [_plain(field, value, self._connection) for value in column]
            self.params.append(_array(values))

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
    return sql, [_plain(fields[name], value, connection) for name, value in rows.common.items()]


class Choice(NamedTuple, Generic[Row]):
    """Which rows are to be updated, and how.

    Attributes:
        rows: in an order, and locked past those that others have.
        still: what they must be, compared once more by the UPDATE itself.
        lease: a row of another table without which none is; locked, so that it stays.
        changes: by column, the value or expression that all of them get.
    """

    rows: QuerySet[Row]
    still: QuerySet[Row]
    lease: QuerySet[Any]
    changes: Mapping[str, Any]


class UpdateChosen(Generic[Row]):
    """Updates the rows that a query chooses and locks, and returns them.

    Where the engine has it, in one statement, whose SQL is made once; elsewhere step by step.

    Args:
        model: whose rows.
        given: the names of the columns for which values are given each time.
        make: called with them by name, makes the choice.
        columns: what to read back beside the values among the changes; the rest is read when it is
            first asked for.
        using: database alias.
    """

    def __init__(
        self,
        model: type[Row],
        given: Sequence[str],
        make: Callable[..., Choice[Row]],
        columns: Sequence[str],
        using: str,
    ) -> None:
        self._make = make
        self._using = using
        self._fields: list[Any] = [model._meta.get_field(name) for name in columns]
        self._model = model
        if has_batches(using):
            # Django writes down a lock only where it could be held.
            with transaction.atomic(using=using):
                self._write_sql(make(**{name: Blank(model, name) for name in given}))

    def __call__(self, limit: int, **given: Any) -> list[Row]:
        """Update up to ``limit`` of them, and return these as they are then, in their order."""
        if not has_batches(self._using):
            return _update_in_steps(limit, self._make(**given))
        connection = connections[self._using]
        before, after = (fill(params, given, connection) for params in self._params)
        with connection.cursor() as cursor:
            cursor.execute(self._sql, [*before, limit, *after])
            rows = sorted(cursor.fetchall(), key=lambda row: row[len(self._fields) :])
        known = {
            name: given[value.name] if isinstance(value, Blank) else value
            for name, value in self._known.items()
        }
        return list(_instances(self._model, self._fields, known, rows, self._using))

    def _write_sql(self, choice: Choice[Row]) -> None:
        quote = connections[self._using].ops.quote_name
        row_id = f"{quote(self._model._meta.db_table)}.{quote('id')}"
        still = choice.still.filter(Exists(choice.lease))
        head, head_params, where, where_params = _update(still, choice.changes)
        ids, id_params = choice.rows.values("pk").query.get_compiler(self._using).as_sql()
        # Evaluated once, as an array; of IN (SELECT ...) more could be locked than were asked for.
        where = [f"{row_id} = ANY(ARRAY({ids} LIMIT %s))", *where]
        returned = [*(quote(field.column) for field in self._fields), *_order(choice.rows, quote)]
        self._sql = f"{head} WHERE {' AND '.join(where)} RETURNING {', '.join(returned)}"
        self._params = [*head_params, *id_params], where_params
        self._known = _known(choice.changes)


def _update_in_steps(limit: int, choice: Choice[Row]) -> list[Row]:
    rows, still, lease, changes = choice
    with transaction.atomic(using=rows.db):
        is_held = list(lease.values_list("pk"))
        ids = list(rows.values_list("pk", flat=True)[:limit]) if is_held else []
        if not ids:
            return []
        still.filter(pk__in=sorted(ids)).update(**changes)
        got = rows.model._base_manager.using(rows.db).filter(pk__in=list(ids), **_known(changes))
        place = {pk: index for index, pk in enumerate(ids)}
        return sorted(got, key=lambda row: place[row.pk])


def _known(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the changes whose values the writer knows."""
    return {
        name: value
        for name, value in changes.items()
        if isinstance(value, Blank) or not hasattr(value, "resolve_expression")
    }


def _order(rows: QuerySet[Any], quote: Callable[[str], str]) -> Iterator[str]:
    """Yield numbers by which the rows of a query come in its order."""
    for term in map(str, rows.query.order_by):
        name = term.lstrip("-")
        field = rows.model._meta.pk if name == "pk" else rows.model._meta.get_field(name)
        number = quote(field.column)
        if isinstance(field, models.DateTimeField):
            # Exact to the microsecond, and read back at a tenth of a time's cost.
            number = f"extract(epoch FROM {number})::float8"
        yield f"-{number}" if term.startswith("-") else number


def _instances(
    model: type[Row],
    fields: Sequence[Any],
    known: Mapping[str, Any],
    rows: Iterable[Sequence[Any]],
    using: str,
) -> Iterator[Row]:
    """Yield what ``Model.from_db`` would make of rows, at a tenth of its cost a row."""
    names = [field.attname for field in fields]
    converters = [(field.attname, read) for field in fields for read in _readers(field, using)]
    for row in rows:
        values = dict(known)
        values.update(zip(names, row, strict=False))  # what it is sorted by follows
        for name, read in converters:
            values[name] = read(values[name])
        values["_state"] = state = ModelState()
        state.adding, state.db = False, using
        instance = model.__new__(model)
        instance.__dict__ = values
        yield instance


def _readers(field: Any, using: str) -> Iterator[Callable[[Any], Any]]:
    """Yield what turns a value from the database into the field's."""
    if isinstance(field, models.JSONField) and field.decoder is None:
        yield lambda value: value if value is None else json.loads(value)
        return
    yield from readers_of(field.get_col(field.model._meta.db_table), connections[using])


def insert_rows(rows: Sequence[models.Model], using: str) -> None:
    """Insert new rows of one model, in few statements, and set what the database gave them."""
    if not has_batches(using):
        type(rows[0])._base_manager.using(using).bulk_create(rows)
        return
    if len(rows) == 1:
        _insert_one(rows[0], using)
        return
    groups: dict[tuple[str, ...], list[models.Model]] = {}
    for row in rows:
        left = (name for name, value in row.__dict__.items() if type(value) is DatabaseDefault)
        groups.setdefault(tuple(left), []).append(row)
    for left_to_database, group in groups.items():
        _insert_group(group, left_to_database, using)


def _insert_group(rows: Sequence[models.Model], left: Sequence[str], using: str) -> None:
    connection = connections[using]
    quote = connection.ops.quote_name
    meta: Any = rows[0]._meta
    values_of = [row.__dict__ for row in rows]
    columns, sources, scalars, types, arrays = [], [], [], [], []
    for field in meta.concrete_fields:
        name = field.attname
        if field is meta.pk or name in left:
            continue
        columns.append(quote(field.column))
        kind = field.db_type(connection)
        column = [values[name] for values in values_of]
        first = column[0]
        if all(value is first for value in column):
            sources.append(f"%s::{kind}")
            scalars.append(field.get_db_prep_save(first, connection))
        else:
            sources.append(f"batch.{quote(name)}")
            types.append((quote(name), f"%s::{kind}[]"))
            arrays.append(_array([_plain(field, value, connection) for value in column]))
    if not arrays:  # Nothing tells them apart but their number.
        types.append(("n", "%s::int[]"))
        arrays.append(_array(range(len(rows))))
    given = [meta.pk, *(meta.get_field(name) for name in left)]
    sql = (
        f"INSERT INTO {quote(meta.db_table)} ({', '.join(columns)}) "
        f"SELECT {', '.join(sources)} FROM unnest({', '.join(kind for _, kind in types)}) "
        f"AS batch ({', '.join(name for name, _ in types)}) "
        f"RETURNING {', '.join(quote(field.column) for field in given)}"
    )
    with connection.cursor() as cursor:
        cursor.execute(sql, [*scalars, *arrays])
        returned = sorted(cursor.fetchall(), key=itemgetter(0))  # ids are given in order
    names = [field.attname for field in given]
    for row, answer in zip(rows, returned, strict=True):
        row.__dict__.update(zip(names, answer, strict=True))
        row._state.adding, row._state.db = False, using


def _insert_one(row: models.Model, using: str) -> None:
    connection = connections[using]
    values = {
        name: value
        for name, value in row.__dict__.items()
        if value is not None and name != "_state" and type(value) is not DatabaseDefault
    }
    sql, fields, given = _insertion(type(row), tuple(values), using)
    prepared = [
        _plain(field, value, connection)
        for field, value in zip(fields, values.values(), strict=True)
    ]
    with connection.cursor() as cursor:
        cursor.execute(sql, prepared)
        row.__dict__.update(zip(given, cursor.fetchone(), strict=True))
    row._state.adding, row._state.db = False, using


@lru_cache(maxsize=64)
def _insertion(
    model: type[models.Model], names: tuple[str, ...], using: str
) -> tuple[str, list[Any], list[str]]:
    """Return the INSERT of one row that has these columns, their fields, and what it gives back."""
    meta: Any = model._meta
    quote = connections[using].ops.quote_name
    fields = [meta.get_field(name) for name in names]
    given = [meta.pk, *(field for field in meta.concrete_fields if field.has_db_default())]
    given = [field for field in given if field not in fields]
    sql = (
        f"INSERT INTO {quote(meta.db_table)} ({', '.join(quote(f.column) for f in fields)}) "
        f"VALUES ({', '.join(['%s'] * len(fields))}) "
        f"RETURNING {', '.join(quote(field.column) for field in given)}"
    )
    return sql, fields, [field.attname for field in given]


def _plain(field: Any, value: Any, connection: BaseDatabaseWrapper) -> Any:
    """Return a value as the driver takes it, without the field's help where that isn't needed."""
    if isinstance(field, models.JSONField):
        if value is not None and field.encoder is None:
            return json.dumps(value)
    elif type(value) in (int, str):
        return value
    return field.get_db_prep_save(value, connection)


def _array(values: Sequence[Any]) -> Any:
    """Return an array as the database reads it: for numbers and text the driver is slow at that."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return f"{{{','.join(map(str, values))}}}"
    if kinds <= {str, type(None)}:
        return f"{{{','.join(map(_quoted, values))}}}"
    return values


def _quoted(text: str | None) -> str:
    if text is None:
        return "NULL"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


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
