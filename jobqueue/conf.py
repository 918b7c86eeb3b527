"""Every setting, its default and its checks. The only reader of Django's settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import cache
from typing import Any, Final

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver

from jobqueue.backoff import Backoff

QUEUE_NAME: Final = re.compile(r"[\w.:-]{1,100}")
MAX_PRIORITY: Final = 100
MAX_BUDGET: Final = 10_000
MAX_PROCESSES: Final = 1000
# Far beyond any use, and such that no engine's columns and no sum of times overflow.
MAX_DURATION: Final = timedelta(days=36_500)


@dataclass(frozen=True, slots=True)
class Settings:
    """``JOBQUEUE = {...}`` with defaults filled in. Times are in seconds.

    Attributes:
        QUEUES: the names that jobs may be enqueued to, and that ``run_worker`` serves when it is
            given none; ``None`` allows any name, and then workers serve ``default``.
        MAX_ATTEMPTS: executions a job may use up before it fails.
        BACKOFF: waits between attempts: figures of ``jobqueue.backoff.Backoff``.
        TIMEOUT: how long an execution may run, ``None`` for as long as its worker lives.
        TIMEOUT_GRACE: how far past its timeout a running job is before a sweep takes it.
        CLAIM_TIMEOUT: how long a job may be claimed without being started.
        LEASE: how long a worker may stay silent before it is declared dead. Heartbeats are sent
            at a third of it.
        SWEEP_INTERVAL: how often each worker sweeps, give or take a tenth.
        POLL: how often an idle worker looks for jobs.
        GRACE: how long a worker that is told to stop waits for its running jobs.
        PROCESSES: worker processes that ``run_worker`` keeps running under a parent; 0 for one
            without a parent.
        THREADS: jobs that one worker process runs at once.
        BATCH: quick jobs that one worker process has in hand at most, its threads' included.
        NOTIFY: whether workers are woken when there is something to do, where the database can.
        MAX_PAYLOAD_BYTES: the largest JSON text of ``args`` and ``kwargs``, ``metadata`` or a
            result.
        VALIDATE_TASKS: refuse to enqueue a dotted path that can't be imported here. Turn it off
            where producers don't have the handlers' code.
    """

    QUEUES: tuple[str, ...] | None = None
    MAX_ATTEMPTS: int = 5
    BACKOFF: Backoff = field(default_factory=Backoff)
    TIMEOUT: float | None = None
    TIMEOUT_GRACE: float = 30.0
    CLAIM_TIMEOUT: float = 60.0
    LEASE: float = 30.0
    SWEEP_INTERVAL: float = 30.0
    POLL: float = 1.0
    GRACE: float = 20.0
    PROCESSES: int = 1
    THREADS: int = 4
    BATCH: int = 500
    NOTIFY: bool = True
    MAX_PAYLOAD_BYTES: int = 1_048_576
    VALIDATE_TASKS: bool = True

    @property
    def worker_queues(self) -> tuple[str, ...]:
        """The queues that a worker serves when it is given none."""
        return self.QUEUES or ("default",)


def check_queue_name(value: Any) -> str:
    """Return ``value`` if it is a well-formed queue name, else raise ``ValueError``."""
    if not isinstance(value, str) or not QUEUE_NAME.fullmatch(value):
        raise ValueError(f"queue must be 1 to 100 letters, digits or any of _ . : -, not {value!r}")
    # Not what str() makes of a member of an enumeration.
    return str.__str__(value)


def check_queue_names(value: Any) -> list[str]:
    """Return the well-formed names in ``value``, each once, or raise ``ValueError``.

    Text is no list of names, although Python would take it for one of its characters.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"queues must be a list of names, not {value!r}")
    return list(dict.fromkeys(map(check_queue_name, value)))


