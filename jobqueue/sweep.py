"""Stale recovery: dead workers first, then their jobs; and pruning of what is long finished.

There is no leader: any number of sweeps may run at once, since each write is fenced and a lost race
is a no-op that is counted.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from itertools import chain

from django.db import router

from jobqueue import conf, db, dispatch, fence, guards, signals, transitions
from jobqueue.exceptions import InvalidJob
from jobqueue.lifecycle import FINAL, Error, Outcome, Released, Retry, State
from jobqueue.models import Job, Worker
from jobqueue.querysets import SWEPT_COLUMNS

Tick = Callable[[int], None]
Page = Sequence[db.Alike[Job]]
# What is stale of a page, and why.
Stale = list[tuple[db.Alike[Job], str]]

BATCH_SIZE = 500


@dataclass(slots=True)
class SweepReport:
    """What one sweep did, in jobs unless said otherwise.

    Attributes:
        examined: claimed and running jobs looked at.
        dead_workers: workers declared dead.
        released: claimed jobs that are waiting again.
        retried: running jobs scheduled for another attempt.
        failed: running jobs that were on their last attempt.
        cancelled: jobs for which cancellation had been asked.
        conflicts: jobs that moved on between the look and the write: left alone.
        errors: jobs that could not be written, with the others' writes done all the same.
    """

    examined: int = 0
    dead_workers: int = 0
    released: int = 0
    retried: int = 0
    failed: int = 0
    cancelled: int = 0
    conflicts: int = 0
    errors: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)

    @property
    def taken(self) -> int:
        """Jobs that this sweep changed."""
        return self.released + self.retried + self.failed + self.cancelled


@dataclass(slots=True)
class PruneReport:
    """What one pruning did: rows deleted."""

    jobs: int = 0
    workers: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


# How a job that isn't final afterwards is counted, by the state in which it was taken.
_GIVEN_BACK = {State.CLAIMED: "released", State.RUNNING: "retried"}


def sweep_stale_jobs(
    queues: Collection[str] | None = None,
    claimed_after: timedelta | float | None = None,
    running_after: timedelta | float | None = None,
    batch_size: int = BATCH_SIZE,
    limit: int | None = None,
    dry_run: bool = False,
    using: str | None = None,
    on_examined: Tick | None = None,
) -> SweepReport:
    """Take back the jobs that nobody works on any more.

    First each worker whose lease ran out is declared dead, unless it renews first. Then jobs are
    taken, each only if it is still the execution that was looked at: those held by a worker
    without a live row, those claimed for too long without being started, and those running past
    their own timeout and the grace. A running job without a timeout whose worker lives is never
    stale.

    Args:
        queues: only jobs of these; ``None`` for all.
        claimed_after: how long a job may be claimed and not started; default
            ``JOBQUEUE["CLAIM_TIMEOUT"]``. In seconds or as a ``timedelta``, as the next.
        running_after: also take any job that has been running for longer than this, live worker
            or not; by default there is no such limit.
        batch_size: jobs per page and, at most, per transaction.
        limit: take at most this many jobs.
        dry_run: count, and write nothing.
        using: database alias; default ``router.db_for_write(Job)``.
        on_examined: called with the number of jobs looked at, after each page.

    Raises:
        InvalidJob: an argument is out of its range.
        DatabaseError: the database failed, not just at one job. What was written stays written.
    """
    using = using or router.db_for_write(Job)
    rules = _rules(claimed_after, running_after, using)
    _check(batch_size=batch_size, limit=limit, queues=queues)
    sweep = _Sweep(using, rules, dry_run, limit)
    sweep.fence_dead_workers()
    if not dry_run:
        dispatch.promote_due(None if queues is None else list(queues), batch_size, using=using)
    held = Job.objects.using(using).held().in_queues(queues)
    for page in db.pages_alike(held, SWEPT_COLUMNS, batch_size):
        sweep.take(page)
        if on_examined:
            on_examined(_size(page))
        if sweep.room() == 0:
            break
    sweep.raise_if_nothing_worked()
    return sweep.report


@dataclass(frozen=True, slots=True)
class StaleRules:
    """From when on a held job is stale, by the database's clock."""

    now: datetime
    claimed_before: datetime
    running_before: datetime | None
    timeout_grace: timedelta

    def lives(self, worker: Worker | None) -> bool:
        """Whether a sweep, if one looked now, would let the worker live."""
        return (
            worker is not None
            and worker.state == Worker.State.ALIVE
            and worker.last_seen_at >= self.now - worker.lease
        )

    def verdict(self, job: Job, alive: Collection[str]) -> str | None:
        """Say why ``job`` is stale, or ``None``: its holder lives and it isn't overdue.

        Everything that this rests on is in the job's fingerprint, but for the holder's death,
        which is for ever.
        """
        if job.claimed_by not in alive:
            return f"its worker {job.claimed_by} is gone"
        if job.state == State.CLAIMED:
            if job.claimed_at is not None and job.claimed_at < self.claimed_before:
                return f"claimed by {job.claimed_by} and not started in time"
            return None
        started = job.attempted_at
        if started is None:
            return None
        if job.timeout is not None and started < self.now - job.timeout - self.timeout_grace:
            return f"ran past its timeout of {job.timeout} on {job.claimed_by}"
        if self.running_before is not None and started < self.running_before:
            return f"ran for longer than this sweep allows on {job.claimed_by}"
        return None


