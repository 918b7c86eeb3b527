"""Signals, and the receivers that turn them into log lines.

Domain code does not log. Every signal is sent after the transaction that it tells of has been
committed, and a receiver's error never reaches the sender.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import transaction
from django.dispatch import Signal, receiver

if TYPE_CHECKING:
    from jobqueue.exceptions import TransitionConflict

logger = logging.getLogger("jobqueue")

# sender=Job; job: as written; verb: what was asked for; from_state; actor.
job_transitioned = Signal(use_caching=True)  # asked for at every write
# sender=Job; job: as it was decided on; error: a TransitionConflict; actor.
write_refused = Signal()
# sender=Worker; worker_id.
worker_declared_dead = Signal()
# sender=Job; job_id; error: what a sweep met at this job.
sweep_failed = Signal()
# sender=type; worker_id; snapshot: a ``db.Snapshot``, old enough to slow claims down.
snapshot_kept = Signal()
# sender=type; worker_id; doing: what the worker was at; error.
worker_in_trouble = Signal()


def tell_trouble(at_work: object, worker_id: str, doing: str, error: Exception) -> None:
    """Send ``worker_in_trouble`` now: no transaction of the worker's is under way."""
    worker_in_trouble.send_robust(type(at_work), worker_id=worker_id, doing=doing, error=error)


def called(worker_id: str) -> str:
    """Return what a worker is called in a sentence; before it has a lease, its id is empty."""
    return f"Worker {worker_id}" if worker_id else "A worker"


def send_after_commit(signal: Signal, sender: type, using: str, **payload: Any) -> None:
    """Send ``signal`` once the current transaction is committed, if anyone listens."""
    if signal.has_listeners(sender):
        transaction.on_commit(
            partial(signal.send_robust, sender, **payload), using=using, robust=True
        )


@receiver(write_refused)
def _log_refused(*, error: TransitionConflict, actor: str, **kwargs: Any) -> None:
    logger.warning("Refused a write of %s: %s", actor, error)


@receiver(worker_declared_dead)
def _log_dead(*, worker_id: str, **kwargs: Any) -> None:
    logger.warning("Worker %s was silent for longer than its lease: declared dead", worker_id)


@receiver(sweep_failed)
def _log_sweep_failed(*, job_id: int, error: Exception, **kwargs: Any) -> None:
    logger.error("A sweep could not settle job %s", job_id, exc_info=error)


@receiver(snapshot_kept)
def _log_snapshot(*, worker_id: str, snapshot: object, **kwargs: Any) -> None:
    logger.warning("Claims of worker %s grow slower: %s", worker_id, snapshot)


@receiver(worker_in_trouble)
def _log_trouble(*, worker_id: str, doing: str, error: Exception, **kwargs: Any) -> None:
    logger.error("%s could not %s: %s", called(worker_id), doing, error, exc_info=error)
