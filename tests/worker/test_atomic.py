"""``context.atomic()``: the handler's own writes and the job's completion, both or neither."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError, connections, transaction

from jobqueue import coordinator
from jobqueue.exceptions import Cancel, JobQueueError, Snooze, TransitionNotAllowed
from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job, JobEvent
from tests.asserting import exactly
from tests.helpers import engine, pause_at, wait_until, wait_until_blocked
from tests.races.scenes import failing, lost_commit_reply
from tests.worker import handlers
from tests.worker.scripted import (
    SpeakingBroker,
    effects,
    finish,
    open_gates,
    play,
    playing,
    scripted_job,
    write,
)
from tests.worker.tools import conflicts, kinds, troubles


def is_update(sql: str) -> bool:
    return sql.startswith("UPDATE") and "jobqueue_job" in sql


def test_effects_and_completion_are_one(alias):
    """Nobody sees the one without the other; the result is stored, and hooks are called."""

    def script(context):
        with context.atomic() as block:
            write("effect")
            transaction.on_commit(lambda: handlers.note(effects()), using=alias)
            block.result = {"rows": 1}
            context.progress(90, "nearly")
        return "not this"

    rig, job = play(alias, script)
    assert (job.state, job.result, effects()) == (State.COMPLETED, {"rows": 1}, ["effect"])
    assert (job.progress, job.progress_note, handlers.seen) == (90, "nearly", [["effect"]])
    assert (kinds(job), rig.loop.settled) == ([], {"completed": 1})


def test_nothing_is_seen_before_the_end_of_the_block(alias):
    """Neither by others nor by a heartbeat, which leaves a block that is open alone."""

    def script(context):
        with context.atomic():
            write("effect")
            handlers.hold()

    with playing(alias, script) as (rig, job):
        handlers.gate().wait_until_entered()
        assert effects() == []
        assert Job.objects.get(pk=job.pk).state == State.RUNNING
        if connections[alias].vendor != "sqlite":  # where a beat has to wait for the block
            rig.beat()
        open_gates("gate")
        finish(rig)
    assert (effects(), kinds(job), rig.loop.settled) == (["effect"], [], {"completed": 1})


# -- After the block, and instead of its end


@pytest.mark.parametrize("error", ["ValueError", "Snooze", "Fail", "Cancel", "exit"])
def test_nothing_after_the_block_changes_the_outcome(alias, error):
    """It is told once."""

    def script(context):
        with context.atomic() as block:
            write("effect")
            block.result = 1
        handlers.fail(error)

    with troubles() as told:
        rig, job = play(alias, script)
    assert (job.state, job.result, effects()) == (State.COMPLETED, 1, ["effect"])
    assert told == [f"undo job {job.pk}, completed before its handler ended with"]
    assert (kinds(job), rig.loop.settled) == ([], {"completed": 1})


@pytest.mark.parametrize(
    ("error", "state", "kind"),
    [
        (ValueError("no"), State.FAILED, EventKind.FAILED),
        (Snooze(60), State.SCHEDULED, EventKind.SNOOZED),
        (Cancel("useless"), State.CANCELLED, EventKind.CANCELLED),
    ],
)
def test_error_within_the_block_rolls_it_back_and_means_what_it_means(alias, error, state, kind):
    def script(context):
        with context.atomic():
            write("effect")
            transaction.on_commit(lambda: handlers.note("hook"), using=alias)
            context.save_checkpoint("said within")
            raise error

    _, job = play(alias, script, max_attempts=1)
    assert (job.state, kinds(job), effects(), handlers.seen) == (state, [kind], [], [])
    assert job.checkpoint == "said within"


def test_result_that_is_not_json_fails_the_attempt(alias):
    """What was said is kept for the next one."""

    def script(context):
        context.save_checkpoint({"page": 3})
        with context.atomic() as block:
            write("effect")
            block.result = {"at": float("nan")}

    _, job = play(alias, script, max_attempts=1)
    assert (job.state, job.result, job.checkpoint, effects()) == ("failed", None, {"page": 3}, [])
    message = f"InvalidJob: Job {job.pk}: result['at'] is nan, which JSON can't hold"
    assert JobEvent.objects.get(job=job).message == message


def test_hook_that_fails_comes_after_the_fact(alias):
    """The job is completed, and its handler's error is told."""

    def script(context):
        with context.atomic():
            write("effect")
            transaction.on_commit(lambda: handlers.fail("ValueError"), using=alias)

    with troubles() as told:
        rig, job = play(alias, script)
    assert (job.state, effects(), kinds(job)) == (State.COMPLETED, ["effect"], [])
    assert (len(told), rig.loop.settled) == (1, {"completed": 1})