def stale_rules(using: str) -> StaleRules:
    """Return the rules that the settings make."""
    return _rules(None, None, using)


def _rules(
    claimed_after: timedelta | float | None, running_after: timedelta | float | None, using: str
) -> StaleRules:
    settings = conf.get()
    claimed = settings.CLAIM_TIMEOUT if claimed_after is None else claimed_after
    try:
        claimed = conf.check_seconds(claimed, "claimed_after", zero=True)
        if running_after is not None:
            running_after = conf.check_seconds(running_after, "running_after", zero=True)
    except ValueError as error:
        raise InvalidJob(str(error)) from None
    now = db.now(using)
    return StaleRules(
        now=now,
        claimed_before=now - claimed,
        running_before=None if running_after is None else now - running_after,
        timeout_grace=timedelta(seconds=settings.TIMEOUT_GRACE),
    )


def _check(
    *, batch_size: int, limit: int | None = None, queues: Collection[str] | None = None
) -> None:
    try:
        if queues is not None:
            conf.check_queue_names(queues)
        conf.check_integer(batch_size, "batch_size", 1, 10_000)
        if limit is not None:
            conf.check_integer(limit, "limit", 1, 2**31)
    except ValueError as error:
        raise InvalidJob(str(error)) from None


def _size(page: Page) -> int:
    return sum(len(jobs.ids) for jobs in page)


