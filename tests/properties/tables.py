"""The tables under test: emptied, read, compared with the mirror, and worked off in the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from django.db import connections, transaction

from jobqueue import broker, transitions
from jobqueue.lifecycle import FINAL, Completed
from jobqueue.models import EventKind, Job, JobEvent, Queue, Worker
from jobqueue.sweep import sweep_stale_jobs
from tests.explorer.values import Event, Lease, tick
from tests.properties.clock import Clock
from tests.properties.mirror import OTHERS, SWEEP, Mirror, row_of, whole
from tests.properties.strategies import QUEUES

DAY = 24 * 3600
# One to find what is left in the air, one to run what that put off.
ROUNDS = 2


def clear(alias: str) -> None:
    """Empty all tables, much faster than a flush."""
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        for model in (JobEvent, Job, Worker, Queue):
            cursor.execute(f"DELETE FROM {model._meta.db_table}")


def compare(mirror: Mirror) -> list[Job]:
    """Assert that every row is what the mirror says; return the jobs."""
    jobs = list(Job.objects.order_by("pk"))
    entries = mirror.jobs
    agree(
        "row",
        {job.pk: row_of(job) for job in jobs},
        {pk: entry.row for pk, entry in entries.items()},
    )
    agree(
        "other columns",
        {job.pk: tuple(getattr(job, name) for name in OTHERS) for job in jobs},
        {pk: entry.others for pk, entry in entries.items()},
    )
    agree(
        "history, and number of refused writes,",
        _histories(),
        {
            pk: ([*entry.events], entry.refused)
            for pk, entry in entries.items()
            if entry.events or entry.refused
        },
    )
    agree(
        "lease",
        {worker.pk: _lease_of(worker) for worker in Worker.objects.all()},
        mirror.workers,
    )
    return jobs


def agree(what: str, database: Mapping[Any, Any], mirror: Mapping[Any, Any]) -> None:
    """Assert that both say the same, and show where they don't."""
    for key in sorted({*database, *mirror}):
        found, wanted = database.get(key), mirror.get(key)
        assert found == wanted, f"{what} of {key}: in the database {found}; in the mirror {wanted}"


def _histories() -> dict[int, tuple[list[Event], int]]:
    """By job, the events of its writes, and the number of those of refused ones."""
    events: dict[int, list[Event]] = defaultdict(list)
    refused: dict[int, int] = defaultdict(int)
    for event in JobEvent.objects.order_by("pk"):
        if event.kind == EventKind.CONFLICT:
            refused[event.job_id] += 1
        else:
            events[event.job_id].append(_event_of(event))
    return {pk: (events[pk], refused[pk]) for pk in {*events, *refused}}


def _event_of(event: JobEvent) -> Event:
    return Event(
        kind=event.kind,
        version=event.version,
        # Each sweep has its process in its name.
        actor=SWEEP if event.actor.startswith(f"{SWEEP} ") else event.actor,
        detail_settled_version=event.detail.get("settled_version"),
        from_state=event.from_state,
        to_state=event.to_state,
    )


def _lease_of(worker: Worker) -> Lease:
    return Lease(worker.state, tick(worker.last_seen_at), whole(worker.lease) or 0)


def work_off(clock: Clock, ending: str) -> None:
    """Bring every job to its end, by a clock that is sane again: no operator, no old worker.

    What workers left in the air is found by sweeps, or, if they live, by their own heartbeats.
    """
    clock.seconds = clock.latest + DAY
    Queue.objects.update(paused_at=None)
    if ending == "by heartbeat":
        for worker in Worker.objects.filter(state="alive"):
            broker.heartbeat(worker.pk, {})
    unfinished = Job.objects.exclude(state__in=FINAL)
    for _ in range(ROUNDS):
        if not unfinished.exists():
            return
        sweep_stale_jobs()
        worker = broker.register(QUEUES)
        jobs = broker.claim(worker.pk, 1000)
        transitions.settle_many([(job, Completed()) for job in jobs])
        broker.leave(worker.pk)
        clock.step(DAY)
    stuck = [f"{job.fingerprint}, due at {tick(job.run_after)}" for job in unfinished]
    assert not stuck, f"stuck at {clock.seconds}: {stuck}"
