"""One worker process: puts loop, threads, heartbeat and sweep together, and hears signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType, SimpleNamespace
from typing import cast

from django.db import Error, connections, router

from jobqueue import broker, conf, db, signals
from jobqueue.lifecycle import stop_asked, work_in
from jobqueue.models import Job, Worker
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.worker import system
from jobqueue.worker.contract import Broker, Ended, LoopOptions
from jobqueue.worker.heartbeat import Heart
from jobqueue.worker.loop import Loop
from jobqueue.worker.threads import THREAD_PREFIX, Periodic

SWEEP_JITTER = 0.1
# How old a snapshot, in seconds, must be for a worker to complain of it: once a sweep.
OLD_SNAPSHOT = 300.0
# How long the interpreter may wait for hung handlers' threads once all else is done.
EXIT_PATIENCE = 3.0
# Before threads or an executor that nothing came of are replaced: the next may do no better.
HUNG_WAIT = 1.0


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What ``run_worker`` was asked for; times in seconds, ``None`` for the setting's value.

    A process that has run ``max_jobs`` jobs, or takes up more than ``max_rss`` MiB of memory, ends
    and should be replaced.
    """

    queues: Sequence[str] = ()
    threads: int | None = None
    lease: float | None = None
    poll: float | None = None
    grace: float | None = None
    burst: bool = False
    max_jobs: int | None = None
    max_rss: int | None = None
    batch: int | None = None
    coroutines: int = 0
    executor: Callable[[], Executor] | None = None
    notify: bool = True
    using: str | None = None

    def loop_options(self) -> LoopOptions:
        """Return the options of a loop, with the settings filled in."""
        settings = conf.get()
        return LoopOptions(
            slots=settings.THREADS if self.threads is None else self.threads,
            poll=settings.POLL if self.poll is None else self.poll,
            lease=settings.LEASE if self.lease is None else self.lease,
            grace=settings.GRACE if self.grace is None else self.grace,
            patience=settings.TIMEOUT_GRACE / 2,
            batch=settings.BATCH if self.batch is None else self.batch,
            coroutines=self.coroutines,
            executor=self.executor,
            burst=self.burst,
            max_jobs=self.max_jobs,
        )


@dataclass(slots=True)
class WorkerProcess:
    """A worker from its start to its end, under one lease after another.

    With ``is_replaceable`` it ends once a handler hangs, whose thread goes on to hold memory and
    connections; without, it goes on with threads anew.
    """

    options: WorkerOptions
    is_replaceable: bool = False
    settled: Counter[str] = field(default_factory=Counter)
    claimed: int = 0
    abandoned: int = 0
    must_be_replaced: bool = False
    is_retiring: bool = False
    _stopping: bool = False
    _loop: Loop | None = None

    def stop(self) -> None:
        """Claim no more, finish within the grace, release the rest. Safe in a signal handler."""
        self._stopping = True
        if self._loop:
            self._loop.stop()

    def retire(self) -> None:
        """Claim no more, finish what runs however long it takes, and end, to be replaced."""
        self.is_retiring = True
        if self._loop:
            self._loop.retire()

    @property
    def is_healthy(self) -> bool:
        """Whether the loop ticks, and its lease is held."""
        loop, now = self._loop, time.monotonic()
        lease = self.options.loop_options().lease
        return loop is not None and now < loop.lease_until and now - loop.ticked <= lease

    def run(
        self,
        on_start: Callable[[str], None] = lambda worker_id: None,
        on_lost: Callable[[str], None] = lambda worker_id: None,
    ) -> None:
        """Work until told to stop, spent, or drained with ``burst``.

        A lost lease ends with a new one: whatever was in hand was told so, and has been settled or
        refused. A database that can't be reached is waited for.

        Args:
            on_start: called with the worker's id under each lease, before it claims.
            on_lost: called with the worker's id when that lease was lost.
        """
        using = self.options.using or router.db_for_write(Job)
        options = self.options.loop_options()
        waits = db.waits()
        while not (self._stopping or self._is_spent):
            began = time.monotonic()
            try:
                worker_id = self._register(options, using)
            except Error as error:
                signals.tell_trouble(self, "", "register", error)
                time.sleep(next(waits))
                continue
            waits = db.waits()
            on_start(worker_id)
            ended = self._work(worker_id, began, options, using)
            if ended is Ended.HUNG:
                self.is_retiring = self.is_retiring or self.is_replaceable
                if not self._loop or not self._loop.settled.total():
                    time.sleep(HUNG_WAIT)
            elif ended is Ended.LEASE_LOST:
                on_lost(worker_id)
            else:
                break
        self.must_be_replaced = self._is_spent and not self._stopping

    @property
    def _is_spent(self) -> bool:
        return self.is_retiring or self.claimed == self.options.max_jobs

    def _register(self, options: LoopOptions, using: str) -> str:
        queues = self.options.queues or conf.get().worker_queues
        return str(broker.register(queues, options.lease, options.slots, using=using).pk)

    def _work(self, worker_id: str, began: float, options: LoopOptions, using: str) -> Ended:
        local = _local_broker(using)
        if options.max_jobs is not None:
            options = replace(options, max_jobs=options.max_jobs - self.claimed)
        try:
            loop = Loop(local, worker_id, options)
        except BaseException:  # an executor that can't be made
            local.leave(worker_id)
            raise
        loop.lease_until = began + options.lease
        self._loop = loop
        if self._stopping:
            loop.stop()
        if self.is_retiring:
            loop.retire()
        heart = Heart(loop, options.lease)
        sweep = partial(self._sweep, worker_id, using)
        interval = conf.get().SWEEP_INTERVAL
        beats = Periodic(heart.beat, heart.interval, name=f"{THREAD_PREFIX}heartbeat")
        with (
            beats,
            self._listening(worker_id, loop, beats, using),
            Periodic(sweep, interval, jitter=SWEEP_JITTER, name=f"{THREAD_PREFIX}sweep"),
        ):
            ended = loop.run()
        loop.shutdown()
        self.settled += loop.settled
        self.claimed += loop.claimed
        self.abandoned += loop.abandoned + loop.hung
        try:
            local.leave(worker_id)
        except Exception as error:
            signals.tell_trouble(self, worker_id, "leave", error)
        return ended

    @contextmanager
    def _listening(self, worker_id: str, loop: Loop, beats: Periodic, using: str) -> Iterator[None]:
        """Wake the loop when there is work, and the heartbeat when somebody asks a job to stop."""
        if not (self.options.notify and conf.get().NOTIFY and db.can_wake(using)):
            yield
            return
        work = {work_in(queue) for queue in self.options.queues or conf.get().worker_queues}

        def ready() -> None:
            loop.wake()
            beats.poke()

        def hear(word: str) -> None:
            if word in work:
                loop.wake()
            elif word in {stop_asked(execution.job.pk) for execution in loop.hand}:
                beats.poke()

        trouble = partial(signals.tell_trouble, self, worker_id, "listen")
        with db.Listener(using, ready=ready, hear=hear, trouble=trouble):
            yield

    def _sweep(self, worker_id: str, using: str) -> None:
        try:
            db.revive(using)
            sweep_stale_jobs(using=using)
            snapshot = db.oldest_snapshot(using)
            if snapshot and snapshot.age > OLD_SNAPSHOT:
                signals.send_after_commit(
                    signals.snapshot_kept, type(self), using, worker_id=worker_id, snapshot=snapshot
                )
        except Exception as error:
            signals.tell_trouble(self, worker_id, "sweep", error)


