"""Load for a failover: worker processes, a sweep, and somebody who enqueues and keeps books."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from django.db import Error

from jobqueue import db
from jobqueue.enqueue import enqueue
from jobqueue.lifecycle import FINAL, State
from jobqueue.models import EventKind, Job, JobEvent
from tests.failover import handlers
from tests.failover.standby import ALIAS, PATIENCE, Node
from tests.helpers import child_environment, run_in_thread, wait_until

# Events with which an execution ends; a completion leaves none.
ENDINGS = (EventKind.FAILED, EventKind.RETRIED, EventKind.RESCUED, EventKind.RELEASED)


class Child:
    """A command as a process of its own; what it prints goes into a file."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.arguments = arguments
        with (directory / f"out-{arguments[0]}").open("ab") as out:
            self._out = Path(out.name)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "django", *arguments],
                env=child_environment(DJANGO_SETTINGS_MODULE="tests.failover.settings"),
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def output(self) -> str:
        """Return what this and its like have printed."""
        return self._out.read_text()

    def lives(self) -> bool:
        """Whether it is the process that was started."""
        return self.process.poll() is None

    def stop(self) -> int:
        """Tell it to end, as a service manager does; return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


@contextmanager
def child(directory: Path, *arguments: str) -> Iterator[Child]:
    """Run a command that doesn't outlive the block."""
    started = Child(directory, *arguments)
    try:
        yield started
    except BaseException:
        sys.stderr.write(started.output())  # pytest shows it
        raise
    finally:
        started.process.kill()
        started.process.wait()


def worker(directory: Path, *options: str) -> AbstractContextManager[Child]:
    """Run a worker."""
    return child(
        directory, "run_worker", "--processes", "0", "--threads", "4", "--poll", "0.1", *options
    )


@dataclass
class Producer:
    """Enqueues without a pause; each try is a number, and is made once.

    Attributes:
        acknowledged: the jobs whose COMMIT was acknowledged, by their numbers.
        unknown: the numbers of those of which nothing is known.
    """

    acknowledged: dict[int, int] = field(default_factory=dict)
    unknown: list[int] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Enqueue until told to stop. One in three fails once, one in three twice."""
        number = 0
        while not self.stopping.wait(0.02):
            number += 1
            try:
                db.revive(ALIAS)
                job = enqueue(
                    f"{handlers.PREFIX}work",
                    kwargs={"failures": number % 3},
                    backoff=0.2,
                    metadata={"number": number},
                )
            except Error:
                self.unknown.append(number)
                self.stopping.wait(0.1)
            else:
                self.acknowledged[number] = job.pk

    def stop(self) -> None:
        """Enqueue no more."""
        self.stopping.set()

    def wait_for(self, more: int) -> None:
        """Wait until so many more have been acknowledged."""
        goal = len(self.acknowledged) + more
        wait_until(lambda: len(self.acknowledged) >= goal, "nobody can enqueue", timeout=PATIENCE)


@contextmanager
def producing() -> Iterator[Producer]:
    """Enqueue in a thread while the block lasts."""
    producer = Producer()
    thread = run_in_thread(producer.run)
    try:
        yield producer
    finally:
        producer.stop()
        thread.result(PATIENCE)


@dataclass(frozen=True)
class Line:
    """What a handler has logged: which process, job and attempt, and that it begins or ends."""

    pid: int
    job_id: int
    attempt: int
    word: str


def wait_for_lines(directory: Path, word: str, number: int) -> list[Line]:
    """Wait until handlers have logged ``word`` so many times; return those lines."""

    def lines() -> list[Line]:
        log = directory / "log"
        words = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        found = [Line(int(pid), int(pk), int(n), said) for pid, pk, n, said in words]
        return [line for line in found if line.word == word]

    wait_until(lambda: len(lines()) >= number, f"no handler logged {word!r}", timeout=PATIENCE)
    return lines()


def wait_until_all_final() -> None:
    """Wait until nothing is left to do."""
    unfinished = Job.objects.exclude(state__in=FINAL)
    wait_until(lambda: not unfinished.exists(), "some jobs never end", timeout=PATIENCE)


def effects(node: Node) -> Counter[int]:
    """Return how often each job has had its effect, as this server knows it."""
    return Counter(job_id for (job_id,) in node.sql("SELECT job_id FROM effect"))


def accepted_outcomes() -> Counter[tuple[int, int]]:
    """Return how many outcomes were accepted of each attempt: events, and completions."""
    endings = JobEvent.objects.filter(kind__in=ENDINGS).values_list("job_id", "attempt")
    completed = Job.objects.filter(state=State.COMPLETED).values_list("pk", "attempt")
    return Counter([*endings, *completed])
