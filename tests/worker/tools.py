"""A loop with a real broker under the test's control, and what goes wrong around it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import OperationalError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

from jobqueue import broker, db, signals
from jobqueue.lifecycle import Heartbeat, Outcome
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.testing.factories import JobFactory
from jobqueue.worker.contract import Ended, LoopOptions
from jobqueue.worker.heartbeat import Heart
from jobqueue.worker.loop import Loop
from jobqueue.worker.process import WorkerOptions, WorkerProcess
from tests.helpers import TIMEOUT, Running, run_in_thread, wait_until
from tests.worker import handlers

AT_ONCE: dict[str, float] = {"base": 0.0, "factor": 1.0, "cap": 0.0, "jitter": 0.0}


def make_job(handler: Any, *args: Any, **columns: Any) -> Job:
    """Store a waiting job of one of the test's handlers, retried at once."""
    columns = {"backoff": AT_ONCE, **columns}
    task = f"{handler.__module__}.{handler.__name__}"
    return JobFactory(task=task, args=list(args), **columns)


def kinds(job: Job) -> list[str]:
    """Return the kinds of the job's events, in order."""
    return list(JobEvent.objects.filter(job_id=job.pk).values_list("kind", flat=True))


def conflicts() -> int:
    """Return how many late writes were refused."""
    return JobEvent.objects.filter(kind=EventKind.CONFLICT).count()


# -- Brokers


class LocalBroker:
    """The real broker; subclasses put something in its way."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def claim(self, worker_id: str, limit: int) -> Sequence[Job]:
        return broker.claim(worker_id, limit, using=self.alias)

    def next_due(self, worker_id: str) -> float | None:
        return broker.next_due(worker_id, using=self.alias)

    def heartbeat(self, worker_id: str, held: Mapping[int, Job] | None) -> Heartbeat:
        return broker.heartbeat(worker_id, held, using=self.alias)

    def settle(self, worker_id: str, items: Sequence[tuple[Job, Outcome]]) -> Sequence[Any]:
        return broker.settle(worker_id, items, using=self.alias)

    def leave(self, worker_id: str) -> None:
        broker.leave(worker_id, using=self.alias)


class RecordingBroker(LocalBroker):
    """Notes what it is asked for: ``("claim", limit, jobs)`` and ``("settle", outcomes)``."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        self.calls: list[tuple[Any, ...]] = []

    def claim(self, worker_id: str, limit: int) -> Sequence[Job]:
        jobs = super().claim(worker_id, limit)
        self.calls.append(("claim", limit, [job.pk for job in jobs]))
        return jobs

    def settle(self, worker_id: str, items: Sequence[tuple[Job, Outcome]]) -> Sequence[Any]:
        results = super().settle(worker_id, items)
        self.calls.append(("settle", [job.pk for job, _ in items]))
        return results


class FailingBroker(RecordingBroker):
    """Raises ``OperationalError`` for verbs as often as ``failures`` says, before they are run.

    With ``late`` it does so after them: the reply is lost.
    """

    def __init__(self, alias: str, *, late: bool = False, **failures: float) -> None:
        super().__init__(alias)
        self.late = late
        self.failures = failures

    def claim(self, worker_id: str, limit: int) -> Sequence[Job]:
        return self._run("claim", lambda: super(FailingBroker, self).claim(worker_id, limit))

    def heartbeat(self, worker_id: str, held: Mapping[int, Job] | None) -> Heartbeat:
        return self._run("heartbeat", lambda: super(FailingBroker, self).heartbeat(worker_id, held))

    def settle(self, worker_id: str, items: Sequence[tuple[Job, Outcome]]) -> Sequence[Any]:
        return self._run("settle", lambda: super(FailingBroker, self).settle(worker_id, items))

    def _run(self, verb: str, work: Callable[[], Any]) -> Any:
        if self.failures.get(verb, 0) <= 0:
            return work()
        answer = work() if self.late else None
        # An empty claim is not worth losing the reply of.
        if not self.late or answer or verb != "claim":
            self.failures[verb] -= 1
            self.calls.append((verb, "failed"))
            raise OperationalError(f"{verb}: the server closed the connection unexpectedly")
        return answer


# -- A loop in a thread, and its heart in the test's hand


@dataclass
class Rig:
    """A running loop; nobody renews its lease but the test."""

    worker: Worker
    loop: Loop
    heart: Heart
    running: Running[Ended]

    def beat(self) -> None:
        """Do what the heartbeat thread does every third of a lease."""
        self.heart.beat()

    def let_tick(self, times: int = 4) -> None:
        """Wait until the loop has gone round: it has had the chance to do what it must not."""
        for _ in range(times):
            ticked = self.loop.ticked
            wait_until(lambda ticked=ticked: self.loop.ticked != ticked, "the loop stands still")

    def stop(self) -> Ended:
        """Tell the loop to stop, and return why it ended."""
        self.loop.stop()
        return self.running.result()