@dataclass(slots=True)
class _Sweep:
    using: str
    rules: StaleRules
    dry_run: bool
    limit: int | None
    report: SweepReport = field(default_factory=SweepReport)
    fenced: set[str] = field(default_factory=set)
    gone: set[str | None] = field(default_factory=set)
    error: Exception | None = None
    clock: db.Clock = field(init=False)
    actor: str = field(default_factory=lambda: f"sweep {socket.gethostname()}:{os.getpid()}")

    def __post_init__(self) -> None:
        self.clock = db.Clock(self.rules.now)

    def room(self) -> int | None:
        """How many more jobs may be taken; ``None`` for any number."""
        return None if self.limit is None else self.limit - self.report.taken

    def fence_dead_workers(self) -> None:
        """Declare silent workers dead: a renewal and this meet on one row, and one of them wins."""
        alive = Worker.objects.using(self.using).alive()
        for worker in alive.only("pk", "lease", "last_seen_at"):
            cutoff = self.rules.now - worker.lease
            if worker.last_seen_at < cutoff and self._fence(worker, cutoff):
                self.fenced.add(worker.pk)
        self.report.dead_workers = len(self.fenced)

    def _fence(self, worker: Worker, cutoff: datetime) -> bool:
        silent = (
            Worker.objects.using(self.using)
            .alive()
            .filter(pk=worker.pk, lease=worker.lease, **guards.silent_since(cutoff))
        )
        if self.dry_run:
            return True
        if not db.retry_transient(self.using, lambda: silent.update(state=Worker.State.DEAD)):
            return False
        signals.send_after_commit(
            signals.worker_declared_dead, Worker, self.using, worker_id=worker.pk
        )
        return True

    def take(self, page: Page) -> None:
        """Settle the stale jobs of one page."""
        self.report.examined += _size(page)
        alive = self._holders_alive(page)
        verdicts = ((jobs, self.rules.verdict(jobs.row, alive)) for jobs in page)
        stale = self._within_limit([(jobs, reason) for jobs, reason in verdicts if reason])
        if self.dry_run:
            for jobs, _ in stale:
                self._count(jobs.row, _foreseen(jobs.row), len(jobs.ids))
        elif stale:
            self._settle([(jobs, _outcome(jobs.row, reason)) for jobs, reason in stale])

    def _holders_alive(self, page: Page) -> Collection[str]:
        # Read after the page: a worker is registered before it claims, so a holder that has no
        # live row now had none when the page was read, or has died since. Death is for ever.
        unsure = {jobs.row.claimed_by for jobs in page} - self.gone
        alive = Worker.objects.using(self.using).alive_ids(unsure) if unsure else set()
        alive -= self.fenced  # A dry run's rows still say that they live.
        self.gone |= unsure - alive
        return alive

    def _within_limit(self, stale: Stale) -> Stale:
        """Return the oldest, as many as may be taken."""
        if self.limit is None:
            return stale
        ids = sorted(job_id for jobs, _ in stale for job_id in jobs.ids)[: self.room()]
        kept = set(ids)
        left = ((jobs.only(kept), reason) for jobs, reason in stale)
        return [(jobs, reason) for jobs, reason in left if jobs.ids]

    def _settle(self, items: Sequence[tuple[db.Alike[Job], Outcome]]) -> None:
        done: list[Sequence[int]] = []
        try:
            for job, state, ids in fence.rescue(items, self.clock(), self.actor, self.using):
                self._count(job, state, len(ids))
                done.append(ids)
        except Exception as error:
            if not db.can_go_on(self.using):
                raise
            self._settle_apart(items, set(chain.from_iterable(done)), error)
        else:
            self.report.conflicts += _size([jobs for jobs, _ in items]) - sum(map(len, done))

    def _settle_apart(
        self, items: Sequence[tuple[db.Alike[Job], Outcome]], done: set[int], error: Exception
    ) -> None:
        """Settle by itself each job that isn't done; the error of one that was is its own."""
        ids = [job_id for jobs, _ in items for job_id in jobs.ids]
        if len(ids) == 1:
            self._record(ids[0], error)
            return
        for jobs, outcome in items:
            for job_id in jobs.ids:
                if job_id not in done:
                    self._settle([(jobs.only({job_id}), outcome)])

    def _record(self, job_id: int, error: Exception) -> None:
        self.error = error
        self.report.errors += 1
        signals.send_after_commit(signals.sweep_failed, Job, self.using, job_id=job_id, error=error)

    def _count(self, job: Job, state: str, number: int) -> None:
        name = state if state in FINAL else _GIVEN_BACK[State(job.state)]
        setattr(self.report, name, getattr(self.report, name) + number)

    def raise_if_nothing_worked(self) -> None:
        """Raise the last error when no job got past one: then it isn't the job's, it is ours."""
        if self.error and not self.report.taken and not self.report.conflicts:
            raise self.error


def _outcome(job: Job, reason: str) -> Outcome:
    if job.state == State.CLAIMED:
        return Released(reason)
    return Retry(Error(reason))


def _foreseen(job: Job) -> State:
    if job.state == State.CLAIMED:
        return State.WAITING
    if job.cancel_requested_at:
        return State.CANCELLED
    return State.FAILED if job.is_budget_spent else State.SCHEDULED


def prune_jobs(
    older_than: timedelta | float,
    batch_size: int = BATCH_SIZE,
    using: str | None = None,
    on_deleted: Tick | None = None,
) -> PruneReport:
    """Delete jobs that have been final for ``older_than``, with their events, batch by batch.

    Also deletes the rows of workers that left or were declared dead, and were silent for as long.

    Args:
        older_than: seconds or ``timedelta``.
        batch_size: jobs per transaction.
        using: database alias; default ``router.db_for_write(Job)``.
        on_deleted: called with the number of jobs deleted, after each batch.

    Raises:
        InvalidJob: an argument is out of its range.
    """
    using = using or router.db_for_write(Job)
    try:
        age = conf.check_seconds(older_than, "older_than", zero=True)
    except ValueError as error:
        raise InvalidJob(str(error)) from None
    _check(batch_size=batch_size)
    before = db.now(using) - age
    report = PruneReport()
    last = 0
    while True:
        old = Job.objects.using(using).finished_before(before).filter(pk__gt=last).order_by("pk")
        ids = list(old.values_list("pk", flat=True)[:batch_size])
        if not ids:
            break
        deleted = transitions.delete_finished(ids, before, using=using)
        report.jobs += deleted
        if on_deleted:
            on_deleted(deleted)
        last = ids[-1]
    gone = Worker.objects.using(using).exclude(state=Worker.State.ALIVE)
    report.workers, _ = gone.filter(last_seen_at__lt=before).delete()
    return report
