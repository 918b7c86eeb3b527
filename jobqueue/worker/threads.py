"""Threads of a worker: those that run jobs, and those that do something now and then."""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from jobqueue import db

THREAD_PREFIX = "jobqueue-"
# How long a call that hangs in the database may keep its worker from ending.
STOP_PATIENCE = 5.0

Work = TypeVar("Work")


class Crew(Generic[Work]):
    """A fixed number of daemon threads that do what they are given, in order.

    Quick work pays for no hand-over of its own: a thread goes on to the next by itself. A thread
    never keeps the interpreter from exiting: ``ThreadPoolExecutor`` joins its threads at exit, so
    one hung handler would keep a worker that was told to stop, and has handed the job back, from
    ever ending.

    Args:
        size: how many threads.
        work: called in one of them with each thing given; it must not raise.
    """

    def __init__(self, size: int, work: Callable[[Work], None]) -> None:
        self.size = size
        self._work = work
        self._backlog: deque[Work] = deque()
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{THREAD_PREFIX}{number}", daemon=True)
            for number in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def give(self, things: Sequence[Work]) -> None:
        """Have these done, after what was given before."""
        self._backlog.extend(things)
        for _ in range(min(len(things), self.size - self._calls.qsize())):
            self._calls.put(True)

    def backlog(self) -> int:
        """How many things no thread has begun yet."""
        return len(self._backlog)

    def first(self) -> Work | None:
        """Return what is begun next, if there is any."""
        try:
            return self._backlog[0]
        except IndexError:
            return None

    def take_back(self) -> list[Work]:
        """Return what no thread has begun yet; none will."""
        return list(iter(self._next, None))

    def shutdown(self, wait: bool = True) -> None:
        """End each thread once it is idle; with ``wait`` not before they have ended."""
        for _ in self._threads:
            self._calls.put(False)
        if wait:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while self._calls.get():
            while (thing := self._next()) is not None:
                self._work(thing)
                del thing  # an idle thread keeps no job's arguments and results alive
        db.close_connections()

    def _next(self) -> Work | None:
        try:
            return self._backlog.popleft()
        except IndexError:
            return None


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
        self._stop = False
        self._poked = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Periodic:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop = True
        self._poked.set()
        self._thread.join(STOP_PATIENCE)

    def poke(self) -> None:
        """Call now, not only when it is time."""
        self._poked.set()

    def _wait(self) -> float:
        return self._every * (1 + self._jitter * (2 * random.random() - 1))

    def _run(self) -> None:
        try:
            while not self._stop:
                self._poked.wait(self._wait())
                self._poked.clear()
                if not self._stop:
                    self._work()
        finally:
            db.close_connections()
