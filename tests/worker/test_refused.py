"""Rows that the database itself refuses to change."""

from __future__ import annotations

from jobqueue.lifecycle import State
from jobqueue.worker import loop as loops
from tests.asserting import stored, stubborn
from tests.helpers import wait_until
from tests.worker import handlers
from tests.worker.tools import LocalBroker, make_job, running_loop, troubles


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
