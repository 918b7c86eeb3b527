"""``manage.py run_worker``: claim jobs, run them, report what became of them."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError

from jobqueue import conf
from jobqueue.management.base import JobQueueCommand, count, positive_duration, queue_name
from jobqueue.models import Worker
from jobqueue.worker.supervisor import WorkerOptions, WorkerProcess, stopping_on_signals


class Command(JobQueueCommand):
    """Run a worker until SIGTERM or SIGINT; a second signal ends it at once."""

    help = "Run jobs until told to stop. Durations: 30, 30s, 5m, 1h."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add what ``WorkerOptions`` takes."""
        super().add_arguments(parser)
        parser.add_argument(
            "--queue",
            action="append",
            type=queue_name,
            dest="queues",
            metavar="NAME",
            help="Queue to serve; repeat for several, looked at in the order given.",
        )
        parser.add_argument("--threads", type=count(1000), help="Jobs to run at once.")
        parser.add_argument(
            "--batch",
            type=count(10_000),
            help="Quick jobs to have in hand at most; 1 claims none ahead of the threads.",
        )
        parser.add_argument(
            "--burst", action="store_true", help="End when no job is waiting any more."
        )
        parser.add_argument("--max-jobs", type=count(2**31), help="End after this many jobs.")
        for name, text in {
            "--lease": "How long this worker may be silent before it is declared dead.",
            "--poll": "How often to look for jobs when idle.",
            "--grace": "When told to stop, how long to wait for running jobs.",
        }.items():
            parser.add_argument(name, type=positive_duration, metavar="DURATION", help=text)

    def handle(self, **options: Any) -> None:
        """Run the worker."""
        process = WorkerProcess(
            WorkerOptions(
                queues=options["queues"] or (),
                threads=options["threads"],
                batch=options["batch"],
                lease=options["lease"],
                poll=options["poll"],
                grace=options["grace"],
                burst=options["burst"],
                max_jobs=options["max_jobs"],
                using=self.database(options),
            )
        )
        self._check(process.options)
        with stopping_on_signals(process):
            process.run(on_start=lambda worker_id: self._greet(worker_id, process.options))
        done = ", ".join(f"{number} {what}" for what, number in sorted(process.settled.items()))
        self.stdout.write(f"Worker stopped: {done or 'no jobs'}.")

    def _check(self, options: WorkerOptions) -> None:
        loop = options.loop_options()
        if loop.poll >= loop.lease:
            raise CommandError(
                f"--poll ({loop.poll:g} s) must be shorter than --lease ({loop.lease:g} s).",
                returncode=2,
            )
        try:
            Worker.objects.using(options.using).exists()
        except DatabaseError as error:
            raise CommandError(
                f"The queue's tables can't be read on database {options.using!r}: {error}. "
                "Has `manage.py migrate` been run?"
            ) from error

    def _greet(self, worker_id: str, options: WorkerOptions) -> None:
        queues = ", ".join(options.queues or conf.get().worker_queues)
        threads = options.loop_options().slots
        self.stdout.write(f"Worker {worker_id} serves {queues} with {threads} thread(s).")
        self.stdout.flush()
