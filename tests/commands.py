"""Running commands: here, for their exit status and output, and as real processes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from django.core.management import execute_from_command_line

from tests.helpers import child_environment


@dataclass(frozen=True)
class Done:
    """What became of a command."""

    status: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """The one JSON object that is all of stdout."""
        assert self.err == ""
        found = json.loads(self.out)
        assert self.out == json.dumps(found) + "\n"
        return dict(found)


class Terminal(io.StringIO):
    """Takes itself for a terminal."""

    def isatty(self) -> bool:
        """Say yes."""
        return True


def manage(*argv: str, terminal: bool = False) -> Done:
    """Run a command as ``manage.py`` does, with stderr at a terminal or not."""
    out, err, status = io.StringIO(), Terminal() if terminal else io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            execute_from_command_line(["manage.py", *argv])
        except SystemExit as end:
            status = int(end.code or 0)
        except Exception:  # as the interpreter does at the end of a program
            traceback.print_exc()
            status = 1
    return Done(status, out.getvalue(), err.getvalue())


@contextmanager
def child(*argv: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command as a real process, which does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "django", *argv],
        env=child_environment(),
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
