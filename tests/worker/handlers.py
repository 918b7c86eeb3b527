"""Handlers that the worker's tests run: in a thread of the test's own process, or in a child."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.db import connections, router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import translation

from jobqueue.exceptions import Cancel, Fail, Retry, Snooze
from jobqueue.models import Job
from jobqueue.worker.context import JobContext, current_context
from tests.helpers import TIMEOUT, other_connection

PREFIX = "tests.worker.handlers"


def path(handler: Any) -> str:
    """Return the dotted path of a handler of this module."""
    return f"{PREFIX}.{handler.__name__}"


# -- What handlers leave behind, and gates at which the test holds them

seen: list[Any] = []
gates: dict[str, Gate] = {}


class Gate:
    """Where a handler waits until the test lets it go on; what it returns or raises is told."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.left = threading.Event()
        self.contexts: list[JobContext] = []

    def wait_until_entered(self) -> JobContext:
        """Return the context of the first handler that has come."""
        assert self.entered.wait(TIMEOUT), "no handler came to the gate"
        return self.contexts[0]

    def open(self) -> None:
        """Let whoever waits here go on, and whoever comes."""
        self.left.set()


def gate(name: str = "gate") -> Gate:
    """Return the gate of this name."""
    return gates.setdefault(name, Gate())


def reset() -> None:
    """Open all gates and forget them, and what was seen."""
    for each in gates.values():
        each.open()
    gates.clear()
    seen.clear()


def hold(name: str = "gate", raises: str = "", result: Any = None) -> Any:
    """Wait at a gate, then return ``result`` or raise."""
    here = gate(name)
    here.contexts.append(current_context())
    here.entered.set()
    if not here.left.wait(3 * TIMEOUT):  # longer than the test waits for anything
        raise AssertionError(f"nobody opened gate {name}")
    if raises:
        _raise(raises)
    return result


def hold_until_lost(name: str = "gate") -> str:
    """Wait at a gate, and end by oneself when told that the job is lost."""
    here = gate(name)
    here.contexts.append(current_context())
    here.entered.set()
    _poll(lambda: current_context().lost)
    return "too late"


def hold_until_cancelled() -> NoReturn:
    """End by oneself when told that somebody asked for it."""
    gate().contexts.append(current_context())
    gate().entered.set()
    _poll(lambda: current_context().cancelled)
    raise Cancel("told so")


def _poll(condition: Any) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- Plain outcomes


def give(value: Any = None) -> Any:
    """Return the argument."""
    return value


def note(value: Any) -> None:
    """Leave the argument in ``seen``."""
    seen.append(value)


def tell_context() -> list[Any]:
    """Return what the context says."""
    context = current_context()
    return [context.job_id, context.task, context.attempt, context.fencing_token]


async def tell_context_async() -> list[Any]:
    """Return what the context says, from a coroutine."""
    await asyncio.sleep(0)
    return tell_context()


async def create_group_async(name: str) -> int:
    """Write through the async ORM, on the connection of the thread that runs the job."""
    seen.append(await sync_to_async(_raw_connection)())
    await Group.objects.acreate(name=name)
    return await Group.objects.acount()


async def fail_async() -> None:
    """Raise ``ValueError`` in a coroutine."""
    raise ValueError("no")


class _AsyncCallable:
    async def __call__(self) -> str:
        return "called"


async_callable = _AsyncCallable()

not_callable = 5


def give_set() -> set[int]:
    """Return what JSON can't hold."""
    return {1}


def give_text(length: int) -> str:
    """Return a long text."""
    return "x" * length


class Unprintable(Exception):
    """Raises itself when shown."""

    def __str__(self) -> str:
        raise Unprintable


class UnprintableCancel(Cancel):
    """Asks for a cancellation that can't say why."""

    def __str__(self) -> str:
        raise Unprintable


_ERRORS: dict[str, Any] = {
    "unprintable cancel": lambda: UnprintableCancel("no"),
    "ValueError": lambda: ValueError("no"),
    "silent": lambda: ValueError(),
    "chain": lambda: ValueError("outer"),
    "exit": lambda: SystemExit(3),
    "interrupt": lambda: KeyboardInterrupt(),
    "generator": lambda: GeneratorExit(),
    "async cancel": lambda: asyncio.CancelledError(),
    "unprintable": lambda: Unprintable(),
    "Snooze": lambda: Snooze(60),
    "Retry": lambda: Retry(reason="not yet"),
    "Retry in 7": lambda: Retry(7),
    "Fail": lambda: Fail("broken"),
    "Cancel": lambda: Cancel("useless"),
    "Snooze 0": lambda: Snooze(0),
    "Snooze -1": lambda: Snooze(-1),
    "Snooze nan": lambda: Snooze(float("nan")),
    "Snooze text": lambda: Snooze("5"),  # type: ignore[arg-type]
    "Snooze late": lambda: Snooze(40_000 * 86400),
    "Retry -1": lambda: Retry(-1),
    "Retry 1e300": lambda: Retry(1e300),
}


