"""A sweep that looked at an old row finds that it moved on, changes nothing and says so.

Each scenario twice: the row changes between the look and the write, and while the write waits.
"""

from __future__ import annotations

import pytest

from jobqueue import db, signals, transitions
from jobqueue.lifecycle import Completed
from jobqueue.models import Job
from jobqueue.sweep import SweepReport, sweep_stale_jobs
from jobqueue.testing.factories import JobFactory
from tests.races.scenes import (
    changed,
    delete_raw,
    events,
    hearing,
    job_in,
    kinds,
    row,
    settle_all,
    sweep_blocked,
    sweep_overtaken,
    take_over,
)

pytestmark = pytest.mark.parametrize("meet", [sweep_overtaken, sweep_blocked])

LOST_RACE = SweepReport(examined=1, conflicts=1)

CHANGES_OF_RUNNING = {
    "its worker completes it": lambda job: transitions.complete(job, {"pages": 3}),
    "its worker fails it": lambda job: transitions.fail(job, "no"),
    "its worker retries it": lambda job: transitions.retry(job, "no", 0),
    "its worker snoozes it": lambda job: transitions.snooze(job, 60),
    "another worker claims it": lambda job: take_over(job, start=False),
    "another worker runs it": take_over,
    "the same worker runs it again": lambda job: take_over(job, job.claimed_by),
    "an operator cancels it": lambda job: transitions.cancel(job, actor="operator"),
    "it is deleted": delete_raw,
}
CHANGES_OF_CLAIMED = {
    "its worker starts it": transitions.start,
    "its worker runs it to its end": lambda job: transitions.complete(transitions.start(job)),
    "its worker releases it": transitions.release,
    "another worker claims it": lambda job: take_over(job, start=False),
    "the same worker claims it again": lambda job: take_over(job, job.claimed_by, start=False),
    "an operator cancels it": lambda job: transitions.cancel(job, actor="operator"),
    "it is deleted": delete_raw,
}


def assert_left_alone(meet, job, change):
    """Sweep while ``change`` happens; the row and its history are what ``change`` made of them."""
    written = []

    def act():
        change(job)
        written.extend([row(job), events(job)])

    with hearing(signals.job_transitioned) as heard:
        assert meet(job, act) == LOST_RACE
    assert [row(job), events(job)] == written
    assert not [told for told in heard if told["actor"].startswith("sweep")]


@pytest.mark.parametrize("change", CHANGES_OF_RUNNING)
def test_running_job_that_moved_on(alias, meet, change):
    """sidequest#208, queue-jobs-worker#6, dagster#8729: not resurrected, nor overwritten."""
    assert_left_alone(meet, job_in("running"), CHANGES_OF_RUNNING[change])


@pytest.mark.parametrize("change", CHANGES_OF_CLAIMED)
def test_claimed_job_that_moved_on(alias, meet, change):
    """sidequest#208: a job is not released from an old claimed snapshot."""
    assert_left_alone(meet, job_in("claimed"), CHANGES_OF_CLAIMED[change])


def test_completed_job_keeps_every_column(alias, meet):
    """State, result, end, counters and progress are what the executor stored."""
    job = job_in("running", excused=1, attempt=2, progress=40, unique_key="k")
    before = row(job)
    meet(job, lambda: transitions.complete(job, {"pages": 3}))
    after = changed(before, job)
    assert after.pop("finished_at") <= db.now(alias)
    assert after == {
        "state": "completed",
        "result": {"pages": 3},
        "version": job.version + 1,
        "settled_version": job.version,
        "unique_key": None,
    }
    assert kinds(job) == []


@pytest.mark.parametrize("columns", [{}, {"max_attempts": 1}], ids=["budget left", "budget spent"])
def test_cancel_requested_between_look_and_write(alias, meet, columns):
    """The condition is part of the write: what the sweep read of it is not asked."""
    job = job_in("running", **columns)
    report = meet(job, lambda: transitions.request_cancel(job, actor="operator"))
    assert report == SweepReport(examined=1, cancelled=1)
    assert row(job)["state"] == "cancelled"
    assert row(job)["version"] == job.version + 1


def test_progress_between_look_and_write_is_kept(alias, meet):
    """antenna#1276: the sweep writes only what it changes, so a report made meanwhile survives."""
    job = job_in("running")
    report = meet(job, lambda: transitions.record_progress(job, 60, "page 6"))
    assert report == SweepReport(examined=1, retried=1)
    assert (row(job)["progress"], row(job)["progress_note"]) == (60, "page 6")


def test_bulk_rescue_of_a_thousand(alias, meet):
    """river#1302: 300 of 1,000 finish between look and write; the other 700 are rescued."""
    now = db.now(alias)
    columns = {"claimed_at": now, "attempted_at": now, "run_after": now}
    Job.objects.bulk_create(JobFactory.build_batch(1000, running=True, **columns))
    finished = list(Job.objects.order_by("pk")[0:900:3])

    def finish():
        assert set(settle_all(finished, Completed("in time"))) == {"applied"}

    report = meet(finished[0], finish, batch_size=1000)
    assert report == SweepReport(examined=1000, retried=700, conflicts=300)
    done = Job.objects.filter(state="completed", result="in time", version=3)
    assert sorted(done.values_list("pk", flat=True)) == [job.pk for job in finished]
    rescued = Job.objects.filter(state="scheduled", version=3, attempt=1, result__isnull=True)
    assert rescued.count() == 700
    assert not any(kinds(job) for job in finished[::50])


def test_one_lost_race_keeps_nobody_else_out(alias, meet):
    """river#1302, jobrunr#186: retried, failed and cancelled, beside one that had just ended."""
    retried = job_in("running")
    done = job_in("running")
    failed = job_in("running", max_attempts=1)
    cancelled = job_in("running", cancel_requested_at=db.now(alias))
    released = job_in("claimed")
    report = meet(done, lambda: transitions.complete(done))
    assert report == SweepReport(
        examined=5, retried=1, failed=1, cancelled=1, released=1, conflicts=1
    )
    states = [row(job)["state"] for job in (retried, done, failed, cancelled, released)]
    assert states == ["scheduled", "completed", "failed", "cancelled", "waiting"]
    assert kinds(done) == []


def test_rows_that_lose_for_ever_hide_nobody(alias, meet):
    """river#1318: a page on which every race is lost does not end the sweep."""
    lost = JobFactory.create_batch(2, running=True)
    behind = job_in("running")
    report = meet(lost[0], lambda: settle_all(lost, Completed()), batch_size=2)
    assert report == SweepReport(examined=3, conflicts=2, retried=1)
    assert row(behind)["state"] == "scheduled"


def test_limit_counts_only_what_was_taken(alias, meet):
    """A lost race uses up nothing of the limit."""
    first, second = JobFactory.create_batch(2, running=True)
    report = meet(first, lambda: transitions.complete(first), batch_size=1, limit=1)
    assert report == SweepReport(examined=2, conflicts=1, retried=1)
    assert row(second)["state"] == "scheduled"


def test_two_sweeps_at_once(alias, meet):
    """Each job is taken once, by one of them, and both report the truth."""
    jobs = [job_in("running"), job_in("claimed")]
    second = []
    first = meet(jobs[0], lambda: second.append(sweep_stale_jobs()))
    (other,) = second
    assert (first.retried + other.retried, first.released + other.released) == (1, 1)
    assert (first.examined, first.conflicts, other.conflicts) == (2, other.taken, 0)
    assert [row(job)["version"] for job in jobs] == [job.version + 1 for job in jobs]
    assert [kinds(job) for job in jobs] == [["rescued"], ["rescued"]]