# -- Refused where the promise can't be kept


def refusal(context: Any, alias: str, using: str | None = None) -> str:
    try:
        with context.atomic(using):
            write("effect")
    except (JobQueueError, RuntimeError) as error:
        return str(error)
    raise AssertionError("it was not refused")


def test_another_database_is_refused(alias):
    _, job = play(alias, lambda context: refusal(context, alias, "elsewhere"))
    assert job.result == (
        f"context.atomic() works on {alias!r}, the database of job {job.pk}, not on 'elsewhere'"
    )
    assert effects() == []


def test_transaction_around_it_is_refused(alias):
    def script(context):
        with transaction.atomic(using=alias):
            return refusal(context, alias)

    rig, job = play(alias, script)
    message = "A durable atomic block cannot be nested within another atomic block."
    assert (job.state, job.result, effects()) == (State.COMPLETED, message, [])
    assert rig.loop.settled == {"completed": 1}


def test_autocommit_that_is_switched_off_is_refused(alias):
    """The block would not be committed, and the job completed without its effects."""

    def script(context):
        transaction.set_autocommit(False, using=alias)
        return refusal(context, alias)

    _, job = play(alias, script)
    assert job.result == "context.atomic() can't commit while autocommit is switched off"
    assert effects() == []


def test_second_use_is_refused_and_the_first_stands(alias):
    def script(context):
        with context.atomic() as block:
            write("first")
            block.result = 1
        handlers.note(refusal(context, alias))

    _, job = play(alias, script)
    assert handlers.seen == [f"job {job.pk} has been completed already"]
    assert (job.state, job.result, effects()) == (State.COMPLETED, 1, ["first"])


# -- What the worker knows of it


def hold_after_commit(alias: str) -> None:
    """Let this thread's next COMMIT take effect, and stand still before anybody is told."""
    connection = connections[alias]
    commit = connection._commit

    def commit_and_hold() -> None:
        del connection._commit
        commit()
        handlers.hold("committed")

    connection._commit = commit_and_hold


def test_heartbeat_after_commit_does_not_take_the_job_for_lost(alias):
    """Neither before the loop knows of it, nor until the handler has ended."""

    def script(context):
        with context.atomic():
            write("effect")
            hold_after_commit(alias)
        handlers.hold("ended")

    with playing(alias, script) as (rig, job):
        for gate in ("committed", "ended"):
            context = handlers.gate(gate).wait_until_entered()
            assert Job.objects.get(pk=job.pk).state == State.COMPLETED
            rig.beat()
            assert not context.lost
            open_gates(gate)
        finish(rig)
        rig.beat()
    assert (kinds(job), rig.loop.settled) == ([], {"completed": 1})


def is_look(sql: str, params: Any) -> bool:
    return sql.startswith("SELECT") and "jobqueue_job" in sql


@pytest.mark.parametrize(
    ("knows", "again"),
    [(True, False), (True, True), (False, True)],
    ids=["found out", "found out, tried again", "not found out, tried again"],
)
def test_lost_reply_to_commit(alias, knows, again):
    """The handler sees the error, and whatever it does then, the block isn't committed twice."""

    def script(context):
        block = context.atomic()
        block.__enter__()
        write("first")
        down, times = OperationalError("no connection"), 0 if knows else 1
        with failing(alias, is_look, down, times=times) as met, lost_commit_reply(alias):
            try:
                block.__exit__(None, None, None)
            except OperationalError as error:
                handlers.note(str(error))
        assert len(met) == times
        handlers.hold()
        if again:
            with context.atomic():
                write("second")
        raise ValueError("no")

    with troubles() as told, playing(alias, script) as (rig, job):
        context = handlers.gate().wait_until_entered()
        if knows:
            rig.beat()
            assert not context.lost
        open_gates("gate")
        finish(rig)
    assert handlers.seen == ["the connection was lost"]
    assert (Job.objects.get(pk=job.pk).state, effects()) == (State.COMPLETED, ["first"])
    assert (kinds(job), rig.loop.settled, len(told)) == ([], {"completed": 1}, 1)


