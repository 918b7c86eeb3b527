"""The processes of a run; they end with it, however it ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Self

import psutil

from example_project.crew import GUARD
from tests.chaos.checker import Violation
from tests.chaos.scene import Scene

CHECKOUT: Final = Path(__file__).resolve().parents[2]
STOP_TIMEOUT: Final = 20.0
TAIL: Final = 3000
# What ``run_worker`` says when the database is away for long as it starts: its supervisor's
# business.
AWAY: Final = "The queue's tables can't be read"
HOUR: Final = 3600
SHARED_MEMORY: Final = Path("/dev/shm")


@dataclass(slots=True)
class Member:
    """One process, started again when it is killed."""

    name: str
    role: str
    arguments: tuple[str, ...]
    skew: int = 0
    process: subprocess.Popen[bytes] | None = None
    started: int = 0
    frozen: bool = False
    output: Path = field(default_factory=Path)

    @property
    def is_running(self) -> bool:
        """Whether it can be struck."""
        return self.process is not None and self.process.poll() is None and not self.frozen


class Stage:
    """All processes, in a process group of their own: Ctrl-C is not for them."""

    def __init__(self, scene: Scene, directory: Path, libfaketime: Path | None) -> None:
        self._scene = scene
        self._directory = directory
        self._libfaketime = libfaketime
        self.members: list[Member] = []
        self.counts: Counter[str] = Counter()
        self.ended: list[Violation] = []

    def __enter__(self) -> Self:
        forget_wrong_clocks()
        self._directory.mkdir()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD], stdin=subprocess.PIPE, process_group=0
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._guard.pid, signal.SIGKILL)
        self._guard.communicate()
        for member in self.members:
            if member.process:
                member.process.wait()
        forget_wrong_clocks()

    def add(self, role: str, number: int, *arguments: str, skews: bool = False) -> None:
        """Start a number of processes of a role; some of those with wrong clocks, if they may."""
        for index in range(number):
            wrong = (HOUR, -HOUR, 0, 0)[index % 4] if skews and self._libfaketime else 0
            member = Member(f"{role}-{index + 1}", role, arguments, skew=wrong)
            self.members.append(member)
            self._start(member)

    def of(self, *roles: str) -> list[Member]:
        """Return the processes of some roles that can be struck."""
        return [m for m in self.members if m.role in roles and m.is_running]

    def _start(self, member: Member) -> None:
        member.started += 1
        seed = random.Random(f"{self._scene.seed} {member.name} {member.started}").randrange(2**32)
        scene = replace(self._scene, seed=seed, skew=member.skew, began=time.monotonic())
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **scene.variables()}
        if member.skew:
            self.counts["skew"] += 1
            environment |= {
                "LD_PRELOAD": str(self._libfaketime),
                "FAKETIME": f"{member.skew:+d}",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        member.output = self._directory / f"{member.name}.{member.started}.txt"
        with member.output.open("wb") as output:
            member.process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.client", member.role, *member.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=CHECKOUT,
                env=environment,
                process_group=self._guard.pid,
            )
        member.frozen = False

    # -- Strikes

    def kill(self, member: Member) -> None:
        """Kill a process by SIGKILL, and start it again."""
        assert member.process is not None
        member.process.kill()
        member.process.wait()
        self._start(member)

    def freeze(self, member: Member) -> None:
        """Stop a process where it is."""
        assert member.process is not None
        member.process.send_signal(signal.SIGSTOP)
        member.frozen = True

    def thaw(self, member: Member) -> None:
        """Let it go on, if it is still the one that was stopped."""
        if member.frozen and member.process:
            member.process.send_signal(signal.SIGCONT)
            member.frozen = False

    # -- Keeping them going, and ending them

    def look(self) -> None:
        """Start again whatever has ended; what ended by itself had better had a reason."""
        for member in self.members:
            if member.process is None or (status := member.process.poll()) is None:
                continue
            if status == -signal.SIGKILL:
                self.counts["suicide"] += 1
            elif not self._found_no_database(member):
                self._blame(member, f"ended by itself with status {status}")
            self._start(member)

    def stop(self, *roles: str) -> None:
        """Stop the processes of some roles by SIGTERM, and require that they end well."""
        chosen = [m for m in self.members if m.role in roles and m.process]
        for member in chosen:
            assert member.process is not None
            self.thaw(member)
            member.process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT
        for member in chosen:
            assert member.process is not None
            try:
                status = member.process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                self._blame(member, f"did not end within {STOP_TIMEOUT:g} s of SIGTERM")
                member.process.kill()
                continue
            if status not in (0, -signal.SIGTERM) and not self._found_no_database(member):
                self._blame(member, f"ended with status {status} when told to stop")
            member.process = None

    def _found_no_database(self, member: Member) -> bool:
        return AWAY in member.output.read_text(errors="replace")

    def _blame(self, member: Member, what: str) -> None:
        tail = member.output.read_text(errors="replace")[-TAIL:]
        told = f"{member.name} {what}; it wrote:\n{tail}"
        self.ended.append(Violation("process ended", told))


def forget_wrong_clocks() -> None:
    """Remove what libfaketime can't remove itself for a process that is killed."""
    for file in SHARED_MEMORY.glob("*faketime_s*_*"):
        pid = file.name.rpartition("_")[2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            file.unlink(missing_ok=True)
