"""Claim, run, settle: with the real broker, and with one whose database is in trouble."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.db import DataError

from jobqueue import coordinator, transitions
from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job, JobEvent
from jobqueue.testing.factories import JobFactory
from jobqueue.worker import runners
from jobqueue.worker.contract import Ended
from tests.helpers import wait_until
from tests.worker import handlers
from tests.worker.tools import (
    FailingBroker,
    LocalBroker,
    RecordingBroker,
    broken_statements,
    conflicts,
    kinds,
    make_job,
    running_loop,
    troubles,
    work_off,
)


def state_of(job: Job) -> str:
    return Job.objects.get(pk=job.pk).state


def wait_for_state(job: Job, state: State) -> None:
    wait_until(lambda: state_of(job) == state, f"the job did not become {state}")


def run_burst(local: LocalBroker, **options: Any) -> Any:
    """Run a loop until the queue is drained, and return it."""
    with running_loop(local, burst=True, **options) as rig:
        assert rig.running.result() is Ended.DRAINED
    return rig.loop


# -- Slots, batches, queues


def test_nothing_is_claimed_that_cannot_be_run_at_once(alias):
    for name in "abc":
        make_job(handlers.hold, name)
    with running_loop(local := RecordingBroker(alias), slots=2) as rig:
        handlers.gate("a").wait_until_entered()
        handlers.gate("b").wait_until_entered()
        assert rig.loop.settled.total() == 0
        assert [call[1] for call in local.calls] == [2]
        handlers.gate("b").open()
        handlers.gate("c").wait_until_entered()
        assert local.calls[-1][1] == 1


def test_outcomes_are_written_in_batches(alias):
    """While one batch is on its way, those that end meanwhile gather for the next."""
    names = "abcd"
    jobs = [make_job(handlers.hold, name) for name in names]

    class SlowBroker(RecordingBroker):
        def settle(self, worker_id: str, items: Any) -> Any:
            if len(items) == 1:
                for name in names:
                    handlers.gate(name).open()
                wait_until(lambda: rig.loop._inbox.qsize() == 3, "the others did not end")
            return super().settle(worker_id, items)

    with running_loop(local := SlowBroker(alias), slots=4) as rig:
        for name in names:
            handlers.gate(name).wait_until_entered()
        handlers.gate("c").open()
        wait_until(lambda: rig.loop.settled["completed"] == 4, "not all were written")
    settled = [call[1] for call in local.calls if call[0] == "settle"]
    assert settled == [[jobs[2].pk], [jobs[0].pk, jobs[1].pk, jobs[3].pk]]


def test_a_slot_is_free_only_once_its_outcome_is_written(alias):
    """A worker that can't report must not go on to claim what it then can't report either."""
    first, second = make_job(handlers.give), make_job(handlers.give)
    local = FailingBroker(alias, settle=3)
    run_burst(local)
    claims_and_settles = [call for call in local.calls if call[-1] != []]
    assert claims_and_settles == [
        ("claim", 1, [first.pk]),
        *[("settle", "failed")] * 3,
        ("settle", [first.pk]),
        ("claim", 1, [second.pk]),
        ("settle", [second.pk]),
    ]


def test_one_job_runs_once_however_many_threads_wait_for_it(alias):
    """bensheldon/good_job#1599."""
    make_job(handlers.note, "ran")
    loop = run_burst(LocalBroker(alias), slots=5)
    assert handlers.seen == ["ran"]
    assert loop.settled == {"completed": 1}


def test_queues_are_served_in_the_order_given(alias):
    for queue in ("a", "b", "c"):
        make_job(handlers.note, queue, queue=queue, priority=5 if queue == "a" else 0)
    run_burst(LocalBroker(alias), queues=["b", "a"])
    assert handlers.seen == ["b", "a"]
    assert Job.objects.get(queue="c").state == State.WAITING


