"""A worker process from its start to its end: alone, or as the child of a supervisor."""

from __future__ import annotations

import gc
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

from jobqueue import conf, db, signals
from jobqueue.worker import system
from jobqueue.worker.link import Link
from jobqueue.worker.log import Log
from jobqueue.worker.process import WorkerOptions, WorkerProcess, bury
from jobqueue.worker.supervisor import BEAT, KILL_MARGIN, RECYCLE, TOUCH_EVERY, TROUBLE
from jobqueue.worker.threads import THREAD_PREFIX

MIB: Final = 2**20


class Guardian(Protocol):
    """Who wants to know how the process is."""

    def send(self, *, healthy: bool) -> None:
        """Hear, every now and then, whether it is well."""

    def wait(self, seconds: float) -> bool:
        """Wait; return at once that nobody is left who wants to know, if that is so."""


class HealthFile:
    """Stands in for a parent: is touched while the process is well, and outlives no process."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._touched_at = 0.0
        self._is_over = threading.Event()

    def __enter__(self) -> HealthFile:
        self._remove()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._remove()

    def send(self, *, healthy: bool) -> None:
        """Touch the file, if all is well."""
        now = time.monotonic()
        if self._path and healthy and now - self._touched_at >= TOUCH_EVERY:
            self._touched_at = now
            with suppress(OSError):
                self._path.touch()

    def wait(self, seconds: float) -> bool:
        """Wait; return at once when the worker has ended."""
        return self._is_over.wait(seconds)

    def _remove(self) -> None:
        if self._path:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


def run_alone(process: WorkerProcess, log: Log, health_file: Path | None = None) -> None:
    """Run a worker in this process, and return."""
    with HealthFile(health_file) as file:
        if health_file or process.options.max_rss:
            _watch(process, file, log)
        _run(process, log)


def run_as_child(options: WorkerOptions, log: Log, link: Link, dead: Sequence[str]) -> int:
    """Run a worker as a child; return what its process is to end with."""
    process = WorkerProcess(_spread(options), is_replaceable=True)
    link.call_on_stop(process.stop)
    _watch(process, link, log, on_orphaned=lambda: _end_by_oneself(process))
    if dead:
        burial = _start_thread("burial", lambda: _bury_all(dead, process, link))
        if options.burst:  # or the queue would seem to be drained before they are rescued
            burial.join()
    try:
        _run(process, log, link)
    finally:
        logging.shutdown()
    return RECYCLE if process.must_be_replaced else 0


def _spread(options: WorkerOptions) -> WorkerOptions:
    """Let a process end after up to a tenth fewer jobs: not when those beside it do."""
    if options.max_jobs is None:
        return options
    fewer = random.randint(0, options.max_jobs // 10)
    return replace(options, max_jobs=options.max_jobs - fewer)


def _bury_all(dead: Sequence[str], process: WorkerProcess, link: Link) -> None:
    """Bury the dead, in a thread of its own: a lock that somebody holds must hold up no worker.

    One that can't be buried, try after try, is left to its lease, and to whoever comes next here.
    """
    try:
        errors = _bury_each(dead, process.options.using)
        for wait in islice(db.waits(), db.TRIES - 1):
            if not errors:
                break
            time.sleep(wait)
            errors = _bury_each(errors, process.options.using)
        for worker_id, error in errors.items():
            doing = f"bury worker {worker_id} in {db.TRIES} tries, and leaves its jobs to a sweep"
            signals.tell_trouble(process, "", doing, error)
        if not errors:
            link.send(buried=True)
    finally:
        db.close_connections()


def _bury_each(dead: Iterable[str], using: str | None) -> dict[str, Exception]:
    """Bury whom it can; return the others, each with what was in the way."""
    errors: dict[str, Exception] = {}
    for worker_id in dead:
        try:
            bury(worker_id, using)
        except Exception as error:
            errors[worker_id] = error
    return errors


def _run(process: WorkerProcess, log: Log, link: Link | None = None) -> None:
    queues = ", ".join(process.options.queues or conf.get().worker_queues)
    threads = process.options.loop_options().slots
    worker = ""

    def on_start(worker_id: str) -> None:
        nonlocal worker
        worker = worker_id
        text = f"Worker {worker_id} serves {queues} with {threads} thread(s)."
        log.tell("worker_started", text, worker=worker_id)
        if link:  # after that line, so that what the parent does next is told later
            link.send(worker=worker_id)

    def on_lost(worker_id: str) -> None:
        text = f"Worker {worker_id} lost its lease, and takes a new one."
        log.tell("lease_lost", text, is_trouble=True, worker=worker_id)

    def on_trouble(worker_id: str, doing: str, error: Exception, **kwargs: Any) -> None:
        text = f"{signals.called(worker_id)} could not {doing}: {error}"
        log.tell("trouble", text, worker=worker_id, doing=doing, error=type(error).__name__)

    if log.as_json:  # Otherwise the project's own logging tells of it.
        signals.worker_in_trouble.connect(on_trouble)
    # What the project has loaded is there to stay: the garbage collector need not look at it again,
    # every few thousand jobs.
    gc.freeze()
    try:
        process.run(on_start, on_lost)
    finally:
        gc.unfreeze()
        signals.worker_in_trouble.disconnect(on_trouble)
    if link:
        link.send(settled=dict(process.settled))
        text = f"Process {os.getpid()} stopped: {summary(process.settled)}."
        log.tell("worker_stopped", text, worker=worker, settled=dict(process.settled))


def summary(settled: Mapping[str, int]) -> str:
    """Return in words what became of jobs."""
    return ", ".join(f"{number} {what}" for what, number in sorted(settled.items())) or "no jobs"


def _watch(
    process: WorkerProcess,
    guardian: Guardian,
    log: Log,
    on_orphaned: Callable[[], None] | None = None,
) -> None:
    """Watch over the process, in a thread of its own, for as long as somebody wants to know."""

    def watch() -> None:
        while not guardian.wait(BEAT):
            guardian.send(healthy=process.is_healthy)
            _limit_memory(process, log)
        if on_orphaned:
            on_orphaned()

    _start_thread("watch", watch)


def _start_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=f"{THREAD_PREFIX}{name}", daemon=True)
    thread.start()
    return thread


def _end_by_oneself(process: WorkerProcess) -> None:
    """Do what the parent would have done, which is gone."""
    process.stop()
    time.sleep(process.options.loop_options().grace + KILL_MARGIN)
    os._exit(TROUBLE)


def _limit_memory(process: WorkerProcess, log: Log) -> None:
    limit = process.options.max_rss
    if limit is None or process.is_retiring or (used := system.resident_bytes() // MIB) <= limit:
        return
    process.retire()
    text = f"Process {os.getpid()} takes up {used} MiB, more than {limit}: it ends after its jobs."
    log.tell("too_big", text, is_trouble=True, rss=used, limit=limit)
