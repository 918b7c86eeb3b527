"""Choosing jobs for a worker: highest priority first, past rows that others are taking."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Final, NamedTuple

from django.db import connections, router
from django.db.models import Exists, Subquery

from jobqueue import db, transitions
from jobqueue.conf import check_integer, check_queue_names
from jobqueue.exceptions import InvalidJob, LeaseLost
from jobqueue.models import Job, Queue, Worker

MAX_CLAIM: Final = 10_000
PROMOTE_AT_LEAST: Final = 100


def claim_jobs(
    worker_id: str,
    queues: Sequence[str] | None,
    limit: int,
    start: bool = False,
    using: str | None = None,
) -> list[Job]:
    """Take up to ``limit`` jobs: waiting -> claimed, or straight to running.

    Scheduled jobs whose time has come are promoted first. A queue is drained before the next one
    is looked at; within one, jobs come by priority, then by ``run_after``. Paused queues are
    passed over.

    Args:
        worker_id: a registered worker.
        queues: their names, in the order in which to look; ``None`` for those that the worker
            registered for.
        limit: at most this many jobs, 1 to 10,000.
        start: begin the executions with the same write; each uses up an attempt.
        using: database alias; default ``router.db_for_write(Job)``.

    Raises:
        LeaseLost: the worker's row isn't alive; nothing was claimed. One that is declared dead at
            this very moment may get no jobs first, and is told so the next time.
        InvalidJob: a name or the limit is malformed.
    """
    using = using or router.db_for_write(Job)
    try:
        names = None if queues is None else check_queue_names(queues)
        check_integer(limit, "limit", 1, MAX_CLAIM)
    except ValueError as error:
        raise InvalidJob(str(error)) from None

    look = _look(worker_id, using)
    now = db.now(using)
    wanted = look.queues if names is None else names
    if look.next_run and look.next_run <= now:
        # By the claim's own time: what is promoted later than that would wait for a poll.
        transitions.promote_due(wanted, max(limit, PROMOTE_AT_LEAST), now, using=using)
    if look.is_any_paused:
        wanted = _without_paused(wanted, using)

    def work() -> list[Job]:
        jobs: list[Job] = []
        for queue in wanted:
            left = limit - len(jobs)
            jobs += transitions.claim(queue, left, worker_id, now, start=start, using=using)
            if len(jobs) >= limit:
                break
        return jobs

    # What came of one queue is not to be lost by trouble at the next.
    is_one = len(wanted) <= 1 and not connections[using].in_atomic_block
    run = db.retry_transient if is_one else db.in_transaction
    return run(using, work)


class Look(NamedTuple):
    """A live worker's row, and what it says of the work there is.

    Attributes:
        queues: those that it registered for.
        next_run: when the next scheduled job is due, of whatever queue.
        is_any_paused: whether some queue is paused.
    """

    queues: list[str]
    next_run: datetime | None
    is_any_paused: bool


def _look(worker_id: str, using: str) -> Look:
    for row in _looking(using)(id=worker_id):
        return Look(*row)
    raise LeaseLost(worker_id)


@cache
def _looking(using: str) -> db.Select:
    alive = Worker.objects.using(using).alive().filter(pk=db.Blank(Worker, "id"))
    scheduled = Job.objects.using(using).scheduled().values("run_after")
    paused = Queue.objects.using(using).filter(paused_at__isnull=False)
    return db.Select(
        alive.annotate(next_run=Subquery(scheduled[:1]), is_any_paused=Exists(paused)).values_list(
            "queues", "next_run", "is_any_paused"
        )
    )


def _without_paused(names: Sequence[str], using: str) -> list[str]:
    paused = set(
        Queue.objects.using(using)
        .filter(name__in=names, paused_at__isnull=False)
        .values_list("name", flat=True)
    )
    return [name for name in names if name not in paused]
