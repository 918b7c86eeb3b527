"""Transitions by someone who holds no claim: an operator, an orchestrator, a control service.

Each locks the row, checks the verb against the table of verbs and against what the caller saw, and
then goes through the same fenced write as everybody, which keeps it right where row locks do not
exist.
"""

from __future__ import annotations

from django.db import router

from jobqueue import db, transitions
from jobqueue.exceptions import JobNotFound, TransitionConflict
from jobqueue.lifecycle import Verb
from jobqueue.models import Job


def release(
    job_id: int,
    *,
    actor: str,
    reason: str = "",
    expected_version: int | None = None,
    using: str | None = None,
) -> Job:
    """Take a job from whoever has it: claimed or running -> waiting.

    An attempt that had begun is excused. The executor, if it still lives, is told with its next
    heartbeat, and whatever it reports is refused.

    Args:
        job_id: which job.
        actor: who does this, for the job's history.
        reason: why, for the same.
        expected_version: the version that the caller saw; ``None`` to act on whatever is found.
        using: database alias; default ``router.db_for_write(Job)``.

    Raises:
        JobNotFound: no such job.
        TransitionConflict: the job is no longer at ``expected_version``.
        TransitionNotAllowed: it is neither claimed nor running.
    """
    using = using or router.db_for_write(Job)

    def work() -> Job:
        job = _lock(job_id, Verb.RELEASE, expected_version, using)
        return transitions.release(job, reason, actor=actor, using=using)

    return db.in_transaction(using, work)


def _lock(job_id: int, verb: Verb, expected_version: int | None, using: str) -> Job:
    job = db.lock_rows(Job.objects.using(using).filter(pk=job_id)).first()
    if job is None:
        raise JobNotFound(job_id)
    if expected_version is not None and job.version != expected_version:
        raise TransitionConflict(job_id, verb, expected_version, job.fingerprint)
    return job
