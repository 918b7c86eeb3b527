"""``manage.py queue_status``: what waits, who works, what went wrong in the last hour."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import CommandParser

from jobqueue.management.base import JobQueueCommand
from jobqueue.status import QueueStatus, Status, queue_status


class Command(JobQueueCommand):
    """Print how the queue is doing."""

    help = "Show what waits, who works, and what went wrong in the last hour."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add ``--json``."""
        super().add_arguments(parser)
        self.add_json_argument(parser)

    def handle(self, **options: Any) -> None:
        """Report."""
        status = queue_status(using=self.database(options))
        if options["as_json"]:
            self.stdout.write(json.dumps(status.as_dict()))
        else:
            self.stdout.write("\n".join(_lines(status)))


def _lines(status: Status) -> list[str]:
    lines = [
        f"Queue {name}: {_queue(queue)}, {status.workers.get(name, 0)} live worker(s)"
        for name, queue in sorted(status.queues.items())
    ]
    idle = sorted(set(status.workers) - set(status.queues))
    lines += [f"Queue {name}: empty, {status.workers[name]} live worker(s)" for name in idle]
    if status.silent_workers:
        lines.append(f"{status.silent_workers} worker(s) silent for longer than their lease")
    lines.append(f"Last hour, finished: {_counts(status.finished)}")
    lines.append(f"Last hour, events: {_counts(status.events)}")
    lines += [
        f"Last hour, refused: {row['verb']} of {row['task']}, {row['count']} time(s)"
        for row in status.refused
    ]
    if status.snapshot:
        lines.append(f"Claims grow slower: {status.snapshot}")
    return lines


def _queue(queue: QueueStatus) -> str:
    names = ("scheduled", "waiting", "claimed", "running")
    text = _counts({name: getattr(queue, name) for name in names if getattr(queue, name)})
    if queue.oldest_waiting is not None:
        text += f", the oldest for {queue.oldest_waiting:.0f} s"
    return f"{text}, PAUSED" if queue.paused else text


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.items()) or "none"
