"""What must fail once a guard is gone from a write of many outcomes, which may be one statement.

Three jobs that one worker claimed and began as one, and in the middle the one that moved on.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import transaction

from jobqueue import db, transitions
from jobqueue.lifecycle import (
    Completed,
    Error,
    Failed,
    Outcome,
    Released,
    Retry,
    Snoozed,
    State,
    Verb,
)
from jobqueue.models import Job
from jobqueue.testing.factories import JobFactory
from tests.helpers import run_in_thread, wait_until_blocked
from tests.mutation.gate import Killer
from tests.mutation.killers import MICROSECOND, named
from tests.races.scenes import job_in, lock, row, settle_all, write_raw

SETBACKS: dict[Verb, Outcome] = {
    Verb.FAIL: Failed(Error("no")),
    Verb.RETRY: Retry(Error("no"), timedelta(seconds=60)),
    Verb.SNOOZE: Snoozed(timedelta(seconds=60)),
    Verb.RELEASE: Released(),
}


def three_running(alias: str, **columns: Any) -> list[Job]:
    """Return jobs that differ in their ids alone, as those of one claim do."""
    now = db.now(alias)
    columns = {"running": True, "claimed_at": now, "attempted_at": now} | columns
    return JobFactory.create_batch(3, **columns)


def one_moved(column: str) -> Killer:
    """Return the killer in which SQL of somebody's own changes one column of one of them."""

    def killer(alias: str) -> None:
        jobs = three_running(alias)
        moved = jobs[1]
        write_raw(moved, **{column: another(moved, column)})
        before = row(moved)
        assert settle_all(jobs, Completed("done")) == ["applied", "conflict", "applied"]
        assert row(moved) == before

    return named(killer, f"one_of_a_batch_had_another_{column}")


def another(job: Job, column: str) -> Any:
    """Return a value that the column of a running job could as well have."""
    value = getattr(job, column)
    if column == "state":
        return State.CLAIMED.value
    if column == "claimed_by":
        return "console:1:1"
    return value + (1 if column in ("attempt", "version") else MICROSECOND)


def one_was_begun_meanwhile(alias: str) -> None:
    """None of the three had begun when they were handed back; NULL is compared as such."""
    jobs = three_running(alias, running=False, claimed=True, attempted_at=None)
    write_raw(jobs[1], attempted_at=jobs[1].claimed_at)
    assert settle_all(jobs, Released()) == ["applied", "conflict", "applied"]
    assert row(jobs[1])["state"] == "claimed"


def one_came_back_meanwhile(alias: str) -> None:
    """Handed back and claimed again in the same instant: ABA, but for the version."""
    jobs = three_running(alias, running=False, claimed=True, attempted_at=None)
    columns = {"claimed_by": jobs[1].claimed_by, "claimed_at": jobs[1].claimed_at}
    transitions.release(jobs[1])
    write_raw(jobs[1], state="claimed", version=jobs[1].version + 2, **columns)
    assert settle_all(jobs, Released()) == ["applied", "already applied", "applied"]
    assert row(jobs[1])["state"] == "claimed"


def asked_while_its_batch_waits(verb: Verb) -> Killer:
    """Return the killer in which one is asked to stop while the write of all waits for it."""

    def killer(alias: str) -> None:
        jobs = three_running(alias)
        with transaction.atomic(using=alias):
            lock(jobs[1])
            late = run_in_thread(settle_all, jobs, SETBACKS[verb])
            wait_until_blocked(alias)
            transitions.request_cancel(jobs[1], actor="operator")
        late.result()
        states = [row(job)["state"] for job in jobs]
        assert [state == "cancelled" for state in states] == [False, True, False]

    return named(killer, f"{verb}_in_a_batch_yields_to_a_request_that_it_waited_for")


def every_version_rises(alias: str) -> None:
    """By one, of each job."""
    jobs = three_running(alias)
    settle_all(jobs, SETBACKS[Verb.RETRY])
    assert [row(job)["version"] for job in jobs] == [job.version + 1 for job in jobs]


def own_completions_are_recognised(alias: str) -> None:
    """The reply to the whole batch was lost: all of it is told as done."""
    jobs = three_running(alias)
    for told in ("applied", "already applied"):
        assert settle_all(jobs, Completed("done")) == [told] * 3


def operators_completions_are_not_the_owners(alias: str) -> None:
    """The results are the same, and yet their executor was fenced out of all three."""
    jobs = three_running(alias)
    settle_all(jobs, Completed("done"), actor="operator")
    assert settle_all(jobs, Completed("done")) == ["conflict"] * 3


def job_of_another_claim_is_settled_too(alias: str) -> None:
    """A batch is of more than one claim; each job is compared with what was decided on it."""
    jobs = [*three_running(alias), job_in("running", claimed_by="another:2:2", attempt=2)]
    assert settle_all(jobs, Completed("done")) == ["applied"] * 4