def check_seconds(value: Any, name: str, *, zero: bool = False) -> timedelta:
    """Return seconds or a ``timedelta`` as a ``timedelta``.

    Raises:
        ValueError: not a number, not finite, negative, more than 100 years, or zero where
            ``zero`` isn't allowed.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            value = timedelta(seconds=value)
        except (OverflowError, ValueError):
            raise ValueError(f"{name} must be a finite number of seconds, not {value!r}") from None
    if not isinstance(value, timedelta):
        raise ValueError(f"{name} must be seconds or a timedelta, not {value!r}")
    if value < timedelta(0) or (not value and not zero):
        wanted = "zero or more" if zero else "more than zero"
        raise ValueError(f"{name} must be {wanted}, not {value.total_seconds():g} seconds")
    if value > MAX_DURATION:
        raise ValueError(f"{name} must be at most {MAX_DURATION.days:,} days, not {value}")
    return value


def check_integer(value: Any, name: str, low: int, high: int) -> int:
    """Return ``value`` if it is an integer from ``low`` to ``high``, else raise ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, not {value!r}")
    return int(value)


def _queues(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = check_queue_names(value)
    if not names:
        raise ValueError("queues must be a list of names or None, not empty")
    return tuple(names)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be True or False, not {value!r}")
    return value


def _seconds(value: Any) -> float:
    return check_seconds(value, "the value").total_seconds()


def _integer(low: int, high: int) -> Callable[[Any], int]:
    return lambda value: check_integer(value, "the value", low, high)


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "QUEUES": _queues,
    "MAX_ATTEMPTS": _integer(1, MAX_BUDGET),
    "BACKOFF": Backoff.parse,
    "TIMEOUT": lambda value: None if value is None else _seconds(value),
    "TIMEOUT_GRACE": _seconds,
    "CLAIM_TIMEOUT": _seconds,
    "LEASE": _seconds,
    "SWEEP_INTERVAL": _seconds,
    "POLL": _seconds,
    "GRACE": _seconds,
    "PROCESSES": _integer(0, MAX_PROCESSES),
    "THREADS": _integer(1, 1000),
    "BATCH": _integer(1, 10_000),
    "NOTIFY": _boolean,
    "MAX_PAYLOAD_BYTES": _integer(1024, 2**30),
    "VALIDATE_TASKS": _boolean,
}


def read(given: Any) -> tuple[Settings, list[str]]:
    """Read a ``JOBQUEUE`` dict; return the settings and what is wrong with it, a line each."""
    if not isinstance(given, Mapping):
        return Settings(), [f"JOBQUEUE must be a dict, not {given!r}"]
    problems, values = [], {}
    for name, value in given.items():
        if name not in _READERS:
            problems.append(f"JOBQUEUE has no setting {name!r}; known: {', '.join(_READERS)}")
            continue
        try:
            values[name] = _READERS[name](value)
        except (ValueError, TypeError) as error:
            problems.append(f"JOBQUEUE[{name!r}]: {error}")
    settings = Settings(**values)
    return settings, problems + list(_contradictions(settings))


def _contradictions(settings: Settings) -> Iterator[str]:
    if settings.POLL >= settings.LEASE:
        # A renewal is only sent while the claiming loop ticks, which it does once a poll.
        yield (
            f"JOBQUEUE['POLL'] ({settings.POLL:g} s) must be shorter than "
            f"JOBQUEUE['LEASE'] ({settings.LEASE:g} s)"
        )


def read_project() -> tuple[Settings, list[str]]:
    """Read the project's own ``settings.JOBQUEUE``; see ``read``."""
    return read(getattr(django_settings, "JOBQUEUE", {}))


@cache
def get() -> Settings:
    """Return the settings in force.

    Raises:
        ImproperlyConfigured: ``settings.JOBQUEUE`` is wrong; the message names each value.
    """
    settings, problems = read_project()
    if problems:
        raise ImproperlyConfigured("; ".join(problems))
    return settings


def check_known_queue(value: Any) -> str:
    """Return the name of a queue that jobs may be enqueued to, else raise ``ValueError``."""
    name = check_queue_name(value)
    known = get().QUEUES
    if known is not None and name not in known:
        raise ValueError(f"there is no queue {name!r} in JOBQUEUE['QUEUES']: {', '.join(known)}")
    return name


@receiver(setting_changed)
def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting == "JOBQUEUE":
        get.cache_clear()


assert set(_READERS) == {entry.name for entry in fields(Settings)}
