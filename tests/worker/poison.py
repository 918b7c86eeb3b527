"""Handlers for worker processes that may be killed: they kill, hang, grow and leave orphans."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import NoReturn

from jobqueue.worker.context import current_context
from tests.worker.handlers import log, wait_for_file

ballast: list[bytes] = []


def path(handler: object) -> str:
    """Return the dotted path of a handler of this module."""
    return f"{__name__}.{handler.__name__}"  # type: ignore[attr-defined]


def die(directory: str, number: int) -> NoReturn:
    """Die once the test writes a file, by a signal as the system sends it."""
    log(directory, "begin die")
    wait_for_file(directory, "die")
    os.kill(os.getpid(), signal.Signals(number))
    raise AssertionError("still here")


def leave(directory: str, status: int) -> NoReturn:
    """End the process without a word, as some libraries do."""
    log(directory, "begin leave")
    os._exit(status)


def leave_once(directory: str) -> None:
    """End the process the first time, once the test writes a file."""
    if current_context().attempt == 1:
        wait_for_file(directory, "leave")
        os._exit(1)


def grow(directory: str, mebibytes: int) -> None:
    """Take up memory and keep it, then wait for a file."""
    ballast.append(b"x" * (mebibytes * 2**20))
    wait_for_file(directory, "grown")


def hold_the_interpreter(directory: str) -> None:
    """Keep all other threads from running, nearly for ever."""
    log(directory, "begin hold")
    re.match("(a+)+$", "a" * 64 + "b")


def leave_an_orphan(directory: str) -> None:
    """Start a process whose parent ends before it does."""
    subprocess.run(["sh", "-c", "sleep 0.2 & echo $! >orphan"], cwd=Path(directory), check=True)


def tell_pid() -> int:
    """Return which process it is."""
    return os.getpid()
