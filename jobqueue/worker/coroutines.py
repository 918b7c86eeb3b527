"""Async handlers, many at once on one event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from jobqueue.lifecycle import Cancelled, Error, Outcome, Retry
from jobqueue.worker.execute import describe, execute_async
from jobqueue.worker.execution import Execution
from jobqueue.worker.threads import STOP_PATIENCE, THREAD_PREFIX


class Coroutines:
    """An event loop in a daemon thread; each execution is a task there, and none waits for another.

    Args:
        done: called with each execution and its outcome, in that thread.
    """

    def __init__(self, done: Callable[[Execution, Outcome], None]) -> None:
        self._done = done
        self._loop = asyncio.new_event_loop()
        self._waiting: deque[Execution] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(
            target=self._run, name=f"{THREAD_PREFIX}coroutines", daemon=True
        )
        self._thread.start()

    def give(self, executions: Sequence[Execution]) -> None:
        """Begin to run these."""
        self._waiting.extend(executions)
        self._loop.call_soon_threadsafe(self._begin, len(executions))

    def first(self) -> Execution | None:
        """Return what is begun next, if there is any."""
        try:
            return self._waiting[0]
        except IndexError:
            return None

    def take_back(self) -> list[Execution]:
        """Return those that have not begun, for another keeps the loop to itself; none will."""
        return list(iter(self._next, None))

    def shutdown(self, wait: bool = True) -> None:
        """End the thread once nothing runs there; without ``wait`` at once."""
        self._loop.call_soon_threadsafe(self._end, wait)
        if wait:
            self._thread.join(STOP_PATIENCE)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _next(self) -> Execution | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _begin(self, count: int) -> None:
        for _ in range(count):
            task = self._loop.create_task(self._perform())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _end(self, wait: bool) -> None:
        if wait and self._tasks:
            gathered = asyncio.gather(*self._tasks, return_exceptions=True)
            gathered.add_done_callback(lambda _: self._end(wait))
        else:
            self._loop.stop()

    async def _perform(self) -> None:
        execution = self._next()
        if execution is None:  # It was taken back.
            return
        context = execution.context
        began = execution.begin()
        handler = asyncio.ensure_future(execute_async(execution.job, context))
        context.when_told(lambda: self._cancel(handler))
        outcome: Outcome
        try:
            async with asyncio.timeout(context.time_left):
                outcome = await handler
        except BaseException as error:
            outcome = Retry(describe(error))
            if isinstance(error, asyncio.CancelledError) and context.cancelled:
                outcome = Cancelled("cancelled as requested")
            elif isinstance(error, asyncio.CancelledError) and context.lost:
                outcome = Retry(Error("CancelledError: its worker lost its lease, or the job"))
        execution.took = time.monotonic() - began
        self._done(execution, outcome)

    def _cancel(self, handler: asyncio.Future[Outcome]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nothing runs there any more
            self._loop.call_soon_threadsafe(handler.cancel)
