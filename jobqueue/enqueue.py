"""The birth of a job, in the caller's transaction."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any, Final

from django.conf import settings as django_settings
from django.db import IntegrityError, connections, router
from django.db.models.base import ModelState
from django.db.models.expressions import DatabaseDefault
from django.utils import timezone
from django.utils.module_loading import import_string

from jobqueue import conf, db
from jobqueue.backoff import Backoff
from jobqueue.exceptions import InvalidJob
from jobqueue.lifecycle import State, work_in
from jobqueue.models import Job
from jobqueue.payload import check_payload, check_text

DOTTED_PATH: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
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
    clock = partial(db.now, using)
    job = _build(spec, {}, {}, using, clock)
    if unique_key is not None:
        return _insert_unique(job, using, clock)
    db.retry_transient(using, partial(_insert, [job], using, clock))
    _tell([job], using)
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
        The stored jobs, in the order of ``specs``.

    Raises:
        InvalidJob: as ``enqueue``, naming the position too; found before the first INSERT. A
            ``unique_key`` that is taken, or stands in ``specs`` twice, is refused as well.
    """
    using = using or router.db_for_write(Job)
    try:
        conf.check_integer(batch_size, "batch_size", 1, MAX_BATCH)
    except ValueError as error:
        raise InvalidJob(str(error)) from None
    clock = cache(partial(db.now, using))
    defaults: dict[str, Any] = {}
    jobs = []
    for position, spec in enumerate(specs):
        try:
            if not isinstance(spec, Mapping):
                raise InvalidJob(f"it must be a mapping of enqueue's arguments, not {spec!r:.80}")
            jobs.append(_build(spec, common, defaults, using, clock))
        except InvalidJob as error:
            raise InvalidJob(f"job {position}: {error}") from None
    try:
        db.in_transaction(using, partial(_insert, jobs, using, clock, batch_size))
    except IntegrityError:
        _refuse_taken_keys(jobs, using)
        raise
    _tell(jobs, using)
    return jobs


# -- From arguments to a row


def _build(
    spec: Mapping[str, Any],
    common: Mapping[str, Any],
    defaults: dict[str, Any],
    using: str,
    clock: Callable[[], datetime],
) -> Job:
    """Return one job, not yet stored; ``defaults`` keeps what those have that say nothing else."""
    unknown = sorted(map(repr, {*spec, *common}.difference(_COLUMNS)))
    if unknown:
        raise InvalidJob(f"a job has no {', '.join(unknown)}")
    task = spec.get("task") or common.get("task")
    if not task:
        raise InvalidJob("a job needs a task: the dotted path of a callable")
    columns = dict(defaults)
    try:
        for name, read in _COLUMNS.items():
            if name in spec:
                columns[name] = read(spec[name])
            elif name not in columns:
                columns[name] = defaults[name] = read(common.get(name))
    except (ValueError, TypeError) as error:
        raise InvalidJob(f"{task!r:.300}: {error}") from None
    run_after = columns.pop("run_after")
    if run_after is None and db.tells_default_times(using):
        return _job(columns)
    now = clock()
    try:
        run_after = now if run_after is None else _moment(run_after, now)
    except ValueError as error:
        raise InvalidJob(f"{task!r:.300}: {error}") from None
    state = State.SCHEDULED if run_after > now else State.WAITING
    return _job({**columns, "state": state, "run_after": run_after, "enqueued_at": now})


@cache
def _blank() -> dict[str, Any]:
    return Job().__dict__


def _job(columns: Mapping[str, Any]) -> Job:
    """Return what ``Job(**columns)`` would be, at a tenth of its cost."""
    job = Job.__new__(Job)
    job.__dict__ = {**_blank(), **columns, "_state": ModelState()}
    return job


def check_edit(changes: Mapping[str, Any], using: str) -> dict[str, Any]:
    """Return new values of a queued job's columns as they are stored.

    Raises:
        InvalidJob: there are none, or one can't be stored; the message names it.
    """
    if not changes:
        raise InvalidJob("there is nothing to edit")
    try:
        checked = {name: _COLUMNS[name](value) for name, value in changes.items()}
        if "run_after" in checked:
            checked["run_after"] = _moment(checked["run_after"], db.now(using))
    except ValueError as error:
        raise InvalidJob(str(error)) from None
    return checked


def _moment(run_after: datetime | timedelta, now: datetime) -> datetime:
    moment = now + run_after if isinstance(run_after, timedelta) else run_after
    if abs(moment - now) > conf.MAX_DURATION:
        limit = f"{conf.MAX_DURATION.days:,} days"
        raise ValueError(f"run_after must be within {limit} of now: {moment}")
    return moment


def _task(value: Any) -> str:
    if not isinstance(value, str) or not DOTTED_PATH.fullmatch(value) or len(value) > 255:
        raise ValueError("the task must be the dotted path of a callable, at most 255 characters")
    if conf.get().VALIDATE_TASKS:
        _import(value)
    return str.__str__(value)


@cache
def _import(path: str) -> None:
    try:
        handler = import_string(path)
    except Exception as error:  # a module may raise anything while it is imported
        cause = str(error) if isinstance(error, ImportError) else repr(error)
        raise ValueError(f"the task can't be imported: {cause}") from error
    if not callable(handler):
        raise ValueError(f"the task must be callable, not {handler!r:.80}")


