"""Job, JobEvent, Worker and Queue: columns, constraints, indexes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from jobqueue.conf import MAX_PRIORITY
from jobqueue.db import ArrivalIndex, DatabaseNow, ExactCharField, StateIndex, UniqueWhenSet
from jobqueue.exceptions import UnfencedWrite
from jobqueue.lifecycle import FINAL, HELD, QUEUED, ExecutionFingerprint, State
from jobqueue.querysets import JobQuerySet, WorkerQuerySet

WORKER_ID_LENGTH = 200
MESSAGE_LENGTH = 1000


def _values(states: Iterable[State]) -> list[str]:
    return sorted(state.value for state in states)


def empty_list() -> list[Any]:
    """Return a new list, the default of ``Job.args``."""
    return []


class Job(models.Model):
    """One unit of work and what has become of it.

    A row is born by ``jobqueue.enqueue``; every later write is a verb of ``jobqueue.transitions``.
    """

    id = models.BigAutoField(primary_key=True)
    queue = ExactCharField(max_length=100, default="default")
    task = ExactCharField(max_length=255, help_text=_("Dotted path of the handler."))
    args = models.JSONField(default=empty_list)
    kwargs = models.JSONField(default=dict)
    priority = models.SmallIntegerField(
        default=0,
        validators=[MinValueValidator(-MAX_PRIORITY), MaxValueValidator(MAX_PRIORITY)],
        help_text=_("-100 to 100; higher runs first."),
    )
    state = models.CharField(
        max_length=10,
        default=State.WAITING.value,
        choices=[(state.value, state.name.title()) for state in State],
    )
    run_after = models.DateTimeField(db_default=DatabaseNow())
    attempt = models.PositiveIntegerField(default=0, help_text=_("Executions started."))
    max_attempts = models.PositiveIntegerField(default=5)
    excused = models.PositiveIntegerField(
        default=0, help_text=_("Executions not held against the budget.")
    )
    backoff = models.JSONField(default=dict)
    timeout = models.DurationField(null=True, blank=True)

    claimed_by = ExactCharField(max_length=WORKER_ID_LENGTH, null=True, blank=True)
    claimed_at = models.DateTimeField(null=True, blank=True)
    attempted_at = models.DateTimeField(null=True, blank=True)
    version = models.PositiveBigIntegerField(default=0)
    settled_version = models.PositiveBigIntegerField(
        null=True,
        blank=True,
        help_text=_("The version from which the execution's owner last settled this job."),
    )

    enqueued_at = models.DateTimeField(db_default=DatabaseNow())
    finished_at = models.DateTimeField(null=True, blank=True)
    result = models.JSONField(null=True, blank=True)
    progress = models.PositiveSmallIntegerField(default=0)
    progress_note = models.TextField(default="", blank=True)
    checkpoint = models.JSONField(null=True, blank=True)
    cancel_requested_at = models.DateTimeField(null=True, blank=True)
    unique_key = ExactCharField(max_length=255, null=True, blank=True)
    workspace = ExactCharField(max_length=100, default="", blank=True)
    metadata = models.JSONField(default=dict, blank=True)

    objects = JobQuerySet.as_manager()

    class Meta:
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        constraints = [
            UniqueWhenSet(fields=["unique_key"], name="jobqueue_job_unique_key"),
            models.CheckConstraint(
                name="jobqueue_job_state_known", condition=Q(state__in=_values(State))
            ),
            models.CheckConstraint(
                name="jobqueue_job_finished_at",
                condition=Q(state__in=_values(FINAL), finished_at__isnull=False)
                | Q(state__in=_values(QUEUED | HELD), finished_at__isnull=True),
            ),
            models.CheckConstraint(
                name="jobqueue_job_claim",
                condition=Q(state__in=_values(FINAL))
                | Q(
                    state__in=_values(QUEUED),
                    claimed_by__isnull=True,
                    claimed_at__isnull=True,
                )
                | Q(
                    state=State.CLAIMED.value,
                    claimed_by__isnull=False,
                    claimed_at__isnull=False,
                )
                | Q(
                    state=State.RUNNING.value,
                    claimed_by__isnull=False,
                    claimed_at__isnull=False,
                    attempted_at__isnull=False,
                ),
            ),
            models.CheckConstraint(
                name="jobqueue_job_priority",
                condition=Q(priority__gte=-MAX_PRIORITY, priority__lte=MAX_PRIORITY),
            ),
            models.CheckConstraint(
                name="jobqueue_job_progress", condition=Q(progress__gte=0, progress__lte=100)
            ),
            models.CheckConstraint(
                name="jobqueue_job_excused", condition=Q(excused__lte=F("attempt"))
            ),
        ]
        indexes = [
            StateIndex(
                fields=["queue", "-priority", "run_after", "id"],
                states=[State.WAITING],
                name="jobqueue_job_claimable",
            ),
            StateIndex(fields=["run_after"], states=[State.SCHEDULED], name="jobqueue_job_due"),
            # On the id alone: an index that leads with claimed_by or claimed_at would be chosen
            # for fenced writes by a planner that believes nobody is running, and walk the dead.
            StateIndex(fields=["id"], states=_values(HELD), name="jobqueue_job_held"),
            StateIndex(
                fields=["state", "finished_at"], states=_values(FINAL), name="jobqueue_job_finished"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.task} #{self.pk}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Insert a new row.

        Raises:
            UnfencedWrite: the row exists; saving it would write over whatever it has become.
        """
        if not self._state.adding:
            raise UnfencedWrite(
                f"Job {self.pk} can't be saved: use a verb of jobqueue.transitions "
                "(for the job's executor) or jobqueue.coordinator (for anybody else)."
            )
        super().save(*args, **{**kwargs, "force_insert": True})

    def delete(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises:
            UnfencedWrite: always.
        """
        raise UnfencedWrite(
            f"Job {self.pk} can't be deleted like that: use jobqueue.coordinator.delete "
            "or jobqueue.sweep.prune_jobs."
        )

    @property
    def fingerprint(self) -> ExecutionFingerprint:
        """What a decision on this copy of the row rests on."""
        return ExecutionFingerprint(
            state=self.state,
            attempt=self.attempt,
            claimed_by=self.claimed_by,
            claimed_at=self.claimed_at,
            attempted_at=self.attempted_at,
            version=self.version,
        )

    @property
    def failures(self) -> int:
        """Executions held against the budget."""
        return self.attempt - self.excused

    @property
    def is_budget_spent(self) -> bool:
        """Whether the execution in hand was the last that this job may use."""
        return self.failures >= self.max_attempts


class EventKind(models.TextChoices):
    """The kinds of exceptional history."""

    COMPLETED = "completed", _("completed by a coordinator")
    FAILED = "failed", _("failed")
    RETRIED = "retried", _("retried")
    RESCUED = "rescued", _("rescued")
    RELEASED = "released", _("released")
    SNOOZED = "snoozed", _("snoozed")
    CANCEL_REQUESTED = "cancel requested", _("cancel requested")
    CANCELLED = "cancelled", _("cancelled")
    RERUN = "rerun", _("rerun")
    EDITED = "edited", _("edited")
    CONFLICT = "conflict", _("rejected write")


class JobEvent(models.Model):
    """Something out of the ordinary that happened to a job: never a step of the hot path."""

    id = models.BigAutoField(primary_key=True)
    # Every writer of an event holds the lock of its job's row, and whoever deletes the row deletes
    # its events first: a constraint would find nothing, and cost as much as the event itself.
    job = models.ForeignKey(
        Job, on_delete=models.CASCADE, related_name="events", db_constraint=False
    )
    at = models.DateTimeField(db_default=DatabaseNow())
    kind = models.CharField(max_length=20, choices=EventKind.choices)
    attempt = models.PositiveIntegerField()
    from_state = models.CharField(max_length=10)
    to_state = models.CharField(max_length=10)
    actor = ExactCharField(max_length=WORKER_ID_LENGTH, default="", blank=True)
    message = models.CharField(max_length=MESSAGE_LENGTH, default="", blank=True)
    version = models.PositiveBigIntegerField(
        help_text=_("The job's version from which this was decided.")
    )
    detail = models.JSONField(default=dict, blank=True)

    class Meta:
        verbose_name = _("job event")
        verbose_name_plural = _("job events")
        ordering = ("pk",)
        indexes = [ArrivalIndex(fields=["at"], name="jobqueue_event_at")]

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


class Worker(models.Model):
    """One worker process; its row is its lease on everything that it claims."""

    class State(models.TextChoices):
        """Whether the lease holds."""

        ALIVE = "alive", _("alive")
        STOPPED = "stopped", _("stopped")
        DEAD = "dead", _("dead")

    id = ExactCharField(
        primary_key=True,
        max_length=WORKER_ID_LENGTH,
        help_text=_("host:pid:random, new at each start of a process."),
    )
    host = models.CharField(max_length=100)
    pid = models.PositiveIntegerField()
    queues = models.JSONField(default=empty_list)
    concurrency = models.PositiveIntegerField(default=1)
    started_at = models.DateTimeField(db_default=DatabaseNow())
    last_seen_at = models.DateTimeField(db_default=DatabaseNow())
    lease = models.DurationField()
    state = models.CharField(max_length=7, choices=State.choices, default=State.ALIVE)
    app_version = models.CharField(max_length=50, default="", blank=True)

    objects = WorkerQuerySet.as_manager()

    class Meta:
        verbose_name = _("worker")
        verbose_name_plural = _("workers")

    def __str__(self) -> str:
        return str(self.id)


class Queue(models.Model):
    """A queue that somebody configured; queues without a row have no limits and aren't paused."""

    name = ExactCharField(primary_key=True, max_length=100)
    paused_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        verbose_name = _("queue")
        verbose_name_plural = _("queues")

    def __str__(self) -> str:
        return str(self.name)
