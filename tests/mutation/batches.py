"""What must fail once a guard is gone from a write of many outcomes, which may be one statement.

Three jobs that one worker claimed and began as one, and in the middle the one that moved on. Jobs
of one version are compared with it as they are with their claim; others each with its own, which is
another form of the statement.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

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
from jobqueue.sweep import SweepReport, sweep_stale_jobs
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

ALIKE: Final = "alike"
OF_MANY_VERSIONS: Final = "of many versions"
FORMS: Final = (ALIKE, OF_MANY_VERSIONS)
# Each job gets a time of its own, so that these are of the other form whatever the versions.
NEVER_ALIKE: Final = (Verb.RETRY, Verb.SNOOZE)


def three(alias: str, form: str, state: str = "running") -> list[Job]:
    """Return jobs of one claim."""
    now = db.now(alias)
    times = {"claimed_at": now} | ({"attempted_at": now} if state == "running" else {})
    versions = (2, 2, 2) if form == ALIKE else (2, 5, 9)
    return [job_in(state, version=version, **times) for version in versions]


def of_each_form(make: Callable[..., Killer], *args: Any) -> tuple[Killer, ...]:
    """Return the killers that a function makes for all forms of the statement."""
    return tuple(make(*args, form) for form in FORMS)


def of_form(form: str, kill: Killer, name: str) -> Killer:
    """Give a killer its name."""
    return named(kill, f"batch {form}: {name}")


def one_moved(column: str, form: str) -> Killer:
    """Return the killer in which SQL of somebody's own changes one column of one of them."""

    def kill(alias: str) -> None:
        jobs = three(alias, form)
        moved = jobs[1]
        write_raw(moved, **{column: another(moved, column)})
        before = row(moved)
        assert settle_all(jobs, Completed("done")) == ["applied", "conflict", "applied"]
        assert row(moved) == before

    return of_form(form, kill, f"one had another {column}")


def another(job: Job, column: str) -> Any:
    """Return a value that the column of a running job could as well have."""
    value = getattr(job, column)
    if column == "state":
        return State.CLAIMED.value
    if column == "claimed_by":
        return "console:1:1"
    return value + (1 if column in ("attempt", "version") else MICROSECOND)


def one_was_begun_meanwhile(form: str) -> Killer:
    """None of the three had begun when they were handed back; NULL is compared as such."""

    def kill(alias: str) -> None:
        jobs = three(alias, form, "claimed")
        write_raw(jobs[1], attempted_at=jobs[1].claimed_at)
        assert settle_all(jobs, Released()) == ["applied", "conflict", "applied"]
        assert row(jobs[1])["state"] == "claimed"

    return of_form(form, kill, "one was begun")


def asked_while_its_batch_waits(verb: Verb, form: str) -> Killer:
    """Return the killer in which one is asked to stop while the write of all waits for it."""

    def kill(alias: str) -> None:
        jobs = three(alias, form)
        with transaction.atomic(using=alias):
            lock(jobs[1])
            late = run_in_thread(settle_all, jobs, SETBACKS[verb])
            wait_until_blocked(alias)
            transitions.request_cancel(jobs[1], actor="operator")
        late.result()
        states = [row(job)["state"] for job in jobs]
        assert [state == "cancelled" for state in states] == [False, True, False]

    return of_form(form, kill, f"{verb} yields to a request")


def versions_rise(form: str) -> Killer:
    """By one, of each job."""

    def kill(alias: str) -> None:
        jobs = three(alias, form)
        settle_all(jobs, SETBACKS[Verb.FAIL])
        assert [row(job)["version"] for job in jobs] == [job.version + 1 for job in jobs]

    return of_form(form, kill, "versions rise")


def own_completions_are_recognised(form: str) -> Killer:
    """The reply to the whole batch was lost: all of it is told as done."""

    def kill(alias: str) -> None:
        jobs = three(alias, form)
        for told in ("applied", "already applied"):
            assert settle_all(jobs, Completed("done")) == [told] * 3

    return of_form(form, kill, "own completions are known")


def operators_completions_are_not_the_owners(form: str) -> Killer:
    """The results are the same, and yet their executor was fenced out of all three."""

    def kill(alias: str) -> None:
        jobs = three(alias, form)
        settle_all(jobs, Completed("done"), actor="operator")
        assert settle_all(jobs, Completed("done")) == ["conflict"] * 3

    return of_form(form, kill, "an operator's completions are not the owner's")


def job_of_another_claim_is_settled_too(form: str, result: Any = "done") -> Killer:
    """A batch is of more than one claim; each job is compared with what was decided on it."""

    def kill(alias: str) -> None:
        jobs = [*three(alias, form), job_in("running", claimed_by="another:2:2", attempt=2)]
        assert settle_all(jobs, Completed(result)) == ["applied"] * 4

    return of_form(form, kill, f"two claims are settled, with {result}")


def each_stale_job_is_taken(column: str) -> Killer:
    """Return the killer in which two jobs of a sweep's page differ in one column."""

    def kill(alias: str) -> None:
        first, _, third = three(alias, ALIKE)
        write_raw(third, **{column: another(third, column)})
        assert sweep_stale_jobs() == SweepReport(examined=3, retried=3)
        assert row(first)["version"] == first.version + 1

    return named(kill, f"jobs of a page that differ in {column} are taken")
