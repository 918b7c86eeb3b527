"""The heartbeat: renews the lease, and compares what the worker holds with what it is given."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from jobqueue import signals
from jobqueue.exceptions import LeaseLost

if TYPE_CHECKING:
    from jobqueue.worker.loop import Loop

BEATS_PER_LEASE = 3


class Turns:
    """Claims and outcomes on their way keep a heartbeat from comparing, and the other way round.

    Between a claim's COMMIT and its reply the database knows more than the loop does. Who wants in
    waits at the door, so a busy loop can't keep the heartbeat out by coming back at once. Who
    can't get in within ``timeout`` seconds is given ``False``, and does without: a statement that
    hangs on the one side must not wedge the other.
    """

    def __init__(self) -> None:
        self._door = threading.Lock()
        self._room = threading.Lock()

    @contextmanager
    def take(self, timeout: float) -> Iterator[bool]:
        """Held by the loop while it claims or settles, and by the heartbeat while it compares."""
        until = time.monotonic() + timeout
        entered = False
        if self._door.acquire(timeout=timeout):
            entered = self._room.acquire(timeout=max(0, until - time.monotonic()))
            self._door.release()
        try:
            yield entered
        finally:
            if entered:
                self._room.release()


class Heart:
    """Beats for one lease; called from a thread of its own."""

    def __init__(self, loop: Loop, lease: float) -> None:
        self._loop = loop
        self._lease = lease

    @property
    def interval(self) -> float:
        """Seconds between beats."""
        return self._lease / BEATS_PER_LEASE

    def beat(self) -> None:
        """Renew the lease and pass on what is learned; tell the loop when the lease is lost."""
        loop = self._loop
        began = time.monotonic()
        if began - loop.ticked > self._lease:
            # The loop is wedged: let the lease run out, so that others may take its jobs.
            loop.lose_lease()
            return
        try:
            with loop.turns.take(timeout=self.interval / 2) as entered:
                held = loop.hand.judged() if entered else None
                heard = loop.broker.heartbeat(loop.worker_id, held)
                loop.hand.hear(heard)
            loop.lease_until = began + self._lease
        except LeaseLost:
            loop.lose_lease()
        except Exception as error:
            signals.tell_trouble(self, loop.worker_id, "renew its lease", error)
            if time.monotonic() > loop.lease_until:
                loop.lose_lease()
