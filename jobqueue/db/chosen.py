"""Rows that a query chooses, locks and changes: the statement of a claim."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple

from django.db import connections, models, transaction
from django.db.models import Exists, QuerySet
from django.db.models.functions import Now

from jobqueue.db.batch import has_batches
from jobqueue.db.convert import Row, epoch_of, from_epoch, instances
from jobqueue.db.statement import Blank, fill, update_parts, writing


class Choice(NamedTuple, Generic[Row]):
    """Which rows are to be updated, and how.

    Attributes:
        rows: in an order, and locked past those that others have.
        still: what they must be, compared once more by the UPDATE itself.
        permit: a row of another table without which none is; locked, so that it stays.
        changes: by column, the value or expression that all of them get; ``Now`` is the time of
            the statement.
    """

    rows: QuerySet[Row]
    still: QuerySet[Row]
    permit: QuerySet[Any]
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
        with writing(self._using) as cursor:
            cursor.execute(self._sql, [*before, limit, *after])
            rows = sorted(cursor.fetchall(), key=lambda row: row[len(self._fields) :])
        if not rows:
            return []
        known = {
            name: given[value.name] if isinstance(value, Blank) else value
            for name, value in self._known.items()
        }
        if self._times:
            known |= dict.fromkeys(self._times, from_epoch(rows[0][-1], connection.timezone))
        return list(instances(self._model, self._fields, known, rows, self._using))

    def _write_sql(self, choice: Choice[Row]) -> None:
        quote = connections[self._using].ops.quote_name
        row_id = f"{quote(self._model._meta.db_table)}.{quote('id')}"
        still = choice.still.filter(Exists(choice.permit))
        head, head_params, where, where_params = update_parts(still, choice.changes)
        ids, id_params = choice.rows.values("pk").query.get_compiler(self._using).as_sql()
        # Evaluated once, as an array; of IN (SELECT ...) more could be locked than were asked for.
        where = [f"{row_id} = ANY(ARRAY({ids} LIMIT %s))", *where]
        returned = [*(quote(field.column) for field in self._fields), *_order(choice.rows, quote)]
        # A statement has one time, whichever columns get it.
        self._times = [name for name, value in choice.changes.items() if isinstance(value, Now)]
        returned += [epoch_of(quote(name)) for name in self._times[:1]]
        self._sql = f"{head} WHERE {' AND '.join(where)} RETURNING {', '.join(returned)}"
        self._params = [*head_params, *id_params], where_params
        self._known = _known(choice.changes)


def _update_in_steps(limit: int, choice: Choice[Row]) -> list[Row]:
    rows, still, permit, changes = choice
    with transaction.atomic(using=rows.db):
        may = list(permit.values_list("pk"))
        ids = list(rows.values_list("pk", flat=True)[:limit]) if may else []
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
            number = epoch_of(number)
        yield f"-{number}" if term.startswith("-") else number
