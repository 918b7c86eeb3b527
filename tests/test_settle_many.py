"""Many outcomes in one transaction: each is applied, already applied or in conflict."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from functools import partial

import pytest
from django.db import connections, router, transaction
from django.test.utils import CaptureQueriesContext

from jobqueue import db, fence, signals, transitions
from jobqueue.exceptions import InvalidJob, TransitionNotAllowed
from jobqueue.lifecycle import (
    Cancelled,
    Completed,
    Error,
    Failed,
    Released,
    Retry,
    Settled,
    Snoozed,
)
from jobqueue.models import EventKind, Job, JobEvent
from jobqueue.testing.factories import JobFactory
from tests.helpers import first_part, run_in_thread, wait_until_blocked
from tests.mutation.batches import FORMS, three
from tests.mutation.killers import clock_standing_still
from tests.races.scenes import (
    hearing,
    job_in,
    lock,
    row,
    settle_all,
    take_over,
)


def test_empty_batch(alias):
    with CaptureQueriesContext(connections[alias]) as queries:
        assert transitions.settle_many([]) == []
    assert len(queries) == 0


def test_results_come_in_the_order_of_the_items(alias):
    """Whatever the order of ids; each with the job as it now is, or the conflict."""
    jobs = JobFactory.create_batch(5, running=True)
    transitions.complete(jobs[1], "once")
    transitions.cancel(jobs[3], actor="operator")
    items = [(job, Completed("once")) for job in reversed(jobs)]
    results = transitions.settle_many(iter(items))
    assert [result.job_id for result in results] == [job.pk for job, _ in items]
    assert [result.status for result in results] == [
        Settled.APPLIED,
        Settled.CONFLICT,
        Settled.APPLIED,
        Settled.ALREADY_APPLIED,
        Settled.APPLIED,
    ]
    for result in results:
        if result.status == Settled.CONFLICT:
            assert (result.job, result.conflict.verb) == (None, "complete")
        else:
            assert (result.job.state, result.conflict) == ("completed", None)
            assert result.job.fingerprint == Job.objects.get(pk=result.job_id).fingerprint


def test_one_job_twice_in_a_batch(alias):
    """The first of its outcomes counts."""
    job = job_in("running")
    results = transitions.settle_many([(job, Failed(Error("a"))), (job, Completed())])
    assert [result.status for result in results] == ["applied", "conflict"]
    assert row(job)["state"] == "failed"


def test_one_completion_twice_in_a_batch(alias):
    """Told twice, by items that are written as one: the second finds the first's trace."""
    job, other = job_in("running"), job_in("running")
    results = transitions.settle_many([(each, Completed()) for each in (job, other, job)])
    assert [result.status for result in results] == ["applied", "applied", "already applied"]
    assert (row(job)["version"], row(other)["version"]) == (3, 3)


@pytest.mark.parametrize("bad", [Completed({"a": float("nan")}), "wrong state"])
def test_one_bad_item_keeps_the_whole_batch_out(alias, bad):
    """It is found before the first write, so that none of the others is half told."""
    job = job_in("running")
    item = (job_in("completed"), Completed()) if bad == "wrong state" else (job_in("running"), bad)
    with (
        CaptureQueriesContext(connections[alias]) as queries,
        pytest.raises(TransitionNotAllowed if bad == "wrong state" else InvalidJob),
    ):
        transitions.settle_many([(job, Completed()), item])
    assert not [q for q in queries if first_part(q["sql"]).startswith(("UPDATE", "INSERT"))]
    assert row(job)["state"] == "running"


def test_events_of_a_batch_are_written_in_one_statement(alias):
    """And its updates in one transaction."""
    jobs = JobFactory.create_batch(20, running=True)
    with CaptureQueriesContext(connections[alias]) as queries:
        transitions.settle_many([(job, Retry(Error("no"))) for job in jobs])
    inserts = [q for q in queries if "INSERT INTO" in q["sql"]]
    assert (len(inserts), JobEvent.objects.filter(kind=EventKind.RETRIED).count()) == (1, 20)


def test_batch_in_a_callers_transaction_ends_with_it(alias):
    """Rolled back with the rest, and told only once it is committed."""
    jobs = JobFactory.create_batch(2, running=True)
    items = [(job, Completed()) for job in jobs]
    with hearing(signals.job_transitioned) as heard:
        with transaction.atomic(using=alias):
            transitions.settle_many(items)
            transaction.set_rollback(True, using=alias)
        assert {row(job)["state"] for job in jobs} == {"running"}
        assert heard == []
        with transaction.atomic(using=alias):
            transitions.settle_many(items)
            assert heard == []
    assert len(heard) == 2


def test_a_job_that_is_there_twice_is_settled_once(alias):
    """Also where the batch is one statement: the second is told that it comes too late."""
    job = JobFactory(running=True)
    items = [(job, Completed("first")), (job, Failed(Error("second")))]
    results = transitions.settle_many(items)
    assert [result.status for result in results] == [Settled.APPLIED, Settled.CONFLICT]
    job.refresh_from_db()
    assert (job.result, job.version) == ("first", results[0].job.version)


# -- Where the batch is one statement, it is as right as one for each


def updates(queries):
    """Return those of the statements that wrote jobs."""
    return [query for query in queries if first_part(query["sql"]).startswith("UPDATE")]


