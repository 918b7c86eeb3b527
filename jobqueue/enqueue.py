"""The birth of a job, in the caller's transaction."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any, Final

from django.db import IntegrityError, connections, router

from jobqueue import conf, db
from jobqueue.arguments import PAYLOADS, Reader
from jobqueue.backoff import Backoff
from jobqueue.exceptions import InvalidJob
from jobqueue.lifecycle import work_in
from jobqueue.models import Job

# An active job with the key may finish, and another be born, between the INSERT and the look.
UNIQUE_TRIES: Final = 5
MAX_BATCH: Final = 10_000


def enqueue(
    task: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    queue: str = "default",
    priority: int = 0,
    run_after: datetime | timedelta | float | None = None,
    max_attempts: int | None = None,
    backoff: Backoff | Mapping[str, Any] | float | timedelta | None = None,
    timeout: timedelta | float | None = None,
    unique_key: str | None = None,
    workspace: str = "",
    metadata: Mapping[str, Any] | None = None,
    using: str | None = None,
) -> Job:
    """Store a job, to be run once the caller's transaction is committed.

    Args:
        task: dotted path of a callable.
        args, kwargs: its arguments, JSON types only.
        queue: the queue's name.
        priority: -100 to 100; higher runs first.
        run_after: not before this time, or this long (seconds or ``timedelta``) from now.
        max_attempts: executions that the job may use up; default ``JOBQUEUE["MAX_ATTEMPTS"]``.
        backoff: the wait between attempts: a ``Backoff``, its figures, or seconds.
        timeout: how long an execution may run, in seconds or as a ``timedelta``.
        unique_key: at most one job that isn't finished has this key.
        workspace: a name by which jobs of one tenant can be told from others'.
        metadata: JSON for the caller's own use.
        using: database alias; default ``router.db_for_write(Job)``.

    Returns:
        The stored job, or the unfinished one that has the ``unique_key`` already.

    Raises:
        InvalidJob: a value can't be stored or run; the message names it. Nothing was written.
    """
    using = using or router.db_for_write(Job)
    spec = {
        "task": task,
        "args": args,
        "kwargs": kwargs,
        "queue": queue,
        "priority": priority,
        "run_after": run_after,
        "max_attempts": max_attempts,
        "backoff": backoff,
        "timeout": timeout,
        "unique_key": unique_key,
        "workspace": workspace,
        "metadata": metadata,
    }
    columns, texts = _read(spec, using)
    insert = partial(_insert, columns, texts, using)
    if columns["unique_key"] is None:
        job = db.retry_transient(using, insert)
    else:
        job, is_new = _insert_unique(columns["unique_key"], insert, using)
        if not is_new:
            return job
    db.wake_after_commit(using, [work_in(job.queue)])
    return job


def enqueue_many(
    specs: Iterable[Mapping[str, Any]],
    *,
    batch_size: int = 1000,
    using: str | None = None,
    **common: Any,
) -> list[Job]:
    """Store many jobs, all or none.

    Args:
        specs: for each job the arguments of ``enqueue`` by name: ``{"task": "shop.mail",
            "args": [1]}``.
        batch_size: rows per INSERT.
        common: arguments that all have in common: ``enqueue_many(specs, queue="mail")``.

    Returns:
        The stored jobs, in the order of ``specs``. ``kwargs``, ``metadata`` and ``backoff`` that
        they have in common are one object, to be copied before it is changed.

    Raises:
        InvalidJob: as ``enqueue``, naming the position too; found before the first INSERT. A
            ``unique_key`` that is taken, or stands in ``specs`` twice, is refused as well.
    """
    using = using or router.db_for_write(Job)
    try:
        conf.check_integer(batch_size, "batch_size", 1, MAX_BATCH)
    except ValueError as error:
        raise InvalidJob(str(error)) from None
    reader = Reader(common, partial(db.now, using))
    births = _Births.read(specs, reader)
    if births is None:
        return []
    try:
        jobs = db.in_transaction(using, partial(births.insert, using, batch_size))
    except IntegrityError:
        _refuse_taken_keys(births.column("unique_key"), using)
        raise
    db.wake_after_commit(using, map(work_in, set(births.column("queue"))))
    return jobs


# -- One


def _read(spec: Mapping[str, Any], using: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the columns that all arguments of a job give, and the texts of what is JSON."""
    reader = Reader({}, partial(db.now, using))
    columns, texts = reader.read(spec), {}
    columns["run_after"], columns["state"] = columns["run_after"]
    for name in PAYLOADS:
        columns[name], texts[name] = columns[name]
    if columns["run_after"] is None and db.tells_default_times(using):
        del columns["run_after"]
    else:
        columns["run_after"] = columns["run_after"] or reader.now()
        columns["enqueued_at"] = reader.now()
    return columns, texts


