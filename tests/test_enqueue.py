"""The birth of a job: in the caller's transaction, by the database's clock, checked first."""

from __future__ import annotations

import enum
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.models.signals import post_save
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from jobqueue import db
from jobqueue.backoff import Backoff
from jobqueue.claim import claim_jobs
from jobqueue.enqueue import enqueue, enqueue_many
from jobqueue.exceptions import InvalidJob
from jobqueue.models import Job, JobEvent
from jobqueue.testing.factories import TASK, WorkerFactory
from tests.asserting import HostAhead, exactly, fresh_connection, servers_only, stored

MINUTE = timedelta(minutes=1)
LOCAL = timezone(timedelta(hours=9))


class Choice(str, enum.Enum):  # noqa: UP042  (not StrEnum: str() gives another text)
    MAIL = "mail"


def close(one: datetime, other: datetime) -> bool:
    return abs(one - other) < timedelta(seconds=5)


# -- what is stored


def test_djangos_own_signals_tell_of_no_birth_on_postgresql(alias: str) -> None:
    """As the page on signals says."""
    heard: list[str] = []

    def hear(instance: Job, **kwargs: Any) -> None:
        heard.append(instance.task)

    post_save.connect(hear, sender=Job)
    try:
        enqueue(TASK)
        enqueue_many([{"task": TASK}] * 2)
    finally:
        post_save.disconnect(hear, sender=Job)
    assert heard == ([] if alias == "postgresql" else [TASK])


def test_a_job_has_the_defaults_of_the_settings(alias: str) -> None:
    job = enqueue(TASK)

    row = stored(job)
    assert close(row.pop("run_after"), db.now(alias))
    assert close(row.pop("enqueued_at"), db.now(alias))
    assert row == {
        "id": job.pk,
        "queue": "default",
        "task": TASK,
        "args": [],
        "kwargs": {},
        "priority": 0,
        "state": "waiting",
        "attempt": 0,
        "max_attempts": 5,
        "excused": 0,
        "backoff": Backoff().as_dict(),
        "timeout": None,
        "version": 0,
        "progress": 0,
        "progress_note": "",
        "workspace": "",
        "metadata": {},
        **dict.fromkeys(("claimed_by", "claimed_at", "attempted_at", "settled_version")),
        **dict.fromkeys(("finished_at", "result", "checkpoint", "cancel_requested_at")),
        "unique_key": None,
    }
    assert not JobEvent.objects.exists()


def test_every_argument_is_stored_and_returned(alias: str) -> None:
    job = enqueue(
        TASK,
        (1, ("two",)),
        {"three": {"four": 4.5}},
        queue="mail",
        priority=-100,
        run_after=MINUTE,
        max_attempts=1,
        backoff=Backoff(base=1, cap=2),
        timeout=1.5,
        unique_key="k",
        workspace="acme",
        metadata={"by": "me"},
    )

    row = stored(job)
    assert (row["args"], row["kwargs"]) == ([1, ["two"]], {"three": {"four": 4.5}})
    assert (row["queue"], row["priority"], row["state"]) == ("mail", -100, "scheduled")
    assert (row["max_attempts"], row["timeout"]) == (1, timedelta(seconds=1.5))
    assert row["backoff"] == Backoff(base=1, cap=2).as_dict()
    assert (row["unique_key"], row["workspace"], row["metadata"]) == ("k", "acme", {"by": "me"})
    assert {name: getattr(job, name) for name in row} == row


def test_the_policy_is_copied_onto_the_row(alias: str) -> None:
    """So that a sweep, or a worker with other settings, goes by what was asked for."""
    policy = {"MAX_ATTEMPTS": 2, "BACKOFF": {"base": 9}, "TIMEOUT": 7}
    with override_settings(JOBQUEUE=policy):
        row = stored(enqueue(TASK))
    assert (row["max_attempts"], row["timeout"]) == (2, timedelta(seconds=7))
    assert row["backoff"] == Backoff(base=9).as_dict()


def test_members_of_enumerations_are_stored_as_their_values(alias: str) -> None:
    job = enqueue(
        TASK, queue=Choice.MAIL, unique_key=Choice.MAIL, workspace=Choice.MAIL, args=[Choice.MAIL]
    )
    for seen in (job, Job.objects.get()):
        texts = [seen.queue, seen.unique_key, seen.workspace, *seen.args]
        assert [(text, type(text)) for text in texts] == [("mail", str)] * 4


