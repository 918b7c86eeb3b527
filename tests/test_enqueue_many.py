"""Many jobs in one call: all or none."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from jobqueue import db
from jobqueue.enqueue import enqueue, enqueue_many
from jobqueue.exceptions import InvalidJob
from jobqueue.models import Job
from jobqueue.testing.factories import TASK
from tests.asserting import (
    exactly,
    fresh_connection,
    never_wait_for_locks,
    open_elsewhere,
    run,
    stored,
)
from tests.helpers import engine


@pytest.fixture(params=["many rows", "row by row"])
def insert(request: pytest.FixtureRequest, alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Insert as each engine can, and as MySQL must, which tells the id of one row only."""
    if request.param == "row by row":
        features = type(connections[alias].features)
        monkeypatch.setattr(features, "can_return_rows_from_bulk_insert", False)
        if alias != "postgresql":  # where Django has no other way to learn an id
            monkeypatch.setattr(features, "can_return_columns_from_insert", False)


def specs(count: int) -> Iterator[dict[str, Any]]:
    return ({"task": TASK, "args": [number]} for number in range(count))


@pytest.mark.timeout(120)
def test_ten_thousand_in_one_call(alias: str) -> None:
    with CaptureQueriesContext(connections[alias]) as queries:
        jobs = enqueue_many(specs(10_000))

    # Ten INSERTs, what begins and ends the transaction, and the clock; SQLite takes fewer values.
    assert len(queries) <= (13 if alias != "default" else 300)
    assert [job.args for job in jobs] == [[number] for number in range(10_000)]
    rows = dict(Job.objects.values_list("pk", "args"))
    assert rows == {job.pk: job.args for job in jobs}


def test_jobs_are_returned_as_they_are_stored(alias: str, insert: None) -> None:
    jobs = enqueue_many([{"task": TASK}, {"task": TASK, "run_after": 60, "unique_key": "k"}])
    for job in jobs:
        row = stored(job)
        assert {name: getattr(job, name) for name in row} == row
    assert [job.state for job in jobs] == ["waiting", "scheduled"]


def test_what_is_common_is_said_once(alias: str) -> None:
    jobs = enqueue_many(
        [{"args": [1]}, {"args": [2], "queue": "slow"}], task=TASK, queue="mail", priority=7
    )
    assert [(job.task, job.queue, job.priority) for job in jobs] == [
        (TASK, "mail", 7),
        (TASK, "slow", 7),
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_what_only_some_say_is_common_for_the_others(alias: str, insert: None, order: int) -> None:
    """Whatever the order in which it first comes up, and again once all of it has."""
    specs: list[dict[str, Any]] = [
        {},
        {"args": [1]},
        {"priority": 3, "run_after": None},
        {"run_after": 60, "kwargs": {"a": 1}},
        {"args": None, "queue": None, "priority": None},
    ]
    jobs = enqueue_many(2 * specs[::order], task=TASK, queue="mail", args=[0], run_after=60)
    assert [(job.args, job.kwargs, job.queue, job.priority, job.state) for job in jobs] == 2 * [
        ([0], {}, "mail", 0, "scheduled"),
        ([1], {}, "mail", 0, "scheduled"),
        ([0], {}, "mail", 3, "waiting"),
        ([0], {"a": 1}, "mail", 0, "scheduled"),
        ([], {}, "default", 0, "scheduled"),
    ][::order]
    for job in jobs:
        row = stored(job)
        assert {name: getattr(job, name) for name in row} == row


@pytest.mark.parametrize("options", [{}, {"args": [1], "run_after": 60}], ids=["least", "more"])
@pytest.mark.parametrize("count", [1, 3])
def test_jobs_may_be_all_alike(alias: str, count: int, options: dict[str, Any]) -> None:
    jobs = enqueue_many([{}] * count, task=TASK, **options)
    assert len({job.pk for job in jobs}) == len(jobs) == Job.objects.count() == count
    assert [job.args for job in jobs] == [options.get("args", [])] * count


def test_specs_are_read_as_they_come(alias: str) -> None:
    """A generator may hand out the same dictionary again and again, with other contents."""

    def again() -> Iterator[dict[str, Any]]:
        spec: dict[str, Any] = {"task": TASK, "args": [0]}
        for number in range(3):
            spec["args"][0] = number
            yield spec

    assert [job.args for job in enqueue_many(again())] == [[0], [1], [2]]


@pytest.mark.parametrize("none", [[], [None]], ids=["all", "all but one"])
def test_texts_are_stored_as_they_are(alias: str, none: list[None]) -> None:
    """Whatever an array's text would make of them."""
    texts = ["NULL", "", '"', "\\", '\\"', '","', "{a,b}", " x ", "\n\t", "%s", "\U0001f600", "'"]
    enqueue_many([{"task": TASK, "args": [text], "metadata": {text: 1}} for text in texts])
    enqueue_many([{"task": TASK, "unique_key": key} for key in [*filter(None, texts), *none]])
    keyless, keyed = Job.objects.order_by("pk")[: len(texts)], Job.objects.order_by("pk")
    assert [(job.args, job.metadata) for job in keyless] == [([text], {text: 1}) for text in texts]
    assert [job.unique_key for job in keyed[len(texts) :]] == [*filter(None, texts), *none]


def test_no_jobs_are_no_trouble(alias: str) -> None:
    assert enqueue_many([]) == []


def test_the_clock_is_read_once(alias: str) -> None:
    """So that jobs with one delay come due together, and none costs a query of its own."""
    with CaptureQueriesContext(connections[alias]) as queries:
        jobs = enqueue_many(specs(50), run_after=timedelta(minutes=1))
    assert len({job.run_after for job in jobs}) == 1
    assert len(queries) <= 4


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"task": TASK, "args": [{1}]},
            f"{TASK!r}: args[0] is a set, which JSON can't hold: {{1}}",
        ),
        ({"task": TASK, "timeout": 0}, f"{TASK!r}: timeout must be more than zero, not 0 seconds"),
        ({"task": "nodots"}, None),
        ({"args": [1]}, "a job needs a task: the dotted path of a callable"),
        ({"task": TASK, "arguments": [1], 7: 1}, "a job has no 'arguments', 7"),
        (TASK, f"it must be a mapping of enqueue's arguments, not {TASK!r}"),
        (None, "it must be a mapping of enqueue's arguments, not None"),
    ],
)
def test_one_bad_job_keeps_all_out_and_is_told_by_its_position(
    alias: str, spec: Any, message: str | None
) -> None:
    pattern = exactly(f"job 3: {message}") if message else r"^job 3: 'nodots': the task must be"
    queries = CaptureQueriesContext(connections[alias])
    with queries, pytest.raises(InvalidJob, match=pattern):
        enqueue_many([*specs(3), spec, *specs(3)])
    assert len(queries) == 0
    assert not Job.objects.exists()