class Careful(SpeakingBroker):
    """Claims one job, and no other before a handler has come to the gate."""

    def claim(self, worker_id: str, limit: int) -> Any:
        if self.calls and not handlers.gate().entered.is_set():
            return []
        return super().claim(worker_id, 1)


@pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)
def test_block_does_not_wait_for_a_loop_that_waits_for_it(alias):
    """The loop, in its turn, waits for the one writer; the block must not want the turn then."""

    def script(context):
        with context.atomic():
            write("effect")
            handlers.hold()

    other = scripted_job(lambda context: None, name="other", priority=-1)
    with playing(alias, script, local=Careful(alias), slots=2, lease=90) as (rig, job):
        handlers.gate().wait_until_entered()
        wait_until_blocked(alias)
        open_gates("gate")
        finish(rig, 2)  # long before the turn is given up
    assert (effects(), kinds(job), kinds(other)) == (["effect"], [], [])


# -- What is said about progress around it


def test_report_on_its_way_is_waited_for(alias):
    """Else it came after the completion, and an execution that is over would be found out."""

    def script(context):
        context.progress(10)
        handlers.hold()
        with context.atomic():
            write("effect")

    def is_report(sql: str) -> bool:
        return is_update(sql) and "progress_note" in sql

    with pause_at(alias, is_report) as pause, playing(alias, script) as (rig, job):
        pause.wait_until_reached()
        open_gates("gate")
        wait_until(lambda: rig.loop.turns._door.locked() or effects(), "the handler doesn't get on")
        pause.release()
        finish(rig)
    job.refresh_from_db()
    assert (job.state, job.progress, kinds(job)) == (State.COMPLETED, 10, [])
    assert rig.loop.settled == {"completed": 1}


@pytest.mark.parametrize("alias", [engine("postgresql"), engine("mariadb")], indirect=True)
def test_loop_writes_no_report_while_the_block_is_open(alias):
    """On its own connection it would wait for the row, and then be too late."""

    def script(context):
        with context.atomic():
            context.progress(20)
            handlers.hold()

    with playing(alias, script, local=SpeakingBroker(alias)) as (rig, job):
        handlers.gate().wait_until_entered()
        rig.let_tick()
        assert Job.objects.get(pk=job.pk).progress == 0
        open_gates("gate")
        finish(rig)
    assert Job.objects.get(pk=job.pk).progress == 20


# -- Cancel requests


@pytest.mark.parametrize("heeds", [False, True])
def test_cancel_request_before_the_block(alias, heeds):
    """The work is done and so completed, unless the handler heeds the request."""

    def script(context):
        handlers.hold()
        with context.atomic():
            write("effect")
            if heeds:
                context.raise_if_cancelled()

    with playing(alias, script) as (rig, job):
        handlers.gate().wait_until_entered()
        coordinator.cancel(job.pk, actor="ann")
        rig.beat()
        open_gates("gate")
        finish(rig)
    ends = (State.CANCELLED, []) if heeds else (State.COMPLETED, ["effect"])
    assert (Job.objects.get(pk=job.pk).state, effects()) == ends
    assert kinds(job)[0] == EventKind.CANCEL_REQUESTED
    assert conflicts() == 0


def test_cancel_request_after_the_block_is_refused(alias):
    def script(context):
        with context.atomic():
            write("effect")
        handlers.hold()

    with playing(alias, script) as (rig, job):
        context = handlers.gate().wait_until_entered()
        message = f"Job {job.pk} is completed: cancel is not allowed."
        with pytest.raises(TransitionNotAllowed, match=exactly(message)):
            coordinator.cancel(job.pk, actor="ann")
        rig.beat()
        assert not context.cancelled
        open_gates("gate")
        finish(rig)
    assert (Job.objects.get(pk=job.pk).state, effects()) == (State.COMPLETED, ["effect"])
