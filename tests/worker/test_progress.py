"""Progress and checkpoints on their way from a handler to the row: coalesced, never lost."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from django.db.backends.signals import connection_created

from jobqueue import coordinator
from jobqueue.exceptions import InvalidJob
from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job, JobEvent
from jobqueue.worker import execution, loop
from tests.asserting import exactly
from tests.helpers import TIMEOUT, run_in_thread, wait_until
from tests.worker import handlers
from tests.worker.scripted import SpeakingBroker, finish, open_gates, play, playing
from tests.worker.tools import kinds, running_loop, troubles


def shown(job: Job) -> tuple[Any, ...]:
    """Return what the row says of how far the job has come."""
    return Job.objects.values_list("progress", "progress_note", "checkpoint").get(pk=job.pk)


@contextmanager
def counted_updates(alias: str) -> Iterator[list[str]]:
    """Collect the statements of other threads that write progress or a checkpoint."""
    here, met = threading.current_thread(), []

    def execute(run: Any, sql: str, *rest: Any) -> Any:
        changes = sql.split("WHERE")[0]
        if sql.startswith("UPDATE") and ("progress_note" in changes or "checkpoint" in changes):
            met.append(sql)
        return run(sql, *rest)

    def wrap(connection: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not here and execute not in connection.execute_wrappers:
            connection.execute_wrappers.append(execute)

    connection_created.connect(wrap)
    try:
        yield met
    finally:
        connection_created.disconnect(wrap)


# -- Coalesced


def test_at_most_one_write_in_the_interval(alias, monkeypatch):
    """antenna#1337: the first at once, the highest when the time is up, the last at the end."""
    monkeypatch.setattr(execution, "REPORT_EVERY", 30.0)

    def script(context):
        context.progress(1, "first")
        handlers.hold("first")
        for percent in range(2, 51):
            context.progress(percent, f"row {percent}")
            context.save_checkpoint(percent)
        handlers.hold("middle")
        context.progress(60, "last")

    with counted_updates(alias) as updates, playing(alias, script) as (rig, job):
        wait_until(lambda: shown(job) == (1, "first", None), "the first was not written")
        open_gates("first")
        handlers.gate("middle").wait_until_entered()
        rig.let_tick()
        assert (shown(job), len(updates)) == ((1, "first", None), 1)
        monkeypatch.setattr(execution, "REPORT_EVERY", 0.0)
        wait_until(lambda: shown(job) == (50, "row 50", 50), "the highest was not written")
        rig.let_tick()
        assert len(updates) == 2
        monkeypatch.setattr(execution, "REPORT_EVERY", 30.0)
        open_gates("middle")
        finish(rig)
    assert (shown(job), len(updates)) == ((60, "last", 50), 3)


def test_each_job_has_an_interval_of_its_own(alias, monkeypatch):
    monkeypatch.setattr(execution, "REPORT_EVERY", 30.0)

    def script(context):
        context.progress(context.attempt)

    with counted_updates(alias) as updates:
        jobs = [play(alias, script)[1] for _ in range(2)]
    assert [job.progress for job in jobs] == [1, 1]
    assert len(updates) == 2


@pytest.mark.parametrize("end", ["", "ValueError", "Snooze", "Retry", "Fail", "Cancel", "exit"])
def test_last_value_is_written_before_the_outcome(alias, end):
    """Also when the handler ends at once; one statement for all that was said."""

    def script(context):
        context.progress(30, "page 3")
        context.save_checkpoint({"page": 3})
        context.progress(20, "page 2")
        if end:
            handlers.fail(end)

    with counted_updates(alias) as updates:
        _, job = play(alias, script, max_attempts=1)
    assert shown(job) == (30, "page 3", {"page": 3})
    assert job.state != State.RUNNING
    assert len(updates) == 1
    assert EventKind.CONFLICT not in kinds(job)


def test_highest_of_several_threads_wins(alias, monkeypatch):
    """harmony#191: helpers of one handler report in any order, while the loop writes."""
    monkeypatch.setattr(execution, "REPORT_EVERY", 0.0)

    def script(context):
        def report(start: int) -> None:
            for percent in [*range(start, 101, 8), *range(start, 0, -8)]:
                context.progress(percent, str(percent))

        for helper in [run_in_thread(report, start) for start in range(93, 101)]:
            helper.result()

    _, job = play(alias, script)
    assert shown(job)[:2] == (100, "100")


# -- Refused


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (
            lambda context: context.progress(101),
            "progress must be an integer from 0 to 100, not 101",
        ),
        (
            lambda context: context.progress(50, "x" * 1001),
            "the progress note has 1,001 of 1,000 characters",
        ),
        (
            lambda context: context.save_checkpoint([float("nan")]),
            "the checkpoint[0] is nan, which JSON can't hold",
        ),
    ],
    ids=["percent", "note", "checkpoint"],
)
def test_bad_value_is_the_handlers_error(alias, say, message):
    """It may deal with it; what was said before stands."""

    def script(context):
        context.progress(5, "good")
        with pytest.raises(InvalidJob, match=exactly(f"Job {context.job_id}: {message}")):
            say(context)
        say(context)

    _, job = play(alias, script, max_attempts=1)
    assert (job.state, shown(job)) == (State.FAILED, (5, "good", None))
    assert JobEvent.objects.get(job=job).message == f"InvalidJob: Job {job.pk}: {message}"


# -- In trouble


