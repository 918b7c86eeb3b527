"""``manage.py run_worker``: claim jobs, run them, report what became of them."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError, connections
from django.utils import autoreload
from django.utils.module_loading import import_string

from jobqueue import conf, db
from jobqueue.management.base import JobQueueCommand, count, positive_duration
from jobqueue.models import Worker
from jobqueue.worker import system
from jobqueue.worker.log import Log
from jobqueue.worker.process import (
    WorkerOptions,
    WorkerProcess,
    disconnect,
    stopping_on_signals,
)
from jobqueue.worker.run import run_alone, run_as_child, summary
from jobqueue.worker.supervisor import BEAT_HOLDS, Supervisor, SupervisorOptions

WRONG_USAGE: Final = 2
# How long a database that can't be reached is waited for at the start, and how often it is asked.
START_PATIENCE: Final = 10.0
FIRST_WAIT: Final = 0.25

Answer = TypeVar("Answer")


def _executor(path: str) -> Callable[[], Executor]:
    """Read the dotted path of a callable."""
    try:
        factory: Callable[[], Executor] = import_string(path)
    except Exception as error:  # a module may raise anything while it is imported
        raise argparse.ArgumentTypeError(f"{path!r} can't be imported: {error}") from None
    if not callable(factory):
        raise argparse.ArgumentTypeError(f"{path!r} must be callable, not {factory!r:.80}")
    return factory


def _queue_name(text: str) -> str:
    try:
        return conf.check_queue_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _processes(text: str) -> int:
    try:
        return conf.check_integer(int(text), "the value", 0, conf.MAX_PROCESSES)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be an integer from 0 to {conf.MAX_PROCESSES}"
        ) from None


_OPTIONS: Final[Mapping[str, tuple[Callable[[str], Any], str, str]]] = {
    "--processes": (_processes, "N", "Worker processes; 0 for one without a parent."),
    "--threads": (count(1000), "N", "Jobs that each process runs at once."),
    "--batch": (count(10_000), "N", "Quick jobs in hand at most; 1: none ahead of the threads."),
    "--async-concurrency": (count(10_000), "N", "Async handlers to run on an event loop at once."),
    "--executor": (_executor, "PATH", "What makes a concurrent.futures.Executor to run jobs in."),
    "--max-jobs": (count(2**31), "N", "Replace a process after this many jobs, or a few less."),
    "--max-rss": (count(2**31), "N", "Replace a process that takes up more than this many MiB."),
    "--lease": (
        positive_duration,
        "DURATION",
        "How long this worker may be silent before it is declared dead.",
    ),
    "--poll": (positive_duration, "DURATION", "How often to look for jobs when idle."),
    "--grace": (positive_duration, "DURATION", "When told to stop, how long to wait for jobs."),
    "--health-file": (Path, "PATH", "Touch this file while all is well."),
}
_SWITCHES: Final = {
    "--no-notify": "Don't listen for new work, only poll.",
    "--burst": "End when no job is waiting any more.",
    "--reload": "For development: start anew when the code changes.",
}


class Command(JobQueueCommand):
    """Run a worker until SIGTERM or SIGINT; a second signal ends it at once."""

    help = "Run jobs until told to stop. Durations: 30, 30s, 5m, 1h."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add what ``WorkerOptions`` and ``SupervisorOptions`` take."""
        super().add_arguments(parser)
        parser.add_argument(
            "--queue",
            action="append",
            type=_queue_name,
            dest="queues",
            metavar="NAME",
            help="Queue to serve; repeat for several, looked at in the order given.",
        )
        for name, (read, metavar, text) in _OPTIONS.items():
            parser.add_argument(name, type=read, metavar=metavar, help=text)
        for name, text in _SWITCHES.items():
            parser.add_argument(name, action="store_true", help=text)
        parser.add_argument(
            "--json",
            action="store_true",
            dest="as_json",
            help="Tell each event as a JSON object on a line of stdout.",
        )

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Note what the system checks, which come first, have to know."""
        self._using, self._as_json = self.database(options), options["as_json"]
        return super().execute(*args, **options)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Run the system checks, some of which ask the database on MySQL."""
        self._wait_for_database(lambda: super(Command, self).check(*args, **kwargs))

    def handle(self, **options: Any) -> None:
        """Run the worker."""
        worker = WorkerOptions(
            queues=options["queues"] or (),
            threads=options["threads"],
            batch=options["batch"],
            coroutines=options["async_concurrency"] or 0,
            executor=options["executor"],
            notify=not options["no_notify"],
            lease=options["lease"],
            poll=options["poll"],
            grace=options["grace"],
            burst=options["burst"],
            max_jobs=options["max_jobs"],
            max_rss=options["max_rss"],
            using=self._using,
        )
        self._check_usage(worker, options)
        if options["reload"]:
            autoreload.run_with_reloader(partial(self._run_reloaded, worker, options))
            return
        self._look_first(worker)
        processes = _processes_wanted(options)
        if processes:
            self._run_children(processes, worker, options)
        else:
            self._run_alone(worker, options)

    # -- How it is run

    def _run_alone(self, worker: WorkerOptions, options: Mapping[str, Any]) -> None:
        process = WorkerProcess(worker)
        with stopping_on_signals(process):
            run_alone(process, self._log, options["health_file"])
        self._bid_farewell(process.settled)

    def _run_children(
        self, processes: int, worker: WorkerOptions, options: Mapping[str, Any]
    ) -> None:
        loop = worker.loop_options()
        supervisor = Supervisor(
            partial(run_as_child, worker, self._log),
            SupervisorOptions(
                processes,
                grace=loop.grace,
                silence=max(2 * loop.lease, BEAT_HOLDS),
                burst=worker.burst,
                health_file=options["health_file"],
            ),
            self._log,
            before_fork=disconnect,
        )
        status = supervisor.run()
        self._bid_farewell(supervisor.settled)
        if status:
            sys.exit(status)

    def _run_reloaded(self, worker: WorkerOptions, options: Mapping[str, Any]) -> None:
        """Called in a thread that ends with the process, whenever the code has changed."""
        self._look_first(worker)
        process, thread = WorkerProcess(worker), threading.current_thread()

        @atexit.register
        def stop() -> None:
            process.stop()
            self._log.tell("stopping", "Stopping.")
            thread.join(worker.loop_options().grace)

        run_alone(process, self._log, options["health_file"])

    def _bid_farewell(self, settled: Mapping[str, int]) -> None:
        text = f"Worker stopped: {summary(settled)}."
        self._log.tell("stopped", text, settled=dict(settled))

    # -- What is checked first

    def _check_usage(self, worker: WorkerOptions, options: Mapping[str, Any]) -> None:
        loop, file = worker.loop_options(), options["health_file"]
        if loop.poll >= loop.lease:
            _refuse(f"--poll ({loop.poll:g} s) must be shorter than --lease ({loop.lease:g} s).")
        if options["executor"] and options["async_concurrency"]:
            _refuse("--executor runs async handlers as well: leave --async-concurrency out.")
        if options["reload"] and options["burst"]:
            _refuse("--reload waits for changes, and --burst ends: give one of them.")
        if options["reload"] and options["processes"]:
            _refuse("--reload runs in one process: leave --processes out.")
        if options["processes"] and not system.CAN_FORK:
            _refuse("--processes needs a system that can fork: start run_worker several times.")
        if options["processes"] and not _is_main_thread():
            _refuse("--processes needs the main thread, for it hears signals.")
        if file and not (file.parent.is_dir() and os.access(file.parent, os.W_OK)):
            _refuse(f"--health-file {file}: its directory must exist, and be writable.")
        if file and file.exists() and not file.is_file():
            _refuse(f"--health-file {file} is there, and no file.")

    def _look_first(self, worker: WorkerOptions) -> None:
        try:
            self._wait_for_database(Worker.objects.using(worker.using).exists)
        except DatabaseError as error:
            raise self._unreadable(error, "Has `manage.py migrate` been run?") from error
        self._warn_of_unknown(worker.queues)

    def _wait_for_database(self, ask: Callable[[], Answer]) -> Answer:
        """Return what the database answers; wait for one that may just be starting."""
        until = time.monotonic() + START_PATIENCE
        for wait in db.waits(FIRST_WAIT):
            db.revive(self._using)
            try:
                return ask()
            except DatabaseError as error:
                if connections[self._using].in_atomic_block or db.can_go_on(self._using):
                    raise
                if time.monotonic() + wait > until:
                    hint = f"It could not be reached for {START_PATIENCE:g} s."
                    raise self._unreadable(error, hint) from error
                text = f"Database {self._using!r} can't be reached, trying again: {_line(error)}"
                self._log.tell("unreachable", text, is_trouble=True, database=self._using)
                time.sleep(wait)
        raise AssertionError("unreachable")  # pragma: no cover

    def _unreadable(self, error: DatabaseError, hint: str) -> CommandError:
        where = f"The queue's tables can't be read on database {self._using!r}"
        return CommandError(f"{where}: {_line(error)}. {hint}")

    @property
    def _log(self) -> Log:
        return Log(self.stdout, self.stderr, self._as_json)

    def _warn_of_unknown(self, queues: Sequence[str]) -> None:
        """A queue may be new here and old elsewhere, as while a deploy is under way."""
        known = conf.get().QUEUES
        for name in queues:
            if known is not None and name not in known:
                text = f"There is no queue {name!r} in JOBQUEUE['QUEUES']: {', '.join(known)}."
                self._log.tell("unknown_queue", text, is_trouble=True, queue=name, known=known)


def _processes_wanted(options: Mapping[str, Any]) -> int:
    """Return how many processes to run under a parent, 0 for no parent.

    ``--burst`` is for tests and scripts, and works where it is called unless told otherwise.
    """
    if options["processes"] is not None:
        return int(options["processes"])
    if options["burst"] or not system.CAN_FORK or not _is_main_thread():
        return 0
    return conf.get().PROCESSES


def _line(error: DatabaseError) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _refuse(message: str) -> NoReturn:
    raise CommandError(message, returncode=WRONG_USAGE)
