"""Sleeping workers are woken once there is something to do, and never depend on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction

from jobqueue import broker, coordinator, db, transitions
from jobqueue.db import wake
from jobqueue.enqueue import enqueue, enqueue_many
from jobqueue.models import Worker
from jobqueue.testing.factories import JobFactory
from jobqueue.worker import loop
from tests.chaos.proxy import Proxy
from tests.helpers import TIMEOUT, engine, run_in_thread, wait_until
from tests.races.scenes import noticing_errors
from tests.worker import handlers
from tests.worker.tools import running_worker

pytestmark = pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
TASK = handlers.path(handlers.note)


@pytest.fixture(autouse=True)
def notifying(settings: Any) -> Iterator[None]:
    settings.JOBQUEUE = {**settings.JOBQUEUE, "NOTIFY": True}
    wake._last_sent.clear()
    yield
    handlers.reset()


class Ears:
    """A listener that keeps what it hears."""

    def __init__(self, alias: str) -> None:
        self.beginnings = 0
        self.words: list[str] = []
        self.troubles: list[Exception] = []
        self.listener = db.Listener(
            alias, ready=self._begin, hear=self.words.append, trouble=self.troubles.append
        )

    def _begin(self) -> None:
        self.beginnings += 1

    def expect(self, *words: str) -> None:
        wait_until(lambda: len(self.words) >= len(words), f"heard only {self.words}")
        assert self.words == list(words)

    def is_listening(self, alias: str) -> bool:
        """Whether a word of the test's own comes through."""
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, 'test')", [wake.CHANNEL])
        return "test" in self.words


@pytest.fixture
def ears(alias: str) -> Iterator[Ears]:
    heard = Ears(alias)
    with heard.listener:
        wait_until(lambda: heard.is_listening(alias), "it hears nothing")
        speak(alias)  # after whatever was said before
        wait_until(lambda: "end" in heard.words, "it hears nothing")
        heard.words.clear()
        yield heard


def speak(alias: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, 'end')", [wake.CHANNEL])


# -- What is said


def test_a_committed_job_is_announced(alias, ears):
    with transaction.atomic(using=alias):
        enqueue(TASK)
        enqueue(TASK, queue="mail")
        enqueue_many([{"task": TASK}, {"task": TASK}], queue="many")
        assert ears.words == []
    ears.expect("work in default", "work in mail", "work in many")


def test_a_job_that_was_rolled_back_is_not(alias, ears):
    with transaction.atomic(using=alias):
        enqueue(TASK)
        transaction.set_rollback(True, using=alias)
    speak(alias)
    ears.expect("end")


def test_of_many_words_in_a_moment_one_is_sent(alias, ears, monkeypatch):
    monkeypatch.setattr(wake, "COALESCE", 60.0)
    for _ in range(5):
        enqueue(TASK)
    speak(alias)
    ears.expect("work in default", "end")


def test_words_are_not_remembered_for_ever(alias, monkeypatch):
    """Each cancel request has one of its own."""
    monkeypatch.setattr(wake, "REMEMBERED", 3)
    for number in range(10):
        enqueue(TASK, queue=f"q{number}")
    assert len(wake._last_sent) <= 4


def test_jobs_that_wait_again_are_announced(alias, ears):
    transitions.release(JobFactory(running=True, queue="a"), actor="operator")
    transitions.retry(JobFactory(running=True, queue="b"), "no", 0)
    coordinator.rerun(JobFactory(failed=True, queue="c").pk, actor="operator")
    transitions.retry(JobFactory(running=True, queue="d"), "no", 60)
    speak(alias)
    ears.expect("work in a", "work in b", "work in c", "end")


def test_a_job_that_moves_to_another_queue_is_announced_there(alias, ears):
    job = JobFactory()
    transitions.edit(job, {"queue": "mail"}, actor="ann")
    speak(alias)
    ears.expect("work in mail", "end")


def test_a_cancel_request_is_announced(alias, ears):
    job = JobFactory(running=True)
    coordinator.cancel(job.pk, actor="operator")
    ears.expect(f"stop {job.pk}")