def _insert(columns: Mapping[str, Any], texts: Mapping[str, str], using: str) -> Job:
    if db.has_batches(using):
        given = db.insert_row(Job, using, {**columns, **texts})
        return db.instance(Job, {**_blank(), **columns, **given}, using)
    job = db.instance(Job, {**_blank(), **columns}, None)
    _save([job], using)
    return job


def _save(jobs: Sequence[Job], using: str, batch_size: int = MAX_BATCH) -> None:
    if len(jobs) > 1 and connections[using].features.can_return_rows_from_bulk_insert:
        Job.objects.using(using).bulk_create(jobs, batch_size=batch_size)
    else:  # MySQL tells the new id of one row only.
        for job in jobs:
            job.save(using=using)


@cache
def _blank() -> dict[str, Any]:
    return Job().__dict__


def _insert_unique(key: str, insert: Callable[[], Job], using: str) -> tuple[Job, bool]:
    """Insert a job, or return the unfinished one that has its key; and say whether it is new.

    The unique index decides, so any number of callers at once get one row.
    """
    for _ in range(UNIQUE_TRIES):
        try:
            return db.in_transaction(using, insert), True
        except IntegrityError:
            holder = Job.objects.using(using).filter(unique_key=key).first()
            if holder:
                return holder, False
    raise InvalidJob(f"unique_key {key!r} is taken by a job that this transaction can't see")


# -- Many


@dataclass(slots=True)
class _Births:
    """Jobs to be: by column, what all of them have in common and what they have one by one.

    Attributes:
        same, each: what they will have.
        same_texts, texts: the same of what is JSON, as text.
    """

    same: dict[str, Any]
    each: dict[str, Sequence[Any]]
    same_texts: dict[str, str] = field(default_factory=dict)
    texts: dict[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, specs: Iterable[Any], reader: Reader) -> _Births | None:
        """Read the arguments of many jobs, if there are any."""
        for number, spec in enumerate(specs):
            try:
                reader.add(spec)
            except InvalidJob as error:
                raise InvalidJob(f"job {number}: {error}") from None
        return cls._of(reader) if reader.count else None

    @classmethod
    def _of(cls, reader: Reader) -> _Births:
        """Tell what the jobs have in common, and apart what was read as one."""
        births = cls({**reader.otherwise, "enqueued_at": reader.now()}, {})
        same, each = births.same, births.each
        for name, column in reader.columns.items():
            if name in PAYLOADS or any(value is not column[0] for value in column):
                each[name] = column
                same.pop(name, None)
            else:
                same[name] = column[0]
        if "run_after" in each:
            moments, each["state"] = zip(*each["run_after"], strict=True)
            each["run_after"] = [moment or reader.now() for moment in moments]
        else:
            moment, same["state"] = same["run_after"]
            same["run_after"] = moment or reader.now()
        for name in PAYLOADS:
            if name in each:
                each[name], births.texts[name] = zip(*each[name], strict=True)
            else:
                same[name], births.same_texts[name] = same[name]
        if not each:
            each["task"] = [same.pop("task")] * reader.count
        return births

    def __len__(self) -> int:
        return len(next(iter(self.each.values())))

    def column(self, name: str) -> Sequence[Any]:
        """Return the values of a column."""
        return self.each[name] if name in self.each else [self.same[name]] * len(self)

    def insert(self, using: str, batch_size: int) -> list[Job]:
        """Store them, many in a statement where the engine can."""
        if db.has_batches(using):
            return self._insert(using, batch_size)
        jobs = self._jobs({}, None)
        _save(jobs, using, batch_size)
        return jobs

    def _insert(self, using: str, batch_size: int) -> list[Job]:
        same = {**self.same, **self.same_texts}
        each = {**self.each, **self.texts}
        given = defaultdict[str, list[Any]](list)
        for start in range(0, len(self), batch_size):
            part = {name: column[start : start + batch_size] for name, column in each.items()}
            for name, column in db.insert_columns(Job, using, same, part).items():
                given[name] += column
        return self._jobs(given, using)

    def _jobs(self, given: Mapping[str, Any], stored_in: str | None) -> list[Job]:
        same = {**_blank(), **self.same}
        rows = [same.copy() for _ in range(len(self))]
        for name, column in {**self.each, **given}.items():
            for row, value in zip(rows, column, strict=True):
                row[name] = value
        return [db.instance(Job, row, stored_in) for row in rows]


def _refuse_taken_keys(given: Iterable[str | None], using: str) -> None:
    keys = [key for key in given if key is not None]
    taken = set(
        Job.objects.using(using).filter(unique_key__in=keys).values_list("unique_key", flat=True)
    )
    taken |= {key for key, count in Counter(keys).items() if count > 1}
    if taken:
        shown = ", ".join(sorted(map(repr, taken))[:10])
        more = f" and {len(taken) - 10} more" if len(taken) > 10 else ""
        raise InvalidJob(f"unique_key taken: {shown}{more}")
