"""``manage.py sweep_stale_jobs``: take back jobs that nobody works on any more."""

from __future__ import annotations

import signal
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from django.core.management.base import CommandError, CommandParser

from jobqueue import db
from jobqueue.management.base import (
    JobQueueCommand,
    count,
    duration,
    positive_duration,
    queue_name,
)
from jobqueue.models import Job
from jobqueue.sweep import BATCH_SIZE, sweep_stale_jobs


class Command(JobQueueCommand):
    """Sweep once, or every so often; lost races are counted and are no error."""

    help = (
        "Declare silent workers dead and take back their jobs, and jobs that were claimed and not "
        "started, or ran past their timeout. Durations: 30, 30s, 5m, 1h, 2d."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add what ``sweep_stale_jobs`` takes."""
        super().add_arguments(parser)
        self.add_json_argument(parser)
        parser.add_argument(
            "--queue",
            action="append",
            type=queue_name,
            dest="queues",
            metavar="NAME",
            help="Only jobs of this queue; repeat for several.",
        )
        parser.add_argument(
            "--claimed-after",
            type=duration,
            metavar="DURATION",
            help="How long a job may be claimed and not started.",
        )
        parser.add_argument(
            "--running-after",
            type=duration,
            metavar="DURATION",
            help="Also take jobs that have run for longer, even from a worker that lives.",
        )
        parser.add_argument("--batch-size", type=count(10_000), default=BATCH_SIZE)
        parser.add_argument("--limit", type=count(2**31), help="Take at most this many jobs.")
        parser.add_argument("--dry-run", action="store_true", help="Count, and write nothing.")
        parser.add_argument(
            "--interval",
            type=positive_duration,
            metavar="DURATION",
            help="Sweep again and again, this long apart, until SIGTERM or SIGINT.",
        )

    def handle(self, **options: Any) -> None:
        """Sweep."""
        using = self.database(options)
        if options["interval"] is None:
            failure = self._sweep(using, options)
        else:
            failure = self._repeat(using, options)
        if failure:
            raise CommandError(failure)

    def _sweep(self, using: str, options: dict[str, Any]) -> str:
        """Sweep once and print the report; return what went wrong, if anything."""
        held = Job.objects.using(using).held().in_queues(options["queues"])
        with self.progress(held.count) as tick:
            report = sweep_stale_jobs(
                queues=options["queues"],
                claimed_after=options["claimed_after"],
                running_after=options["running_after"],
                batch_size=options["batch_size"],
                limit=options["limit"],
                dry_run=options["dry_run"],
                using=using,
                on_examined=tick,
            )
        self.print_report(report.as_dict(), as_json=options["as_json"])
        self.stdout.flush()
        return f"{report.errors} job(s) could not be settled; see the log." if report.errors else ""

    def _repeat(self, using: str, options: dict[str, Any]) -> str:
        """Sweep until told to stop. An error ends one pass; the next may find it mended."""
        # Its put() may be called from a signal handler; an Event's set() may not.
        told: SimpleQueue[int] = SimpleQueue()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: told.put(number))
        while True:
            try:
                db.revive(using)
                failure = self._sweep(using, options)
            except Exception as error:
                failure = f"This sweep failed: {error}"
                self.stderr.write(self.style.ERROR(failure))
            with suppress(Empty):
                told.get(timeout=options["interval"])
                return failure
