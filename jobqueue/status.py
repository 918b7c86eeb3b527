"""How the queue is doing: what waits, who works, what went wrong in the last hour. Reads only."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Final

from django.db import router
from django.db.models import Count, Min

from jobqueue import db
from jobqueue.lifecycle import FINAL, HELD, QUEUED, State
from jobqueue.models import EventKind, Job, JobEvent, Queue, Worker

RECENT: Final = timedelta(hours=1)
# A snapshot that is kept for longer than this, in seconds, is worth a line.
OLD_SNAPSHOT: Final = 60.0


@dataclass(slots=True)
class QueueStatus:
    """One queue: jobs by state, and for how long, in seconds, the oldest due one has waited."""

    scheduled: int = 0
    waiting: int = 0
    claimed: int = 0
    running: int = 0
    oldest_waiting: float | None = None
    paused: bool = False


@dataclass(slots=True)
class Status:
    """The whole of it.

    Attributes:
        queues: by name, each queue that has jobs to do or is paused.
        workers: live workers by the queue that they serve, without the silent ones.
        silent_workers: workers whose lease ran out and that no sweep has declared dead yet.
        finished: jobs that ended in the last hour, by state.
        events: events of the last hour, by kind.
        refused: writes refused in the last hour: a list of task, verb and count.
        snapshot: who keeps an old snapshot, and since when: each claim then walks what has died.
    """

    queues: dict[str, QueueStatus] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)
    silent_workers: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    refused: list[dict[str, Any]] = field(default_factory=list)
    snapshot: db.Snapshot | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, fit for JSON."""
        return asdict(self)


def queue_status(using: str | None = None) -> Status:
    """Count what is to do and what went wrong; its cost doesn't grow with what is long finished."""
    using = using or router.db_for_write(Job)
    now = db.now(using)
    status = Status()
    _count_queues(status, now, using)
    served: Counter[str] = Counter()
    for worker in Worker.objects.using(using).alive():
        if worker.last_seen_at < now - worker.lease:
            status.silent_workers += 1
        else:
            served.update(worker.queues)
    status.workers = dict(served)
    recent = Job.objects.using(using).filter(state__in=FINAL, finished_at__gte=now - RECENT)
    status.finished = dict(recent.values_list("state").annotate(Count("pk")).order_by("state"))
    _count_events(status, now, using)
    oldest = db.oldest_snapshot(using)
    status.snapshot = oldest if oldest and oldest.age > OLD_SNAPSHOT else None
    return status


def _count_queues(status: Status, now: Any, using: str) -> None:
    open_jobs = Job.objects.using(using).filter(state__in=QUEUED | HELD)
    for name, state, number in open_jobs.values_list("queue", "state").annotate(Count("pk")):
        setattr(status.queues.setdefault(name, QueueStatus()), state, number)
    due = Job.objects.using(using).filter(state=State.WAITING, run_after__lte=now)
    for name, oldest in due.values_list("queue").annotate(Min("run_after")):
        # Not there yet if its first job came since the count.
        queue = status.queues.setdefault(name, QueueStatus())
        queue.oldest_waiting = (now - oldest).total_seconds()
    paused = Queue.objects.using(using).filter(paused_at__isnull=False)
    for name in paused.values_list("name", flat=True):
        status.queues.setdefault(name, QueueStatus()).paused = True


def _count_events(status: Status, now: Any, using: str) -> None:
    recent = JobEvent.objects.using(using).filter(at__gte=now - RECENT)
    kinds = recent.order_by("kind").values_list("kind").annotate(Count("pk"))
    status.events = dict(kinds)
    conflicts = recent.filter(kind=EventKind.CONFLICT).values_list("job__task", "detail__wanted")
    counted = conflicts.order_by("job__task", "detail__wanted").annotate(Count("pk"))
    status.refused = [
        {"task": task, "verb": verb, "count": number} for task, verb, number in counted
    ]
