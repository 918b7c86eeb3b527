"""What ``enqueue`` takes: each argument checked, and turned into what its column holds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from django.conf import settings as django_settings
from django.utils import timezone
from django.utils.module_loading import import_string

from jobqueue import conf, db
from jobqueue.backoff import Backoff
from jobqueue.exceptions import InvalidJob
from jobqueue.lifecycle import State
from jobqueue.payload import Payload, check_text, read_payload

DOTTED_PATH: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
# Arguments that are stored as JSON.
PAYLOADS: Final = ("args", "kwargs", "backoff", "metadata")
_WAITING: Final = State.WAITING.value
_SCHEDULED: Final = State.SCHEDULED.value
# For each argument that jobs of a kind give, how it is read and put; and what else to put, and how.
_Steps = tuple[
    list[tuple[str, Callable[[Any], Any], Callable[[Any], None]]],
    list[tuple[Callable[[Any], None], Any]],
]
NO_PATH: Final = "the task must be the dotted path of a callable, at most 255 characters"


class Reader:
    """Reads jobs' arguments; what many jobs have in common it reads once.

    What is read is a column's value; of ``PAYLOADS`` it is a ``Payload``, and of ``run_after`` the
    time, ``None`` for that of the INSERT, and the state that goes with it.

    Args:
        common: arguments of all jobs that don't say otherwise.
        clock: tells the database's time.

    Attributes:
        columns: by argument, what was added, for each job; nothing for those that none has given.
        otherwise: by argument, what those jobs have that don't give it.
        count: how many were added.
    """

    def __init__(self, common: Mapping[str, Any], clock: Callable[[], datetime]) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.otherwise: dict[str, Any] = {}
        self.count = 0
        self._common = common
        self._clock = clock
        self._now: datetime | None = None
        self._readers = {**_COLUMNS, "run_after": self._due}
        self._steps: dict[tuple[Any, ...], _Steps] = {}

    def read(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a job has that gives every argument.

        Raises:
            InvalidJob: one of them can't be stored.
        """
        try:
            return {name: read(spec[name]) for name, read in self._readers.items()}
        except (ValueError, TypeError) as error:
            raise self._refusal(spec, error) from None

    def add(self, spec: Any) -> None:
        """Add to each column what one of many jobs has.

        It is not kept as a row: objects that last are what the garbage collector goes through, and
        for so many that takes longer than all the rest.

        Raises:
            InvalidJob: an argument, or one of those in common, can't be stored or is missing.
        """
        if type(spec) is not dict and not isinstance(spec, Mapping):
            raise InvalidJob(f"it must be a mapping of enqueue's arguments, not {spec!r:.80}")
        shape = tuple(spec)
        steps = self._steps.get(shape)
        if steps is None:
            self._check_names(shape)
        try:
            given, left = steps or self._steps_of(shape)
            for name, read, append in given:
                append(read(spec[name]))
        except (ValueError, TypeError) as error:
            raise self._refusal(spec, error) from None
        for append, value in left:
            append(value)
        self.count += 1

    def now(self) -> datetime:
        """Return the database's time, asked for once."""
        if self._now is None:
            self._now = self._clock()
        return self._now

    def _check_names(self, shape: tuple[Any, ...]) -> None:
        unknown = sorted(map(repr, {*shape, *self._common}.difference(_COLUMNS)))
        if unknown:
            raise InvalidJob(f"a job has no {', '.join(unknown)}")

    def _steps_of(self, shape: tuple[Any, ...]) -> _Steps:
        """Return how to add jobs that give these arguments."""
        for name, read in self._readers.items():
            if name not in shape and name not in self.otherwise:
                self.otherwise[name] = read(self._common.get(name))
        for name in shape:
            if name not in self.columns:
                # None of those before gave it; and how to add others like them has changed.
                self.columns[name] = [self.otherwise.get(name)] * self.count
                self._steps.clear()
        left = [name for name in self.columns if name not in shape]
        self._steps[shape] = steps = (
            [(name, self._readers[name], self.columns[name].append) for name in shape],
            [(self.columns[name].append, self.otherwise[name]) for name in left],
        )
        return steps

    def _refusal(self, spec: Mapping[str, Any], error: Exception) -> InvalidJob:
        task = spec.get("task") or self._common.get("task")
        if not task:
            return InvalidJob("a job needs a task: the dotted path of a callable")
        return InvalidJob(f"{task!r:.300}: {error}")

    def _due(self, value: Any) -> tuple[datetime | None, str]:
        run_after = _run_after(value)
        if run_after is None:
            return None, _WAITING
        moment = _moment(run_after, self.now())
        return moment, _SCHEDULED if moment > self.now() else _WAITING


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


# -- One argument each


def _moment(run_after: datetime | timedelta, now: datetime) -> datetime:
    moment = now + run_after if isinstance(run_after, timedelta) else run_after
    if abs(moment - now) > conf.MAX_DURATION:
        limit = f"{conf.MAX_DURATION.days:,} days"
        raise ValueError(f"run_after must be within {limit} of now: {moment}")
    return moment


def _task(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(NO_PATH)
    return _path(value, conf.get().VALIDATE_TASKS)


@lru_cache(maxsize=1000)
def _path(text: str, must_import: bool) -> str:
    if not DOTTED_PATH.fullmatch(text) or len(text) > 255:
        raise ValueError(NO_PATH)
    if must_import:
        try:
            handler = import_string(text)
        except Exception as error:  # a module may raise anything while it is imported
            cause = str(error) if isinstance(error, ImportError) else repr(error)
            raise ValueError(f"the task can't be imported: {cause}") from error
        if not callable(handler):
            raise ValueError(f"the task must be callable, not {handler!r:.80}")
    return str.__str__(text)


def _args(value: Any) -> Payload:
    value = () if value is None else value
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"args must be a list or a tuple, not {value!r:.80}")
    return read_payload(value, "args", conf.get().MAX_PAYLOAD_BYTES)


def _mapping(name: str) -> Callable[[Any], Payload]:
    def read(value: Any) -> Payload:
        if value is None:
            return {}, "{}"
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a mapping, not {value!r:.80}")
        return read_payload(dict(value), name, conf.get().MAX_PAYLOAD_BYTES)

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


def _backoff(value: Any) -> Payload:
    figures, text = _figures(conf.get().BACKOFF if value is None else Backoff.parse(value))
    return dict(figures), text


@lru_cache(maxsize=16)
def _figures(backoff: Backoff) -> Payload:
    return read_payload(backoff.as_dict(), "backoff", conf.get().MAX_PAYLOAD_BYTES)


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