def test_burst_leaves_what_is_scheduled_for_later(alias):
    later = JobFactory(scheduled=True)
    slow = make_job(handlers.fail, backoff={"base": 60})
    loop = run_burst(LocalBroker(alias))
    assert loop.settled == {"retried": 1}
    assert state_of(later) == state_of(slow) == State.SCHEDULED


@pytest.mark.parametrize("slots", [1, 4])
def test_max_jobs_is_never_exceeded(alias, slots):
    for number in range(5):
        make_job(handlers.note, number)
    with running_loop(LocalBroker(alias), slots=slots, max_jobs=3) as rig:
        assert rig.running.result() is Ended.STOPPED
    assert len(handlers.seen) == rig.loop.claimed == rig.loop.settled["completed"] == 3


# -- What becomes of jobs


def test_a_job_is_retried_until_its_budget_is_spent(alias):
    job = make_job(handlers.fail, max_attempts=3)
    run_burst(LocalBroker(alias))
    job.refresh_from_db()
    assert (job.state, job.attempt) == (State.FAILED, 3)
    events = list(JobEvent.objects.filter(job=job))
    assert [(event.kind, event.attempt) for event in events] == [
        (EventKind.RETRIED, 1),
        (EventKind.RETRIED, 2),
        (EventKind.FAILED, 3),
    ]
    assert {event.message for event in events} == {"ValueError: no"}
    assert all("in _raise" in event.detail["traceback"] for event in events)


def test_each_outcome_is_written_as_what_it_is(alias):
    names = ["Snooze", "Retry in 7", "Fail", "Cancel"]
    jobs = [make_job(handlers.fail, name) for name in names]
    loop = run_burst(LocalBroker(alias), slots=4)
    assert loop.settled == {"snoozed": 1, "retried": 1, "failed": 1, "cancelled": 1}
    states = [State.SCHEDULED, State.SCHEDULED, State.FAILED, State.CANCELLED]
    assert [state_of(job) for job in jobs] == states


def test_a_job_deleted_while_it_runs_is_a_conflict_and_no_crash(alias):
    doomed, after = make_job(handlers.hold), make_job(handlers.give)
    with running_loop(LocalBroker(alias)) as rig, troubles() as heard:
        handlers.gate().wait_until_entered()
        Job.objects.filter(pk=doomed.pk).delete()
        handlers.gate().open()
        wait_for_state(after, State.COMPLETED)
        assert rig.stop() is Ended.STOPPED
    assert rig.loop.settled == {"conflict": 1, "completed": 1}
    assert heard == []


@pytest.mark.parametrize("raises", ["", "ValueError", "Snooze", "Fail", "Cancel"])
def test_a_refused_outcome_is_a_conflict_and_never_a_retry(alias, raises):
    """sidequestjs/sidequest#209, oxpull/django-ox#16, procrastinate-org/procrastinate#511."""
    job, after = make_job(handlers.hold, "gate", raises), make_job(handlers.give)
    with running_loop(LocalBroker(alias)) as rig, troubles() as heard:
        handlers.gate().wait_until_entered()
        released = coordinator.release(job.pk, actor="operator", using=alias)
        transitions.cancel(released, actor="operator", using=alias)
        before = Job.objects.filter(pk=job.pk).values().get()
        handlers.gate().open()
        wait_for_state(after, State.COMPLETED)
        assert rig.stop() is Ended.STOPPED
    assert rig.loop.settled == {"conflict": 1, "completed": 1}
    assert Job.objects.filter(pk=job.pk).values().get() == before
    assert kinds(job) == [EventKind.RELEASED, EventKind.CANCELLED, EventKind.CONFLICT]
    assert heard == []


