"""The fence for many jobs at once: like writes in one statement, made once for all of a form.

What all of a group has in common goes as a scalar. To compare scalars costs nearly nothing; as
arrays it would cost a quarter (ADR 0021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

from django.db.models import F, Q

from jobqueue import db, guards, ledger
from jobqueue.backoff import Drawn
from jobqueue.models import Job, JobEvent
from jobqueue.querysets import JobQuerySet
from jobqueue.settlement import Write


class Part(NamedTuple):
    """What one statement writes to jobs alike, beside others: ``changes`` with the owner's mark."""

    job: Job
    ids: Sequence[int]
    write: Write
    changes: Mapping[str, Any]


def kind_of(job: Job, write: Write) -> tuple[Any, ...]:
    """Return what the writes of one statement have in common."""
    nulls = (job.claimed_by is None, job.claimed_at is None, job.attempted_at is None)
    return (*nulls, write.verb, write.kind is None, *write.changes, id(write.where))


def in_order_of_ids(groups: Sequence[Sequence[int]]) -> tuple[Sequence[int], Sequence[int]]:
    """Return all ids, sorted so that batches never wait crosswise, and each one's group's place."""
    if len(groups) == 1:
        return sorted(groups[0]), [0] * len(groups[0])
    pairs = sorted((job_id, place) for place, ids in enumerate(groups) for job_id in ids)
    return [job_id for job_id, _ in pairs], [place for _, place in pairs]


def expecting(names: Sequence[str], state: str | None, using: str) -> JobQuerySet:
    """Return the jobs that are as ``guards.unchanged`` says, with blanks for what it expects."""
    lookups: guards.Where = {
        name: True if name.endswith("__isnull") else db.Blank(Job, name) for name in names
    }
    if "state" in lookups:
        lookups["state"] = state  # which is compared in a form of its own
    return Job.objects.using(using).alike(lookups)


def update(parts: Sequence[Part], actor: str | None, using: str) -> set[int]:
    """Write parts of one kind, and their events; return the ids of the jobs that were met."""
    first = parts[0]
    ids, places = in_order_of_ids([part.ids for part in parts])
    expected = guards.unchanged(first.job.fingerprint)
    names = [name for name in expected if name in guards.FINGERPRINT]
    _, match = _split([{name: getattr(p.job, name) for name in names} for p in parts], places)
    alike = {name: value for name, value in expected.items() if name not in match}
    new, own_new = _split([part.changes for part in parts], places)
    words = [ledger.told(p.job, p.write, actor) if p.write.kind else {} for p in parts]
    told, own_told = _split(words, places)
    form = _Form(
        *(tuple(alike), alike.get("state"), first.write.where, tuple(match)),
        tuple((name, type(value) is Drawn) for name, value in new.items()),
        *(tuple(own_new), tuple(told), tuple(own_told)),
    )
    columns = {**match, **_prefixed("new_", own_new), **_prefixed("own_", own_told)}
    given = {**alike, **_prefixed("new_", new), **_prefixed("told_", told)}
    if isinstance(wait := new.get("run_after"), Drawn):
        given |= {"earliest": wait.earliest, "latest": wait.latest}
    return _updating(form, using)(ids, columns, given)


class _Form(NamedTuple):
    """What makes a statement: names of columns, and what stands in it as it is.

    Attributes:
        alike, state: what all of its jobs are expected to be (see ``expecting``).
        where: the write's own condition.
        match: what is expected of each by itself.
        new: what all of them get, and whether the database draws it for each.
        own_new: what they get one by one.
        told, own_told: what their events say, all of them or one by one; nothing if there are none.
    """

    alike: tuple[str, ...]
    state: str | None
    where: Q
    match: tuple[str, ...]
    new: tuple[tuple[str, bool], ...]
    own_new: tuple[str, ...]
    told: tuple[str, ...]
    own_told: tuple[str, ...]


@lru_cache(maxsize=256)
def _updating(form: _Form, using: str) -> db.UpdateEach:
    changes: dict[str, Any] = {"version": F("version") + 1}
    for name, is_drawn in form.new:
        changes[name] = db.Blank(Job, name, f"new_{name}")
        if is_drawn:
            moments = (db.Blank(Job, name, moment) for moment in ("earliest", "latest"))
            changes[name] = db.drawn_between(*moments)
    told = {name: db.Blank(JobEvent, name, f"told_{name}") for name in form.told}
    return db.UpdateEach(
        expecting(form.alike, form.state, using).filter(form.where),
        form.match,
        changes,
        form.own_new,
        db.Companions(JobEvent, "job_id", told, form.own_told) if told else None,
    )


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in values.items()}


def _split(
    records: Sequence[Mapping[str, Any]], places: Sequence[int]
) -> tuple[dict[str, Any], dict[str, Sequence[Any]]]:
    """Part columns into those of which all records have one value, and those given row by row."""
    common: dict[str, Any] = {}
    each: dict[str, Sequence[Any]] = {}
    for name, value in records[0].items():
        values = [record[name] for record in records]
        if _is_one_value(values):
            common[name] = value
        else:
            each[name] = [_moment(values[place]) for place in places]
    return common, each


def _moment(value: Any) -> Any:
    return value.draw() if type(value) is Drawn else value


def _is_one_value(values: Sequence[Any]) -> bool:
    """Whether all are one object or one value; as JSON ``True`` is not 1, though equal."""
    first = values[0]
    kind = type(first)
    if kind in (int, str, datetime, Drawn):
        return all(type(value) is kind and value == first for value in values)
    return all(value is first for value in values)