@pytest.mark.parametrize("options", [{}, {"queue": "mail", "args": [1]}], ids=["least", "more"])
def test_one_statement_is_all(alias: str, options: dict[str, Any]) -> None:
    with CaptureQueriesContext(connections[alias]) as queries:
        enqueue(TASK, **options)
    assert len(queries) == 1


def test_what_the_database_gave_is_returned_exactly(alias: str) -> None:
    for _ in range(20):
        job = enqueue(TASK)
        row = stored(job)
        assert {name: getattr(job, name) for name in row} == row
        assert job.run_after.tzinfo is not None


# -- times


@pytest.mark.parametrize("delay", [60, 60.0, MINUTE], ids=repr)
def test_a_delay_is_from_now(alias: str, delay: Any) -> None:
    job = enqueue(TASK, run_after=delay)
    assert job.state == "scheduled"
    assert close(stored(job)["run_after"], db.now(alias) + MINUTE)


@pytest.mark.parametrize("delay", [0, timedelta(0)], ids=repr)
def test_no_delay_is_waiting(alias: str, delay: Any) -> None:
    assert enqueue(TASK, run_after=delay).state == "waiting"


def test_a_time_is_kept_whatever_its_zone(alias: str) -> None:
    job = enqueue(TASK, run_after=db.now(alias).astimezone(LOCAL) + MINUTE)
    past = enqueue(TASK, run_after=datetime(2001, 1, 1, 3, 30, 0, 123456, tzinfo=LOCAL))
    assert (job.state, past.state) == ("scheduled", "waiting")
    assert close(stored(job)["run_after"], db.now(alias) + MINUTE)
    assert stored(past)["run_after"] == datetime(2000, 12, 31, 18, 30, 0, 123456, tzinfo=UTC)


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/Los_Angeles"])
def test_without_use_tz_times_are_naive_and_local(alias: str, zone: str) -> None:
    """oxpull/django-ox#16 (USE_TZ): a fresh job is due now, one with a delay later."""
    with override_settings(USE_TZ=False, TIME_ZONE=zone):
        now = db.now(alias)
        fresh = enqueue(TASK)
        exact = enqueue(TASK, run_after=now + MINUTE)
        WorkerFactory(id="w")

        assert close(stored(fresh)["run_after"], now)
        assert (exact.state, stored(exact)["run_after"]) == ("scheduled", now + MINUTE)
        assert [job.pk for job in claim_jobs("w", ["default"], 9)] == [fresh.pk]
    with override_settings(USE_TZ=False), pytest.raises(InvalidJob) as refused:
        enqueue(TASK, run_after=datetime(2026, 1, 1, tzinfo=UTC))
    assert str(refused.value) == (
        f"{TASK!r}: run_after must be naive, without USE_TZ: 2026-01-01T00:00:00+00:00"
    )


def test_run_now_is_due_now(alias: str) -> None:
    """microsoft/MLOS#775: a time that is rounded up is not due at the next poll."""
    WorkerFactory(id="w")
    for options in [{}, {"run_after": 0}] * 15:
        job = enqueue(TASK, **options)
        assert [claimed.pk for claimed in claim_jobs("w", ["default"], 9)] == [job.pk]


@servers_only
def test_the_host_s_clock_is_not_asked(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """earendil-works/absurd#122: one clock for writing and for checking what is due."""
    now = db.now(alias)
    HostAhead.install(monkeypatch)
    assert close(stored(enqueue(TASK, run_after=60))["run_after"], now + MINUTE)
    assert close(stored(enqueue(TASK))["run_after"], now)
    assert enqueue(TASK, run_after=now + MINUTE).state == "scheduled"


# -- the caller's transaction


def seen_by_others(alias: str) -> int:
    with fresh_connection(alias):
        return Job.objects.count()


def test_a_job_is_seen_by_others_once_the_caller_commits(alias: str) -> None:
    with transaction.atomic(using=alias):
        enqueue(TASK)
        enqueue(TASK, unique_key="k")
        assert Job.objects.count() == 2
        assert seen_by_others(alias) == 0
    assert seen_by_others(alias) == 2


def test_a_job_goes_when_the_caller_rolls_back(alias: str) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=alias):  # noqa: PT012
        enqueue(TASK)
        raise ZeroDivisionError
    assert seen_by_others(alias) == 0


