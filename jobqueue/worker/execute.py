"""One job, run: from a claimed snapshot to an outcome. Touches no table of ours."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, Protocol

from asgiref.sync import async_to_sync
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
    """Run a job's handler in this thread and say what became of it. Never raises an ``Exception``.

    A handler steers its outcome by raising ``Snooze``, ``Retry``, ``Fail`` or ``Cancel``; anything
    else that it raises is a failed attempt, as is a handler that can't be imported and a result
    that can't be stored.
    """
    token = _current.set(context)
    try:
        db.before_job()
        handler = _handler(job.task)
        result = handler(*job.args, **job.kwargs)
        return Completed(check_payload(result, "result", conf.get().MAX_PAYLOAD_BYTES))
    except Exception as error:
        return _outcome_of(error)
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        # A handler that calls sys.exit() ends its attempt, not its worker.
        return Retry(describe(error))
    finally:
        db.after_job()
        _current.reset(token)


def describe(error: BaseException) -> Error:
    """Return an exception as the error of a failed attempt."""
    lines = traceback.format_exception(error)
    return Error(f"{type(error).__name__}: {error}".rstrip(": "), "".join(lines))


def _outcome_of(error: Exception) -> Outcome:
    for kind, outcome_of in _STEERING.items():
        if isinstance(error, kind):
            try:
                return outcome_of(error)
            except ValueError as invalid:
                return Retry(describe(invalid))
    return Retry(describe(error))


_STEERING: Final[Mapping[type[Exception], Callable[[Any], Outcome]]] = {
    exceptions.Snooze: lambda e: Snoozed(conf.check_seconds(e.delay, "delay", zero=True)),
    exceptions.Retry: lambda e: Retry(
        describe(e), None if e.delay is None else conf.check_seconds(e.delay, "delay", zero=True)
    ),
    exceptions.Fail: lambda e: Failed(describe(e)),
    exceptions.Cancel: lambda e: Cancelled(str(e)),
}


@cache
def _handler(path: str) -> Callable[..., Any]:
    handler: Callable[..., Any] = import_string(path)
    return async_to_sync(handler) if inspect.iscoroutinefunction(handler) else handler