def _raise(name: str) -> NoReturn:
    error = _ERRORS[name]()
    if name == "chain":
        raise error from KeyError("inner")
    raise error


def fail(name: str = "ValueError") -> None:
    """Raise the error of this name."""
    _raise(name)


# -- What a handler should not leave behind, and does


def activate_french() -> None:
    """Leave a language active."""
    translation.activate("fr")


def _connection() -> Any:
    return connections[router.db_for_write(Job)]


def _raw_connection() -> Any:
    connection = _connection()
    connection.ensure_connection()
    return connection.connection


def _write_group() -> None:
    Group.objects.create(name="uncommitted")


def leave_block_open() -> NoReturn:
    """Raise inside an atomic block that nobody leaves."""
    transaction.atomic(using=_connection().alias).__enter__()
    _write_group()
    raise ValueError("no")


def leave_block_open_and_return() -> str:
    """Say that all went well, with what was written still inside a block that nobody leaves."""
    transaction.atomic(using=_connection().alias).__enter__()
    _write_group()
    return "done"


def break_transaction() -> NoReturn:
    """Let a database error spoil an atomic block, and leave it with another error."""
    with transaction.atomic(using=_connection().alias):
        _write_group()
        Group.objects.create(name="uncommitted")
    raise AssertionError("the name is unique")


def leave_autocommit_off() -> NoReturn:
    """Switch autocommit off and raise."""
    _connection().set_autocommit(False)
    _write_group()
    raise ValueError("no")


def leave_raw_transaction() -> NoReturn:
    """Begin a transaction behind Django's back and raise."""
    with _connection().cursor() as cursor:
        cursor.execute("BEGIN")
    _write_group()
    raise ValueError("no")


def break_connection() -> None:
    """Lose the connection, as in a failover, and find out."""
    kill_session(_connection())
    Group.objects.count()


def kill_session(connection: BaseDatabaseWrapper) -> None:
    """Make the server end the session that ``connection`` has."""
    connection.ensure_connection()
    raw = connection.connection
    with other_connection(connection.alias) as other, other.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_terminate_backend(%s, 1000)", [raw.info.backend_pid])
        else:
            cursor.execute("KILL %s", [raw.thread_id()])


def make_closing_fail() -> str:
    """Leave a connection that can't be closed without an error."""
    connection = _connection()
    connection.ensure_connection()

    def close() -> NoReturn:
        del connection.close
        connection.close()
        raise OSError("broken pipe")

    connection.close = close
    return "done"


def tell_connection() -> dict[str, Any]:
    """Return in what state the connection is."""
    connection = _connection()
    seen.append(_raw_connection())
    return {
        "autocommit": connection.get_autocommit(),
        "in_atomic_block": connection.in_atomic_block,
        "groups": Group.objects.count(),
    }


def tell_connection_slowly() -> None:
    """Use the connection, and take long enough for a heartbeat and a sweep."""
    tell_connection()
    time.sleep(0.05)


# -- In worker processes: they tell by files


def hang(directory: str) -> None:
    """Never end."""
    log(directory, "begin hang")
    threading.Event().wait()


async def hang_async(directory: str) -> None:
    """Never end, in a coroutine: its loop runs in a thread that isn't a daemon."""
    log(directory, "begin hang_async")
    await asyncio.Event().wait()


def wait_for_file(directory: str, name: str) -> str:
    """Wait until the test writes a file."""
    log(directory, f"begin {name}")
    _poll((Path(directory) / name).exists)
    log(directory, f"end {name} lost={current_context().lost}")
    return name


def kill_worker(directory: str) -> None:
    """Take the worker's process down."""
    log(directory, "begin kill_worker")
    os.kill(os.getpid(), signal.SIGKILL)


def log(directory: str, line: str) -> None:
    """Add a line, with the process's id in front, to the log that the test reads."""
    with (Path(directory) / "log").open("a") as file:
        file.write(f"{os.getpid()} {line}\n")


# -- Whatever a test wants to be run, in its own process

scripts: dict[str, Callable[[JobContext], Any]] = {}


def play(name: str) -> Any:
    """Call what the test has put down under this name with the context."""
    return scripts[name](current_context())
