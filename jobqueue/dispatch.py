"""Promotions and claims: the writes for whatever jobs are there, made for many at once.

What they rest on, state and time, stands in the statement itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

from django.db.models import Exists, F

from jobqueue import db, guards
from jobqueue.lifecycle import RULES, State, Verb
from jobqueue.models import Job, Queue, Worker
from jobqueue.querysets import CLAIMED_COLUMNS


def promote_due(
    queues: Sequence[str] | None, limit: int, now: datetime | None = None, *, using: str
) -> int:
    """Turn up to ``limit`` scheduled jobs whose time has come into waiting ones; return how many.

    Any worker and any sweep may do so at any time.
    """
    moment = now or db.now(using)
    jobs = Job.objects.using(using)
    due = jobs.in_queues(queues).due(moment)
    if not due.exists():
        return 0

    def work() -> int:
        ids = db.lock_rows(due, skip_locked=True).values_list("pk", flat=True)[:limit]
        still = jobs.chosen(ids, *RULES[Verb.PROMOTE].sources).filter(**guards.due(moment))
        return still.update(state=State.WAITING, version=F("version") + 1)

    return db.in_transaction(using, work)


def claim(
    queue: str,
    worker_id: str,
    now: datetime | None,
    limit: int,
    *,
    start: bool,
    after: tuple[int, int] | None = None,
    using: str,
) -> list[Job]:
    """Give up to ``limit`` jobs of a queue, that nobody has locked, to a live worker; return them.

    None of a queue that is paused. The worker's row is locked until they are committed: this and a
    sweep that fences the worker come one after the other. What is returned, in the order of the
    queue, has been read back. ``after`` a job, given by its priority and its id, means those of
    its priority that come after it; none of them while there are any of a higher one. ``now`` is
    ``None`` where the statement tells the time itself (``db.tells_update_time``).
    """
    given: dict[str, Any] = {"queue": queue, "claimed_by": worker_id}
    if now:
        given["claimed_at"] = now
    if after:
        given["priority"], given["id"] = after
    return _claiming(start, tuple(given), using)(limit, **given)


@cache
def _claiming(start: bool, given: tuple[str, ...], using: str) -> db.UpdateChosen[Job]:
    jobs = Job.objects.using(using)

    def make(queue: Any, claimed_by: Any, claimed_at: Any = None, **end: Any) -> db.Choice[Job]:
        claimed_at = claimed_at or db.DatabaseNow()
        rows = jobs.claimable(queue, claimed_at)
        paused = Queue.objects.using(using).filter(pk=queue, paused_at__isnull=False)
        permit = Worker.objects.using(using).alive().filter(~Exists(paused), pk=claimed_by)
        if end:
            more_urgent = rows.filter(priority__gt=end["priority"])
            permit = permit.filter(~Exists(more_urgent))
            rows = rows.after(end["priority"], end["id"])
        changes = {"claimed_by": claimed_by, "claimed_at": claimed_at, "version": F("version") + 1}
        began = {"attempt": F("attempt") + 1, "attempted_at": claimed_at} if start else {}
        changes |= {**began, "state": State.RUNNING if start else State.CLAIMED}
        still = jobs.alike(guards.in_states(*RULES[Verb.CLAIM].sources) | guards.due(claimed_at))
        chosen = db.lock_rows(rows, skip_locked=True)
        return db.Choice(chosen, still, db.lock_rows(permit), changes)

    columns = CLAIMED_COLUMNS if start else (*CLAIMED_COLUMNS, "attempted_at")
    return db.UpdateChosen(Job, given, make, columns, using)
