"""Two writers want one row: the winner commits while the loser waits, and the loser is told."""

from __future__ import annotations

from functools import partial

import pytest
from django.db import connections, transaction

from jobqueue import db, signals, transitions
from jobqueue.claim import claim_jobs
from jobqueue.exceptions import TransitionConflict
from jobqueue.models import Job
from jobqueue.testing.factories import WorkerFactory
from tests.helpers import run_in_thread, wait_until_blocked
from tests.races.scenes import (
    ON_CLAIMED,
    ON_RUNNING,
    SETTLING,
    conflict_of,
    hearing,
    job_in,
    kinds,
    row,
    take_over,
)


def lose(alias, job, winner, loser):
    """Let ``loser`` wait for the row on which ``winner`` acts; return the row and the conflict."""
    with hearing(signals.job_transitioned) as heard:
        with transaction.atomic(using=alias):
            winner(job)
            running = run_in_thread(loser, job)
            wait_until_blocked(alias)
            written = row(job)
        told_of_winner = len(heard)
        with pytest.raises(TransitionConflict) as caught:
            running.result()
    assert row(job) == written
    assert len(heard) == told_of_winner
    return written, caught.value


@pytest.mark.parametrize("loser", ON_RUNNING)
@pytest.mark.parametrize("winner", SETTLING)
def test_verb_against_verb_on_a_running_job(alias, winner, loser):
    """sidequest#208, bull#1416: no column of the winner's, and no signal, comes from the loser."""
    job = job_in("running")
    by_operator = partial(SETTLING[winner], actor="operator")
    written, conflict = lose(alias, job, by_operator, ON_RUNNING[loser])
    assert conflict.expected == job.fingerprint
    assert conflict.found == Job.objects.get().fingerprint
    assert written["version"] == job.version + 1
    assert kinds(job).count("conflict") == 1


@pytest.mark.parametrize("loser", ON_CLAIMED)
@pytest.mark.parametrize("winner", ON_CLAIMED)
def test_verb_against_verb_on_a_claimed_job(alias, winner, loser):
    """awx#12135, prefect#16429: a claim held in memory is not started once the row moved on."""
    job = job_in("claimed")
    by = {} if winner == "start" else {"actor": "operator"}
    written, conflict = lose(alias, job, partial(ON_CLAIMED[winner], **by), ON_CLAIMED[loser])
    assert conflict.verb == loser
    assert written["version"] == job.version + 1
    assert kinds(job).count("conflict") == 1


@pytest.mark.parametrize("loser", ON_RUNNING)
@pytest.mark.parametrize("worker", ["another", "the same"])
def test_late_write_while_the_next_execution_begins(alias, worker, loser):
    """The row is running again, also by the same worker, when the late write gets its turn."""
    job = job_in("running")
    worker_id = "other:2:2" if worker == "another" else job.claimed_by
    written, conflict = lose(alias, job, lambda old: take_over(old, worker_id), ON_RUNNING[loser])
    assert (written["state"], written["attempt"]) == ("running", 2)
    assert written["claimed_by"] == worker_id
    event = conflict_of(job)
    assert (event.actor, event.attempt, event.version) == (job.claimed_by, 1, job.version)
    assert event.detail == {
        "wanted": conflict.verb,
        "expected": job.fingerprint.as_dict(),
        "found": Job.objects.get().fingerprint.as_dict(),
    }
    assert event.message == str(conflict)


@pytest.mark.parametrize("loser", ON_CLAIMED)
@pytest.mark.parametrize("start", [False, True])
def test_late_write_of_a_claim_while_another_claims(alias, start, loser):
    """solid_queue#761, delayed_job_active_record#193: a stranger's claim stays a stranger's."""
    job = job_in("claimed")
    written, _ = lose(alias, job, lambda old: take_over(old, start=start), ON_CLAIMED[loser])
    assert written["claimed_by"] == "other:2:2"


@pytest.mark.parametrize("state", ["waiting", "scheduled"])
def test_claim_against_cancel(alias, state):
    """A job that is cancelled while a claim looks for work is not claimed, due or not."""
    job = job_in(state, run_after=db.now(alias))
    worker = WorkerFactory()
    with transaction.atomic(using=alias):
        transitions.cancel(job, actor="operator")
        claim = run_in_thread(claim_jobs, worker.pk, ["default"], 10)
        if connections[alias].features.has_select_for_update_skip_locked:
            assert claim.result() == []  # passed over, not waited for
        else:
            wait_until_blocked(alias)
    assert claim.result() == []
    assert row(job)["state"] == "cancelled"


def test_cancel_against_claim(alias):
    """Cancelling by what a page showed before a claim is refused."""
    job = job_in("waiting")
    worker = WorkerFactory()

    def cancel(job):
        return transitions.cancel(job, actor="operator")

    written, conflict = lose(alias, job, lambda job: claim_jobs(worker.pk, ["default"], 1), cancel)
    assert written["state"] == "claimed"
    assert str(conflict) == (
        f"Job {job.pk} moved on: cancel was decided on waiting, attempt 0, version 0; "
        f"it is now claimed by {worker.pk}, attempt 0, version 1."
    )
    assert kinds(job) == ["conflict"]
