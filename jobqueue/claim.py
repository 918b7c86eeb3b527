"""Choosing jobs for a worker: highest priority first, past rows that others are taking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from django.db import router

from jobqueue import db, transitions
from jobqueue.conf import check_integer, check_queue_names
from jobqueue.exceptions import InvalidJob, LeaseLost
from jobqueue.models import Job, Queue, Worker

MAX_CLAIM: Final = 10_000
PROMOTE_AT_LEAST: Final = 100


def claim_jobs(
    worker_id: str,
    queues: Sequence[str],
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
        queues: their names, in the order in which to look.
        limit: at most this many jobs, 1 to 10,000.
        start: begin the executions with the same write; each uses up an attempt.
        using: database alias; default ``router.db_for_write(Job)``.

    Raises:
        LeaseLost: the worker's row isn't alive; nothing was claimed.
        InvalidJob: a name or the limit is malformed.
    """
    using = using or router.db_for_write(Job)
    try:
        names = check_queue_names(queues)
        check_integer(limit, "limit", 1, MAX_CLAIM)
    except ValueError as error:
        raise InvalidJob(str(error)) from None
    transitions.promote_due(names, max(limit, PROMOTE_AT_LEAST), using=using)

    def work() -> list[Job]:
        _require_lease(worker_id, using)
        now = db.now(using)
        jobs: list[Job] = []
        for queue in _open_queues(names, using):
            rows = Job.objects.using(using).claimable(queue, now)[: limit - len(jobs)]
            jobs += transitions.claim(rows, worker_id, now, start=start, using=using)
            if len(jobs) >= limit:
                break
        return jobs

    return db.in_transaction(using, work)


def _require_lease(worker_id: str, using: str) -> None:
    """Hold the worker's row until the claim is committed.

    Locked, so that this claim and a sweep that fences the worker come one after the other.
    """
    alive = Worker.objects.using(using).alive().filter(pk=worker_id)
    if not db.lock_rows(alive).values_list("pk", flat=True).first():
        raise LeaseLost(worker_id)


def _open_queues(names: Sequence[str], using: str) -> list[str]:
    paused = set(
        Queue.objects.using(using)
        .filter(name__in=names, paused_at__isnull=False)
        .values_list("name", flat=True)
    )
    return [name for name in names if name not in paused]
