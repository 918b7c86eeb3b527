"""One job, run: every way in which a handler can end has its outcome. No table is touched."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.utils import translation

from jobqueue.exceptions import JobQueueError
from jobqueue.lifecycle import Cancelled, Completed, Error, Failed, Outcome, Retry, Snoozed
from jobqueue.worker.context import JobContext, current_context
from jobqueue.worker.execute import describe, execute
from tests.helpers import run_in_thread
from tests.worker import handlers
from tests.worker.handlers import path


def run(task: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return the outcome of a job, run in a thread of its own."""
    task = task if isinstance(task, str) else path(task)
    job = SimpleNamespace(pk=7, task=task, args=list(args), kwargs=kwargs)
    context = JobContext(job_id=7, task=task, attempt=2, fencing_token=9)
    return run_in_thread(execute, job, context).result()


def message_of(outcome: Outcome) -> str:
    """Return the message of a failed attempt that is to be retried by the job's own backoff."""
    assert isinstance(outcome, Retry)
    assert outcome.delay is None
    return outcome.error.message


# -- Results


@pytest.mark.parametrize("value", [None, 0, "", [1, {"a": None}], 1.5, True])
def test_what_a_handler_returns_is_the_result(value):
    assert run(handlers.give, value) == Completed(value)


def test_arguments_go_by_position_and_by_name():
    assert run("jobqueue.testing.tasks.succeed", 1, b=2) == Completed(
        {"args": [1], "kwargs": {"b": 2}}
    )


@pytest.mark.parametrize(
    ("handler", "args", "message"),
    [
        (handlers.give_set, (), "ValueError: result is a set, which JSON can't hold: {1}"),
        (handlers.give, (float("nan"),), "ValueError: result is nan, which JSON can't hold"),
        (handlers.give, (["a\x00"],), "ValueError: result[0] contains a NUL character"),
        (handlers.give_text, (2_000_000,), "ValueError: result takes 2,000,002 bytes as JSON; "),
    ],
)
def test_a_result_that_cannot_be_stored_fails_the_attempt(handler, args, message):
    assert message_of(run(handler, *args)).startswith(message)


# -- Errors


def test_an_exception_is_a_failed_attempt_with_its_traceback():
    outcome = run(handlers.fail, "chain")
    assert message_of(outcome) == "ValueError: outer"
    traceback = outcome.error.traceback
    assert "KeyError: 'inner'" in traceback
    assert "The above exception was the direct cause" in traceback
    assert traceback.endswith("ValueError: outer\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("silent", "ValueError"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt"),
        ("generator", "GeneratorExit"),
        ("async cancel", "CancelledError"),
        ("unprintable", "Unprintable: (its message can't be shown)"),
        ("unprintable cancel", "Unprintable: (its message can't be shown)"),
    ],
)
def test_whatever_is_raised_fails_the_attempt_and_not_the_thread(name, message):
    """An outcome that never came would keep its slot and its job for ever."""
    assert message_of(run(handlers.fail, name)) == message


def test_an_error_without_traceback_can_be_described():
    assert describe(ValueError("no")) == Error("ValueError: no", "ValueError: no\n")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("tests.worker.missing.handler", "No module named 'tests.worker.missing'"),
        (f"{handlers.PREFIX}.missing", 'does not define a "missing" attribute/class'),
        (f"{handlers.PREFIX}.not_callable", "TypeError: 'int' object is not callable"),
    ],
)
def test_a_handler_that_cannot_be_imported_or_called_fails_the_attempt(task, message):
    assert message in message_of(run(task))


def test_a_handler_is_found_once_it_appears(tmp_path, monkeypatch):
    """A rolling deploy heals itself: a failed import is not remembered."""
    monkeypatch.syspath_prepend(tmp_path)
    assert "No module named 'appears_later'" in message_of(run("appears_later.handler"))
    (tmp_path / "appears_later.py").write_text("def handler(): return 'here'\n")
    monkeypatch.syspath_prepend(tmp_path)  # which lets the import system look again
    assert run("appears_later.handler") == Completed("here")
    sys.modules.pop("appears_later")


# -- Steering


@pytest.mark.parametrize(
    ("name", "outcome"),
    [("Snooze", Snoozed(timedelta(minutes=1))), ("Snooze 0", Snoozed(timedelta(0)))],
)
def test_snooze(name, outcome):
    assert run(handlers.fail, name) == outcome


@pytest.mark.parametrize(("name", "delay"), [("Retry", None), ("Retry in 7", timedelta(seconds=7))])
def test_retry_with_the_handlers_own_delay_or_the_jobs_backoff(name, delay):
    outcome = run(handlers.fail, name)
    assert isinstance(outcome, Retry)
    assert outcome.delay == delay
    assert outcome.error.message.startswith("Retry: ")


def test_fail_and_cancel_are_final():
    failed = run(handlers.fail, "Fail")
    assert isinstance(failed, Failed)
    assert failed.error.message == "Fail: broken"
    assert run(handlers.fail, "Cancel") == Cancelled("useless")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Snooze -1", "ValueError: delay must be zero or more, not -1 seconds"),
        ("Snooze nan", "ValueError: delay must be a finite number of seconds, not nan"),
        ("Snooze text", "ValueError: delay must be seconds or a timedelta, not '5'"),
        (
            "Snooze late",
            "ValueError: delay must be at most 36,500 days, not 40000 days, 0:00:00",
        ),
        ("Retry -1", "ValueError: delay must be zero or more, not -1 seconds"),
        ("Retry 1e300", "ValueError: delay must be a finite number of seconds, not 1e+300"),
    ],
)
def test_a_bad_delay_fails_the_attempt_and_shows_where_it_came_from(name, message):
    outcome = run(handlers.fail, name)
    assert message_of(outcome) == message
    assert "in _raise" in outcome.error.traceback


# -- Coroutines


def test_a_coroutine_is_run_to_its_end():
    assert run(handlers.tell_context_async).result[0] == 7
    assert message_of(run(handlers.fail_async)) == "ValueError: no"
    assert run("tests.worker.handlers.async_callable") == Completed("called")


# -- The context


def test_the_context_tells_of_this_execution():
    task = path(handlers.tell_context)
    assert run(handlers.tell_context) == Completed([7, task, 2, 9])


def test_there_is_no_context_outside_a_job():
    message = r"^current_context\(\) was called outside a running job$"
    with pytest.raises(JobQueueError, match=message):
        current_context()


def test_nothing_that_a_handler_sets_in_its_context_outlives_it():
    """Neither a language nor the job's own context is there for the thread's next job."""

    def two_jobs() -> tuple[Outcome, str | None]:
        job = SimpleNamespace(pk=7, task=path(handlers.activate_french), args=[], kwargs={})
        outcome = execute(job, JobContext(7, job.task, 1, 1))
        with pytest.raises(JobQueueError):
            current_context()
        return outcome, translation.get_language()

    assert run_in_thread(two_jobs).result() == (Completed(None), "en-us")
