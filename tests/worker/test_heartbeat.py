"""The lease: renewed while the loop lives, let go when it doesn't, and what a beat tells."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from jobqueue import db
from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.worker.contract import Ended
from jobqueue.worker.heartbeat import Turns
from tests.helpers import TIMEOUT, run_in_thread, wait_until
from tests.worker import handlers
from tests.worker.tools import (
    FailingBroker,
    LocalBroker,
    RecordingBroker,
    declare_dead,
    kinds,
    make_job,
    running_loop,
    troubles,
)


def let_pass(seconds: float) -> None:
    """Let the lease run out: time that passes is what is tested here, not what is raced with."""
    until = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > until, "")


# -- Turns


def test_only_one_side_has_its_turn():
    turns = Turns()
    for _ in range(2):
        with turns.take(1) as entered:
            assert entered
            with turns.take(0.01) as beside:
                assert not beside


def test_who_waits_at_the_door_does_not_hold_up_others_for_longer_than_they_would_wait():
    """Many handlers that wait for their turns must not cost their worker its lease."""
    turns = Turns()

    def wait_for_long() -> bool:
        with turns.take(TIMEOUT) as entered:
            return entered

    with turns.take(1):
        waiting = run_in_thread(wait_for_long)
        wait_until(turns._door.locked, "nobody waits at the door")
        with turns.take(0.05) as compared:
            assert not compared
        assert not waiting.done
    assert waiting.result()


def test_a_busy_loop_cannot_keep_the_heartbeat_out():
    """Who comes back at once finds that somebody else has been waiting."""
    for _ in range(20):
        turns = Turns()
        order: list[str] = []

        def compare(turns: Turns = turns, order: list[str] = order) -> None:
            with turns.take(TIMEOUT):
                order.append("heartbeat")

        with turns.take(TIMEOUT):
            waiting = run_in_thread(compare)
            wait_until(turns._door.locked, "the heartbeat doesn't wait")
        with turns.take(TIMEOUT):
            order.append("loop")
        waiting.result()
        assert order == ["heartbeat", "loop"]


# -- Renewal


def test_a_beat_renews_the_lease(alias):
    with running_loop(LocalBroker(alias)) as rig:
        Worker.objects.update(last_seen_at=db.now(alias) - timedelta(seconds=20))
        until = rig.loop.lease_until
        rig.beat()
        assert db.now(alias) - Worker.objects.get().last_seen_at < timedelta(seconds=10)
        assert rig.loop.lease_until > until


def test_a_wedged_loop_is_not_renewed_and_lets_go(alias):
    """Others may take its jobs; its handlers are told."""
    make_job(handlers.hold)
    wedged, free = threading.Event(), threading.Event()

    class WedgingBroker(LocalBroker):
        def claim(self, worker_id: str, limit: int) -> Any:
            if handlers.gate().entered.is_set():
                wedged.set()
                assert free.wait(TIMEOUT)
            return super().claim(worker_id, limit)

    with running_loop(WedgingBroker(alias), slots=2, lease=0.5, grace=0.05) as rig:
        context = handlers.gate().wait_until_entered()
        assert wedged.wait(TIMEOUT)
        rig.beat()
        assert not context.lost
        seen_at = Worker.objects.get().last_seen_at
        let_pass(0.55)
        rig.beat()
        assert Worker.objects.get().last_seen_at == seen_at
        assert context.lost
        free.set()
        assert rig.running.result() is Ended.LEASE_LOST


def test_an_idle_loop_never_looks_wedged_however_seldom_it_polls(alias):
    with running_loop(LocalBroker(alias), poll=3600, lease=0.6) as rig:
        for _ in range(4):
            let_pass(0.2)
            rig.beat()
        assert not rig.running.done
        assert rig.stop() is Ended.STOPPED


# -- A lost lease


@pytest.mark.parametrize("told_by", ["beat", "claim"])
def test_who_was_declared_dead_claims_no_more_and_tells_its_handlers(alias, told_by):
    """A late outcome is refused, and leaves one event."""
    job = make_job(handlers.hold_until_lost, backoff={"base": 60})
    local = RecordingBroker(alias)
    with running_loop(local, slots=2 if told_by == "claim" else 1) as rig:
        handlers.gate().wait_until_entered()
        declare_dead(rig)
        other = make_job(handlers.give)
        if told_by == "beat":
            rig.beat()
        assert rig.running.result() is Ended.LEASE_LOST
    assert rig.loop.settled == {"conflict": 1}
    assert kinds(job) == [EventKind.RESCUED, EventKind.CONFLICT]
    assert Job.objects.get(pk=other.pk).state == State.WAITING


def test_the_budget_pays_for_a_handler_that_outlasts_a_lost_lease(alias):
    """Were it excused, a job that wedges its worker would come back for ever."""
    job = make_job(handlers.hold, max_attempts=1)
    with running_loop(LocalBroker(alias), grace=0.05) as rig:
        handlers.gate().wait_until_entered()
        rig.loop.lose_lease()
        assert rig.running.result() is Ended.LEASE_LOST
    job.refresh_from_db()
    assert (job.state, job.excused) == (State.FAILED, 0)
    assert JobEvent.objects.get().message == (
        "its worker lost its lease, and the handler did not end"
    )


def test_outcomes_outlast_a_lost_lease(alias):
    """bensheldon/good_job#90: the database was gone for longer than lease and grace together."""
    job = make_job(handlers.give, "kept")
    local = FailingBroker(alias, settle=10_000)
    with running_loop(local, grace=0.02) as rig:
        wait_until(lambda: ("settle", "failed") in local.calls, "it doesn't try")
        rig.loop.lose_lease()
        failed = len(local.calls)
        wait_until(lambda: len(local.calls) >= failed + 3, "it gave up")
        local.failures["settle"] = 0
        assert rig.running.result() is Ended.LEASE_LOST
    job.refresh_from_db()
    assert (job.state, job.result) == (State.COMPLETED, "kept")


