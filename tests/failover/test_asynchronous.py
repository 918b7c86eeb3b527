"""With an asynchronous standby the last commits may be lost; the fence holds for what remains.

What the standby has not received is a timeline that never was. Versions, attempts and even ids of
jobs come again on the other one, so here it is the times and the holder that tell executions apart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobqueue import broker, coordinator, transitions
from jobqueue.enqueue import enqueue, enqueue_many
from jobqueue.exceptions import TransitionConflict
from jobqueue.lifecycle import Completed, Settled, State
from jobqueue.models import EventKind, Job, Queue, Worker
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.worker.context import JobContext
from jobqueue.worker.execution import Execution
from tests.failover import load
from tests.failover.handlers import PREFIX, write_effect
from tests.failover.standby import ALIAS, PATIENCE, Pair
from tests.helpers import wait_until
from tests.races.scenes import ON_RUNNING, kinds, row
from tests.worker import handlers
from tests.worker.scripted import SpeakingBroker
from tests.worker.tools import make_job, running_loop

GIVE = "tests.worker.handlers.give"


def cut_off(pair: Pair) -> None:
    """Let the standby have all there is, and nothing of what comes."""
    pair.wait_until_received()
    pair.db2.stop_receiving()


def executing(job: Job) -> Execution:
    """Return what a worker has in hand while the job's handler runs."""
    return Execution(job, JobContext(job.pk, job.task, job.attempt, job.version))


def complete_with_effect(worker: Worker, execution: Execution) -> None:
    """Do what a handler does that uses ``context.atomic()``."""
    job = execution.job
    with broker.atomic(worker.pk, job, execution):
        write_effect(job.pk, job.attempt)


def silence(worker: Worker) -> None:
    """Let a worker have died with the old primary, and its lease run out."""
    Worker.objects.filter(pk=worker.pk).update(last_seen_at=worker.last_seen_at - 2 * worker.lease)
    assert sweep_stale_jobs().taken == 1


@pytest.mark.parametrize(
    ("come_round", "kind"),
    [
        (lambda worker: broker.heartbeat(worker.pk, {}), EventKind.RELEASED),
        (silence, EventKind.RESCUED),
    ],
    ids=["the worker lives", "the worker is gone"],
)
def test_what_was_not_received_is_lost_and_done_again(
    pair: Pair, come_round: Callable[[Worker], Any], kind: str
) -> None:
    """An acknowledged job is gone; an acknowledged completion is undone with its effects."""
    worker = broker.register(["default"])
    kept = enqueue(GIVE, backoff=0.001)
    (running,) = broker.claim(worker.pk, 1)
    cut_off(pair)
    lost = enqueue(GIVE)
    complete_with_effect(worker, executing(running))
    completed = Job.objects.get(pk=kept.pk)
    assert load.effects(pair.db1) == {kept.pk: 1}
    pair.fail_over()

    assert not Job.objects.filter(pk=lost.pk).exists()
    assert load.effects(pair.db2) == {}
    found = row(kept)
    assert (found["state"], found["version"]) == (State.RUNNING, completed.version - 1)
    with pytest.raises(TransitionConflict) as refused:
        transitions.rerun(completed, actor="ann")
    assert str(refused.value) == (
        f"Job {kept.pk} moved on: rerun was decided on completed by {worker.pk}, attempt 1, "
        f"version {completed.version}; it is now running by {worker.pk}, attempt 1, "
        f"version {running.version}."
    )
    with pytest.raises(TransitionConflict):
        coordinator.cancel(kept.pk, actor="ann", expected_version=completed.version)
    assert row(kept) == found

    come_round(worker)
    other = broker.register(["default"])
    (again,) = wait_until(lambda: broker.claim(other.pk, 1), "it doesn't wait", timeout=PATIENCE)
    complete_with_effect(other, executing(again))
    assert load.effects(pair.db2) == {kept.pk: 1}
    assert (row(kept)["state"], row(kept)["attempt"]) == (State.COMPLETED, 2)
    assert kinds(kept)[-1] == kind


@pytest.mark.parametrize("taker", ["another worker", "the same worker"])
def test_same_version_and_attempt_of_a_lost_timeline_are_refused(pair: Pair, taker: str) -> None:
    """ABA over a failover: all that differs is who claimed and when, or only when."""
    mine = broker.register(["default"])
    other = broker.register(["default"]) if taker == "another worker" else mine
    enqueue_many([{"task": GIVE}] * len(ON_RUNNING))
    cut_off(pair)
    old = broker.claim(mine.pk, len(ON_RUNNING))
    pair.fail_over()
    new = broker.claim(other.pk, len(ON_RUNNING))
    for before, after in zip(old, new, strict=True):
        same = ("pk", "state", "attempt", "version")
        assert [getattr(before, n) for n in same] == [getattr(after, n) for n in same]

    for job, (verb, report) in zip(old, ON_RUNNING.items(), strict=True):
        found = row(job)
        with pytest.raises(TransitionConflict):
            report(job)
        assert row(job) == found, verb
        assert kinds(job) == [EventKind.CONFLICT]
    for job in new:
        assert transitions.complete(job, "done").state == State.COMPLETED
    late = broker.settle(mine.pk, [(job, Completed("done")) for job in old])
    assert {result.status for result in late} == {Settled.CONFLICT}


