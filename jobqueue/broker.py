"""The verbs that a worker needs, on this database. Another broker may speak HTTP."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

from django.db import DataError, router

from jobqueue import __version__, conf, db, ledger, transitions
from jobqueue import claim as claims
from jobqueue.exceptions import InvalidJob, LeaseLost
from jobqueue.lifecycle import Error, Heartbeat, Outcome, Released, Retry
from jobqueue.models import Job, Worker
from jobqueue.transitions import SettleResult


def register(
    queues: Sequence[str],
    lease: timedelta | float | None = None,
    concurrency: int = 1,
    using: str | None = None,
) -> Worker:
    """Announce a worker process; its row is its lease.

    Args:
        queues: the queues that it will claim from, in order.
        lease: how long it may stay silent, in seconds or as a ``timedelta``; default
            ``JOBQUEUE["LEASE"]``.
        concurrency: jobs that it runs at once.
        using: database alias; default ``router.db_for_write(Job)``.

    Returns:
        The worker, with an id that no process before it had.

    Raises:
        InvalidJob: a queue's name or the lease is malformed.
    """
    using = _database(using)
    try:
        names = conf.check_queue_names(queues)
        length = conf.check_seconds(conf.get().LEASE if lease is None else lease, "lease")
    except ValueError as error:
        raise InvalidJob(str(error)) from None
    host, pid = socket.gethostname()[:100], os.getpid()
    now = db.now(using)
    return Worker.objects.using(using).create(
        id=f"{host}:{pid}:{secrets.token_hex(4)}",
        host=host,
        pid=pid,
        queues=names,
        concurrency=concurrency,
        lease=length,
        started_at=now,
        last_seen_at=now,
        app_version=__version__,
    )


def claim(worker_id: str, limit: int, start: bool = True, using: str | None = None) -> list[Job]:
    """Claim up to ``limit`` jobs from the queues that the worker registered for.

    Raises:
        LeaseLost: the worker's row isn't alive.
    """
    using = _database(using)
    queues = (
        Worker.objects.using(using).alive().filter(pk=worker_id).values_list("queues", flat=True)
    )
    for names in queues:
        return claims.claim_jobs(worker_id, names, limit, start=start, using=using)
    raise LeaseLost(worker_id)


def heartbeat(
    worker_id: str, held: Mapping[int, Job] | None = None, using: str | None = None
) -> Heartbeat:
    """Renew the lease and compare what the worker holds with what the database gives it.

    Args:
        worker_id: whose lease.
        held: by id, the jobs that the worker holds, as it claimed them; ``None`` while it can't
            say, since a claim or an outcome is on its way. A job that names the worker but isn't
            in ``held`` is one whose claim's reply was lost: it is released, an attempt that had
            begun excused. One in ``held`` that the database no longer gives it is lost, which
            leaves one event.
        using: database alias; default ``router.db_for_write(Job)``.

    Raises:
        LeaseLost: the worker has been declared dead, or has left.
    """
    using = _database(using)
    now = db.now(using)
    alive = Worker.objects.using(using).alive().filter(pk=worker_id)
    if not db.retry_transient(using, lambda: alive.update(last_seen_at=now)):
        raise LeaseLost(worker_id)
    rows = {job.pk: job for job in Job.objects.using(using).held_by(worker_id)}
    cancel = frozenset(pk for pk, job in rows.items() if job.cancel_requested_at)
    if held is None:
        return Heartbeat(cancel_requested=cancel)
    outcome = Released("its worker never learned of this claim")
    unknown = [
        (job, outcome)
        for pk, job in rows.items()
        if pk not in held or held[pk].version != job.version
    ]
    transitions.settle_many(unknown, actor=worker_id, using=using)
    lost = [job for pk, job in held.items() if pk not in rows or rows[pk].version != job.version]
    for job in lost:
        ledger.refuse(job, "hold", transitions.read(job.pk, using), None, using)
    return Heartbeat(cancel - {job.pk for job in lost}, frozenset(job.pk for job in lost))


def settle(
    worker_id: str, items: Sequence[tuple[Job, Outcome]], using: str | None = None
) -> list[SettleResult]:
    """Write the outcomes of a worker's executions; see ``transitions.settle_many``.

    An outcome that the database can't store makes its own attempt fail, with that reason, and
    keeps none of the others out.
    """
    using = _database(using)
    strangers = [job.pk for job, _ in items if job.claimed_by != worker_id]
    if strangers:
        raise InvalidJob(f"jobs {strangers} are not in the hands of worker {worker_id}")
    try:
        return transitions.settle_many(items, using=using)
    except (DataError, InvalidJob):
        return [_settle_storable(job, outcome, using) for job, outcome in items]


def _settle_storable(job: Job, outcome: Outcome, using: str) -> SettleResult:
    try:
        (result,) = transitions.settle_many([(job, outcome)], using=using)
    except (DataError, InvalidJob) as error:
        reason = Retry(Error(f"the outcome can't be stored: {error}"))
        (result,) = transitions.settle_many([(job, reason)], using=using)
    return result


def leave(worker_id: str, using: str | None = None) -> None:
    """End the lease of a worker that has settled or released all that it held."""
    using = _database(using)
    alive = Worker.objects.using(using).alive().filter(pk=worker_id)
    db.retry_transient(using, lambda: alive.update(state=Worker.State.STOPPED))


def _database(using: str | None) -> str:
    """The alias to work on, its connection opened anew if it broke."""
    using = using or router.db_for_write(Job)
    db.revive(using)
    return using
