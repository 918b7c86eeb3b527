"""Transitions by someone who holds no claim: an operator, an orchestrator, a control service.

Each locks the row, checks the verb against the table of verbs and against what the caller saw, and
then goes through the same fenced write as everybody, which keeps it right where row locks do not
exist. Each leaves an event with the actor and the reason, and one if it is in conflict.

``Caller`` has the arguments that all of them take by name. The errors that they have in common:

* ``JobNotFound``: there is no such job, or it is of another workspace.
* ``TransitionNotAllowed``: the table of verbs has no such verb for the state that the job is in.
* ``TransitionConflict``: the job is no longer at ``expected_version``; or, without one, somebody
  outside the rules changed it under our hands in each of 4 tries.
* ``JobBusy``: other transactions had it locked in each of 4 tries.
* ``InvalidJob``: a value can't be stored.

After any of them the job is as it was.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Required, TypedDict, TypeVar, Unpack

from django.db import DatabaseError, connections, router, transaction

from jobqueue import conf, db, ledger, transitions
from jobqueue.arguments import check_edit
from jobqueue.exceptions import (
    InvalidJob,
    JobBusy,
    JobNotFound,
    TransitionConflict,
    TransitionNotAllowed,
)
from jobqueue.lifecycle import (
    FINAL,
    HELD,
    Cancelled,
    Completed,
    Error,
    Failed,
    Outcome,
    Released,
    State,
)
from jobqueue.models import Job

Done = TypeVar("Done")

# The first try and three more, with 100, 200 and 400 ms between them at most.
TRIES: Final = 4
FIRST_WAIT: Final = 0.1
# The largest that the column holds.
MAX_VERSION: Final = 2**63 - 1


class Caller(TypedDict, total=False):
    """Who acts, and on what ground.

    Attributes:
        actor: who does this, for the job's history.
        reason: why, for the same.
        expected_version: the version that the caller decided on; ``None`` to act on what is found.
        workspace: a job of another workspace is not found; ``None`` for any.
        lock: with ``False`` the row isn't locked and nothing is tried twice: ``expected_version``,
            then required, decides alone, and the caller decides what to do about a conflict.
        using: database alias; default ``router.db_for_write(Job)``.
    """

    actor: Required[str]
    reason: str
    expected_version: int | None
    workspace: str | None
    lock: bool
    using: str | None


def complete(job_id: int, result: Any = None, **caller: Unpack[Caller]) -> Job:
    """Give a running job its result: running -> completed. Its executor is fenced out."""
    return _Act(job_id, **caller).run("complete", lambda act, job: act.complete(job, result))


def fail(job_id: int, **caller: Unpack[Caller]) -> Job:
    """End a running job without success: running -> failed, or cancelled if that was asked for."""
    return _Act(job_id, **caller).run("fail", _Act.fail)


def cancel(job_id: int, *, force: bool = False, **caller: Unpack[Caller]) -> Job:
    """Cancel a job that isn't running; ask a running one to stop.

    Whether a job that is asked ends as cancelled is its executor's doing: if it succeeds all the
    same, it is completed. ``force`` cancels a running job at once and fences its executor out.
    """
    return _Act(job_id, **caller).run("cancel", lambda act, job: act.cancel(job, force))


def release(job_id: int, **caller: Unpack[Caller]) -> Job:
    """Take a job from whoever has it: claimed or running -> waiting.

    An attempt that had begun is excused. The executor, if it still lives, is told with its next
    heartbeat.
    """
    return _Act(job_id, **caller).run("release", _Act.release)


def rerun(job_id: int, **caller: Unpack[Caller]) -> Job:
    """Run a finished job again: completed, failed or cancelled -> waiting.

    Its result and progress are cleared, and its budget is raised by one attempt if it is spent.
    """
    return _Act(job_id, **caller).run("rerun", _Act.rerun)


def edit(
    job_id: int,
    *,
    queue: str | None = None,
    priority: int | None = None,
    run_after: datetime | timedelta | float | None = None,
    max_attempts: int | None = None,
    **caller: Unpack[Caller],
) -> Job:
    """Change a job that is scheduled or waiting; what is ``None`` stays as it is.

    The values are those of ``enqueue``. A waiting job that is given a time to come stays waiting,
    and isn't claimed before.
    """
    given = {
        "queue": queue,
        "priority": priority,
        "run_after": run_after,
        "max_attempts": max_attempts,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return _Act(job_id, **caller).run("edit", lambda act, job: act.edit(job, changes))


def delete(job_id: int, **caller: Unpack[Caller]) -> None:
    """Delete a finished job and its history."""
    _Act(job_id, **caller).run("delete", _Act.delete)


def transition(
    job_id: int,
    to: State | str,
    *,
    result: Any = None,
    force: bool = False,
    **caller: Unpack[Caller],
) -> Job:
    """Bring a job to a state by whichever verb leads there from the one that it is in.

    To *completed* (with ``result``), *failed*, *cancelled* (with ``force``), or *waiting*: released
    if somebody has it, run again if it is finished.
    """
    if to not in tuple(State):
        raise InvalidJob(f"there is no state {to!r}; there are {', '.join(State)}")
    verb = f"transition to {to}"

    def write(act: _Act, job: Job) -> Job:
        if to == State.COMPLETED:
            return act.complete(job, result)
        if to == State.FAILED:
            return act.fail(job)
        if to == State.CANCELLED:
            return act.cancel(job, force)
        if to == State.WAITING and job.state in HELD:
            return act.release(job)
        if to == State.WAITING and job.state in FINAL:
            return act.rerun(job)
        raise TransitionNotAllowed(job.pk, verb, job.state)

    return _Act(job_id, **caller).run(verb, write)


@dataclass(slots=True)
class _Act:
    """One call: finds the job, writes through a fenced verb, tries again where that may help."""

    job_id: int
    _: KW_ONLY
    actor: str
    reason: str = ""
    expected_version: int | None = None
    workspace: str | None = None
    lock: bool = True
    using: str | None = None
    seen: Job | None = field(default=None, init=False)

    def run(self, verb: str, write: Callable[[_Act, Job], Done]) -> Done:
        using = self.using = self.using or router.db_for_write(Job)
        if isinstance(self.job_id, bool) or not isinstance(self.job_id, int):
            raise InvalidJob(f"a job's id must be an integer, not {self.job_id!r:.80}")
        self._check()
        pauses = db.waits(FIRST_WAIT)
        for tries in range(1, TRIES + 1):
            try:
                with transaction.atomic(using=using):
                    return write(self, self._find(verb))
            except TransitionConflict as conflict:
                if self._is_last(tries) or self.expected_version is not None:
                    raise self._recorded(conflict, tries) from None
            except DatabaseError as error:
                if not self._may_try_again(error):
                    raise
                if self._is_last(tries):
                    raise self._busy(error, tries) from error
            time.sleep(next(pauses))
        raise AssertionError("unreachable")  # pragma: no cover

    # -- What each verb writes, given the job as it was found

    def complete(self, job: Job, result: Any) -> Job:
        return self._settle(job, Completed(result, self.reason))

    def fail(self, job: Job) -> Job:
        return self._settle(job, Failed(Error(self.reason)))

    def cancel(self, job: Job, force: bool) -> Job:
        if job.state == State.RUNNING and not force:
            return transitions.request_cancel(job, self.reason, actor=self.actor, using=self.using)
        return self._settle(job, Cancelled(self.reason))

    def release(self, job: Job) -> Job:
        return self._settle(job, Released(self.reason))

    def rerun(self, job: Job) -> Job:
        return transitions.rerun(job, self.reason, actor=self.actor, using=self.using)

    def edit(self, job: Job, changes: dict[str, Any]) -> Job:
        checked = check_edit(changes, self.using or "")
        return transitions.edit(job, checked, self.reason, actor=self.actor, using=self.using)

    def delete(self, job: Job) -> None:
        transitions.delete(job, actor=self.actor, using=self.using)

    def _settle(self, job: Job, outcome: Outcome) -> Job:
        return transitions.settle(job, outcome, actor=self.actor, using=self.using)

    # -- Finding, and giving up

    def _check(self) -> None:
        if not self.actor or not isinstance(self.actor, str):
            raise InvalidJob(f"actor must name who acts, not {self.actor!r}")
        if self.expected_version is None:
            if not self.lock:
                raise InvalidJob("without a lock, expected_version is needed")
            return
        try:
            conf.check_integer(self.expected_version, "expected_version", 0, MAX_VERSION)
        except ValueError as error:
            raise InvalidJob(str(error)) from None

    def _find(self, verb: str) -> Job:
        if not 0 < self.job_id < 2**63:
            raise JobNotFound(self.job_id)
        rows = Job.objects.using(self.using).filter(pk=self.job_id)
        if self.workspace is not None:
            rows = rows.filter(workspace=self.workspace)
        job = self.seen = (db.lock_rows(rows, nowait=True) if self.lock else rows).first()
        if job is None:
            raise JobNotFound(self.job_id)
        if self.expected_version is not None and job.version != self.expected_version:
            raise TransitionConflict(job.pk, verb, self.expected_version, job.fingerprint)
        return job

    def _is_last(self, tries: int) -> bool:
        return tries == TRIES or not self.lock

    def _may_try_again(self, error: DatabaseError) -> bool:
        # In a caller's transaction all but a refused lock has broken more than this call can mend.
        nested = connections[self.using or ""].in_atomic_block
        return db.is_lock_refused(error) if nested else db.is_transient(error)

    def _recorded(self, conflict: TransitionConflict, tries: int) -> TransitionConflict:
        """Leave the event of a conflict, which went with the transaction that met it."""
        conflict.tries = tries
        decided_on = copy.copy(self.seen)
        assert decided_on is not None
        if isinstance(conflict.expected, int):
            decided_on.version = conflict.expected
        ledger.record(decided_on, conflict, self.actor, self.using or "")
        return conflict

    def _busy(self, error: DatabaseError, tries: int) -> JobBusy:
        holder = db.lock_holder(self.using or "", Job._meta.db_table, self.job_id)
        # MySQL's errors have their number first.
        reason = str(error.args[-1] if error.args else error).strip()
        return JobBusy(self.job_id, tries, reason, holder)