WINNERS = {
    "cancelled": lambda job: transitions.cancel(job, actor="operator"),
    "run again by another": take_over,
    "run again by its worker": lambda job: take_over(job, job.claimed_by),
}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("result", [None, "late"])
@pytest.mark.parametrize("winner", WINNERS)
@pytest.mark.parametrize("form", FORMS)
def test_row_that_moves_while_its_batch_waits_is_in_conflict(alias, form, winner, result, place):
    """And the two others are applied: what is waited for is compared again, each by itself."""
    jobs = three(alias, form)
    with transaction.atomic(using=alias):
        lock(jobs[place])
        late = run_in_thread(settle_all, jobs, Completed(result))
        wait_until_blocked(alias)
        WINNERS[winner](jobs[place])
        written = row(jobs[place])
    assert late.result() == ["conflict" if n == place else "applied" for n in range(3)]
    assert row(jobs[place]) == written
    others = [row(job) for n, job in enumerate(jobs) if n != place]
    assert [(other["state"], other["result"]) for other in others] == [("completed", result)] * 2


RESULTS = (
    *(True, False, 1, 0, 1.0, -1, 0.5, 2**53, None),
    *("text", "", "1", "null", "NULL", "{a,b}", '"\\', "caf\u00e9 \u2603"),
    *([], [[]], {}, [None, True, 1], {"a": {"b": [1, {"c": None}]}, "": "{}"}),
)
SAME_IN_PYTHON = [
    *itertools.permutations((True, 1, 1.0), 2),
    *itertools.permutations((False, 0), 2),
]


def as_json(value):
    """Tell apart what is equal in Python."""
    return json.dumps(value, sort_keys=True)


@pytest.mark.parametrize(
    "results",
    [RESULTS, *SAME_IN_PYTHON, *([result] * 2 for result in RESULTS)],
    ids=lambda results: "all" if results is RESULTS else as_json(results),
)
def test_each_result_is_stored_as_it_is(alias, results):
    """``True == 1 == 1.0`` in Python, and yet they are three values of JSON; NULL is none."""
    now = db.now(alias)
    jobs = JobFactory.create_batch(
        len(results), running=True, claimed_at=now, attempted_at=now, result="old"
    )
    items = [(job, Completed(result)) for job, result in zip(jobs, results, strict=True)]
    with CaptureQueriesContext(connections[alias]) as queries:
        transitions.settle_many(items)
    assert len(updates(queries)) == (1 if db.has_batches(alias) else len(results))
    stored = [row(job)["result"] for job in jobs]
    assert [as_json(result) for result in stored] == [as_json(result) for result in results]
    nulls = Job.objects.filter(result__isnull=True).values_list("pk", flat=True)
    assert set(nulls) == {job.pk for job, outcome in items if outcome.result is None}


MINUTE = timedelta(seconds=60)
ENDS = {
    "running": (
        *(Completed("one"), Completed({"two": [2]}), Completed()),
        *(Failed(Error("no", "a traceback")), Failed(Error("never"))),
        *(Retry(Error("no"), MINUTE), Retry(Error("once more"), 2 * MINUTE)),
        *(Retry(Error("at once"), timedelta()), Snoozed(MINUTE), Snoozed(2 * MINUTE)),
        *(Released("shutdown"), Released(), Cancelled("as asked"), Cancelled()),
    ),
    "claimed": (Released("shutdown"), Released(), Cancelled("not needed")),
    "waiting": (Cancelled("not needed"), Cancelled()),
}


def settled(items, **by):
    """Settle, and tell what became of each."""
    return [(result.status, result.state) for result in transitions.settle_many(items, **by)]


def rescued(items):
    """Do that as a sweep, which counts."""
    jobs = [(db.Alike(job, [job.pk]), outcome) for job, outcome in items]
    using = router.db_for_write(Job)
    rescued = fence.rescue(jobs, db.now(using), "sweep", using)
    states = {job_id: state for _, state, ids in rescued for job_id in ids}
    return [
        ("applied", states[job.pk]) if job.pk in states else ("conflict", None) for job, _ in items
    ]


WRITERS = {
    "owner": settled,
    "operator": partial(settled, actor="ann"),
    "sweep": rescued,
}


def all_ends(alias):
    """Return a job for each outcome, with a cancel request and without, and with no try left."""
    now = db.now(alias)
    claim = {"claimed_at": now - MINUTE}
    run = claim | {"attempted_at": now - MINUTE, "attempt": 3, "excused": 1, "max_attempts": 9}
    columns = {
        "running": [run, run | {"cancel_requested_at": now}, run | {"max_attempts": 2}],
        "claimed": [claim],
        "waiting": [{}],
    }
    return [
        (job_in(state, **lived), outcome)
        for state, outcomes in ENDS.items()
        for lived in columns[state]
        for outcome in outcomes
    ]


def written_by(alias, settle):
    """Settle, undo it, and return what was told, and the rows and the history that it left."""
    with transaction.atomic(using=alias):
        told = settle()
        rows = list(Job.objects.order_by("pk").values())
        fields = [
            field.attname for field in JobEvent._meta.fields if field.name not in ("id", "at")
        ]
        history = list(JobEvent.objects.order_by("job_id", "pk").values(*fields))
        transaction.set_rollback(True, using=alias)
    return told, rows, history


@pytest.mark.parametrize("writer", WRITERS)
def test_batch_of_all_outcomes_ends_as_one_by_one(alias, writer):
    """Every column, every event and every answer; two of the items come too late."""
    items = all_ends(alias)
    (moved, _), (done, outcome), *_ = items
    transitions.cancel(moved, actor="operator")
    transitions.settle_many([(done, outcome)])
    items.reverse()
    settle = WRITERS[writer]
    with clock_standing_still(alias):
        alone = written_by(alias, lambda: [settle([item])[0] for item in items])
        with CaptureQueriesContext(connections[alias]) as queries:
            together = written_by(alias, lambda: settle(items))
    assert together == alone
    assert (len(updates(queries)) < len(items) / 2) == db.has_batches(alias)
    states = {state for _, state in alone[0]}
    assert states >= {"completed", "failed", "scheduled", "waiting", "cancelled", None}