def test_an_error_of_the_caller_s_own_iterator_keeps_all_out(alias: str) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield from specs(3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        enqueue_many(broken())
    assert not Job.objects.exists()


def test_a_bad_batch_size_writes_nothing(alias: str) -> None:
    with pytest.raises(
        InvalidJob, match=exactly("batch_size must be an integer from 1 to 10000, not 0")
    ):
        enqueue_many(specs(3), batch_size=0)
    assert not Job.objects.exists()


def test_a_key_that_is_taken_keeps_all_out(alias: str, insert: None) -> None:
    holder = enqueue(TASK, unique_key="b")
    before = stored(holder)
    keys = [{"task": TASK, "unique_key": key} for key in "abc"]

    with transaction.atomic(using=alias):
        with pytest.raises(InvalidJob, match=exactly("unique_key taken: 'b'")):
            enqueue_many(keys, batch_size=1)
        later = enqueue(TASK)  # the caller's transaction is as good as before

    assert set(Job.objects.values_list("pk", flat=True)) == {holder.pk, later.pk}
    assert stored(holder) == before


def test_a_key_that_comes_twice_keeps_all_out(alias: str, insert: None) -> None:
    keys = ["a", None, "b", "a", None, "b"]
    with pytest.raises(InvalidJob, match=exactly("unique_key taken: 'a', 'b'")):
        enqueue_many([{"task": TASK, "unique_key": key} for key in keys])
    assert not Job.objects.exists()


def test_of_many_taken_keys_ten_are_told(alias: str) -> None:
    keys = [{"task": TASK, "unique_key": f"k{number:02}"} for number in range(13)]
    enqueue_many(keys)
    told = ", ".join(repr(f"k{number:02}") for number in range(10))
    with pytest.raises(InvalidJob, match=exactly(f"unique_key taken: {told} and 3 more")):
        enqueue_many(keys)


def test_all_are_seen_by_others_at_once(alias: str) -> None:
    def seen_by_others() -> int:
        with fresh_connection(alias):
            return Job.objects.count()

    with transaction.atomic(using=alias):
        enqueue_many(specs(7), batch_size=2)
        assert seen_by_others() == 0
    assert seen_by_others() == 7


def test_they_go_when_the_caller_rolls_back(alias: str, insert: None) -> None:
    with transaction.atomic(using=alias):
        enqueue_many(specs(7))
        transaction.set_rollback(True, using=alias)
    assert not Job.objects.exists()


@pytest.mark.parametrize("alias", [engine("sqlite"), engine("postgresql")], indirect=True)
@pytest.mark.parametrize("count", [1, 3])
def test_a_passing_trouble_is_tried_again(
    alias: str, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Nobody can keep an INSERT into MariaDB waiting, but by its key."""

    def lock_all() -> None:
        enqueue(TASK)
        if alias == "postgresql":
            run(alias, "LOCK TABLE jobqueue_job IN EXCLUSIVE MODE")

    with fresh_connection(alias), open_elsewhere(alias, lock_all) as roll_back:
        never_wait_for_locks(alias)
        monkeypatch.setattr(db.trouble.time, "sleep", lambda wait: roll_back())
        jobs = [enqueue(TASK)] if count == 1 else enqueue_many(specs(count))
    assert set(Job.objects.values_list("pk", flat=True)) == {job.pk for job in jobs}
    assert len(jobs) == count


def test_times_are_the_database_s(alias: str, insert: None) -> None:
    now = db.now(alias)
    for job in enqueue_many(specs(3)):
        assert abs(job.run_after - now) < timedelta(seconds=5)
        assert abs(job.enqueued_at - now) < timedelta(seconds=5)
