"""Jobs run by an executor: of this machine's processes, and of a Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from typing import Any

import pytest

from jobqueue import transitions
from jobqueue.exceptions import JobQueueError
from jobqueue.lifecycle import State
from jobqueue.models import Job, Worker
from jobqueue.worker.context import current_context
from jobqueue.worker.contract import Ended
from tests.helpers import engine, wait_until
from tests.worker import handlers
from tests.worker.scripted import SpeakingBroker, scripted_job
from tests.worker.tools import conflicts, kinds, make_job, running_loop, work_off

on_postgresql = pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)


def processes() -> Executor:
    return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))


def threads() -> Executor:
    return ThreadPoolExecutor(2)


def tell_process(number: int) -> list[int]:
    context = current_context()
    context.progress(50, "half")
    context.save_checkpoint({"number": number})
    return [os.getpid(), context.attempt, context.fencing_token]


def die() -> None:
    os._exit(1)


def want_atomic() -> None:
    with current_context().atomic():
        pass


# -- Processes


def test_jobs_run_in_processes_of_their_own(alias):
    jobs = [make_job(tell_process, number) for number in range(4)]
    process = work_off(alias, threads=2, executor=processes)
    assert process.settled == {"completed": 4}
    for number, job in enumerate(jobs):
        job.refresh_from_db()
        pid, attempt, token = job.result
        assert (attempt, token) == (1, 1)
        assert pid != os.getpid()
        assert (job.progress, job.progress_note, job.checkpoint) == (50, "half", {"number": number})


def test_a_job_that_kills_its_process_uses_up_its_attempts(alias):
    """And those after it are not run by what is left of the pool, but fail as well."""
    job = make_job(die, max_attempts=2)
    work_off(alias, executor=processes)
    job.refresh_from_db()
    assert (job.state, job.attempt) == (State.FAILED, 2)
    assert all("BrokenProcessPool" in event.message for event in job.events.all())


def test_what_needs_the_queue_is_refused_there(alias):
    job = make_job(want_atomic, max_attempts=1)
    work_off(alias, executor=threads)
    job.refresh_from_db()
    assert job.state == State.FAILED
    assert JobQueueError.__name__ in job.events.get().message


# -- Any executor


class Held(Executor):
    """Begins nothing until it is told."""

    def __init__(self) -> None:
        self.orders: list[tuple[Future[Any], Any, Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.orders.append((future, fn, args))
        return future

    def begin(self) -> None:
        for future, fn, args in self.orders:
            if future.set_running_or_notify_cancel():
                future.set_result(fn(*args))
        self.orders.clear()


def test_no_more_at_once_than_it_takes(alias):
    held = Held()
    for number in range(3):
        make_job(handlers.note, number)
    with running_loop(SpeakingBroker(alias), slots=2, executor=lambda: held) as rig:
        wait_until(lambda: len(held.orders) == 2, "nothing is ordered")
        rig.let_tick()
        assert len(held.orders) == 2
        held.begin()
        wait_until(lambda: len(held.orders) == 1, "the last one is not ordered")
        held.begin()
        wait_until(lambda: rig.loop.settled["completed"] == 3, "not all are completed")


def test_a_stopping_worker_waits_for_what_it_has_handed_over(alias):
    """Nobody knows of a task elsewhere whether it has begun."""
    held = Held()
    job = make_job(handlers.note, "done")
    with running_loop(SpeakingBroker(alias), executor=lambda: held) as rig:
        wait_until(lambda: held.orders, "nothing is ordered")
        rig.loop.stop()
        rig.let_tick(2)
        held.begin()
        rig.running.result()
    job.refresh_from_db()
    assert job.state == State.COMPLETED


def test_what_does_not_end_within_the_grace_is_handed_back_and_cancelled(alias):
    held = Held()
    job = make_job(handlers.note, "never")
    with running_loop(SpeakingBroker(alias), executor=lambda: held, grace=0.05) as rig:
        wait_until(lambda: held.orders, "nothing is ordered")
        ((future, *_),) = held.orders
        rig.stop()
    job.refresh_from_db()
    assert (job.state, job.failures, kinds(job)) == (State.WAITING, 0, ["released"])
    assert future.cancelled()


def test_what_the_executor_cancels_is_handed_back(alias):
    """As a Dask cluster does that somebody restarts."""
    held = Held()
    job = make_job(handlers.give)
    with running_loop(SpeakingBroker(alias), executor=lambda: held) as rig:
        wait_until(lambda: held.orders, "nothing is ordered")
        ((future, *_),) = held.orders
        held.orders.clear()
        assert future.cancel()
        wait_until(lambda: held.orders, "it is not ordered again")
        held.begin()
        wait_until(lambda: rig.loop.settled["completed"] == 1, "it is not completed")
    assert (Job.objects.get(pk=job.pk).failures, kinds(job)) == (1, ["released"])


def test_an_executor_that_breaks_is_replaced_by_another(alias):
    """What it no longer takes is handed back, not failed."""
    make_job(tell_process, 0)
    bad = make_job(die, max_attempts=1, priority=-1)
    after = [make_job(tell_process, number, max_attempts=1, priority=-2) for number in (1, 2, 3)]
    work_off(alias, executor=processes)
    assert Job.objects.get(pk=bad.pk).state == State.FAILED
    assert {Job.objects.get(pk=job.pk).state for job in after} == {State.COMPLETED}


class Broken(Held):
    """Takes one job, and then breaks."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.orders or self.has_worked:
            raise BrokenExecutor("no more")
        return super().submit(fn, *args, **kwargs)

    has_worked = False

    def begin(self) -> None:
        super().begin()
        self.has_worked = True


