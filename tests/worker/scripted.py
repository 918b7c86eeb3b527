"""Handlers that a test writes down where it uses them, run by a loop that can report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from django.contrib.auth.models import Group
from django.db import OperationalError

from jobqueue import broker
from jobqueue.lifecycle import Effects, Report
from jobqueue.models import Job
from jobqueue.worker.context import JobContext
from jobqueue.worker.execution import Execution
from tests.helpers import wait_until
from tests.worker import handlers
from tests.worker.tools import RecordingBroker, Rig, make_job, running_loop

Script = Callable[[JobContext], Any]


class SpeakingBroker(RecordingBroker):
    """Notes reports too, as ``("report", [said, ...])``; the first ``broken`` of them fail."""

    broken = 0

    def report(self, worker_id: str, items: Sequence[tuple[Job, Report]]) -> Sequence[bool]:
        said = [report for _, report in items]
        if self.broken > 0:
            self.broken -= 1
            self.calls.append(("report failed", said))
            raise OperationalError("report: the server closed the connection unexpectedly")
        answers = broker.report(worker_id, items, using=self.alias)
        self.calls.append(("report", said))
        return answers

    def atomic(
        self, worker_id: str, job: Job, closing: Execution, alias: str | None
    ) -> AbstractContextManager[Effects]:
        return broker.atomic(worker_id, job, closing, alias, using=self.alias)


def scripted_job(script: Script, *, name: str = "script", **columns: Any) -> Job:
    """Store a waiting job that runs ``script``."""
    handlers.scripts[name] = script
    return make_job(handlers.play, name, **columns)


@contextmanager
def playing(
    alias: str, script: Script, *, local: SpeakingBroker | None = None, **options: Any
) -> Iterator[tuple[Rig, Job]]:
    """Run a job with ``script`` in a loop while the block lasts."""
    job = scripted_job(script)
    with running_loop(local or SpeakingBroker(alias), **options) as rig:
        yield rig, job


def play(alias: str, script: Script, **columns: Any) -> tuple[Rig, Job]:
    """Run a job with ``script`` until nothing is left to do; return it as it is then."""
    job = scripted_job(script, **columns)
    with running_loop(SpeakingBroker(alias), burst=True) as rig:
        rig.running.result()
    job.refresh_from_db()
    return rig, job


def finish(rig: Rig, count: int = 1) -> None:
    """Wait until so many executions are over."""
    wait_until(lambda: rig.loop.settled.total() >= count, "the job has not ended")
    assert rig.loop.settled.total() == count


def open_gates(*names: str) -> None:
    """Let go on whoever waits at these gates, or comes to them."""
    for name in names:
        handlers.gate(name).open()


def write(what: str) -> None:
    """Write a row: the effect of a job."""
    Group.objects.create(name=what)


def effects() -> list[str]:
    """Return the effects that are committed."""
    return sorted(Group.objects.values_list("name", flat=True))
