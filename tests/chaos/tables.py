"""What the database holds: asked while a run goes on, and read when it has ended."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress

from django.core.management import call_command
from django.db import DatabaseError, connection
from django.db.models import Q

from jobqueue import db
from jobqueue.lifecycle import FINAL
from jobqueue.models import EventKind, Job, JobEvent
from tests.chaos.checker import Row, Tables
from tests.chaos.history import History, Known, Status
from tests.chaos.models import Effect

# More than there can be: the database could not be asked.
UNKNOWN = 10**9


def create() -> None:
    """Create the tables."""
    call_command("migrate", run_syncdb=True, interactive=False, verbosity=0)


def count_final() -> int:
    """Return how many jobs are final, none if that can't be asked."""
    with suppress(DatabaseError):
        db.revive(connection.alias)
        return Job.objects.filter(state__in=FINAL).count()
    return 0


def count_unfinished() -> int:
    """Return how many jobs are not final."""
    with suppress(DatabaseError):
        db.revive(connection.alias)
        return Job.objects.exclude(state__in=FINAL).count()
    return UNKNOWN


def read() -> Tables:
    """Return what there is in the end."""
    db.revive(connection.alias)
    columns = ("pk", "version", "state", "attempt", "claimed_by", "args", "task", "result")
    jobs = {
        pk: Row(version, Known(state, attempt, holder), args[0], task.rpartition(".")[2], result)
        for pk, version, state, attempt, holder, args, task, result in (
            Job.objects.values_list(*columns)
        )
    }
    effects: dict[int, list[int]] = defaultdict(list)
    for job_id, version in Effect.objects.values_list("job_id", "version"):
        effects[job_id].append(version)
    return Tables(jobs, dict(effects))


def count_jobs(history: History) -> int:
    """Return how many jobs were committed, deleted ones included."""
    births = (life.birth for life in history.lives.values())
    return sum(birth is not None and birth.status is Status.OK for birth in births)


def count_rescued() -> int:
    """Return how many times a sweep took a job from an executor that was gone."""
    taken = JobEvent.objects.exclude(kind=EventKind.CONFLICT).filter(actor__startswith="sweep ")
    return taken.filter(
        Q(kind=EventKind.RESCUED) | Q(from_state__in=("claimed", "running"))
    ).count()


def count_refused() -> int:
    """Return how many refused writes have left their event."""
    return JobEvent.objects.filter(kind=EventKind.CONFLICT).count()
