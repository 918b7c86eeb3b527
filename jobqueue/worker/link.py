"""What a parent and its worker processes tell each other: lines of JSON, and the end of a pipe."""

from __future__ import annotations

import json
import os
import selectors
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Link:
    """The worker process's end.

    The parent alone holds the other end of ``lifeline``, so that its end, however it came, is the
    end of that pipe. No message may have more than a pipe takes in one piece, 512 bytes.
    """

    def __init__(self, lifeline: int, outward: int) -> None:
        os.set_blocking(outward, False)
        self._outward = outward
        self._selector = selectors.DefaultSelector()
        self._selector.register(lifeline, selectors.EVENT_READ)
        self._on_stop: Callable[[], None] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Pass on that the worker is to stop, as often as it is said. Safe in a signal handler."""
        self._is_stopped = True
        if self._on_stop:
            self._on_stop()

    def call_on_stop(self, on_stop: Callable[[], None]) -> None:
        """Have ``on_stop`` called, at once if the word has come already."""
        self._on_stop = on_stop
        if self._is_stopped:
            on_stop()

    def send(self, **message: Any) -> None:
        """Tell the parent; a parent that is gone or doesn't read holds nobody up."""
        with suppress(OSError):
            os.write(self._outward, json.dumps(message).encode() + b"\n")

    def wait(self, seconds: float) -> bool:
        """Wait for so long, and return at once that the parent is gone, if it is."""
        return bool(self._selector.select(seconds))


class Inbox:
    """The parent's end of what one worker process sends, and what it has learned from that.

    Attributes:
        worker_id: of the lease that the process has, once it has one.
        healthy_at: when it last said that it is well, by the caller's clock.
        heard_at: when it last said anything.
        has_buried: whether it has buried the dead that it was told of.
        settled: what became of its jobs, told as its farewell.
        has_said_farewell: whether it has ended as it should.
    """

    def __init__(self, fd: int, now: float) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.worker_id: str | None = None
        self.heard_at = now
        self.healthy_at: float | None = None
        self.settled: Counter[str] = Counter()
        self.has_said_farewell = False
        self.has_buried = False
        self._rest = b""

    def read(self, now: float) -> bool:
        """Take in what has come; return whether more may come."""
        while True:
            try:
                data = os.read(self.fd, 65536)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.heard_at = now
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                with suppress(ValueError):  # whatever else may have written there
                    self._take(json.loads(line), now)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.fd)

    def _take(self, message: dict[str, Any], now: float) -> None:
        self.worker_id = message.get("worker", self.worker_id)
        self.has_buried = self.has_buried or "buried" in message
        if "settled" in message:
            self.settled, self.has_said_farewell = Counter(message["settled"]), True
        if "healthy" in message:
            self.healthy_at = now if message["healthy"] else None