def test_report_that_could_not_be_written_is_kept(alias):
    """What was said since stands over it; all of it is there before the outcome."""

    def script(context):
        context.progress(40, "before")
        context.save_checkpoint("before")
        handlers.hold()
        context.progress(30, "since")
        context.save_checkpoint("since")

    local = SpeakingBroker(alias)
    local.broken = 2
    with troubles() as told, playing(alias, script, local=local) as (rig, job):
        wait_until(lambda: "report" in told, "nothing was reported")
        open_gates("gate")
        finish(rig)
    assert (shown(job), Job.objects.get(pk=job.pk).state) == ((40, "before", "since"), "completed")
    assert (told, kinds(job)) == (["report", "report"], [])
    verbs = [verb for verb, *_ in local.calls if verb != "claim"]
    assert verbs.index("settle") > verbs.index("report")


def test_last_try_of_a_worker_that_stops_is_one_for_reports_too(alias, monkeypatch):
    """What the next attempt is to go on with must not be forgotten."""
    patient = SimpleNamespace(waits=lambda: itertools.repeat(3600.0))
    monkeypatch.setattr(loop, "db", patient)

    def script(context):
        context.save_checkpoint({"page": 3})
        handlers.hold()

    local = SpeakingBroker(alias)
    local.broken = 1
    with troubles() as told, playing(alias, script, local=local, grace=0.0) as (rig, job):
        wait_until(lambda: told, "nothing was reported")
        rig.stop()
        assert rig.loop.settled == {"released": 1}
    assert (shown(job)[2], told) == ({"page": 3}, ["report"])


# -- Of an execution that is over


@pytest.mark.parametrize(
    "say",
    [
        lambda context: context.progress(90, "late"),
        lambda context: context.save_checkpoint("late"),
    ],
    ids=["progress", "checkpoint"],
)
@pytest.mark.parametrize("error", ["", "ValueError"])
def test_fenced_out_execution_writes_nothing(alias, say, error):
    """river#1226: neither value nor outcome; one event, and its handler is told."""

    def script(context):
        handlers.hold("before")
        say(context)
        handlers.hold_until_lost()
        if error:
            handlers.fail(error)

    with playing(alias, script, max_jobs=1) as (rig, job):
        handlers.gate("before").wait_until_entered()
        coordinator.release(job.pk, actor="ann")
        before = Job.objects.filter(pk=job.pk).values().get()
        open_gates("before")
        finish(rig)
        rig.beat()
    assert Job.objects.filter(pk=job.pk).values().get() == before
    assert kinds(job) == [EventKind.RELEASED, EventKind.CONFLICT]
    assert rig.loop.settled == {"conflict": 1}


def test_two_executions_of_one_job_in_one_worker_are_told_apart(alias, monkeypatch):
    """The older one is found out by its report; the newer one's counts."""
    monkeypatch.setattr(execution, "REPORT_EVERY", 30.0)

    def script(context):
        handlers.hold(f"begin {context.attempt}")
        context.progress(10 * context.attempt)
        handlers.hold(f"end {context.attempt}")

    with playing(alias, script, slots=2) as (rig, job):
        first = handlers.gate("begin 1").wait_until_entered()
        coordinator.release(job.pk, actor="ann")
        second = handlers.gate("begin 2").wait_until_entered()
        with rig.loop.turns.take(TIMEOUT):  # so that the loop finds both reports at once
            open_gates("begin 1", "begin 2")
            handlers.gate("end 1").wait_until_entered()
            handlers.gate("end 2").wait_until_entered()
        wait_until(lambda: first.lost, "the older one was not found out")
        wait_until(lambda: shown(job)[0] == 20, "the newer one's report was not written")
        rig.beat()
        assert (first.lost, second.lost) == (True, False)
        open_gates("end 1", "end 2")
        finish(rig, 2)
        assert rig.loop.settled == {"completed": 1, "conflict": 1}
    assert (Job.objects.get(pk=job.pk).state, shown(job)[0]) == (State.COMPLETED, 20)
    assert kinds(job) == [EventKind.RELEASED, EventKind.CONFLICT]


# -- From one execution to the next


def test_next_attempt_goes_on_where_the_last_one_was(alias):
    def script(context):
        handlers.note((context.attempt, context.checkpoint))
        context.save_checkpoint({"page": context.attempt})
        context.progress(50)
        if context.attempt == 1:
            handlers.fail("ValueError")
        handlers.note((context.attempt, context.checkpoint))

    _, job = play(alias, script)
    assert handlers.seen == [(1, None), (2, {"page": 1}), (2, {"page": 2})]
    assert (job.state, shown(job)) == (State.COMPLETED, (50, "", {"page": 2}))


def test_rerun_starts_from_0(alias):
    """Neither the figure nor the checkpoint of the run that came to its end is there."""

    def script(context):
        now = Job.objects.get(pk=context.job_id)
        handlers.note((context.attempt, now.progress, now.progress_note, context.checkpoint))
        context.progress(100 if context.attempt == 1 else 5, f"run {context.attempt}")
        context.save_checkpoint(context.attempt)

    _, job = play(alias, script)
    assert shown(job) == (100, "run 1", 1)
    coordinator.rerun(job.pk, actor="ann")
    with running_loop(SpeakingBroker(alias), burst=True) as rig:
        rig.running.result()
    assert handlers.seen == [(1, 0, "", None), (2, 0, "", None)]
    assert shown(job) == (5, "run 2", 2)
