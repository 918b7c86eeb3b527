"""One log per process: a line of JSON for each thing that was asked and each answer.

A line is one ``write`` to a file opened for appending, so that it survives SIGKILL whole or not at
all. Times are those of ``time.monotonic()``, which on one host is one clock for all processes.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIX = ".jsonl"


class Log:
    """The log of this process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._numbers = itertools.count(1)

    def write(self, kind: str, **what: Any) -> None:
        """Append one line."""
        line = json.dumps({"e": kind, "t": round(time.monotonic(), 6), **what})
        os.write(self._file, f"{line}\n".encode())

    def ask(self, kind: str, **what: Any) -> int:
        """Append what is about to be asked; return the number by which it is answered."""
        number = next(self._numbers)
        self.write(kind, n=number, **what)
        return number

    def answer(self, status: str, numbers: Iterable[int], **what: Any) -> None:
        """Append the answer to what was asked: ``ok``, ``refused``, ``undone`` or ``unknown``."""
        if known := list(numbers):
            self.write(status, of=known, **what)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of one log, as it stands there."""

    log: str
    text: str
    said: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.log}: {self.text}"


def read(directory: Path, names: str = "*") -> Iterator[Line]:
    """Yield the lines of logs, each log in its order; one that was cut short is left out."""
    for path in sorted(directory.glob(f"{names}{SUFFIX}")):
        for text in path.read_text(errors="replace").splitlines():
            try:
                said = json.loads(text)
            except ValueError:
                continue  # only the last line of a log can be cut short
            yield Line(path.stem, text, said)
