"""Named WHEREs: the questions that the verbs ask of the tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Self

from django.db import models
from django.db.models import Subquery

from jobqueue import db, guards
from jobqueue.lifecycle import FINAL, HELD, ExecutionFingerprint, State

if TYPE_CHECKING:
    from jobqueue.models import Job, Worker  # noqa: F401  (named in the bases, as text)

# What a person or a handler brings can be large; the fence needs none of it.
PAYLOAD_COLUMNS = ("args", "kwargs", "result", "checkpoint", "metadata", "progress_note")

# What a claim reads of a job, for its executor; the rest is read when it is asked for.
CLAIMED_COLUMNS: Final = (
    *("id", "queue", "task", "args", "kwargs", "priority", "attempt", "max_attempts", "excused"),
    *("backoff", "timeout", "version", "checkpoint", "workspace"),
)

# What a sweep reads of one: what it judges by, what a plan needs, and what listeners ask about.
SWEPT_COLUMNS: Final = (
    *("state", "attempt", "claimed_by", "claimed_at", "attempted_at", "version"),
    *("excused", "max_attempts", "backoff", "timeout", "cancel_requested_at", "queue", "task"),
)


class JobQuerySet(models.QuerySet["Job"]):
    """Questions about jobs, each served by the index of the same name."""

    def matching(self, job_id: int, fingerprint: ExecutionFingerprint) -> Self:
        """The one row, if it still is what ``fingerprint`` says; see ``groups.expecting``."""
        return self.alike(guards.unchanged(fingerprint)).filter(pk=job_id)

    def chosen(self, job_ids: Iterable[int], *states: str) -> Self:
        """Those of the rows that are still in one of ``states``: for writes to a batch."""
        return self.alike(guards.in_states(*states)).filter(pk__in=sorted(job_ids))

    def alike(self, where: guards.Where) -> Self:
        """Rows like this; to be chosen by their ids, so that no index on ``state`` is used."""
        rest = dict(where)
        states = rest.pop("state__in", None) or ([rest.pop("state")] if "state" in rest else [])
        rows = self.filter(db.state_is(*states)) if states else self
        return rows.filter(**rest)

    def claimable(self, queue: str, now: datetime) -> Self:
        """Jobs of one queue that a worker may take, in the order in which it takes them."""
        return self.filter(state=State.WAITING, queue=queue, **guards.due(now)).order_by(
            "-priority", "run_after", "pk"
        )

    def after(self, priority: Any, job_id: Any) -> Self:
        """Those of the same priority that come after this job in the order of ``claimable``."""
        run_after = self.model._base_manager.filter(pk=job_id).values("run_after")
        return self.filter(
            db.comes_after(("run_after", "id"), (Subquery(run_after), job_id)), priority=priority
        )

    def due(self, now: datetime) -> Self:
        """Scheduled jobs whose time has come, oldest first."""
        return self.filter(state=State.SCHEDULED, **guards.due(now)).order_by("run_after", "pk")

    def scheduled(self) -> Self:
        """Scheduled jobs, soonest first."""
        return self.filter(state=State.SCHEDULED).order_by("run_after")

    def due_later(self, now: datetime | db.Blank) -> Self:
        """Those of them whose time is yet to come."""
        return self.scheduled().filter(run_after__gt=now)

    def held(self) -> Self:
        """Jobs that some worker has, by id, without their payloads."""
        return self.filter(state__in=HELD).order_by("pk").defer(*PAYLOAD_COLUMNS)

    def held_by(self, worker_id: str) -> Self:
        """Jobs that this worker has, as the database sees it."""
        return self.held().filter(claimed_by=worker_id)

    def finished_before(self, moment: datetime) -> Self:
        """Jobs in a final state since before ``moment``."""
        return self.filter(state__in=FINAL, **guards.finished_before(moment))

    def in_queues(self, queues: Collection[str] | None) -> Self:
        """Only jobs of these queues; ``None`` means all."""
        return self if queues is None else self.filter(queue__in=queues)


class WorkerQuerySet(models.QuerySet["Worker"]):
    """Questions about workers."""

    def alive(self) -> Self:
        """Workers that nobody has declared dead and that have not left."""
        return self.filter(**guards.alive())

    def alive_ids(self, ids: Iterable[str | None]) -> set[str]:
        """Which of these ids have a live row."""
        wanted = sorted({worker_id for worker_id in ids if worker_id})
        return set(self.alive().filter(pk__in=wanted).values_list("pk", flat=True))
