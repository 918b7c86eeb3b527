"""Real worker processes, to be killed and frozen; they end with the demo, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

MANAGE: Final = Path(__file__).resolve().parent.parent / "manage.py"
STOP_TIMEOUT: Final = 15.0
LOG_TAIL: Final = 2000

# Leads the workers' process group and waits for the end of its standard input, which is the end
# of the demo, even if that was killed. SIGKILL also ends a process that is stopped.
GUARD: Final = "import os, signal, sys; sys.stdin.read(); os.killpg(0, signal.SIGKILL)"


class DemoError(Exception):
    """The demo can't go on."""


class Crew:
    """The worker processes of one run, in a process group of their own: Ctrl-C is not for them.

    Args:
        arguments: what ``run_worker`` is given.
        directory: where each worker's output goes.
    """

    def __init__(self, arguments: list[str], directory: Path) -> None:
        self._command = [sys.executable, str(MANAGE), "run_worker", "--processes", "0", *arguments]
        self._directory = directory
        self._workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD], stdin=subprocess.PIPE, process_group=0
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End every process at once; after ``stop`` only the guard is left."""
        with suppress(ProcessLookupError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        self._guard.communicate()
        for worker in self._workers:
            worker.wait()

    @property
    def pids(self) -> list[int]:
        """The workers that have not been killed."""
        return [worker.pid for worker in self._workers]

    def start(self, count: int) -> None:
        """Start workers."""
        for number in range(1, count + 1):
            log = self._directory / f"worker-{number}.log"
            with log.open("wb") as output:
                worker = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=self._guard.pid,
                )
            self._workers.append(worker)

    def freeze(self, pid: int) -> None:
        """Stop a worker by SIGSTOP; return when all its threads stand still."""
        os.kill(pid, signal.SIGSTOP)
        _, status = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise DemoError(f"Worker process {pid} ended by itself. {self._logs()}")

    def thaw(self, pid: int) -> None:
        """Let a stopped worker go on."""
        os.kill(pid, signal.SIGCONT)

    def kill(self, pid: int) -> None:
        """Kill a worker by SIGKILL."""
        (worker,) = (worker for worker in self._workers if worker.pid == pid)
        worker.kill()
        worker.wait()
        self._workers.remove(worker)

    def check(self) -> None:
        """Raise ``DemoError`` if a worker has ended that was not told to."""
        for worker in self._workers:
            if worker.poll() is not None:
                raise DemoError(
                    f"Worker process {worker.pid} ended by itself, with status "
                    f"{worker.returncode}. {self._logs()}"
                )

    def stop(self) -> None:
        """Stop the workers by SIGTERM, and require that each ends well."""
        for worker in self._workers:
            worker.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        for worker in self._workers:
            try:
                status = worker.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                raise DemoError(
                    f"Worker process {worker.pid} did not end within {STOP_TIMEOUT:g} s of "
                    f"SIGTERM. {self._logs()}"
                ) from None
            if status:
                raise DemoError(
                    f"Worker process {worker.pid} ended with status {status} after SIGTERM. "
                    f"{self._logs()}"
                )

    def _logs(self) -> str:
        tails = (
            f"{log.name}:\n{text[-LOG_TAIL:]}"
            for log in sorted(self._directory.iterdir())
            if (text := log.read_text(errors="replace").rstrip())
        )
        return "What the workers wrote:\n" + "\n".join(tails)