def test_a_savepoint_takes_only_its_own_jobs_with_it(alias: str) -> None:
    with transaction.atomic(using=alias):
        kept = enqueue(TASK)
        with pytest.raises(ZeroDivisionError), transaction.atomic(using=alias):  # noqa: PT012
            enqueue(TASK, unique_key="k")
            raise ZeroDivisionError
        later = enqueue(TASK, unique_key="k")
    assert list(Job.objects.order_by("pk").values_list("pk", flat=True)) == [kept.pk, later.pk]


def test_using_names_the_database(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOBQUEUE_TEST_ALIAS", "nowhere")
    job = enqueue(TASK, using=alias)
    assert job._state.db == alias
    assert Job.objects.using(alias).count() == 1


# -- bad input

CALLABLE = "the task must be the dotted path of a callable, at most 255 characters"
QUEUE = "queue must be 1 to 100 letters, digits or any of _ . : -, not"
PRIORITY = "priority must be an integer from -100 to 100, not"
FAR = "run_after must be within 36,500 days of now:"

BAD_TASKS: list[tuple[Any, str]] = [
    (None, "a job needs a task: the dotted path of a callable"),
    ("", "a job needs a task: the dotted path of a callable"),
    (7, f"7: {CALLABLE}"),
    (print, f"{print!r}: {CALLABLE}"),
    ("nodots", f"'nodots': {CALLABLE}"),
    ("a..b", f"'a..b': {CALLABLE}"),
    ("a.b\n", f"'a.b\\n': {CALLABLE}"),
    ("1a.b", f"'1a.b': {CALLABLE}"),
    ("a." * 127 + "ab", f"{'a.' * 127 + 'ab'!r}: {CALLABLE}"),
    ("nowhere.to_be", "'nowhere.to_be': the task can't be imported: No module named 'nowhere'"),
    (
        "jobqueue.testing.tasks.gone",
        "'jobqueue.testing.tasks.gone': the task can't be imported: "
        'Module "jobqueue.testing.tasks" does not define a "gone" attribute/class',
    ),
    (
        "jobqueue.testing.factories.TASK",
        f"'jobqueue.testing.factories.TASK': the task must be callable, not {TASK!r}",
    ),
]
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"args": "abc"}, "args must be a list or a tuple, not 'abc'"),
    ({"args": {"a": 1}}, "args must be a list or a tuple, not {'a': 1}"),
    ({"args": [1, float("nan")]}, "args[1] is nan, which JSON can't hold"),
    ({"args": [b"x"]}, "args[0] is a bytes, which JSON can't hold: b'x'"),
    ({"args": ["a\x00"]}, "args[0] contains a NUL character"),
    ({"args": [2**70]}, "args[0] is a number beyond 64 bits: of 71 bits"),
    (
        {"args": ["x" * 10_000_000]},
        "args takes 10,000,004 bytes as JSON; at most 1,048,576 are allowed "
        "(JOBQUEUE['MAX_PAYLOAD_BYTES']): store it elsewhere and pass a reference",
    ),
    ({"kwargs": [1]}, "kwargs must be a mapping, not [1]"),
    ({"kwargs": {1: 2}}, "kwargs has a key that is not a string: 1"),
    ({"kwargs": {"a": {"b": {1}}}}, "kwargs['a']['b'] is a set, which JSON can't hold: {1}"),
    ({"metadata": [1]}, "metadata must be a mapping, not [1]"),
    ({"metadata": {"a": float("inf")}}, "metadata['a'] is inf, which JSON can't hold"),
    ({"queue": ""}, f"{QUEUE} ''"),
    ({"queue": "a b"}, f"{QUEUE} 'a b'"),
    ({"queue": 7}, f"{QUEUE} 7"),
    ({"queue": "q" * 101}, f"{QUEUE} {'q' * 101!r}"),
    ({"priority": 101}, f"{PRIORITY} 101"),
    ({"priority": -101}, f"{PRIORITY} -101"),
    ({"priority": 1.0}, f"{PRIORITY} 1.0"),
    ({"priority": True}, f"{PRIORITY} True"),
    ({"run_after": -1}, "run_after must be zero or more, not -1 seconds"),
    ({"run_after": -MINUTE}, "run_after must be zero or more, not -60 seconds"),
    ({"run_after": float("nan")}, "run_after must be a finite number of seconds, not nan"),
    (
        {"run_after": "soon"},
        "run_after must be a datetime, seconds or a timedelta, not 'soon'",
    ),
    (
        {"run_after": date(2026, 1, 1)},
        "run_after must be a datetime, seconds or a timedelta, not datetime.date(2026, 1, 1)",
    ),
    (
        {"run_after": datetime(2026, 1, 1)},
        "run_after must have a time zone, since USE_TZ: 2026-01-01T00:00:00",
    ),
    (
        {"run_after": timedelta.max},
        "run_after must be at most 36,500 days, not 999999999 days, 23:59:59.999999",
    ),
    (
        {"run_after": datetime.max.replace(tzinfo=timezone(-timedelta(hours=1)))},
        f"{FAR} 9999-12-31 23:59:59.999999-01:00",
    ),
    ({"run_after": datetime.min.replace(tzinfo=LOCAL)}, f"{FAR} 0001-01-01 00:00:00+09:00"),
    ({"max_attempts": 0}, "max_attempts must be an integer from 1 to 10000, not 0"),
    ({"max_attempts": 10_001}, "max_attempts must be an integer from 1 to 10000, not 10001"),
    ({"backoff": -1}, "backoff base must be 0 to 31,536,000, not -1"),
    ({"backoff": {"bass": 1}}, "backoff has no figure 'bass'"),
    ({"timeout": 0}, "timeout must be more than zero, not 0 seconds"),
    ({"timeout": -1}, "timeout must be more than zero, not -1 seconds"),
    ({"timeout": "5"}, "timeout must be seconds or a timedelta, not '5'"),
    (
        {"timeout": timedelta.max},
        "timeout must be at most 36,500 days, not 999999999 days, 23:59:59.999999",
    ),
    ({"unique_key": ""}, "unique_key must not be empty"),
    ({"unique_key": 7}, "unique_key must be text of at most 255 characters: 7"),
    (
        {"unique_key": "k" * 256},
        f"unique_key must be text of at most 255 characters: {'k' * 256!r:.80}",
    ),
    ({"unique_key": "\x00"}, "unique_key contains a NUL character"),
    (
        {"workspace": "w" * 101},
        f"workspace must be text of at most 100 characters: {'w' * 101!r:.80}",
    ),
    (
        {"workspace": "\ud800"},
        "workspace contains a lone surrogate, which is not Unicode text",
    ),
]