def test_an_outcome_that_the_database_refuses_fails_its_own_attempt_only(alias):
    bad = make_job(handlers.hold, "gate", "", "poison", max_attempts=1)
    good = make_job(handlers.hold, "gate", "", "fine")

    def is_poison(sql: str, params: Any) -> bool:
        return sql.startswith("UPDATE") and "poison" in repr(params)

    with (
        broken_statements(alias, is_poison, DataError("value too long")),
        running_loop(LocalBroker(alias), slots=2) as rig,
        troubles() as heard,
    ):
        wait_until(lambda: len(handlers.gate().contexts) == 2, "not both have begun")
        handlers.gate().open()
        wait_for_state(good, State.COMPLETED)
        wait_for_state(bad, State.FAILED)
        rig.stop()
    assert JobEvent.objects.get(job=bad).message == "the outcome can't be stored: value too long"
    assert heard == []


def test_an_outcome_comes_even_from_what_breaks_the_describing_of_errors(alias):
    """Were the outcome missing, the slot would be taken for ever."""
    job, after = make_job(handlers.fail, "unprintable", max_attempts=1), make_job(handlers.give)
    loop = run_burst(LocalBroker(alias))
    assert loop.settled == {"failed": 1, "completed": 1}
    assert state_of(job) == State.FAILED
    assert state_of(after) == State.COMPLETED


# -- The database in trouble


def test_outcomes_wait_until_the_database_takes_them(alias):
    """graphile/worker#449: all resumes by itself."""
    job = make_job(handlers.give, "kept")
    with troubles() as heard:
        loop = run_burst(local := FailingBroker(alias, settle=3))
    job.refresh_from_db()
    assert (job.state, job.result, job.attempt) == (State.COMPLETED, "kept", 1)
    assert heard == ["settle"] * 3
    assert local.calls.count(("settle", "failed")) == 3
    assert loop.settled == {"completed": 1}


def test_claims_that_fail_are_tried_again(alias):
    """RealOrangeOne/django-tasks-db#49."""
    job = make_job(handlers.give)
    with troubles() as heard:
        run_burst(FailingBroker(alias, claim=3))
    assert state_of(job) == State.COMPLETED
    assert heard == ["claim"] * 3


def test_trouble_is_waited_out_and_not_hammered(alias):
    """Waits grow; a poll in between changes nothing."""
    with running_loop(local := FailingBroker(alias, claim=10_000), poll=0.001) as rig:
        wait_until(lambda: len(local.calls) >= 3, "it doesn't try")
        began, tried = time.monotonic(), len(local.calls)
        wait_until(lambda: len(local.calls) >= tried + 2, "it doesn't try again")
        assert time.monotonic() - began > 0.1
        rig.stop()


def test_a_lost_reply_to_a_written_outcome_is_no_conflict(alias):
    """quartznet/quartznet#1726: written, and its reply lost; a heartbeat sees it gone meanwhile."""
    job = make_job(handlers.give, "once")

    class LosingBroker(FailingBroker):
        def settle(self, worker_id: str, items: Any) -> Any:
            self.late = not self.calls or self.calls[-1][0] != "settle"  # the first one only
            return super().settle(worker_id, items)

    with running_loop(local := LosingBroker(alias, settle=10_000)) as rig:
        wait_until(lambda: ("settle", "failed") in local.calls, "it doesn't try")
        assert state_of(job) == State.COMPLETED
        rig.beat()
        local.failures["settle"] = 0
        wait_until(lambda: rig.loop.settled.total(), "the outcome was never settled")
        assert rig.loop.settled == {"completed": 1}
    job.refresh_from_db()
    assert (job.state, job.result, job.attempt) == (State.COMPLETED, "once", 1)
    assert kinds(job) == []


# -- Stopping


def test_stop_finishes_what_ends_within_the_grace_and_claims_no_more(alias):
    job = make_job(handlers.hold)
    with running_loop(LocalBroker(alias), slots=2) as rig:
        handlers.gate().wait_until_entered()
        rig.loop.stop()
        other = make_job(handlers.give)
        rig.let_tick()
        handlers.gate().open()
        assert rig.running.result() is Ended.STOPPED
    assert (state_of(job), state_of(other)) == (State.COMPLETED, State.WAITING)
    assert rig.loop.abandoned == 0


