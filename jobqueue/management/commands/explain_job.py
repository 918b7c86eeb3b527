"""``manage.py explain_job``: why a job is not running."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import CommandError, CommandParser

from jobqueue.exceptions import JobNotFound
from jobqueue.explain import explain
from jobqueue.management.base import JobQueueCommand


class Command(JobQueueCommand):
    """Print what is known about one job, each answer with its evidence."""

    help = "Say why a job is not running, or what became of it, with the evidence."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the id."""
        super().add_arguments(parser)
        self.add_json_argument(parser)
        parser.add_argument("job_id", type=int, metavar="ID")

    def handle(self, **options: Any) -> None:
        """Explain."""
        try:
            explanation = explain(options["job_id"], using=self.database(options))
        except JobNotFound as error:
            raise CommandError(str(error)) from None
        if options["as_json"]:
            self.stdout.write(json.dumps(explanation.as_dict()))
            return
        self.stdout.write(
            f"Job {explanation.job_id}, {explanation.task}, "
            f"is {explanation.state} in the queue {explanation.queue}."
        )
        for answer in explanation.answers:
            self.stdout.write(f"- {answer.text}")
            for name, value in answer.evidence.items():
                self.stdout.write(f"    {name}: {value}")
