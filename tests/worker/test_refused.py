"""Rows that the database itself refuses to change."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connections, transaction

from jobqueue import broker
from jobqueue.lifecycle import Completed, Settled, State
from jobqueue.models import Job
from jobqueue.worker import loop as loops
from tests.asserting import stored, stubborn
from tests.helpers import engine, other_connection, use_connection, wait_until
from tests.worker import handlers
from tests.worker.tools import LocalBroker, kinds, make_job, running_loop, troubles


def claim_one() -> Job:
    make_job(handlers.tell_connection)
    worker = broker.register(["default"])
    (job,) = broker.claim(worker.pk, 1)
    return job


IMPATIENT = "-c lock_timeout=10ms"


def test_an_outcome_that_the_database_refuses_is_kept_and_holds_up_nobody(alias, monkeypatch):
    """A trigger that raises, say. Its job keeps its slot; the worker goes on with the others."""
    monkeypatch.setattr(loops, "REFUSED_WAIT", 0.05)
    kept = make_job(handlers.hold)
    with running_loop(LocalBroker(alias), slots=2) as rig, troubles() as told:
        handlers.gate().wait_until_entered()
        with stubborn(alias, kept):
            handlers.gate().open()
            wait_until(lambda: f"settle job {kept.pk}" in " ".join(told), "nobody was told")
            other = make_job(handlers.tell_connection)
            wait_until(lambda: stored(other)["state"] == State.COMPLETED, "the other waits")
            rig.beat()
            assert stored(kept)["state"] == State.RUNNING
        wait_until(lambda: stored(kept)["state"] == State.COMPLETED, "it was dropped")
    assert rig.loop.settled == {"completed": 2}


def test_a_success_is_not_made_a_failure_by_trouble_that_passes(alias):
    """A disk that was full for a moment, say: the batch and the first try alone meet it."""
    job = claim_one()
    left = [1, 1]

    def fill_disk(execute, sql, params, many, context):
        if left and sql.startswith("UPDATE") and "jobqueue_job" in sql:
            left.pop()
            raise OperationalError("could not extend file: No space left on device")
        return execute(sql, params, many, context)

    with connections[alias].execute_wrapper(fill_disk):
        (refused,) = broker.settle(job.claimed_by, [(job, Completed("done"))])
        (settled,) = broker.settle(job.claimed_by, [(job, Completed("done"))])
    assert (refused.status, settled.status) == (Settled.NOT_WRITTEN, Settled.APPLIED)
    assert (stored(job)["state"], stored(job)["result"], kinds(job)) == ("completed", "done", [])


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_an_outcome_whose_row_is_locked_is_kept_and_holds_up_nobody(alias, monkeypatch):
    """By somebody who sits idle in a transaction; where waiting for locks has its limit."""
    monkeypatch.setattr(loops, "REFUSED_WAIT", 0.05)
    monkeypatch.setitem(connections[alias].settings_dict, "OPTIONS", {"options": IMPATIENT})
    kept = make_job(handlers.hold)
    with running_loop(LocalBroker(alias), slots=2) as rig, troubles() as told:
        handlers.gate().wait_until_entered()
        with (
            other_connection(alias) as other,
            use_connection(other),
            transaction.atomic(using=alias),
        ):
            Job.objects.select_for_update().get(pk=kept.pk)
            handlers.gate().open()
            wait_until(lambda: f"settle job {kept.pk}" in " ".join(told), "nobody was told")
        wait_until(lambda: stored(kept)["state"] == State.COMPLETED, "it was dropped")
    assert (rig.loop.settled, kinds(kept)) == ({"completed": 1}, [])
