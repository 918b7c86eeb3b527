"""The verbs that a worker needs, on this database. Another broker may speak HTTP."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import chain
from typing import Any, Final, Protocol

from django.db import (
    DatabaseError,
    DataError,
    IntegrityError,
    connections,
    router,
    transaction,
)

from jobqueue import __version__, conf, db, fence, guards, ledger, transitions
from jobqueue import claim as claims
from jobqueue.exceptions import InvalidJob, JobQueueError, LeaseLost, TransitionConflict
from jobqueue.fence import SettleResult
from jobqueue.lifecycle import (
    Completed,
    Effects,
    Error,
    Heartbeat,
    Outcome,
    Released,
    Report,
    Retry,
    Settled,
    State,
    Verb,
)
from jobqueue.models import Job, Worker

# What speaks of the outcome's own values: it won't be stored however often it is tried.
UNSTORABLE: Final = (DataError, IntegrityError, InvalidJob)
# How many scheduled jobs, of whatever queues, are looked at for the next one of a worker's own.
LOOK_AHEAD: Final = 50


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
    return claims.claim_jobs(worker_id, None, limit, start=start, using=_database(using))


def next_due(worker_id: str, using: str | None = None) -> float | None:
    """Return in how many seconds to look for the worker's next scheduled job, if there is one.

    That is when it is due; or earlier, if many of other queues come before it.
    """
    using = _database(using)
    now = db.now(using)
    later = _later(LOOK_AHEAD, using)(run_after=now)
    if not later:
        return None
    workers = Worker.objects.using(using).filter(pk=worker_id)
    queues = set(chain.from_iterable(workers.values_list("queues", flat=True)))
    mine = (moment for queue, moment in later if queue in queues)
    page_ends = later[-1][1] if len(later) == LOOK_AHEAD else None
    moment = next(mine, page_ends)
    return None if moment is None else (moment - now).total_seconds()


@cache
def _later(limit: int, using: str) -> db.Select:
    later = Job.objects.using(using).due_later(db.Blank(Job, "run_after"))
    return db.Select(later.values_list("queue", "run_after")[:limit])


def heartbeat(
    worker_id: str, held: Mapping[int, Job | None] | None = None, using: str | None = None
) -> Heartbeat:
    """Renew the lease and compare what the worker holds with what the database gives it.

    Args:
        worker_id: whose lease.
        held: by id, the jobs that the worker holds, as it claimed them; ``None`` while it can't
            say, since a claim or an outcome is on its way. A job that names the worker but isn't
            in ``held`` is one whose claim's reply was lost: it is released, an attempt that had
            begun excused. One in ``held`` that the database no longer gives it is lost, which
            leaves one event. An id with ``None`` is not to be judged: its end is on its way.
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
    unknown, lost = compare(held, rows)
    try:
        transitions.settle_many([(job, outcome) for job in unknown], actor=worker_id, using=using)
    except DatabaseError as error:
        if not db.is_lock_refused(error):  # else the next heartbeat finds them again
            raise
    for job in lost:
        fence.refuse(job, "hold", None, using)
    return Heartbeat(cancel - {job.pk for job in lost}, frozenset(job.pk for job in lost))


def compare(held: Mapping[int, Job | None], rows: Mapping[int, Job]) -> tuple[list[Job], list[Job]]:
    """Return the rows that a worker doesn't know of, and what it holds that isn't its any more."""
    known = {pk: rows.get(pk) if job is None else job for pk, job in held.items()}
    unknown = [job for pk, job in rows.items() if not guards.is_same_execution(known.get(pk), job)]
    lost = [
        job for pk, job in held.items() if job and not guards.is_same_execution(job, rows.get(pk))
    ]
    return unknown, lost


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
    except (DatabaseError, InvalidJob) as error:
        if not _is_of_one_item(error, using):
            raise
        return [_settle_alone(job, outcome, using) for job, outcome in items]


