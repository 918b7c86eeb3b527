"""The worker's threads: none keeps the process from ending, none dies of what it runs."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
from django.contrib.auth.models import Group

from jobqueue.worker import threads
from jobqueue.worker.threads import DaemonThreadExecutor, Periodic
from tests.helpers import TIMEOUT, run_in_thread, wait_until
from tests.worker.tools import made_connections


def named(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


class Result:
    """Something that a weak reference can point to."""


def test_the_executor_returns_results_and_errors():
    executor = DaemonThreadExecutor(2)
    assert executor.submit(max, 1, 2).result(TIMEOUT) == 2
    with pytest.raises(ZeroDivisionError):
        executor.submit(lambda: 1 / 0).result(TIMEOUT)
    executor.shutdown()


def test_the_executor_runs_as_much_at_once_as_it_has_threads():
    executor = DaemonThreadExecutor(3)
    together = threading.Barrier(3)
    futures = [executor.submit(together.wait, TIMEOUT) for _ in range(3)]
    assert sorted(future.result(TIMEOUT) for future in futures) == [0, 1, 2]
    executor.shutdown()


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_no_error_ends_a_thread(error):
    executor = DaemonThreadExecutor(1)

    def work() -> None:
        raise error

    assert isinstance(executor.submit(work).exception(TIMEOUT), error)
    assert executor.submit(max, 1, 2).result(TIMEOUT) == 2
    executor.shutdown()


def test_an_idle_thread_keeps_no_result_alive():
    executor = DaemonThreadExecutor(1)
    result = weakref.ref(executor.submit(Result).result(TIMEOUT))
    wait_until(lambda: not gc.collect() and result() is None, "the result is still held")
    executor.shutdown()


def test_shutdown_waits_for_what_runs_unless_told_not_to():
    before = set(threading.enumerate())
    executor = DaemonThreadExecutor(2)
    gate = threading.Event()
    executor.submit(gate.wait, TIMEOUT)
    ours = set(threading.enumerate()) - before
    executor.shutdown(wait=False)
    wait_until(lambda: sum(t.is_alive() for t in ours) == 1, "the idle thread lives on")
    assert all(thread.daemon for thread in ours)
    waiting = run_in_thread(executor.shutdown)
    assert not waiting.done
    gate.set()
    waiting.result()
    assert not any(thread.is_alive() for thread in ours)


def test_a_periodic_thread_closes_its_connections(alias):
    ticks: list[int] = []
    with (
        made_connections(alias) as made,
        Periodic(lambda: ticks.append(Group.objects.count()), 0.01, name="test-periodic"),
    ):
        assert all(thread.daemon for thread in named("test-periodic"))
        wait_until(lambda: len(ticks) > 1, "it does nothing")
    assert not named("test-periodic")
    (connection,) = made
    assert connection.connection is None


def test_a_periodic_thread_waits_between_its_calls_with_jitter():
    every = Periodic(lambda: None, 10.0, jitter=0.1, name="test-jitter")
    waits = [every._wait() for _ in range(200)]
    assert 9 <= min(waits) < 9.5
    assert 10.5 < max(waits) <= 11


def test_a_call_that_hangs_is_waited_for_but_not_for_ever(monkeypatch):
    """A heartbeat or a sweep that hangs in the database must not keep its worker from ending."""
    monkeypatch.setattr(threads, "STOP_PATIENCE", 0.05)
    entered, gate = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        gate.wait(TIMEOUT)

    with Periodic(work, 0.001, name="test-hangs"):
        assert entered.wait(TIMEOUT)
        began = time.monotonic()
    assert time.monotonic() - began < TIMEOUT / 2
    (thread,) = named("test-hangs")
    gate.set()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