def bury(worker_id: str, using: str | None = None) -> None:
    """Declare a worker dead whose process is known to be gone, and rescue its jobs at once.

    Only for who has reaped that process: nobody else can tell death from silence.
    """
    using = using or router.db_for_write(Job)
    db.revive(using)
    alive = Worker.objects.using(using).alive().filter(pk=worker_id)
    db.retry_transient(using, lambda: alive.update(state=Worker.State.DEAD))
    sweep_stale_jobs(using=using)


def disconnect() -> None:
    """Close all of this thread's connections, and their pools: what a fork must not find open."""
    db.close_connections()
    for connection in connections.all(initialized_only=True):
        if close_pool := getattr(connection, "close_pool", None):
            with suppress(Exception):
                close_pool()


def _local_broker(using: str) -> Broker:
    verbs = ("claim", "next_due", "heartbeat", "settle", "report", "atomic", "leave")
    bound = {verb: partial(getattr(broker, verb), using=using) for verb in verbs}
    return cast(Broker, SimpleNamespace(**bound))


@contextmanager
def stopping_on_signals(process: WorkerProcess) -> Iterator[None]:
    """Stop ``process`` on the first SIGTERM or SIGINT; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    heard: list[int] = []
    threads = set(threading.enumerate())

    def handle(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        for each in numbers:
            signal.signal(each, _leave_at_once if os.getpid() == 1 else signal.SIG_DFL)
        process.stop()

    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        with system.dumping_stacks_on_signal():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if heard and process.abandoned:
        handlers_own = {t for t in threading.enumerate() if not t.name.startswith(THREAD_PREFIX)}
        if handlers_own - threads:
            _end_soon()


def _leave_at_once(number: int, frame: FrameType | None) -> None:
    """End as a signal would, which the kernel doesn't let end the first process of a container."""
    os._exit(128 + number)


def _end_soon() -> None:
    """End the process, though the interpreter waits for threads that a hung handler started.

    It doesn't wait for the worker's own; but it does for the one of an async handler's event loop,
    and for any pool.
    """

    def end() -> None:
        time.sleep(EXIT_PATIENCE)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(0)

    threading.Thread(target=end, name=f"{THREAD_PREFIX}exit", daemon=True).start()
