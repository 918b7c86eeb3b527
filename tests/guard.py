"""Who stops servers and removes their files when the session that started them is gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Waits for the end of its standard input, which is the end of the test session, however it came.
GUARD = """
import os, pathlib, shutil, signal, sys, time
sys.stdin.read()
directory = pathlib.Path(sys.argv[1])
def tell(signum):
    for file in directory.rglob("server.pid"):
        try:
            os.kill(int(file.read_text()), signum)
        except (OSError, ValueError):
            file.unlink()
    return list(directory.rglob("server.pid"))
if directory.exists():
    tell(signal.SIGQUIT)
    deadline = time.monotonic() + 10
    while tell(0) and time.monotonic() < deadline:
        time.sleep(0.1)
    tell(signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)
"""


@contextmanager
def guarded(directory: Path) -> Iterator[None]:
    """Have a process of its own clean up, should this one be killed."""
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", GUARD, str(directory)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.communicate()
