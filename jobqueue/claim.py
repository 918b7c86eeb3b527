"""Choosing jobs for a worker: highest priority first, past rows that others are taking."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Final

from django.db import DatabaseError, connections, router
from django.db.models import Subquery

from jobqueue import db, dispatch
from jobqueue.conf import check_integer, check_queue_names
from jobqueue.exceptions import InvalidJob, LeaseLost
from jobqueue.models import Job, Worker

MAX_CLAIM: Final = 10_000
PROMOTE_AT_LEAST: Final = 100
# How long, in seconds, what a look has told is relied on while jobs come in.
RELY: Final = 0.1
# A claim for at least so many jobs that gets them all begins the next one where it ended.
LARGE: Final = 50
REMEMBERED: Final = 1000


def claim_jobs(
    worker_id: str,
    queues: Sequence[str] | None,
    limit: int,
    start: bool = False,
    using: str | None = None,
) -> list[Job]:
    """Take up to ``limit`` jobs: waiting -> claimed, or straight to running.

    Scheduled jobs whose time has come are promoted first; while jobs come in, one that this
    process hasn't heard of waits for some ``RELY`` seconds. A queue is drained before the next one
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

    def take(known: Known) -> list[Job]:
        wanted = known.queues if names is None else names
        return _take(known, wanted, worker_id, limit, start, using)

    known = _recall(worker_id, using)
    jobs = take(known) if known else []
    if known is None or not jobs:
        known = _look(worker_id, names, max(limit, PROMOTE_AT_LEAST), using)
        jobs = take(known)
        # From the end of what may have been long: a claim from the front under an old snapshot.
        known.looked_at = time.monotonic()
    if not db.is_in_transaction(using):  # Else it may never have been.
        if jobs:
            known.due_at = min(known.due_at, known.looked_at + RELY)
        _remember(known, worker_id, using)
    return jobs


@dataclass(slots=True)
class Known:
    """What a look told of a live worker and of the work there is.

    It holds until the next scheduled job is due; and for ``RELY`` seconds once jobs come in, since
    nobody tells a busy worker of what is scheduled, or comes back, meanwhile.

    Attributes:
        queues: those that the worker registered for.
        looked_at: when it was found out, by this process's clock.
        due_at: when the next scheduled job is due, of whatever queue, or it holds no longer.
        ends: by queue, the priority and the id of the job at which a large claim ended.
    """

    queues: list[str]
    looked_at: float
    due_at: float = math.inf
    ends: dict[str, tuple[int, int]] = field(default_factory=dict)


# A hint, and never more: each claim asks for itself whether the lease holds.
_known: Final[dict[tuple[str, str], Known]] = {}


def _recall(worker_id: str, using: str) -> Known | None:
    known = _known.pop((using, worker_id), None)
    return known if known and time.monotonic() < known.due_at else None


def _remember(known: Known, worker_id: str, using: str) -> None:
    if len(_known) >= REMEMBERED:
        _known.clear()
    _known[using, worker_id] = known


def _look(worker_id: str, names: Sequence[str] | None, limit: int, using: str) -> Known:
    """Find out whether the lease holds, and promote what is due."""
    for queues, next_run in _looking(using)(id=worker_id):
        known = Known(queues, time.monotonic())
        if next_run:
            now = db.now(using)
            known.due_at = known.looked_at + (next_run - now).total_seconds()
            if next_run <= now:
                wanted = queues if names is None else names
                dispatch.promote_due(wanted, limit, now, using=using)
        return known
    raise LeaseLost(worker_id)


@cache
def _looking(using: str) -> db.Select:
    alive = Worker.objects.using(using).alive().filter(pk=db.Blank(Worker, "id"))
    scheduled = Job.objects.using(using).scheduled().values("run_after")
    return db.Select(
        alive.annotate(next_run=Subquery(scheduled[:1])).values_list("queues", "next_run")
    )


def _take(
    known: Known, wanted: Sequence[str], worker_id: str, limit: int, start: bool, using: str
) -> list[Job]:
    now = None if db.tells_update_time(using) else db.now(using)
    # What came of one queue is not to be lost by trouble at the next.
    is_one = len(wanted) <= 1 and not connections[using].in_atomic_block

    def work() -> list[Job]:
        jobs: list[Job] = []
        for queue in wanted:
            claim = partial(dispatch.claim, queue, worker_id, now, start=start, using=using)
            left = limit - len(jobs)
            end = known.ends.pop(queue, None)
            got = claim(left, after=end) if end else []
            if len(got) < left:
                try:
                    got += claim(left - len(got))
                except DatabaseError:
                    if not (got and is_one):
                        raise
                    # Those are committed, and the next claim will meet the trouble, if it stays.
            if len(got) == left >= LARGE and db.keeps_old_rows(using):
                known.ends[queue] = (got[-1].priority, got[-1].pk)
            jobs += got
            if len(jobs) == limit:
                break
        return jobs

    return (db.retry_transient if is_one else db.in_transaction)(using, work)
