"""Why a job is not running: each answer with its evidence. Reads only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import router
from django.utils.module_loading import import_string

from jobqueue import db
from jobqueue.exceptions import JobNotFound
from jobqueue.lifecycle import FINAL, HELD, QUEUED, State
from jobqueue.models import EventKind, Job, JobEvent, Queue, Worker
from jobqueue.sweep import StaleRules, stale_rules

# Counting those ahead of a job stops here.
MANY: Final = 1000


@dataclass(frozen=True, slots=True)
class Answer:
    """One thing that is to be known about a job, and what it was concluded from.

    ``code`` is a fixed word for programs, ``text`` a sentence for people.
    """

    code: str
    text: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A job's state and every answer that applies, the most telling first."""

    job_id: int
    task: str
    queue: str
    state: str
    answers: list[Answer]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, fit for JSON."""
        return asdict(self)


def explain(job_id: int, using: str | None = None) -> Explanation:
    """Say why a job is not running, or what became of it.

    Args:
        job_id: which job.
        using: database alias; default ``router.db_for_write(Job)``.

    Raises:
        JobNotFound: no such job.
    """
    using = using or router.db_for_write(Job)
    job = Job.objects.using(using).filter(pk=job_id).first()
    if job is None:
        raise JobNotFound(job_id)
    case = _Case(job, using, db.now(using), stale_rules(using))
    answers = [answer for look in _LOOKS for answer in look(case)]
    return Explanation(job.pk, job.task, job.queue, job.state, answers)


@dataclass(frozen=True, slots=True)
class _Case:
    job: Job
    using: str
    now: datetime
    rules: StaleRules

    @property
    def is_queued(self) -> bool:
        return self.job.state in QUEUED


def _finished(case: _Case) -> Iterator[Answer]:
    job = case.job
    if job.state in FINAL:
        at = _time(job.finished_at)
        yield Answer("finished", f"It is {job.state} since {at}.", {"finished_at": at})


def _last_error(case: _Case) -> Iterator[Answer]:
    """The last setback; a job that was completed after it has left it behind."""
    setbacks = (EventKind.FAILED, EventKind.RETRIED, EventKind.RESCUED)
    events = JobEvent.objects.using(case.using).filter(job_id=case.job.pk, kind__in=setbacks)
    last = events.order_by("-pk").first()
    if last and case.job.state != State.COMPLETED:
        at = _time(last.at)
        # One that was claimed and never started has used up no attempt.
        ended = "A claim" if last.from_state == State.CLAIMED else f"Attempt {last.attempt}"
        yield Answer(
            "last-error",
            f"{ended} ended on {at}: {last.message}",
            {"event": last.pk, "kind": last.kind, "at": at, "message": last.message},
        )


def _held(case: _Case) -> Iterator[Answer]:
    job = case.job
    if job.state not in HELD:
        return
    worker = Worker.objects.using(case.using).filter(pk=job.claimed_by).first()
    since = _time(job.claimed_at if job.state == State.CLAIMED else job.attempted_at)
    evidence = {
        "claimed_by": job.claimed_by,
        "since": since,
        "worker_state": worker.state if worker else None,
        "last_seen_at": _time(worker.last_seen_at) if worker else None,
    }
    yield Answer("held", f"It is {job.state} by {job.claimed_by} since {since}.", evidence)
    alive = {job.claimed_by or ""} if case.rules.lives(worker) else set()
    if verdict := case.rules.verdict(job, alive):
        yield Answer("stale", f"The next sweep takes it: {verdict}.", {"reason": verdict})


def _cancel_requested(case: _Case) -> Iterator[Answer]:
    at = _time(case.job.cancel_requested_at)
    if at and case.job.state not in FINAL:
        yield Answer(
            "cancel-requested",
            f"Cancellation was asked for on {at}; it ends when its handler does.",
            {"cancel_requested_at": at},
        )


def _not_due(case: _Case) -> Iterator[Answer]:
    job = case.job
    if not case.is_queued:
        return
    if job.run_after > case.now:
        at, wait = _time(job.run_after), job.run_after - case.now
        wait = timedelta(seconds=math.ceil(wait.total_seconds()))
        yield Answer("not-due", f"It is not due before {at}, in {wait}.", {"run_after": at})
    elif job.state == State.SCHEDULED:
        yield Answer(
            "not-promoted",
            "It is due, and will be waiting as soon as a worker of its queue or a sweep looks.",
            {"run_after": _time(job.run_after)},
        )


def _paused(case: _Case) -> Iterator[Answer]:
    queue = Queue.objects.using(case.using).filter(pk=case.job.queue).first()
    if case.is_queued and queue and queue.paused_at:
        at = _time(queue.paused_at)
        yield Answer(
            "queue-paused", f"Its queue, {queue.name}, is paused since {at}.", {"paused_at": at}
        )


def _no_worker(case: _Case) -> Iterator[Answer]:
    if not case.is_queued:
        return
    workers = Worker.objects.using(case.using).alive()
    live = {worker.pk: worker.queues for worker in workers if case.rules.lives(worker)}
    silent = [worker.pk for worker in workers if worker.pk not in live]
    serving = [worker_id for worker_id, queues in live.items() if case.job.queue in queues]
    if serving:
        yield Answer(
            "workers", f"{len(serving)} live worker(s) serve its queue.", {"workers": serving}
        )
    else:
        yield Answer(
            "no-worker",
            f"No live worker serves the queue {case.job.queue}.",
            {"live_workers": live, "silent_workers": silent},
        )


def _behind_others(case: _Case) -> Iterator[Answer]:
    job = case.job
    if job.state != State.WAITING or job.run_after > case.now:
        return
    queue = Job.objects.using(case.using).claimable(job.queue, case.now)
    first = list(queue.values_list("pk", flat=True)[:MANY])
    ahead = first.index(job.pk) if job.pk in first else len(first)
    if ahead:
        number = f"{ahead} or more" if ahead == MANY else f"{ahead}"
        yield Answer("behind", f"{number} job(s) of its queue come before it.", {"ahead": ahead})


def _budget(case: _Case) -> Iterator[Answer]:
    """The last attempt, to come or in hand. Budgets only count once an attempt has ended."""
    job = case.job
    is_running = job.state == State.RUNNING
    last = job.max_attempts if is_running else job.max_attempts - 1
    if job.state in FINAL or job.failures < last:
        return
    text = f"{job.failures} of {job.max_attempts} attempts are used up; "
    yield Answer(
        "budget",
        text + ("this is the last." if is_running else "the next is the last."),
        {"attempt": job.attempt, "excused": job.excused, "max_attempts": job.max_attempts},
    )


def _not_importable(case: _Case) -> Iterator[Answer]:
    if case.job.state in FINAL:
        return
    try:
        import_string(case.job.task)
    except Exception as error:
        yield Answer(
            "not-importable",
            f"Its handler can't be imported here: {type(error).__name__}: {error}",
            {"task": case.job.task},
        )


_LOOKS: Final[tuple[Callable[[_Case], Iterator[Answer]], ...]] = (
    _finished,
    _held,
    _cancel_requested,
    _paused,
    _not_due,
    _no_worker,
    _behind_others,
    _not_importable,
    _budget,
    _last_error,
)


def _time(moment: datetime | None) -> str | None:
    return moment.isoformat(sep=" ", timespec="seconds") if moment else None
