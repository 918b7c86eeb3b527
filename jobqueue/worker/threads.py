"""Threads of a worker: those that run jobs, and those that do something now and then."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from jobqueue import db

THREAD_PREFIX = "jobqueue-"
# How long a call that hangs in the database may keep its worker from ending.
STOP_PATIENCE = 5.0

Result = TypeVar("Result")
Task = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreadExecutor(Executor):
    """A fixed number of threads that never keep the interpreter from exiting.

    ``ThreadPoolExecutor`` joins its threads at exit, so one hung handler would keep a worker that
    was told to stop, and has handed the job back, from ever ending.
    """

    def __init__(self, max_workers: int) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{THREAD_PREFIX}{number}", daemon=True)
            for number in range(max_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Run ``fn`` in one of the threads."""
        future: Future[Result] = Future()
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End each thread once it is idle; with ``wait`` not before they have ended."""
        for _ in self._threads:
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while task := self._tasks.get():
            self._run(*task)
            del task  # an idle thread keeps no job's arguments and results alive
        db.close_connections()

    @staticmethod
    def _run(future: Future[Any], work: Callable[[], Any]) -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


class Periodic:
    """A daemon thread that calls ``work`` every so often, on database connections of its own.

    Args:
        work: what to do; it must not raise.
        every: seconds between the ends and the starts of calls.
        jitter: share of ``every`` by which each wait is shortened or lengthened at random.
        name: the thread's name.
    """

    def __init__(
        self, work: Callable[[], None], every: float, *, jitter: float = 0.0, name: str
    ) -> None:
        self._work = work
        self._every = every
        self._jitter = jitter
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Periodic:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(STOP_PATIENCE)

    def _wait(self) -> float:
        return self._every * (1 + self._jitter * (2 * random.random() - 1))

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._wait()):
                self._work()
        finally:
            db.close_connections()
