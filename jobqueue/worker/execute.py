"""One job, run: from a claimed snapshot to an outcome. Touches no table of ours."""

from __future__ import annotations

import traceback
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from contextvars import copy_context
from datetime import timedelta
from functools import cache
from typing import Any, Final, Protocol

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.utils.module_loading import import_string

from jobqueue import conf, db, exceptions
from jobqueue.lifecycle import Cancelled, Completed, Error, Failed, Outcome, Retry, Snoozed
from jobqueue.payload import check_payload
from jobqueue.worker.context import JobContext, _current


class Runnable(Protocol):
    """What of a job is needed to run it."""

    pk: int
    task: str
    args: Any
    kwargs: Any


def execute(job: Runnable, context: JobContext) -> Outcome:
    """Run a job's handler in this thread and say what became of it. Never raises.

    A handler steers its outcome by raising ``Snooze``, ``Retry``, ``Fail`` or ``Cancel``; anything
    else that it raises, ``SystemExit`` included, is a failed attempt, as is a handler that can't be
    imported and a result that can't be stored.
    """
    # In a copy, so that a language or a time zone that a handler activates ends with its job.
    return copy_context().run(_run, job, context)


def describe(error: BaseException) -> Error:
    """Return an exception as the error of a failed attempt. Never raises."""
    try:
        text = str(error)
    except BaseException:
        text = "(its message can't be shown)"
    lines = traceback.format_exception(error)
    return Error(f"{type(error).__name__}: {text}".rstrip(": "), "".join(lines))


def _run(job: Runnable, context: JobContext) -> Outcome:
    _current.set(context)
    db.before_job()
    try:
        result = _handler(job.task)(*job.args, **job.kwargs)
        result = check_payload(result, "result", conf.get().MAX_PAYLOAD_BYTES)
        outcome: Outcome = Completed(result, is_plain=True)
    except BaseException as error:
        outcome = _outcome_of(error)
    left_open = db.after_job()
    if left_open and isinstance(outcome, Completed):
        where = ", ".join(left_open)
        return Retry(Error(f"the handler left a transaction open on {where}; it was rolled back"))
    return outcome


def is_async(task: str) -> bool:
    """Say whether a task's handler is a coroutine function; not so, if it can't be imported."""
    try:
        return _is_async(_imported(task))
    except BaseException:
        return False  # to be found out by whoever runs it


async def execute_async(job: Runnable, context: JobContext) -> Outcome:
    """Run a job's async handler and say what became of it. Raises nothing but ``CancelledError``.

    What it leaves open on database connections is its own affair: they belong to the thread of
    ``sync_to_async``, which other handlers share with it. One that broke is opened anew before it.
    """
    _current.set(context)
    await sync_to_async(db.before_job)()
    try:
        result = await _imported(job.task)(*job.args, **job.kwargs)
        result = check_payload(result, "result", conf.get().MAX_PAYLOAD_BYTES)
        return Completed(result, is_plain=True)
    except CancelledError:
        raise
    except BaseException as error:
        return _outcome_of(error)


def _outcome_of(error: BaseException) -> Outcome:
    for kind, outcome_of in _STEERING.items():
        if isinstance(error, kind):
            try:
                return outcome_of(error)
            except Exception as invalid:  # a delay that is none, a message that can't be shown
                invalid.__cause__ = error  # which tells where in the handler
                return Retry(describe(invalid))
    return Retry(describe(error))


def _delay(value: Any) -> timedelta:
    return conf.check_seconds(value, "delay", zero=True)


_STEERING: Final[Mapping[type[Exception], Callable[[Any], Outcome]]] = {
    exceptions.Snooze: lambda e: Snoozed(_delay(e.delay)),
    exceptions.Retry: lambda e: Retry(describe(e), None if e.delay is None else _delay(e.delay)),
    exceptions.Fail: lambda e: Failed(describe(e)),
    exceptions.Cancel: lambda e: Cancelled(str(e)),
}


@cache
def _imported(path: str) -> Callable[..., Any]:
    handler: Callable[..., Any] = import_string(path)
    return handler


def _is_async(handler: Callable[..., Any]) -> bool:
    return iscoroutinefunction(handler) or iscoroutinefunction(type(handler).__call__)


@cache
def _handler(path: str) -> Callable[..., Any]:
    handler = _imported(path)
    return async_to_sync(handler) if _is_async(handler) else handler