@pytest.mark.parametrize(("task", "message"), BAD_TASKS)
def test_a_bad_task_is_refused(alias: str, task: Any, message: str) -> None:
    with pytest.raises(InvalidJob, match=exactly(message)):
        enqueue(task)
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    BAD_OPTIONS,
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_value_is_refused_by_name_and_nothing_is_written(
    alias: str, options: dict[str, Any], message: str
) -> None:
    with transaction.atomic(using=alias):
        with pytest.raises(InvalidJob, match=exactly(f"{TASK!r}: {message}")):
            enqueue(TASK, **options)
        kept = enqueue(TASK)  # the caller's transaction is as good as before
    assert [job.pk for job in Job.objects.all()] == [kept.pk]


def test_an_unknown_queue_is_refused(alias: str) -> None:
    with override_settings(JOBQUEUE={"QUEUES": ["mail", "slow"]}):
        assert enqueue(TASK, queue="mail").queue == "mail"
        message = f"{TASK!r}: there is no queue 'default' in JOBQUEUE['QUEUES']: mail, slow"
        with pytest.raises(InvalidJob, match=exactly(message)):
            enqueue(TASK)


def test_a_module_that_breaks_while_it_is_imported_is_told(
    alias: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobqueue_broken.py").write_text("raise RuntimeError('boom')")
    monkeypatch.syspath_prepend(tmp_path)
    message = "'jobqueue_broken.run': the task can't be imported: RuntimeError('boom')"
    with pytest.raises(InvalidJob, match=exactly(message)):
        enqueue("jobqueue_broken.run")


def test_a_producer_may_be_without_the_handlers(alias: str) -> None:
    with override_settings(JOBQUEUE={"VALIDATE_TASKS": False}):
        assert enqueue("nowhere.to_be").task == "nowhere.to_be"
        with pytest.raises(InvalidJob, match=exactly(f"'nodots': {CALLABLE}")):
            enqueue("nodots")
