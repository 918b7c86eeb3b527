"""The plan of each question that an index was made for, on PostgreSQL with 100,000 rows.

No index may lead with a column of the fence: the planner takes such a one for the fenced writes,
since statistics of an idle table say that nobody is running, and then walks the dead entries of the
whole run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connections
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from jobqueue import db, transitions
from jobqueue.broker import register
from jobqueue.claim import claim_jobs
from jobqueue.lifecycle import Completed
from jobqueue.models import Job
from jobqueue.status import queue_status
from jobqueue.sweep import sweep_stale_jobs
from tests.helpers import engine
from tests.routers import use_alias

ROWS = 100_000


def fill(alias: str, *, state: str, count: int, queue: str = "default", worker: str = "w") -> None:
    """Insert many rows of one state, as the verbs would have left them."""
    held = state in ("claimed", "running")
    final = state in ("completed", "failed", "cancelled")
    with connections[alias].cursor() as cursor:
        cursor.execute(
            """
            INSERT INTO jobqueue_job
                (queue, task, args, kwargs, priority, state, run_after, attempt, max_attempts,
                 excused, backoff, version, progress, progress_note, workspace, metadata,
                 claimed_by, claimed_at, attempted_at, finished_at)
            SELECT %s, 'a.b', '[]', '{}', n %% 7, %s, now() + (%s * n) * interval '1 second', 1, 3,
                 0, '{}', 2, 0, '', '', '{}',
                 %s, CASE WHEN %s THEN now() END, now(), CASE WHEN %s THEN now() END
            FROM generate_series(1, %s) AS n
            """,
            [
                queue,
                state,
                1 if state == "scheduled" else -1,
                None if state in ("scheduled", "waiting") else worker,
                held or final,
                final,
                count,
            ],
        )


def analyze(alias: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute("ANALYZE jobqueue_job")


@pytest.fixture(params=[engine("postgresql")])
def full_table(request: pytest.FixtureRequest) -> Iterator[str]:
    """50,000 finished, 25,000 scheduled, 20,000 waiting, 5,000 of other queues: an idle table."""
    alias = request.param
    with use_alias(alias):
        fill(alias, state="completed", count=ROWS // 2)
        fill(alias, state="scheduled", count=ROWS // 4)
        fill(alias, state="waiting", count=ROWS // 5)
        fill(alias, state="waiting", count=ROWS // 20, queue="other")
        analyze(alias)
        yield alias


def indexes_of(plan: str) -> set[str]:
    """Return the indexes that a plan reads."""
    return set(re.findall(r"(?:using|on) (jobqueue_job_\w+)", plan))


@contextmanager
def plans(alias: str, beginning: str) -> Iterator[list[str]]:
    """Collect the plans of the statements on the jobs table that begin like this."""
    found: list[str] = []
    with CaptureQueriesContext(connections[alias]) as captured:
        yield found
    with connections[alias].cursor() as cursor:
        for query in captured.captured_queries:
            if query["sql"].startswith(beginning) and '"jobqueue_job"' in query["sql"]:
                cursor.execute(f"EXPLAIN {query['sql']}")
                found.append("\n".join(row[0] for row in cursor.fetchall()))


def test_a_claim_reads_its_queue_in_the_order_of_the_index(full_table: str) -> None:
    plan = Job.objects.claimable("default", db.now(full_table))[:100].explain()

    assert indexes_of(plan) == {"jobqueue_job_claimable"}
    assert "Sort" not in plan


def test_due_jobs_are_found_by_their_time(full_table: str) -> None:
    plan = Job.objects.due(db.now(full_table) + timedelta(minutes=5))[:100].explain()

    assert indexes_of(plan) == {"jobqueue_job_due"}


def test_a_sweep_reads_held_jobs_alone(full_table: str) -> None:
    fill(full_table, state="running", count=500)
    analyze(full_table)

    with plans(full_table, "SELECT array_agg") as found:
        sweep_stale_jobs(batch_size=100, dry_run=True)

    assert len(found) == 3
    for plan in found:
        assert indexes_of(plan) == {"jobqueue_job_held"}
        assert "Index Cond: (id > " in plan


@pytest.mark.parametrize("times", ["alike", "each its own"])
def test_a_rescue_reaches_its_rows_by_their_ids(full_table: str, times: str) -> None:
    """Right after ANALYZE of a table in which few are running; events are inserted with it."""
    fill(full_table, state="running", count=500)
    analyze(full_table)
    if times == "each its own":
        running = Job.objects.filter(state="running")
        running.update(attempted_at=F("claimed_at") + F("id") * timedelta(microseconds=1))

    with plans(full_table, "WITH met") as found:
        assert sweep_stale_jobs().retried == 500

    (plan,) = found
    assert indexes_of(plan) == {"jobqueue_job_pkey"}
    assert "Insert on jobqueue_jobevent" in plan
    assert "Join Filter" not in plan


def test_events_of_the_last_hour_are_read_without_those_before(full_table: str) -> None:
    """Both by a range of pages that has its summary, and by those that came since."""
    with connections[full_table].cursor() as cursor:
        for hours, count in ((200, 50_000), (0, 1_000)):
            cursor.execute(
                "INSERT INTO jobqueue_jobevent (job_id, at, kind, attempt, from_state, to_state, "
                "actor, message, version, detail) SELECT n, now() - make_interval(hours => %s), "
                "'rescued', 1, 'running', 'scheduled', 'sweep', 'its worker is gone', 2, '{}' "
                "FROM generate_series(1, %s) AS n",
                [hours, count],
            )
            if hours:
                cursor.execute("SELECT brin_summarize_new_values('jobqueue_event_at')")
        cursor.execute("ANALYZE jobqueue_jobevent")

    with CaptureQueriesContext(connections[full_table]) as captured:
        assert queue_status().events == {"rescued": 1_000}

    query = next(q["sql"] for q in captured if 'FROM "jobqueue_jobevent"' in q["sql"])
    with connections[full_table].cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE) {query}")
        plan = "\n".join(row[0] for row in cursor.fetchall())
    assert "Bitmap Index Scan on jobqueue_event_at" in plan
    (left_out,) = re.findall(r"Rows Removed by Index Recheck: (\d+)", plan) or ["0"]
    assert int(left_out) < 10_000


def test_pruning_finds_old_jobs_by_when_they_finished(full_table: str) -> None:
    old = db.now(full_table) - timedelta(days=30)

    plan = Job.objects.finished_before(old).order_by("pk")[:500].explain()

    assert indexes_of(plan) == {"jobqueue_job_finished"}


def test_a_unique_key_is_found_by_its_index(full_table: str) -> None:
    plan = Job.objects.filter(unique_key="k").explain()

    assert indexes_of(plan) == {"jobqueue_job_unique_key"}


@pytest.mark.parametrize("results", ["alike", "each its own"])
@pytest.mark.parametrize("count", [1, 5, 500])
@pytest.mark.parametrize("running", [0, 500], ids=["idle", "500 running"])
def test_a_settle_reaches_its_rows_by_their_ids(
    full_table: str, running: int, count: int, results: str
) -> None:
    """Right after ANALYZE of a table in which nobody, or few, are running."""
    fill(full_table, state="running", count=running)
    analyze(full_table)
    worker = register(["default"])
    jobs = claim_jobs(worker.pk, ["default"], count, start=True)

    with plans(full_table, "UPDATE") as found:
        transitions.settle_many(
            (job, Completed(place if results == "each its own" else None))
            for place, job in enumerate(jobs)
        )

    (plan,) = found
    assert indexes_of(plan) == {"jobqueue_job_pkey"}
    assert re.search(r"Index Cond: \(id = (\d+\)|ANY )", plan), plan
    if count == 500:  # else comparing each row with each of the batch costs nothing
        assert "Join Filter" not in plan


def test_a_claim_writes_to_its_rows_by_their_ids(full_table: str) -> None:
    worker = register(["default"])

    with plans(full_table, "UPDATE") as found:
        claim_jobs(worker.pk, ["default"], 100)

    (plan,) = found
    # One to choose, in its own order, and the other to write.
    assert indexes_of(plan) == {"jobqueue_job_claimable", "jobqueue_job_pkey"}
    assert "Sort" not in plan


def test_no_index_leads_with_a_column_of_the_fence() -> None:
    leading = {index.fields[0].lstrip("-") for index in Job._meta.indexes}

    assert not leading & {"claimed_by", "claimed_at", "attempted_at", "attempt", "version"}
