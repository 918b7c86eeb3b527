"""Rows of which many are alike: read as one, and written as one but for what each draws itself."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, Final, Generic, NamedTuple

from django.core.exceptions import EmptyResultSet
from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Expression, Func, QuerySet
from django.db.models.sql.compiler import SQLCompiler

from jobqueue.db.batch import has_batches
from jobqueue.db.convert import Row, maker

# So many pages are read at once.
AHEAD: Final = 4

# By what they have in common, the ids of rows, in order.
Groups = dict[tuple[Any, ...], list[int]]


class Alike(NamedTuple, Generic[Row]):
    """Rows that differ, in what was read of them, by their ids alone: the first, and all ids."""

    row: Row
    ids: Sequence[int]

    def only(self, some: Collection[int]) -> Alike[Row]:
        """Return those of them that are among these, in the place of all."""
        return Alike(self.row, [row_id for row_id in self.ids if row_id in some])


def pages_alike(
    rows: QuerySet[Row], columns: Sequence[str], size: int
) -> Iterator[list[Alike[Row]]]:
    """Read some columns of rows page by page in the order of ids, those that are alike as one.

    What is decided on such rows is decided once, and most of what their conversion costs is saved.
    Some pages are read at once, ahead of what is done with the first: who writes compares anyway.
    """
    using = rows.db
    fields: list[Any] = [rows.model._meta.get_field(name) for name in columns]
    own = ", ".join(connections[using].ops.quote_name(field.column) for field in fields)
    try:
        query = rows.order_by().values_list("id", *columns).query
        sql, params = query.get_compiler(using).as_sql()
    except EmptyResultSet:  # so much is known without asking
        return
    sql = f"SELECT id, {own} FROM ({sql}) AS found WHERE id > %s ORDER BY id LIMIT %s"
    if has_batches(using):
        sql = f"SELECT array_agg(id), {own} FROM ({sql}) AS page GROUP BY {own}"
    make = maker(rows.model, [rows.model._meta.pk, *fields], using)
    last = 0
    while groups := _groups(sql, (*params, last, size * AHEAD), using):
        for page in _parted(groups, size):
            firsts = make(((ids[0], *values) for values, ids in page), {})
            yield [Alike(row, ids) for row, (_, ids) in zip(firsts, page, strict=True)]
        last = max(ids[-1] for ids in groups.values())


def _groups(sql: str, params: Sequence[Any], using: str) -> Groups:
    groups: Groups = {}
    with connections[using].cursor() as cursor:
        cursor.execute(sql, params)
        for ids, *values in cursor.fetchall():
            group = groups.setdefault(tuple(values), [])
            group += ids if has_batches(using) else [ids]
    for ids in groups.values():
        ids.sort()
    return groups


def _parted(groups: Groups, size: int) -> list[list[tuple[tuple[Any, ...], list[int]]]]:
    """Return the pages of groups: each has the next ``size`` ids of all."""
    lasts = sorted(chain.from_iterable(groups.values()))[size - 1 :: size]
    pages: list[list[tuple[tuple[Any, ...], list[int]]]] = [[] for _ in range(len(lasts) + 1)]
    for values, ids in groups.items():
        begin = 0
        while begin < len(ids):
            place = bisect_left(lasts, ids[begin])
            end = bisect_right(ids, lasts[place]) if place < len(lasts) else len(ids)
            pages[place].append((values, ids[begin:end]))
            begin = end
    return [page for page in pages if page]


def drawn_between(earliest: Expression, latest: Expression) -> Func:
    """Return a time that the database draws anew for each row."""
    return _Drawn(earliest, latest, output_field=models.DateTimeField())


class _Drawn(Func):
    def as_sql(  # type: ignore[override]
        self, compiler: SQLCompiler, connection: BaseDatabaseWrapper
    ) -> Any:
        earliest, latest = map(compiler.compile, self.get_source_expressions())
        sql = f"({latest[0]} - random() * ({latest[0]} - {earliest[0]}))"
        return sql, (*latest[1], *latest[1], *earliest[1])