def _args(value: Any) -> Any:
    value = () if value is None else value
    if not isinstance(value, list | tuple):
        raise ValueError(f"args must be a list or a tuple, not {value!r:.80}")
    return check_payload(value, "args", conf.get().MAX_PAYLOAD_BYTES)


def _mapping(name: str) -> Any:
    def read(value: Any) -> Any:
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a mapping, not {value!r:.80}")
        return check_payload(dict(value), name, conf.get().MAX_PAYLOAD_BYTES)

    return read


def _queue(value: Any) -> str:
    return conf.check_known_queue("default" if value is None else value)


def _priority(value: Any) -> int:
    limit = conf.MAX_PRIORITY
    return 0 if value is None else conf.check_integer(value, "priority", -limit, limit)


def _run_after(value: Any) -> datetime | timedelta | None:
    if value is None:
        return None
    if not isinstance(value, datetime | timedelta | int | float):
        raise ValueError(f"run_after must be a datetime, seconds or a timedelta, not {value!r:.80}")
    if not isinstance(value, datetime):
        return conf.check_seconds(value, "run_after", zero=True)
    if timezone.is_naive(value) == django_settings.USE_TZ:
        wanted = "have a time zone, since" if django_settings.USE_TZ else "be naive, without"
        raise ValueError(f"run_after must {wanted} USE_TZ: {value.isoformat()}")
    return value


def _max_attempts(value: Any) -> int:
    if value is None:
        return conf.get().MAX_ATTEMPTS
    return conf.check_integer(value, "max_attempts", 1, conf.MAX_BUDGET)


def _backoff(value: Any) -> dict[str, float]:
    return (conf.get().BACKOFF if value is None else Backoff.parse(value)).as_dict()


def _timeout(value: Any) -> timedelta | None:
    value = conf.get().TIMEOUT if value is None else value
    return None if value is None else conf.check_seconds(value, "timeout")


def _text(name: str, length: int) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        value = "" if value is None else value
        if not isinstance(value, str) or len(value) > length:
            raise ValueError(f"{name} must be text of at most {length} characters: {value!r:.80}")
        check_text(value, name)
        return str.__str__(value)

    return read


def _unique_key(value: Any) -> str | None:
    if value is None:
        return None
    if value == "":
        raise ValueError("unique_key must not be empty")
    return _text("unique_key", 255)(value)


_COLUMNS: Final[Mapping[str, Any]] = {
    "task": _task,
    "args": _args,
    "kwargs": _mapping("kwargs"),
    "queue": _queue,
    "priority": _priority,
    "run_after": _run_after,
    "max_attempts": _max_attempts,
    "backoff": _backoff,
    "timeout": _timeout,
    "unique_key": _unique_key,
    "workspace": _text("workspace", 100),
    "metadata": _mapping("metadata"),
}


# -- Inserting


def _insert(
    jobs: Sequence[Job], using: str, clock: Callable[[], datetime], batch_size: int = MAX_BATCH
) -> None:
    for job in jobs:  # An attempt that was rolled back has left its marks.
        job.pk, job._state.adding = None, True
    if db.has_batches(using):
        if len(jobs) > 1:
            # To read a time back for each row costs more than to ask for it once.
            now = clock()
            for job in jobs:
                for name in ("run_after", "enqueued_at"):
                    if isinstance(job.__dict__[name], DatabaseDefault):
                        job.__dict__[name] = now
        for start in range(0, len(jobs), batch_size):
            db.insert_rows(jobs[start : start + batch_size], using)
    elif len(jobs) > 1 and connections[using].features.can_return_rows_from_bulk_insert:
        Job.objects.using(using).bulk_create(jobs, batch_size=batch_size)
    else:  # MySQL tells the new id of one row only.
        for job in jobs:
            job.save(using=using)


def _tell(jobs: Iterable[Job], using: str) -> None:
    """Wake workers of the jobs' queues, once the jobs are committed."""
    db.wake_after_commit(using, {work_in(job.queue) for job in jobs})


# -- Unique keys


def _insert_unique(job: Job, using: str, clock: Callable[[], datetime]) -> Job:
    """Insert ``job``, or return the unfinished one that has its key.

    The unique index decides, so any number of callers at once get one row.
    """
    for _ in range(UNIQUE_TRIES):
        try:
            db.in_transaction(using, partial(_insert, [job], using, clock))
            _tell([job], using)
            return job
        except IntegrityError:
            holder = Job.objects.using(using).filter(unique_key=job.unique_key).first()
            if holder:
                return holder
    raise InvalidJob(
        f"unique_key {job.unique_key!r} is taken by a job that this transaction can't see"
    )


def _refuse_taken_keys(jobs: Sequence[Job], using: str) -> None:
    keys = [job.unique_key for job in jobs if job.unique_key is not None]
    taken = set(
        Job.objects.using(using).filter(unique_key__in=keys).values_list("unique_key", flat=True)
    )
    taken |= {key for key, count in Counter(keys).items() if count > 1}
    if taken:
        shown = ", ".join(sorted(map(repr, taken))[:10])
        more = f" and {len(taken) - 10} more" if len(taken) > 10 else ""
        raise InvalidJob(f"unique_key taken: {shown}{more}")
