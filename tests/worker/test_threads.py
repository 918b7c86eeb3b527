"""The worker's threads: none keeps the process from ending, none dies of what it runs."""

from __future__ import annotations

import gc
import threading
import time
import weakref

from django.contrib.auth.models import Group

from jobqueue.worker import threads
from jobqueue.worker.threads import Crew, Periodic
from tests.helpers import TIMEOUT, run_in_thread, wait_until
from tests.worker.tools import made_connections


def named(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


class Thing:
    """Something that a weak reference can point to."""


def test_a_crew_does_all_that_it_is_given_in_order():
    done: list[int] = []
    crew = Crew(1, done.append)
    crew.give([1, 2])
    crew.give([3])
    crew.shutdown()
    assert done == [1, 2, 3]


def test_a_crew_does_as_much_at_once_as_it_has_threads():
    together = threading.Barrier(3)
    passed: list[int] = []
    crew = Crew(3, lambda _: passed.append(together.wait(TIMEOUT)))
    crew.give([1, 2, 3])
    crew.shutdown()
    assert sorted(passed) == [0, 1, 2]


def test_what_no_thread_has_begun_can_be_taken_back():
    entered, gate = threading.Event(), threading.Event()
    done: list[int] = []

    def work(number: int) -> None:
        entered.set()
        gate.wait(TIMEOUT)
        done.append(number)

    crew = Crew(1, work)
    crew.give([1, 2, 3])
    assert entered.wait(TIMEOUT)
    assert (crew.first(), crew.backlog()) == (2, 2)
    assert crew.take_back() == [2, 3]
    assert (crew.first(), crew.backlog()) == (None, 0)
    gate.set()
    crew.shutdown()
    assert done == [1]


def test_an_idle_thread_keeps_nothing_alive():
    crew = Crew(1, lambda thing: None)
    crew.give([thing := Thing()])
    left = weakref.ref(thing)
    del thing
    wait_until(lambda: not gc.collect() and left() is None, "it is still held")
    crew.shutdown()


def test_shutdown_waits_for_what_runs_unless_told_not_to():
    before = set(threading.enumerate())
    gate = threading.Event()
    crew = Crew(2, lambda _: gate.wait(TIMEOUT))
    crew.give([1])
    ours = set(threading.enumerate()) - before
    wait_until(lambda: not crew.backlog(), "nobody has begun")
    crew.shutdown(wait=False)
    wait_until(lambda: sum(t.is_alive() for t in ours) == 1, "the idle thread lives on")
    assert all(thread.daemon for thread in ours)
    waiting = run_in_thread(crew.shutdown)
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


def test_a_periodic_thread_can_be_poked():
    called = threading.Event()
    with Periodic(called.set, 3600, name="test-poked") as periodic:
        assert not called.is_set()
        periodic.poke()
        assert called.wait(TIMEOUT)


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