def test_what_a_broken_executor_refuses_is_handed_back(alias):
    held = Broken()
    make_job(handlers.note, "first")
    with running_loop(SpeakingBroker(alias), executor=lambda: held) as rig:
        wait_until(lambda: held.orders, "nothing is ordered")
        held.begin()
        wait_until(lambda: rig.loop.settled["completed"] == 1, "it is not completed")
        second = make_job(handlers.note, "second")
        assert rig.running.result() is Ended.HUNG
    second.refresh_from_db()
    assert (second.state, second.failures) == (State.WAITING, 0)
    assert second.events.get().message == "its executor has broken: no more"


def test_an_executor_that_cannot_be_made_leaves_no_lease_behind(alias):
    def make() -> Executor:
        raise RuntimeError("no cluster")

    with pytest.raises(RuntimeError, match="no cluster"):
        work_off(alias, executor=make)
    assert Worker.objects.get().state == Worker.State.STOPPED


def test_what_is_no_executor_is_told_before_any_job_is_touched(alias):
    job = make_job(handlers.give, max_attempts=1)
    with pytest.raises(TypeError, match=r"^an executor must have submit\(\), not be 7$"):
        work_off(alias, executor=lambda: 7)
    job.refresh_from_db()
    assert (job.state, job.attempt) == (State.WAITING, 0)


def test_the_fence_holds_across_it(alias):
    """The job is given away while somebody far away works at it: the late result is refused."""
    held = Held()
    job = make_job(handlers.give)
    with running_loop(SpeakingBroker(alias), executor=lambda: held) as rig:
        wait_until(lambda: held.orders, "nothing is ordered")
        transitions.cancel(Job.objects.get(pk=job.pk), actor="operator")
        held.begin()
        wait_until(lambda: rig.loop.settled["conflict"] == 1, "it is not refused")
    assert Job.objects.get(pk=job.pk).state == State.CANCELLED
    assert conflicts() == 1


def test_an_executor_that_refuses_work_fails_the_attempt(alias):
    broken = ThreadPoolExecutor(1)
    broken.shutdown()
    job = make_job(handlers.give, max_attempts=1)
    work_off(alias, executor=lambda: broken)
    job.refresh_from_db()
    assert job.state == State.FAILED
    assert job.events.get().message == ("RuntimeError: cannot schedule new futures after shutdown")


def test_a_handler_that_is_a_closure_of_this_process_is_none_of_its_affair(alias):
    """Only names travel, so whatever the executor can import it can run."""
    scripted_job(lambda context: context.job_id)
    process = work_off(alias, executor=threads)
    assert process.settled == {"completed": 1}


# -- Dask


@pytest.fixture
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, processes=True
        ) as running,
        distributed.Client(running) as client,
    ):
        yield client


@on_postgresql
def test_a_dask_cluster_does_the_work(alias, cluster):
    jobs = [make_job(tell_process, number) for number in range(6)]
    process = work_off(alias, threads=4, executor=cluster.get_executor)
    assert process.settled == {"completed": 6}
    for job in jobs:
        job.refresh_from_db()
    pids = {job.result[0] for job in jobs}
    assert os.getpid() not in pids
    assert len(pids) == 2


@on_postgresql
def test_a_dask_worker_that_dies_costs_an_attempt(alias, cluster):
    job = make_job(die, max_attempts=1)
    work_off(alias, executor=lambda: cluster.get_executor(retries=0))
    job.refresh_from_db()
    assert job.state == State.FAILED
    assert "KilledWorker" in job.events.get().message
