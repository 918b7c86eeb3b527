"""One worker process: puts loop, threads, heartbeat and sweep together, and hears signals."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, SimpleNamespace
from typing import cast

from django.db import router

from jobqueue import broker, conf, db, signals
from jobqueue.models import Job
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.worker.heartbeat import Heart
from jobqueue.worker.loop import Broker, Ended, Loop, LoopOptions
from jobqueue.worker.threads import DaemonThreadExecutor, Periodic

SWEEP_JITTER = 0.1


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What ``run_worker`` was asked for; times in seconds, ``None`` for the setting's value."""

    queues: Sequence[str] = ()
    threads: int | None = None
    lease: float | None = None
    poll: float | None = None
    grace: float | None = None
    burst: bool = False
    max_jobs: int | None = None
    using: str | None = None

    def loop_options(self) -> LoopOptions:
        """Return the options of a loop, with the settings filled in."""
        settings = conf.get()
        return LoopOptions(
            slots=settings.THREADS if self.threads is None else self.threads,
            poll=settings.POLL if self.poll is None else self.poll,
            lease=settings.LEASE if self.lease is None else self.lease,
            grace=settings.GRACE if self.grace is None else self.grace,
            burst=self.burst,
            max_jobs=self.max_jobs,
        )


@dataclass(slots=True)
class WorkerProcess:
    """A worker from its start to its end, under one lease after another."""

    options: WorkerOptions
    settled: Counter[str] = field(default_factory=Counter)
    _stopping: bool = False
    _loop: Loop | None = None

    def stop(self) -> None:
        """Claim no more, finish within the grace, release the rest. Safe in a signal handler."""
        self._stopping = True
        if self._loop:
            self._loop.stop()

    def run(self, on_start: Callable[[str], None] = lambda worker_id: None) -> None:
        """Work until told to stop, or drained with ``burst``.

        A lost lease ends with a new one: whatever was in hand was told so, and has been settled or
        refused. A database that can't be reached is waited for.
        """
        using = self.options.using or router.db_for_write(Job)
        verbs = ("claim", "heartbeat", "settle", "leave")
        local = cast(
            Broker,
            SimpleNamespace(
                **{verb: partial(getattr(broker, verb), using=using) for verb in verbs}
            ),
        )
        waits = db.waits()
        pause = threading.Event()
        while not self._stopping:
            try:
                worker_id = self._register(using)
            except Exception as error:
                self._tell("register", "", error)
                pause.wait(next(waits))
                continue
            waits = db.waits()
            on_start(worker_id)
            if self._work(local, worker_id, using) is not Ended.LEASE_LOST:
                break

    def _register(self, using: str) -> str:
        options = self.options.loop_options()
        queues = self.options.queues or conf.get().worker_queues
        return broker.register(queues, options.lease, options.slots, using=using).pk

    def _work(self, local: Broker, worker_id: str, using: str) -> Ended:
        options = self.options.loop_options()
        executor = DaemonThreadExecutor(options.slots)
        loop = Loop(local, worker_id, executor, options)
        self._loop = loop
        if self._stopping:
            loop.stop()
        heart = Heart(loop, options.lease)
        sweep = partial(self._sweep, worker_id, using)
        interval = conf.get().SWEEP_INTERVAL
        with (
            Periodic(heart.beat, heart.interval, name="jobqueue-heartbeat"),
            Periodic(sweep, interval, jitter=SWEEP_JITTER, name="jobqueue-sweep"),
        ):
            ended = loop.run()
        executor.shutdown(wait=not loop.abandoned)
        self.settled += loop.settled
        try:
            local.leave(worker_id)
        except Exception as error:
            self._tell("leave", worker_id, error)
        return ended

    def _sweep(self, worker_id: str, using: str) -> None:
        try:
            db.revive(using)
            sweep_stale_jobs(using=using)
        except Exception as error:
            self._tell("sweep", worker_id, error)

    def _tell(self, doing: str, worker_id: str, error: Exception) -> None:
        signals.worker_in_trouble.send_robust(
            type(self), worker_id=worker_id, doing=doing, error=error
        )


def _local_broker(using: str) -> Broker:
    verbs = (broker.claim, broker.heartbeat, broker.settle, broker.leave)
    bound = {verb.__name__: partial(verb, using=using) for verb in verbs}
    return cast(Broker, SimpleNamespace(**bound))


@contextmanager
def stopping_on_signals(process: WorkerProcess) -> Iterator[None]:
    """Stop ``process`` on the first SIGTERM or SIGINT; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        process.stop()

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