def test_nothing_is_said_where_that_is_switched_off(alias, ears, settings):
    settings.JOBQUEUE = {"NOTIFY": False}
    enqueue(TASK)
    speak(alias)
    ears.expect("end")


def test_trouble_at_a_word_does_not_reach_the_caller(alias, monkeypatch):
    """The job is committed; a poll will find it."""
    monkeypatch.setattr(wake, "CHANNEL", "x" * 100)  # too long a name for the server
    with noticing_errors(alias) as met:
        job = enqueue(TASK)
    assert len(met) == 1
    job.refresh_from_db()


def test_who_commits_by_hand_is_not_bothered(alias, ears):
    """There is no hook for it, and a poll will find the job."""
    transaction.set_autocommit(False, using=alias)
    try:
        enqueue(TASK)
        transaction.commit(using=alias)
    finally:
        transaction.set_autocommit(True, using=alias)
    speak(alias)
    ears.expect("end")


# -- Who hears it


def test_an_idle_worker_is_woken(alias):
    """django-q#238: no poll is waited for."""
    with running_worker(alias, poll=3600, lease=7200):
        wait_until(Worker.objects.exists, "the worker does not start")
        wait_until(lambda: listening(alias), "nobody listens")
        enqueue(TASK, ["woken"])
        wait_until(lambda: handlers.seen == ["woken"], "the worker sleeps on")


def test_a_job_that_was_not_announced_is_found_shortly_after_one_that_was(alias, monkeypatch):
    monkeypatch.setattr(wake, "COALESCE", 3600.0)
    with running_worker(alias, poll=3600, lease=7200):
        wait_until(lambda: listening(alias), "nobody listens")
        enqueue(TASK, ["first"])
        enqueue(TASK, ["second"])
        wait_until(lambda: handlers.seen == ["first", "second"], "the worker sleeps on")


def test_a_scheduled_job_is_run_when_it_is_due(alias):
    """Precisely, and not at the next poll."""
    enqueue(TASK, ["due"], run_after=timedelta(seconds=0.3))
    with running_worker(alias, poll=3600, lease=7200):
        wait_until(lambda: handlers.seen == ["due"], "the worker sleeps on")


def test_a_cancel_request_reaches_the_handler_at_once(alias):
    job = enqueue(handlers.path(handlers.hold))
    with running_worker(alias, poll=3600, lease=7200):
        context = handlers.gate().wait_until_entered()
        wait_until(lambda: listening(alias), "nobody listens")
        coordinator.cancel(job.pk, actor="operator")
        wait_until(lambda: context.cancelled, "the handler is not told")


def test_a_worker_without_notify_does_not_listen(alias):
    with running_worker(alias, notify=False):
        wait_until(Worker.objects.exists, "the worker does not start")
        assert not listening(alias)


# -- The connection


def listening(alias: str) -> list[int]:
    """Return the sessions that listen."""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE query = %s", [f"LISTEN {wake.CHANNEL}"]
        )
        return [pid for (pid,) in cursor.fetchall()]


def break_connection(alias: str) -> None:
    (pid,) = listening(alias)
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s)", [pid])


def test_a_broken_connection_is_opened_anew(alias, ears, monkeypatch):
    """taskforcesh/bullmq#4729."""
    monkeypatch.setattr(wake, "FIRST_WAIT", 0.01)
    break_connection(alias)
    wait_until(lambda: ears.troubles, "nobody notices")
    wait_until(lambda: ears.is_listening(alias), "it hears nothing any more")
    assert ears.beginnings == 2