def declare_dead(rig: Rig) -> None:
    """Do what a sweep does to a worker that was silent for too long, but with one COMMIT.

    Else the worker could notice its death, and report, before the sweep has taken its job.
    """
    alias = rig.worker._state.db
    with transaction.atomic(using=alias):
        long_ago = db.now(alias) - timedelta(hours=1)
        Worker.objects.filter(pk=rig.worker.pk).update(last_seen_at=long_ago)
        assert sweep_stale_jobs().dead_workers == 1


@contextmanager
def running_loop(
    local: LocalBroker,
    *,
    queues: Sequence[str] = ("default",),
    slots: int = 1,
    poll: float = 0.02,
    lease: float = 30.0,
    grace: float = TIMEOUT,
    batch: int = 1,
    **options: Any,
) -> Iterator[Rig]:
    """Run a loop in a thread while the block lasts; then open all gates and stop it.

    It claims nothing ahead of its threads, unless a larger ``batch`` lets it.
    """
    worker = broker.register(queues, lease, slots, using=local.alias)
    settings = LoopOptions(slots=slots, poll=poll, lease=lease, grace=grace, batch=batch, **options)
    loop = Loop(local, worker.pk, settings)
    rig = Rig(worker, loop, Heart(loop, lease), run_in_thread(loop.run))
    try:
        yield rig
    finally:
        for gate in handlers.gates.values():
            gate.open()
        loop.stop()
        rig.running.thread.join(TIMEOUT)
        loop.shutdown()
        # Also those that were given up: what they still do must not meet the next test's tables.
        for thread in getattr(loop.runners._crew, "_threads", ()):
            thread.join(TIMEOUT)
            assert not thread.is_alive(), "a handler has outlived its test"


@contextmanager
def running_worker(alias: str, **options: Any) -> Iterator[WorkerProcess]:
    """Run a whole worker in a thread while the block lasts; then open all gates and stop it."""
    given = {"threads": 1, "poll": 0.02, "grace": TIMEOUT, "using": alias, **options}
    process = WorkerProcess(WorkerOptions(**given))
    running = run_in_thread(process.run)
    try:
        yield process
    finally:
        for gate in handlers.gates.values():
            gate.open()
        process.stop()
        running.result()


def work_off(alias: str, **options: Any) -> WorkerProcess:
    """Run a whole worker in a thread until the queue is drained."""
    given = {"threads": 1, "poll": 0.02, "burst": True, "using": alias, **options}
    process = WorkerProcess(WorkerOptions(**given))
    run_in_thread(process.run).result()
    return process


# -- Listening


@contextmanager
def troubles() -> Iterator[list[str]]:
    """Collect what workers could not do."""
    heard: list[str] = []

    def hear(*, doing: str, **kwargs: Any) -> None:
        heard.append(doing)

    signals.worker_in_trouble.connect(hear)
    try:
        yield heard
    finally:
        signals.worker_in_trouble.disconnect(hear)


@contextmanager
def made_connections(alias: str) -> Iterator[dict[BaseDatabaseWrapper, str]]:
    """Collect the connections to ``alias`` that other threads make, with the threads' names."""
    here = threading.current_thread()
    made: dict[BaseDatabaseWrapper, str] = {}

    def hear(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
        if connection.alias == alias and threading.current_thread() is not here:
            made[connection] = threading.current_thread().name

    connection_created.connect(hear)
    try:
        yield made
    finally:
        connection_created.disconnect(hear)


@contextmanager
def broken_statements(
    alias: str,
    matches: Callable[[str, Any], bool],
    error: Exception,
    *,
    thread: str = "",
    times: float = math.inf,
) -> Iterator[list[str]]:
    """Make statements fail that match, on connections that threads so named open in the block.

    Yields the list of the statements that were made to fail: at most ``times``.
    """
    broken: list[str] = []
    here = threading.current_thread()

    def execute(run: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if len(broken) < times and matches(sql, params):
            broken.append(sql)
            raise error
        return run(sql, params, many, context)

    def wrap(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
        current = threading.current_thread()
        if connection.alias != alias or current is here or not current.name.startswith(thread):
            return
        if execute not in connection.execute_wrappers:
            connection.execute_wrappers.append(execute)

    connection_created.connect(wrap)
    try:
        yield broken
    finally:
        connection_created.disconnect(wrap)