def test_what_was_decided_about_a_hung_handler_is_not_overruled_by_its_end(alias):
    """It may have been written, and the reply lost; a second word would be a conflict."""
    job = make_job(handlers.hold, max_attempts=1)
    local = FailingBroker(alias, settle=10_000)
    with running_loop(local, grace=0.02) as rig:
        handlers.gate().wait_until_entered()
        rig.loop.lose_lease()
        wait_until(lambda: ("settle", "failed") in local.calls, "it doesn't try")
        handlers.gate().open()
        rig.let_tick()
        wait_until(rig.loop._inbox.empty, "the handler's end is not noticed")
        local.failures["settle"] = 0
        assert rig.running.result() is Ended.LEASE_LOST
    assert Job.objects.get(pk=job.pk).state == State.FAILED


def test_jobs_claimed_while_the_lease_is_being_lost_are_told_so(alias):
    class LosingBroker(LocalBroker):
        def claim(self, worker_id: str, limit: int) -> Any:
            jobs = super().claim(worker_id, limit)
            if jobs:
                rig.loop.lose_lease()
            return jobs

    with running_loop(LosingBroker(alias)) as rig:
        make_job(handlers.hold_until_lost)
        assert rig.running.result() is Ended.LEASE_LOST
    assert rig.loop.abandoned == 0


# -- Renewals that fail


def test_one_failed_renewal_is_no_lost_lease(alias):
    """actions/runner#4635."""
    job = make_job(handlers.hold)
    with running_loop(FailingBroker(alias, heartbeat=1)) as rig, troubles() as heard:
        context = handlers.gate().wait_until_entered()
        rig.beat()
        assert heard == ["renew its lease"]
        rig.beat()
        assert not context.lost
        handlers.gate().open()
        wait_until(lambda: rig.loop.settled["completed"], "the job did not go on")
        assert rig.stop() is Ended.STOPPED
    assert kinds(job) == []


def test_renewals_that_fail_for_longer_than_the_lease_lose_it(alias):
    """rails/solid_queue#778: nothing is claimed from then on, and handlers are told."""
    make_job(handlers.hold_until_lost)
    local = FailingBroker(alias, heartbeat=10_000)
    with running_loop(local, slots=2, lease=0.5) as rig:
        context = handlers.gate().wait_until_entered()
        rig.beat()
        assert not context.lost
        let_pass(rig.loop.lease_until - time.monotonic() + 0.01)
        other = make_job(handlers.give)
        rig.beat()
        assert context.lost
        assert rig.running.result() is Ended.LEASE_LOST
    assert Job.objects.get(pk=other.pk).state == State.WAITING


def test_a_heartbeat_that_hangs_loses_the_lease_too(alias):
    """blehnen/DotNetWorkQueue#294: nobody beats, and the loop finds out by its own clock."""
    make_job(handlers.hold_until_lost)
    with running_loop(LocalBroker(alias), lease=0.3) as rig:
        context = handlers.gate().wait_until_entered()
        with rig.loop.turns.take(1):  # the heartbeat, hanging in the database
            wait_until(lambda: context.lost, "the handler was never told")
        assert rig.running.result() is Ended.LEASE_LOST


def test_nothing_is_claimed_once_the_lease_has_run_out(alias):
    """Also before anybody has found out: from then on others may take the jobs."""
    with running_loop(local := RecordingBroker(alias)) as rig:
        wait_until(lambda: local.calls, "it doesn't claim")
        rig.loop.lease_until = time.monotonic()
        rig.let_tick(2)
        claims = len(local.calls)
        job = make_job(handlers.give)
        rig.let_tick()
        assert len(local.calls) == claims
        assert Job.objects.get(pk=job.pk).state == State.WAITING
        rig.beat()
        wait_until(lambda: rig.loop.settled["completed"], "a renewal didn't set it going again")