@pytest.mark.parametrize("taker", ["another worker", "the same worker"])
def test_a_block_of_a_lost_timeline_is_rolled_back_and_knows_it(pair: Pair, taker: str) -> None:
    """Though the row looks as if this block's own COMMIT had taken effect."""
    mine = broker.register(["default"])
    other = broker.register(["default"]) if taker == "another worker" else mine
    job = enqueue(GIVE)
    cut_off(pair)
    (old,) = broker.claim(mine.pk, 1)
    pair.fail_over()
    (new,) = broker.claim(other.pk, 1)
    complete_with_effect(other, executing(new))

    late = executing(old)
    with pytest.raises(TransitionConflict):
        complete_with_effect(mine, late)
    assert (late.completed, late.lost) == (False, True)
    assert load.effects(pair.db2) == {job.pk: 1}
    assert kinds(job) == [EventKind.CONFLICT]


def test_a_heartbeat_tells_executions_of_two_timelines_apart(pair: Pair) -> None:
    """The same worker claimed the same version twice; the reply of the second claim was lost."""
    worker = broker.register(["default"])
    job = enqueue(GIVE)
    cut_off(pair)
    (old,) = broker.claim(worker.pk, 1)
    pair.fail_over()
    broker.claim(worker.pk, 1)
    heard = broker.heartbeat(worker.pk, {job.pk: old})
    assert heard.lost == {job.pk}
    assert (row(job)["state"], row(job)["excused"]) == (State.WAITING, 1)


def test_a_worker_whose_registration_was_lost_registers_anew(pair: Pair, tmp_path: Path) -> None:
    """Its job, claimed on the lost timeline too, is run by another; its own effect is refused."""
    job = enqueue(f"{PREFIX}work_when_told", args=[str(tmp_path)])
    cut_off(pair)
    with load.worker(tmp_path, "--lease", "3") as lost:
        load.wait_for_lines(tmp_path, "begins", 1)
        pair.fail_over()
        assert not Worker.objects.exists()
        with load.worker(tmp_path) as other:
            begun = load.wait_for_lines(tmp_path, "begins", 2)
            (tmp_path / f"go-{lost.pid}").touch()
            wait_until(
                lambda: Worker.objects.filter(pid=lost.pid).exists(),
                "it did not register again",
                timeout=PATIENCE,
            )
            assert load.effects(pair.db2) == {}
            (tmp_path / "go").touch()
            load.wait_until_all_final()
            assert [lost.lives(), other.stop()] == [True, 0]
        after = enqueue(f"{PREFIX}work")
        load.wait_until_all_final()
        assert lost.stop() == 0
    assert [(line.pid, line.attempt) for line in begun] == [(lost.pid, 1), (other.pid, 1)]
    assert kinds(job) == [EventKind.CONFLICT]
    assert sorted(pair.db2.sql("SELECT job_id, pid FROM effect")) == [
        (job.pk, other.pid),
        (after.pk, lost.pid),
    ]


def test_a_worker_that_claims_its_lost_execution_again_knows_both(pair: Pair) -> None:
    """The older one is told, and keeps its slot until its handler ends."""
    first = make_job(handlers.hold)
    paused = Queue.objects.create(name="default", paused_at=first.enqueued_at)
    with running_loop(SpeakingBroker(ALIAS), slots=2, lease=PATIENCE) as rig:
        cut_off(pair)
        Queue.objects.update(paused_at=None)
        handlers.gate().wait_until_entered()
        pair.fail_over()
        assert Queue.objects.get() == paused
        Queue.objects.update(paused_at=None)
        contexts = handlers.gate().contexts
        wait_until(lambda: len(contexts) == 2, "it is not claimed again", timeout=PATIENCE)
        one_too_many = make_job(handlers.give)
        rig.let_tick()
        assert row(one_too_many)["state"] == State.WAITING
        rig.beat()
        assert [context.lost for context in contexts] == [True, False]
        assert {context.fencing_token for context in contexts} == {first.version + 1}
        handlers.gate().open()
        load.wait_until_all_final()
    assert (row(first)["state"], row(first)["attempt"]) == (State.COMPLETED, 1)
