"""Django admin: see every job and worker, and release a job that hangs."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.db import router
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from jobqueue import conf, coordinator
from jobqueue.exceptions import JobBusy, JobNotFound, TransitionConflict, TransitionNotAllowed
from jobqueue.lifecycle import State
from jobqueue.models import Job, JobEvent, Queue, Worker
from jobqueue.querysets import PAYLOAD_COLUMNS
from jobqueue.sweep import stale_rules


class _ReadOnly:
    """Nothing is added, changed or deleted by a form: a form saves what it read long ago."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class JobEventInline(_ReadOnly, admin.TabularInline):  # type: ignore[type-arg]
    """A job's exceptional history, oldest first."""

    model = JobEvent
    extra = 0
    fields = ("at", "kind", "attempt", "from_state", "to_state", "actor", "message", "detail")
    readonly_fields = fields


class QueueFilter(admin.SimpleListFilter):
    """By queue. Offers those that are configured or served: a DISTINCT would read every job."""

    title = _("queue")
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the names to choose from, the one that is chosen in any case."""
        names = {*conf.get().worker_queues, *Queue.objects.values_list("name", flat=True)}
        for served in Worker.objects.alive().values_list("queues", flat=True):
            names.update(served)
        if chosen := self.value():
            names.add(chosen)
        return [(name, name) for name in sorted(names)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Job]) -> QuerySet[Job]:
        """Keep the jobs of the chosen queue."""
        chosen = self.value()
        return queryset if chosen is None else queryset.filter(queue=chosen)


@admin.register(Job)
class JobAdmin(_ReadOnly, admin.ModelAdmin):  # type: ignore[type-arg]
    """Jobs, and the action *release*."""

    list_display = (
        "id",
        "task",
        "queue",
        "state",
        "priority",
        "attempt",
        "run_after",
        "claimed_by",
        "finished_at",
    )
    list_filter = ("state", QueueFilter)
    search_fields = ("id", "task", "claimed_by", "unique_key")
    search_help_text = _("An id, or the whole of a task's path, a worker's id or a unique key.")
    ordering = ("-id",)
    actions = ("release",)
    inlines = (JobEventInline,)
    show_full_result_count = False
    list_per_page = 50

    def get_queryset(self, request: HttpRequest) -> QuerySet[Job]:
        """Leave payloads, which may be large, to the detail page."""
        jobs = super().get_queryset(request)
        match = request.resolver_match
        is_list = match is not None and match.url_name == "jobqueue_job_changelist"
        return jobs.defer(*PAYLOAD_COLUMNS) if is_list else jobs

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Job], search_term: str
    ) -> tuple[QuerySet[Job], bool]:
        """Look for the whole term, as it is: folding case or casting ids would read every job."""
        term = search_term.strip()
        if not term:
            return queryset, False
        wanted = Q(unique_key=term)
        if term.isdecimal() and len(term) < 20:
            wanted |= Q(pk=int(term))
        else:
            wanted |= Q(task=term) | Q(claimed_by=term)
        return queryset.filter(wanted), False

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Refuse an action that the user may not take, where Django would just show the list."""
        action = request.POST.get("action")
        if action and action not in self.get_actions(request):
            raise PermissionDenied
        return super().changelist_view(request, extra_context)

    def action_checkbox(self, obj: Job) -> SafeString:
        """Carry the version that the page shows, so that an action is fenced on it."""
        return format_html(
            '{}<input type="hidden" name="{}" value="{}">',
            super().action_checkbox(obj),
            _version_field(obj.pk),
            obj.version,
        )

    def has_release_permission(self, request: HttpRequest) -> bool:
        """Ask for the permission to change jobs."""
        return request.user.has_perm("jobqueue.change_job")

    @admin.action(description=_("Release claimed and stale running jobs"), permissions=["release"])
    def release(self, request: HttpRequest, queryset: QuerySet[Job]) -> None:
        """Release the selected jobs that are claimed, or running and stale, one by one."""
        done = Counter(self._release(request, job) for job in queryset.order_by("pk"))
        if request.POST.get("select_across", "0") == "0":
            # Some that were selected may have left what the page's filters show.
            done["moved on"] += len(request.POST.getlist(ACTION_CHECKBOX_NAME)) - done.total()
        for outcome, level in self._levels.items():
            if number := done[outcome]:
                self.message_user(request, _TOLD[outcome](number), level)

    _levels: ClassVar[dict[str, int]] = {
        "released": messages.SUCCESS,
        "moved on": messages.WARNING,
        "not stale": messages.WARNING,
        "busy": messages.ERROR,
    }

    def _release(self, request: HttpRequest, job: Job) -> str:
        using = router.db_for_write(Job, instance=job)
        seen = request.POST.get(_version_field(job.pk), "")
        version = int(seen) if seen.isdecimal() and len(seen) < 20 else job.version
        if job.version == version and job.state == State.RUNNING and not _is_stale(job, using):
            return "not stale"
        try:
            coordinator.release(
                job.pk,
                actor=f"admin {request.user.get_username()}",
                reason="released in the admin",
                expected_version=version,
                using=using,
            )
        except (JobNotFound, TransitionConflict, TransitionNotAllowed):
            return "moved on"
        except JobBusy:
            return "busy"
        return "released"


def _version_field(job_id: int) -> str:
    return f"_version_{job_id}"


def _is_stale(job: Job, using: str) -> bool:
    rules = stale_rules(using)
    holder = Worker.objects.using(using).filter(pk=job.claimed_by).first()
    alive = {job.claimed_by or ""} if rules.lives(holder) else set()
    return rules.verdict(job, alive) is not None


_TOLD = {
    "busy": lambda n: (
        ngettext(
            "%d job is locked by another transaction, and was left alone.",
            "%d jobs are locked by other transactions, and were left alone.",
            n,
        )
        % n
    ),
    "released": lambda n: ngettext("%d job was released.", "%d jobs were released.", n) % n,
    "moved on": lambda n: (
        ngettext(
            "%d job had moved on and was left alone.",
            "%d jobs had moved on and were left alone.",
            n,
        )
        % n
    ),
    "not stale": lambda n: (
        ngettext(
            "%d job is running on a worker that lives, and was left alone.",
            "%d jobs are running on workers that live, and were left alone.",
            n,
        )
        % n
    ),
}


@admin.register(Worker)
class WorkerAdmin(_ReadOnly, admin.ModelAdmin):  # type: ignore[type-arg]
    """Worker processes and their leases."""

    list_display = ("id", "state", "queues", "concurrency", "started_at", "last_seen_at", "lease")
    list_filter = ("state",)
    ordering = ("state", "-last_seen_at")
    show_full_result_count = False
