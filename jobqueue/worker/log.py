"""What a worker tells of its own life: lines for people, or JSON objects for programs."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol


class Stream(Protocol):
    """Django's ``OutputWrapper`` is one, which adds the line's end."""

    def write(self, text: str) -> Any: ...

    def flush(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Log:
    """Each event is one line, flushed at once.

    Attributes:
        out: where events go.
        err: where those go that are trouble, unless they are told as JSON.
        as_json: one object per event, all of them to ``out``.
    """

    out: Stream
    err: Stream
    as_json: bool = False

    def tell(self, event: str, text: str, *, is_trouble: bool = False, **facts: Any) -> None:
        """Tell of an event. A log that nobody reads any more ends no worker."""
        stream = self.out
        if self.as_json:
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            about = {"event": event, "time": time, "pid": os.getpid(), "message": text, **facts}
            text = json.dumps(about, default=str)
        elif is_trouble:
            stream = self.err
        with suppress(OSError):
            stream.write(text)
            stream.flush()
