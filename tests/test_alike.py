"""Rows that differ in their ids alone: read as one, and written as one."""

from __future__ import annotations

from datetime import timedelta
from itertools import chain

import pytest
from django.db import connections, transaction
from django.db.models import F, Value
from django.test.utils import CaptureQueriesContext

from jobqueue import db, fence, guards, signals
from jobqueue.db import Alike
from jobqueue.lifecycle import Error, Retry
from jobqueue.models import Job, JobEvent
from jobqueue.querysets import SWEPT_COLUMNS
from jobqueue.sweep import SweepReport, sweep_stale_jobs
from jobqueue.testing.factories import JobFactory, WorkerFactory
from tests.helpers import engine
from tests.races.scenes import hearing, job_in, row

MINUTE = timedelta(minutes=1)


def three_alike(alias, **columns):
    now = db.now(alias)
    times = {"claimed_at": now, "attempted_at": now, "claimed_by": "gone:1:1"}
    return JobFactory.create_batch(3, running=True, **times, **columns)


def pages(rows, size=10, columns=SWEPT_COLUMNS):
    return list(db.pages_alike(rows, columns, size))


# -- read


def test_rows_alike_are_one_with_all_their_ids(alias):
    jobs = three_alike(alias, timeout=MINUTE, backoff={"base": 5, "jitter": 0.5})
    ((found,),) = pages(Job.objects.all())
    assert list(found.ids) == [job.pk for job in jobs]
    assert found.row.pk == jobs[0].pk
    with CaptureQueriesContext(connections[alias]) as queries:
        values = [getattr(found.row, name) for name in SWEPT_COLUMNS]
    assert values == [getattr(Job.objects.get(pk=jobs[0].pk), name) for name in SWEPT_COLUMNS]
    assert len(queries) == 0


@pytest.mark.parametrize(
    "column",
    [
        {"state": "claimed"},
        {"attempt": 4},
        {"claimed_by": "other:1:1"},
        {"version": 9},
        {"excused": 1},
        {"max_attempts": 77},
        {"backoff": {"base": 1}},
        {"timeout": MINUTE},
        {"queue": "other"},
        {"task": "other.task"},
    ],
    ids=lambda column: next(iter(column)),
)
def test_one_column_tells_rows_apart(alias, column):
    first, other, last = three_alike(alias)
    Job.objects.filter(pk=other.pk).update(**column)
    (page,) = pages(Job.objects.all())
    assert sorted(list(found.ids) for found in page) == [[first.pk, last.pk], [other.pk]]


@pytest.mark.parametrize("size", [1, 3, 4])
def test_pages_are_in_the_order_of_ids_and_of_the_size_asked_for(alias, size):
    """However the groups lie among each other, no row is missed and none comes twice.

    Four pages are read at once, and once more it is asked whether there are others.
    """
    jobs = [job_in("running", queue=queue) for queue in "abaabbbcabbbba"]
    Job.objects.filter(pk=jobs[0].pk).update(progress=1)  # which moves it to the end of its table
    with CaptureQueriesContext(connections[alias]) as queries:
        found = pages(Job.objects.all(), size=size, columns=["queue"])
    ids = [sorted(job_id for alike in page for job_id in alike.ids) for page in found]
    assert ids == [[job.pk for job in jobs[at : at + size]] for at in range(0, len(jobs), size)]
    assert len(queries) == {1: 5, 3: 3, 4: 2}[size]
    queue_of = {job.pk: job.queue for job in jobs}
    for alike in chain.from_iterable(found):
        assert alike.row.pk == alike.ids[0]
        assert {queue_of[job_id] for job_id in alike.ids} == {alike.row.queue}


def test_no_rows_are_no_pages(alias):
    job_in("running")
    assert pages(Job.objects.filter(queue="none")) == []
    with CaptureQueriesContext(connections[alias]) as queries:
        assert pages(Job.objects.filter(queue__in=[])) == []
    assert len(queries) == 0


def test_some_of_them():
    assert Alike("row", [1, 2, 3]).only({3, 1, 9}) == ("row", [1, 3])


def test_a_sweep_tells_jobs_apart_by_the_whole_fence():
    assert set(guards.FINGERPRINT) <= set(SWEPT_COLUMNS)


# -- swept


def test_each_job_of_many_alike_draws_its_own_wait(alias):
    """Within the policy's bounds; so that jobs lost together do not come back together."""
    jobs = three_alike(alias, backoff={"base": 60, "factor": 1, "cap": 60, "jitter": 0.5})
    before = db.now(alias)
    assert sweep_stale_jobs().retried == 3
    times = {row(job)["run_after"] for job in jobs}
    assert len(times) == 3
    assert before + MINUTE / 2 <= min(times) <= max(times) <= db.now(alias) + MINUTE