def test_what_was_said_while_nobody_listened_is_found_without_a_poll(alias, settings, monkeypatch):
    """taskforcesh/bullmq#4729: the worker looks for itself as soon as it listens again."""
    monkeypatch.setattr(wake, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(loop, "LOOK_AGAIN", 3600.0)
    found = spy_on_claims(monkeypatch)
    with running_worker(alias, poll=3600, lease=7200):
        wait_until(lambda: listening(alias), "nobody listens")
        enqueue(TASK, ["heard"])
        wait_until(lambda: sum(found) and not found[-1], "the worker sleeps on")
        settings.JOBQUEUE = {**settings.JOBQUEUE, "NOTIFY": False}  # as if nobody had heard it
        enqueue(TASK, ["unheard"])
        break_connection(alias)
        wait_until(lambda: sum(found) == 2, "the worker sleeps on")


def test_a_cancel_request_that_went_unheard_reaches_the_handler(alias, settings, monkeypatch):
    monkeypatch.setattr(wake, "FIRST_WAIT", 0.01)
    job = enqueue(handlers.path(handlers.hold))
    with running_worker(alias, poll=3600, lease=7200):
        context = handlers.gate().wait_until_entered()
        wait_until(lambda: listening(alias), "nobody listens")
        settings.JOBQUEUE = {**settings.JOBQUEUE, "NOTIFY": False}
        coordinator.cancel(job.pk, actor="operator")
        break_connection(alias)
        wait_until(lambda: context.cancelled, "the handler is not told")


def spy_on_claims(monkeypatch) -> list[int]:
    """Return the numbers of jobs found by claims, which grows with each."""
    found: list[int] = []
    claim = broker.claim

    def noting(*args: Any, **kwargs: Any) -> Any:
        jobs = claim(*args, **kwargs)
        found.append(len(jobs))
        return jobs

    monkeypatch.setattr(broker, "claim", noting)
    return found


def test_a_connection_that_is_open_at_this_end_alone_is_given_up(alias, monkeypatch):
    """timgit/pg-boss#850: nothing fails, and nothing comes either."""
    monkeypatch.setattr(wake, "CHECK_EVERY", 0.05)
    monkeypatch.setattr(wake, "ANSWER_PATIENCE", 0.2)
    monkeypatch.setattr(wake, "FIRST_WAIT", 0.01)
    connections[alias].ensure_connection()  # the test's own goes past the proxy
    ours = connections[alias].settings_dict
    with Proxy(socket_of(ours)) as proxy:
        monkeypatch.setitem(ours, "HOST", "127.0.0.1")
        monkeypatch.setitem(ours, "PORT", str(proxy.port))
        ears = Ears(alias)
        with ears.listener:
            wait_until(lambda: ears.is_listening(alias), "it hears nothing")
            proxy.stall()
            wait_until(lambda: ears.troubles, "nobody notices")
            assert str(ears.troubles[0]) == "no answer within 0.2 s"
            proxy.flow()
            wait_until(lambda: ears.beginnings == 2, "it does not begin anew")


def socket_of(settings: Mapping[str, Any]) -> Path:
    return Path(settings["HOST"]) / f".s.PGSQL.{settings['PORT'] or 5432}"


def test_a_silent_connection_is_asked_whether_it_lives(alias, monkeypatch):
    monkeypatch.setattr(wake, "CHECK_EVERY", 0.05)
    ears = Ears(alias)
    with ears.listener:
        wait_until(lambda: listening(alias) == [] and ears.is_listening(alias), "it never asks")


def test_a_listener_ends_at_once(alias, monkeypatch):
    monkeypatch.setattr(wake, "CHECK_EVERY", TIMEOUT)
    ears = Ears(alias)
    with ears.listener:
        wait_until(lambda: listening(alias), "nobody listens")
    assert not [t for t in threading.enumerate() if t.name == "jobqueue-listener"]
    assert ears.troubles == []


def test_a_listener_that_cannot_connect_ends_as_well(alias, monkeypatch):
    monkeypatch.setattr(wake, "FIRST_WAIT", 3600.0)
    ears = Ears(alias)

    def refuse(self: Any) -> None:
        raise OSError("nobody there")

    monkeypatch.setattr(db.Listener, "_connect", refuse)
    with ears.listener:
        wait_until(lambda: ears.troubles, "nobody notices")
    assert str(ears.troubles[0]) == "nobody there"


def test_words_are_heard_while_others_are_said(alias, ears):
    """The listener's connection is its own, so nothing else waits for it."""
    saying = [run_in_thread(enqueue, TASK, queue=f"q{number}") for number in range(4)]
    for each in saying:
        each.result()
    wait_until(lambda: len(ears.words) == 4, "some are missing")
    assert sorted(ears.words) == [f"work in q{number}" for number in range(4)]
