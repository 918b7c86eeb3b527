"""Real worker processes, alone or under a parent, that don't outlive a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.helpers import TIMEOUT, child_environment, wait_until

POLL = ("--poll", "0.02")
ALONE = (*POLL, "--processes", "0")


class Child:
    """A process that runs ``run_worker``, and the log that its handlers write."""

    def __init__(
        self, directory: Path, *options: str, before: Sequence[str] = (), **variables: str
    ) -> None:
        self.directory = directory
        self.log = directory / "log"
        self.output = directory / "output"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "django", "run_worker", *options],
                env=child_environment(**variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lines(self) -> list[str]:
        """Return what the handlers of this process have logged."""
        own = f"{self.process.pid} "
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.removeprefix(own) for line in lines if line.startswith(own)]

    def wait_for(self, line: str) -> None:
        """Wait until a handler of this process has logged ``line``."""
        wait_until(lambda: line in self.lines(), f"no handler logged {line!r}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for the end; return exit status and output."""
        try:
            status = self.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it does not end:\n{self.output.read_text()}") from error
        return status, self.output.read_text()

    def destroy(self) -> None:
        """Kill it with all that it has started, and wait."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Parent(Child):
    """A parent of worker processes that tells its events as JSON."""

    def __init__(self, directory: Path, *options: str, **more: Any) -> None:
        super().__init__(directory, *POLL, "--json", *options, **more)

    def lines(self) -> list[str]:
        """Return what the handlers of all its processes have logged."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.partition(" ")[2] for line in lines]

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Return the events so far, of these names or all."""
        lines = self.output.read_text().splitlines()
        told = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [event for event in told if not names or event["event"] in names]

    def wait_for_event(self, name: str, count: int = 1) -> dict[str, Any]:
        """Return the last event of a name, once so many have been told."""

        def told() -> bool:
            assert self.process.poll() is None or len(self.events(name)) >= count, (
                self.output.read_text()
            )
            return len(self.events(name)) >= count

        wait_until(told, f"not {count} times {name!r}")
        return self.events(name)[-1]

    def wait_until_up(self, count: int = 1) -> list[int]:
        """Wait until so many workers have started in all; return the processes of the last."""
        self.wait_for_event("worker_started", count)
        return [event["pid"] for event in self.events("worker_started")]

    @property
    def children(self) -> list[psutil.Process]:
        """Its processes."""
        return psutil.Process(self.process.pid).children()


@contextmanager
def alone(directory: Path, *options: str, **more: Any) -> Iterator[Child]:
    """Run a worker without a parent while the block lasts."""
    with _destroyed(Child(directory, *ALONE, *options, **more)) as child:
        yield child


@contextmanager
def parent(directory: Path, *options: str, **more: Any) -> Iterator[Parent]:
    """Run a parent and its workers while the block lasts."""
    with _destroyed(Parent(directory, *options, **more)) as started:
        yield started


@contextmanager
def _destroyed(child: Any) -> Iterator[Any]:
    try:
        yield child
    finally:
        child.destroy()


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has, too."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