def test_budgets_and_requests_of_jobs_that_were_begun_as_one(alias):
    """Each ends by its own, though a statement writes many of them."""
    kept, spent, asked = three_alike(alias)
    Job.objects.filter(pk=spent.pk).update(max_attempts=1)
    Job.objects.filter(pk=asked.pk).update(cancel_requested_at=db.now(alias))
    assert sweep_stale_jobs() == SweepReport(examined=3, retried=1, failed=1, cancelled=1)
    states = [row(job)["state"] for job in (kept, spent, asked)]
    assert states == ["scheduled", "failed", "cancelled"]
    kinds = JobEvent.objects.order_by("job_id").values_list("job_id", "kind", "version", "attempt")
    told = ["rescued", "failed", "cancelled"]
    assert list(kinds) == [
        (job.pk, kind, 2, 1) for job, kind in zip((kept, spent, asked), told, strict=True)
    ]


def test_each_of_many_alike_is_told(alias):
    """By a copy of its own, as it now is; a wait that the database drew is read when asked for."""
    jobs = three_alike(alias, backoff={"base": 60, "jitter": 0.5})
    with hearing(signals.job_transitioned) as heard:
        sweep_stale_jobs()
    told = sorted((heard["job"] for heard in heard), key=lambda job: job.pk)
    assert [job.fingerprint for job in told] == [
        Job.objects.get(pk=job.pk).fingerprint for job in jobs
    ]
    assert [job.run_after for job in told] == [row(job)["run_after"] for job in jobs]
    assert {(h["verb"], h["from_state"], h["actor"].split()[0]) for h in heard} == {
        ("retry", "running", "sweep")
    }


def test_wait_that_the_database_drew_is_not_what_the_job_said_before(alias):
    jobs = three_alike(alias, backoff={"base": 60, "jitter": 0.5})
    alike = Alike(jobs[0], [job.pk for job in jobs])
    with hearing(signals.job_transitioned) as heard:
        rescued = fence.rescue([(alike, Retry(Error("gone")))], db.now(alias), "ann", alias)
        assert [(state, len(ids)) for _, state, ids in rescued] in (
            [("scheduled", 3)],
            [("scheduled", 1)] * 3,
        )
    for told in heard:
        assert told["job"].run_after == row(told["job"])["run_after"] > jobs[0].run_after


def test_holders_are_asked_about_until_they_are_gone(alias):
    """Death is for ever: who is gone is asked about once, who lives at every page."""
    dead, alive = "gone:1:1", WorkerFactory().pk
    for claimed_by in [dead, alive] * 3:
        job_in("running", claimed_by=claimed_by)
    with CaptureQueriesContext(connections[alias]) as queries:
        assert sweep_stale_jobs(batch_size=2).retried == 3
    asked = [q["sql"] for q in queries if "jobqueue_worker" in q["sql"] and " IN (" in q["sql"]]
    assert [(dead in sql, alive in sql) for sql in asked] == [(True, True)] + [(False, True)] * 2


# -- written, where a statement writes many


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_companions_come_with_the_rows_that_are_met(alias):
    """One for each, with what is its own; none for a row that was not as it had to be."""
    first, moved, last = three_alike(alias)
    Job.objects.filter(pk=moved.pk).update(version=9)
    common = {"kind": "rescued", "attempt": 1, "from_state": "a", "to_state": "b", "version": 7}
    common["actor"] = "ann"
    each = {"message": ["one", "two", 'th"ree'], "detail": [{"n": 1}, {}, {"n": [3]}]}
    update = db.UpdateEach(
        Job.objects.filter(version=2),
        (),
        {"version": F("version") + 1},
        (),
        db.Companions(
            JobEvent, "job_id", {name: db.Blank(JobEvent, name) for name in common}, tuple(each)
        ),
    )
    columns = {f"own_{name}": values for name, values in each.items()}
    met = update([first.pk, moved.pk, last.pk], columns, common)
    assert met == {first.pk, last.pk}
    told = JobEvent.objects.order_by("job_id").values_list("job_id", "actor", "message", "detail")
    assert list(told) == [
        (first.pk, "ann", "one", {"n": 1}),
        (last.pk, "ann", 'th"ree', {"n": [3]}),
    ]
    assert set(JobEvent.objects.filter(at__isnull=False).values_list("version", flat=True)) == {7}


@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_time_is_drawn_for_each_row(alias):
    jobs = JobFactory.create_batch(20)
    now = db.now(alias)
    with transaction.atomic(using=alias):
        Job.objects.update(run_after=db.drawn_between(Value(now), Value(now + MINUTE)))
    times = [row(job)["run_after"] for job in jobs]
    assert now <= min(times) < max(times) <= now + MINUTE
    assert len(set(times)) == 20
