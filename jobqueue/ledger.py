"""The exceptional history: which events a settled or refused write leaves."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Final

from django.db import DatabaseError
from django.dispatch import receiver

from jobqueue import db, signals
from jobqueue.exceptions import TransitionConflict
from jobqueue.models import MESSAGE_LENGTH, WORKER_ID_LENGTH, EventKind, Job, JobEvent
from jobqueue.payload import clean_text
from jobqueue.settlement import Write

MAX_DETAIL: Final = 20_000


_refused: Final[Counter[tuple[str, str]]] = Counter()
_refused_lock: Final = threading.Lock()


def refused_writes() -> Counter[tuple[str, str]]:
    """Return how many writes this process saw refused, by task and verb wanted."""
    with _refused_lock:
        return _refused.copy()


def event(job: Job, write: Write, actor: str | None) -> JobEvent:
    """Return the event, not yet stored, of a write that was applied to ``job``."""
    return JobEvent(job_id=job.pk, **told(job, write, actor))


def told(job: Job, write: Write, actor: str | None) -> dict[str, Any]:
    """Return the columns of the event of a write to ``job``, but for its id."""
    assert write.kind is not None
    return {
        "kind": write.kind,
        "attempt": job.attempt,
        "from_state": job.state,
        "to_state": write.changes.get("state", job.state),
        "actor": clean_text(actor or job.claimed_by or "", WORKER_ID_LENGTH),
        "message": clean_text(write.message, MESSAGE_LENGTH),
        "version": job.version,
        "detail": {
            name: clean_text(value, MAX_DETAIL) if isinstance(value, str) else value
            for name, value in write.detail.items()
        },
    }


def conflict_of(job: Job, verb: str, found: Job | None) -> TransitionConflict:
    """Return the conflict between ``job`` as decided on and as ``found``, ``None`` if gone."""
    now = found.fingerprint if found else None
    return TransitionConflict(job.pk, verb, job.fingerprint, now)


def record(job: Job, conflict: TransitionConflict, actor: str | None, using: str) -> None:
    """Leave one event of a refused write, count it, and tell whoever listens."""

    def leave_event() -> None:
        # Locked, since the event of a job that is being deleted would be left behind.
        row = db.lock_rows(Job.objects.using(using).filter(pk=job.pk), nowait=True)
        if row.values_list("pk", flat=True).first():
            JobEvent.objects.using(using).bulk_create([_conflict_event(job, conflict, actor)])

    if conflict.found:
        try:
            db.in_transaction(using, leave_event)
        except DatabaseError as error:
            # Whoever keeps the row locked for so long must not hold up the news of the conflict.
            if not db.is_lock_refused(error):
                raise
    signals.send_after_commit(
        signals.write_refused,
        Job,
        using,
        job=job,
        error=conflict,
        actor=actor or job.claimed_by or "",
    )


@receiver(signals.write_refused)
def _count(*, job: Job, error: TransitionConflict, **kwargs: Any) -> None:
    with _refused_lock:
        _refused[job.task, str(error.verb)] += 1


def _conflict_event(job: Job, conflict: TransitionConflict, actor: str | None) -> JobEvent:
    expected, found = conflict.expected, conflict.found
    assert found is not None
    return JobEvent(
        job_id=job.pk,
        kind=EventKind.CONFLICT,
        attempt=job.attempt,
        from_state=job.state,
        to_state=found.state,
        actor=clean_text(actor or job.claimed_by or "", WORKER_ID_LENGTH),
        message=clean_text(str(conflict), MESSAGE_LENGTH),
        version=job.version,
        detail={
            "wanted": str(conflict.verb),
            "expected": {"version": expected} if isinstance(expected, int) else expected.as_dict(),
            "found": found.as_dict(),
        },
    )
