"""The exceptional history: which events a settled or refused write leaves."""

from __future__ import annotations

from typing import Final

from jobqueue import db, signals
from jobqueue.exceptions import TransitionConflict
from jobqueue.models import MESSAGE_LENGTH, WORKER_ID_LENGTH, EventKind, Job, JobEvent
from jobqueue.payload import clean_text
from jobqueue.settlement import Write

MAX_DETAIL: Final = 20_000


def event(job: Job, write: Write, actor: str | None) -> JobEvent:
    """Return the event, not yet stored, of a write that was applied to ``job``."""
    assert write.kind is not None
    return JobEvent(
        job_id=job.pk,
        kind=write.kind,
        attempt=job.attempt,
        from_state=job.state,
        to_state=write.changes["state"],
        actor=clean_text(actor or job.claimed_by or "", WORKER_ID_LENGTH),
        message=clean_text(write.message, MESSAGE_LENGTH),
        version=job.version,
        detail={name: clean_text(text, MAX_DETAIL) for name, text in write.detail.items()},
    )


def refuse(
    job: Job, verb: str, found: Job | None, actor: str | None, using: str
) -> TransitionConflict:
    """Return the conflict between ``job`` as decided on and as ``found``.

    An executor's leaves one event, the only trace of its late write. Others are told, and act.
    """
    now = found.fingerprint if found else None
    conflict = TransitionConflict(job.pk, verb, job.fingerprint, now)

    def leave_event() -> None:
        # Locked, since the event of a job that is being deleted would fail at COMMIT.
        row = db.lock_rows(Job.objects.using(using).filter(pk=job.pk))
        if row.values_list("pk", flat=True).first():
            JobEvent.objects.using(using).bulk_create([_conflict_event(job, conflict)])

    if found and actor is None:
        db.in_transaction(using, leave_event)
    signals.send_after_commit(
        signals.write_refused, Job, using, error=conflict, actor=actor or job.claimed_by or ""
    )
    return conflict


def _conflict_event(job: Job, conflict: TransitionConflict) -> JobEvent:
    assert conflict.found is not None
    return JobEvent(
        job_id=job.pk,
        kind=EventKind.CONFLICT,
        attempt=job.attempt,
        from_state=job.state,
        to_state=conflict.found.state,
        actor=job.claimed_by or "",
        message=clean_text(str(conflict), MESSAGE_LENGTH),
        version=job.version,
        detail={
            "wanted": str(conflict.verb),
            "expected": job.fingerprint.as_dict(),
            "found": conflict.found.as_dict(),
        },
    )
