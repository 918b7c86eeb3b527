"""Workers under a parent: what has to follow when a child is killed, or the parent.

A killed child is replaced, and the next one buries its lease; the children of a killed parent end
by themselves.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from jobqueue.lifecycle import State
from tests.chaos import log
from tests.chaos.checker import Violation
from tests.chaos.stage import Member, Stage

ROLE: Final = "parent"
CHILDREN: Final = 2
# Longer than a parent waits before it starts another child in the place of many that crashed, and
# than a child takes to end without its parent.
PATIENCE: Final = 60.0
LOOK_EVERY: Final = 0.5
# How long a child may take to learn that its parent is gone, on a machine that is busy.
NEWS_TAKE: Final = 2.0


def count(workers: int) -> int:
    """Return how many of a run's worker processes are parents, each with ``CHILDREN``."""
    return workers // (CHILDREN + 1)


@dataclass(frozen=True, slots=True)
class Loss:
    """A child that was killed; its parent was the process that was ``started``th in its place."""

    parent: Member
    started: int
    pid: int

    @property
    def is_due(self) -> bool:
        """Whether its parent still lives, and so has to make up for it."""
        return self.parent.is_running and self.parent.started == self.started


@dataclass(frozen=True, slots=True)
class Orphan:
    """A child whose parent has ended, at ``since``; frozen, it can't know yet."""

    process: psutil.Process
    since: float
    was_frozen: bool = False


class Families:
    """The parents of a run and their children."""

    def __init__(self, stage: Stage, logs: Path) -> None:
        self.losses: list[Loss] = []
        self.orphans: list[Orphan] = []
        self._frozen: list[psutil.Process] = []
        self._stage = stage
        self._logs = logs

    def kill_child(self, dice: random.Random) -> bool:
        """Kill a child by SIGKILL, if there is one."""
        born = [(parent, child) for parent in self._parents() for child in children(parent)]
        if not born:
            return False
        parent, child = dice.choice(born)
        self.losses.append(Loss(parent, parent.started, child.pid))
        child.kill()
        return True

    def kill_parent(self, dice: random.Random) -> bool:
        """Kill a parent by SIGKILL, and start another; its children are to end by themselves."""
        if not (parents := self._parents()):
            return False
        parent = dice.choice(parents)
        left = children(parent)
        self._stage.kill(parent)
        now = time.monotonic()
        self.orphans += [Orphan(child, now, child in self._frozen) for child in left]
        return True

    def freeze_child(self, dice: random.Random) -> psutil.Process | None:
        """Stop a child where it is, if there is one, and return it."""
        if not (born := [child for parent in self._parents() for child in children(parent)]):
            return None
        child = dice.choice(born)
        with suppress(psutil.NoSuchProcess):
            child.suspend()
        self._frozen.append(child)
        return child

    def thaw(self) -> None:
        """Let all frozen children go on that have not been killed meanwhile."""
        while self._frozen:
            with suppress(psutil.NoSuchProcess):
                self._frozen.pop().resume()

    def stop(self) -> None:
        """Stop all parents by SIGTERM; their children must have ended before them."""
        left = [child for parent in self._parents() for child in children(parent)]
        self._stage.stop(ROLE)
        self.orphans += [Orphan(child, time.monotonic()) for child in left]

    def settle(self, patience: float = PATIENCE) -> Iterator[Violation]:
        """Wait until all that has to follow has; yield what has not in time."""
        deadline = time.monotonic() + patience
        while found := list(self._missing()):
            if time.monotonic() > deadline:
                yield from found
                return
            self._stage.look()
            time.sleep(LOOK_EVERY)

    def _missing(self) -> Iterator[Violation]:
        for orphan in self.orphans:
            pid = orphan.process.pid
            if is_alive(orphan.process):
                yield Violation("outlived its parent", f"process {pid} runs without its parent")
            late = claims_after(log.read(self._logs, f"{ROLE}-{pid}"), orphan.since + NEWS_TAKE)
            if late > 1 and not orphan.was_frozen:  # One may have been under way.
                what = f"process {pid} claimed {late} times without its parent"
                yield Violation("outlived its parent", what)
        for parent in self._parents():
            if (number := len(children(parent))) != CHILDREN:
                what = f"{parent.name} has {number} of {CHILDREN} children"
                yield Violation("not replaced", what)
        due = {loss.pid for loss in self.losses if loss.is_due}
        if due:
            for pid, worker_id in unburied(log.read(self._logs, f"{ROLE}-*"), due).items():
                what = f"process {pid} was killed, and nobody buried its worker {worker_id}"
                yield Violation("not buried", what)

    def _parents(self) -> list[Member]:
        """Return all that live; whoever is frozen can be struck as well."""
        own = [member for member in self._stage.members if member.role == ROLE]
        return [member for member in own if member.process and member.process.poll() is None]


def children(parent: Member) -> list[psutil.Process]:
    """Return the children of a parent that run."""
    assert parent.process is not None
    with suppress(psutil.NoSuchProcess):
        return list(filter(is_alive, psutil.Process(parent.process.pid).children()))
    return []


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended; nobody may be there to reap an orphan."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def claims_after(lines: Iterable[log.Line], moment: float) -> int:
    """Return how often jobs were claimed after ``moment``."""
    writes = (line.said for line in lines if line.said["e"] == "write")
    late = [said["jobs"] for said in writes if said["t"] > moment]
    return sum(any(after[0] == State.RUNNING for *_, after in jobs) for jobs in late)


def unburied(lines: Iterable[log.Line], pids: Collection[int]) -> dict[int, str]:
    """Return the last leases of these children that nobody has set out to bury, by process.

    Those of which the parent was told; and no more, since a burial may meet a fault of its own:
    then the lease runs out.
    """
    leases: dict[int, str] = {}
    buried: set[str] = set()
    for line in lines:
        if line.said["e"] == "led":
            leases[line.said["pid"]] = line.said["worker"]
        elif line.said["e"] == "bury":
            buried.update(line.said["workers"])
    return {pid: leases[pid] for pid in pids if pid in leases and leases[pid] not in buried}
