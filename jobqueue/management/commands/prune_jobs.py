"""``manage.py prune_jobs``: delete what has been finished for long."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from jobqueue.management.base import JobQueueCommand, count, duration
from jobqueue.sweep import BATCH_SIZE, prune_jobs


class Command(JobQueueCommand):
    """Delete old jobs in final states, batch by batch."""

    help = (
        "Delete completed, failed and cancelled jobs that are older than a duration "
        "(3600, 12h, 30d), with their history, and the rows of workers gone for as long."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add what ``prune_jobs`` takes."""
        super().add_arguments(parser)
        self.add_json_argument(parser)
        parser.add_argument(
            "--older-than",
            type=duration,
            required=True,
            metavar="DURATION",
            help="How long a job must have been finished.",
        )
        parser.add_argument("--batch-size", type=count(10_000), default=BATCH_SIZE)

    def handle(self, **options: Any) -> None:
        """Prune."""
        using = self.database(options)
        with self.progress() as tick:
            report = prune_jobs(
                options["older_than"],
                batch_size=options["batch_size"],
                using=using,
                on_deleted=tick,
            )
        self.print_report(report.as_dict(), as_json=options["as_json"])