def _settle_alone(job: Job, outcome: Outcome, using: str) -> SettleResult:
    """Settle one; what it can't be settled as is a failed attempt, if at least that is taken."""
    try:
        (result,) = transitions.settle_many([(job, outcome)], using=using)
        return result
    except (DatabaseError, InvalidJob) as error:
        if not _is_of_one_item(error, using):
            raise
        if not isinstance(error, UNSTORABLE):  # Nothing is wrong with the outcome.
            return SettleResult(job.pk, Settled.NOT_WRITTEN)
        reason = Retry(Error(f"the outcome can't be stored: {error}"))
    try:
        (result,) = transitions.settle_many([(job, reason)], using=using)
        return result
    except DatabaseError as error:
        if not _is_of_one_item(error, using):
            raise
        return SettleResult(job.pk, Settled.NOT_WRITTEN)


def _is_of_one_item(error: Exception, using: str) -> bool:
    """Say whether the database may well take the others: it is there, and one row is the matter."""
    is_passing = db.is_transient(error) and not db.is_lock_refused(error)
    return not is_passing and db.can_go_on(using)


def report(
    worker_id: str, items: Sequence[tuple[Job, Report]], using: str | None = None
) -> list[bool]:
    """Write what running executions say about themselves; what can't be stored is left out.

    Returns:
        For each whether it is still this worker's; one that isn't leaves its event: it is lost.
    """
    using = _database(using)
    return [_report_one(job, said, using) for job, said in items]


def _report_one(job: Job, said: Report, using: str) -> bool:
    try:
        transitions.report(job, said, using=using)
    except TransitionConflict:
        return False
    except DatabaseError as error:
        if not _is_of_one_item(error, using):
            raise
    return True


class Closing(Protocol):
    """An execution that is being completed by its own handler."""

    def last_words(self) -> Report | None:
        """Return what it said and nobody has written yet."""

    def committed(self) -> None:
        """Called once the completion is committed, before the handler's own hooks."""

    def refused(self) -> bool:
        """Called when the job is no longer this execution's; return whether that is news."""


@contextmanager
def atomic(
    worker_id: str, job: Job, closing: Closing, alias: str | None = None, using: str | None = None
) -> Iterator[Effects]:
    """Complete an execution in one transaction with the writes of the ``with`` block.

    See ``JobContext.atomic``.

    Raises:
        TransitionConflict: the execution was superseded; the block was rolled back.
        JobQueueError: ``alias`` isn't the job's database.
        RuntimeError: called within a transaction, or with autocommit switched off.
    """
    using = _database(using)
    if alias not in (None, using):
        raise JobQueueError(
            f"context.atomic() works on {using!r}, the database of job {job.pk}, not on {alias!r}"
        )
    connection = connections[using]
    if not connection.in_atomic_block and not connection.get_autocommit():
        raise RuntimeError("context.atomic() can't commit while autocommit is switched off")
    effects, deciding = Effects(), False
    try:
        with transaction.atomic(using=using, durable=True):
            # The first hook to run, so that none of the handler's can keep it from running.
            transaction.on_commit(closing.committed, using=using)
            yield effects
            deciding = True
            if said := closing.last_words():
                transitions.report(job, said, using=using)
            _complete_once(job, effects.result, using)
    except (TransitionConflict, DatabaseError) as error:
        if deciding and _took_effect(job, using):
            closing.committed()
        elif deciding and isinstance(error, TransitionConflict) and closing.refused():
            ledger.record(job, error, None, using)  # Its event was rolled back with the rest.
        raise


def _complete_once(job: Job, result: Any, using: str) -> None:
    """Complete; that the job is completed already is no success, for this block would be twice."""
    (settled,) = transitions.settle_many([(job, Completed(result))], using=using)
    if settled.status == Settled.ALREADY_APPLIED:
        raise ledger.conflict_of(job, Verb.COMPLETE, settled.job)
    settled.unwrap()


def _took_effect(job: Job, using: str) -> bool:
    """Say whether only COMMIT's reply was lost; no, if that can't be found out."""
    with suppress(DatabaseError):
        found = fence.read(job.pk, _database(using))
        if found is None or not guards.is_same_claim(found, job):
            return False
        completed = (State.COMPLETED, job.version + 1, job.version)
        return (found.state, found.version, found.settled_version) == completed
    return False


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