def test_stop_hands_back_what_does_not_end_within_the_grace(alias):
    """What the handler returns afterwards is dropped: the job isn't this worker's any more."""
    job = make_job(handlers.hold_until_lost)
    with running_loop(LocalBroker(alias), grace=0.05) as rig:
        context = handlers.gate().wait_until_entered()
        assert rig.stop() is Ended.STOPPED
        assert context.lost
    job.refresh_from_db()
    assert (job.state, job.attempt, job.excused) == (State.WAITING, 1, 1)
    assert [(e.kind, e.message) for e in JobEvent.objects.filter(job=job)] == [
        (EventKind.RELEASED, "its worker was stopped")
    ]
    assert rig.loop.settled == {"released": 1}
    assert rig.loop.abandoned == 1


def test_an_outcome_that_came_in_time_is_not_overruled_by_the_end_of_the_grace(alias):
    """It came while the loop was held up writing another one."""
    quick, slow = make_job(handlers.hold, "quick"), make_job(handlers.hold, "slow")

    class SlowBroker(LocalBroker):
        def settle(self, worker_id: str, items: Any) -> Any:
            if len(items) == 1 and items[0][0].pk == quick.pk:
                rig.loop.stop()
                handlers.gate("slow").open()
                wait_until(lambda: rig.loop._inbox.qsize() == 2, "the slow one did not end")
                grace_is_over = time.monotonic() + 0.02
                wait_until(lambda: time.monotonic() > grace_is_over, "")
            return super().settle(worker_id, items)

    with running_loop(SlowBroker(alias), slots=2, grace=0.01) as rig:
        handlers.gate("slow").wait_until_entered()
        handlers.gate("quick").open()
        assert rig.running.result() is Ended.STOPPED
    assert (state_of(quick), state_of(slow)) == (State.COMPLETED, State.COMPLETED)
    assert rig.loop.abandoned == 0


def test_stop_ends_a_loop_whose_database_is_down(alias):
    """When the grace is over, however often it is told."""
    job = make_job(handlers.give)
    with running_loop(local := FailingBroker(alias, settle=10_000), grace=0.1) as rig:
        wait_until(lambda: ("settle", "failed") in local.calls, "it doesn't try")

        def ended() -> bool:
            rig.loop.stop()
            return rig.running.done

        wait_until(ended, "the loop goes on")
        assert rig.running.result() is Ended.STOPPED
    assert state_of(job) == State.RUNNING  # for a sweep to take
    assert conflicts() == 0


def test_a_last_try_is_made_when_the_grace_is_over(alias):
    """However long the wait after the last trouble was to be."""
    job = make_job(handlers.give)
    with running_loop(local := FailingBroker(alias, settle=10_000), grace=0.2) as rig:
        wait_until(lambda: len(local.calls) > 2, "it doesn't try")
        rig.loop._retry_at = time.monotonic() + 3600
        local.failures["settle"] = 0
        assert rig.stop() is Ended.STOPPED
    assert state_of(job) == State.COMPLETED


def test_dead_claims_of_an_earlier_process_take_no_slots(alias):
    """django-background-tasks/django-background-tasks#151."""
    JobFactory.create_batch(2, running=True, claimed_by="host:1:0")
    job = make_job(handlers.give)
    work_off(alias, threads=2, max_jobs=1)
    assert state_of(job) == State.COMPLETED


def test_no_error_of_ours_ends_a_thread_or_keeps_a_job(alias, monkeypatch):
    """What should never be raised is a failed attempt too."""

    def out_of_memory(*args: Any) -> Any:
        raise MemoryError

    job, after = make_job(handlers.give, max_attempts=1), make_job(handlers.give, max_attempts=1)
    monkeypatch.setattr(runners, "execute", out_of_memory)
    run_burst(LocalBroker(alias))
    assert {state_of(job), state_of(after)} == {State.FAILED}
    assert job.events.get().message == "MemoryError"
