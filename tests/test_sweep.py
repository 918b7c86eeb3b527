"""What a sweep takes and what it leaves, count by count. The races are in ``tests/races``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import DatabaseError, connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from jobqueue import db, signals
from jobqueue.exceptions import InvalidJob
from jobqueue.models import Job, JobEvent, Worker
from jobqueue.sweep import StaleRules, SweepReport, stale_rules, sweep_stale_jobs
from jobqueue.testing.factories import JobFactory, WorkerFactory
from tests.asserting import exactly, stubborn
from tests.races.scenes import hearing, job_in, kinds, row

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
MOMENT = timedelta(microseconds=1)


def live_worker(**columns):
    return WorkerFactory(**columns).pk


# -- verdicts


def verdict(state, *, alive=True, running_after=None, **columns):
    """Return why a job is stale at NOW, by the default settings; ``alive`` is its worker."""
    rules = StaleRules(
        now=NOW,
        claimed_before=NOW - MINUTE,
        running_before=running_after and NOW - running_after,
        timeout_grace=30 * SECOND,
    )
    job = Job(state=state, claimed_by="w", **columns)
    return rules.verdict(job, {"w"} if alive else {"other"})


@pytest.mark.parametrize(
    ("age", "stale"), [(MINUTE - MOMENT, False), (MINUTE, False), (MINUTE + MOMENT, True)]
)
def test_claimed_for_too_long(age, stale):
    """Longer than the claim timeout, to the microsecond."""
    reason = verdict("claimed", claimed_at=NOW - age)
    assert reason == ("claimed by w and not started in time" if stale else None)


@pytest.mark.parametrize("over", [-MOMENT, timedelta(0), MOMENT])
def test_running_past_the_timeout_and_the_grace(over):
    """lion-reader#871: the sweep gives the executor time to notice its timeout itself."""
    reason = verdict("running", timeout=HOUR, attempted_at=NOW - HOUR - 30 * SECOND - over)
    assert reason == ("ran past its timeout of 1:00:00 on w" if over > timedelta(0) else None)


@pytest.mark.parametrize("over", [-MOMENT, timedelta(0), MOMENT])
def test_running_for_longer_than_the_sweep_allows(over):
    reason = verdict("running", running_after=HOUR, attempted_at=NOW - HOUR - over)
    assert reason == ("ran for longer than this sweep allows on w" if over > timedelta(0) else None)


@pytest.mark.parametrize("timeout", [None, 1000 * HOUR])
def test_healthy_long_runner_is_never_stale(timeout):
    """hexpm#1825, oban#1141, django-q#307: elapsed time alone says nothing."""
    assert verdict("running", timeout=timeout, attempted_at=NOW - 999 * HOUR) is None


@pytest.mark.parametrize("state", ["claimed", "running"])
def test_holder_that_is_gone(state):
    """However fresh the claim."""
    reason = verdict(state, alive=False, claimed_at=NOW, attempted_at=NOW)
    assert reason == "its worker w is gone"


@pytest.mark.parametrize("state", ["claimed", "running"])
def test_null_is_handled_on_purpose(state):
    """antenna#1354: no time means no verdict on it; no holder means that nobody holds the job."""
    times = {"claimed_at": None, "attempted_at": None, "timeout": SECOND}
    assert verdict(state, running_after=SECOND, **times) is None
    job = Job(state=state, claimed_by=None, **times)
    assert stale_rules_at_now().verdict(job, {"w"}) == "its worker None is gone"


def stale_rules_at_now():
    return StaleRules(NOW, NOW, NOW, SECOND)


@override_settings(JOBQUEUE={"CLAIM_TIMEOUT": 90, "TIMEOUT_GRACE": 7})
def test_rules_come_from_the_settings(alias):
    rules = stale_rules(alias)
    assert rules.now - rules.claimed_before == timedelta(seconds=90)
    assert rules.timeout_grace == timedelta(seconds=7)
    assert rules.running_before is None


# -- what is looked at


@pytest.mark.parametrize("row_state", ["dead", "stopped", "no row"])
def test_holders_without_a_live_row(alias, row_state):
    """A job held by an id without a live row is held by nobody."""
    holder = "gone:1:1"
    if row_state != "no row":
        WorkerFactory(id=holder, state=row_state)
    job = job_in("claimed", claimed_by=holder)
    assert sweep_stale_jobs() == SweepReport(examined=1, released=1)
    event = JobEvent.objects.get()
    assert (event.kind, event.message) == ("rescued", "its worker gone:1:1 is gone")
    assert event.actor.startswith("sweep ")
    assert row(job)["settled_version"] is None


@pytest.mark.parametrize(
    ("silence", "dead"), [(29 * SECOND, 0), (31 * SECOND, 1)], ids=["in time", "too late"]
)
def test_lease_of_each_worker_is_its_own(alias, silence, dead):
    """Beside one of a day, that is as silent; each row carries its own length."""
    now = db.now(alias)
    WorkerFactory(lease=30 * SECOND, last_seen_at=now - silence)
    WorkerFactory(lease=24 * HOUR, last_seen_at=now - silence)
    WorkerFactory(state="stopped", last_seen_at=now - HOUR)
    with hearing(signals.worker_declared_dead) as heard:
        assert sweep_stale_jobs().dead_workers == dead
    assert len(heard) == Worker.objects.filter(state="dead").count() == dead


def test_death_is_told_and_logged(alias, caplog):
    worker = live_worker(silent=True)
    sweep_stale_jobs()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"Worker {worker} was silent for longer than its lease: declared dead"
    )


def test_queued_and_final_jobs_are_not_looked_at(alias):
    """antenna#1354: however old, and whoever they name."""
    old = {"run_after": db.now(alias) - 999 * HOUR}
    jobs = [job_in("waiting", **old)]
    jobs += [job_in(state) for state in ("scheduled", "completed", "failed", "cancelled")]
    before = [row(job) for job in jobs]
    assert sweep_stale_jobs(claimed_after=0, running_after=0) == SweepReport()
    assert [row(job) for job in jobs] == before


def test_only_jobs_of_the_queues_named(alias):
    """The workers of all queues are judged, though, since a lease has no queue."""
    worker = live_worker(silent=True)
    jobs = {queue: job_in("running", queue=queue, claimed_by=worker) for queue in "abc"}
    report = sweep_stale_jobs(queues=["a", "c", "none"])
    assert report == SweepReport(examined=2, dead_workers=1, retried=2)
    assert row(jobs["b"])["state"] == "running"
    assert sweep_stale_jobs(queues=[]) == SweepReport()
    assert sweep_stale_jobs() == SweepReport(examined=1, retried=1)


def test_due_jobs_are_promoted(alias):
    """So that a queue without a worker shows what waits; not by a dry run, nor in other queues."""
    due = [job_in("scheduled", run_after=db.now(alias), queue=queue) for queue in "ab"]
    sweep_stale_jobs(dry_run=True)
    assert {row(job)["state"] for job in due} == {"scheduled"}
    sweep_stale_jobs(queues=["a"])
    assert [row(job)["state"] for job in due] == ["waiting", "scheduled"]


# -- arguments


@pytest.mark.parametrize("seconds", [0, timedelta(0), 5, 5 * SECOND])
def test_claimed_after(alias, seconds):
    """In seconds or as a timedelta; 0 takes whatever is claimed and not started."""
    worker = live_worker()
    old = job_in("claimed", claimed_by=worker, claimed_at=db.now(alias) - 10 * SECOND)
    new = job_in("claimed", claimed_by=worker, claimed_at=db.now(alias) + SECOND)
    assert sweep_stale_jobs(claimed_after=seconds) == SweepReport(examined=2, released=1)
    assert [row(job)["state"] for job in (old, new)] == ["waiting", "claimed"]


def test_running_after(alias):
    """An operator's own limit: also for jobs of a live worker and without a timeout."""
    old = job_in("running", claimed_by=live_worker(), attempted_at=db.now(alias) - HOUR)
    assert sweep_stale_jobs() == SweepReport(examined=1)
    assert sweep_stale_jobs(running_after=2 * HOUR) == SweepReport(examined=1)
    assert sweep_stale_jobs(running_after=MINUTE) == SweepReport(examined=1, retried=1)
    assert JobEvent.objects.get().message.startswith("ran for longer than this sweep allows on ")
    assert row(old)["state"] == "scheduled"


def test_each_page_is_told(alias):
    """For a progress bar: jobs looked at, taken or not, each of them once."""
    JobFactory.create_batch(2, running=True)
    JobFactory.create_batch(3, running=True, claimed_by=live_worker())
    seen = []
    assert sweep_stale_jobs(batch_size=2, on_examined=seen.append).examined == 5
    assert seen == [2, 2, 1]


@pytest.mark.parametrize("batch_size", [1, 2, 10])
@pytest.mark.parametrize("dry_run", [False, True])
def test_limit(alias, batch_size, dry_run):
    """At most so many are taken, the oldest first; a sweep that reached it looks no further."""
    jobs = JobFactory.create_batch(5, running=True)
    report = sweep_stale_jobs(limit=3, batch_size=batch_size, dry_run=dry_run)
    assert (report.retried, report.taken) == (3, 3)
    assert report.examined == {1: 3, 2: 4, 10: 5}[batch_size]
    taken = [job for job in jobs if row(job)["state"] == "scheduled"]
    assert taken == ([] if dry_run else jobs[:3])


def test_dry_run_writes_nothing_at_all(alias):
    """Not even an event or a signal; what it counts is what a sweep would do."""
    worker = live_worker(silent=True)
    held = {"claimed_by": worker}
    job_in("running", cancel_requested_at=db.now(alias), **held)
    for state, columns in [("claimed", {}), ("running", {}), ("running", {"max_attempts": 1})]:
        job_in(state, **held, **columns)
    job_in("scheduled", run_after=db.now(alias))
    with (
        CaptureQueriesContext(connections[alias]) as queries,
        hearing(signals.worker_declared_dead) as heard,
    ):
        report = sweep_stale_jobs(dry_run=True)
    assert report == SweepReport(
        examined=4, dead_workers=1, released=1, retried=1, failed=1, cancelled=1
    )
    assert {query["sql"].split()[0] for query in queries} == {"SELECT"}
    assert heard == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"claimed_after": -1}, "claimed_after must be zero or more, not -1 seconds"),
        ({"claimed_after": "5"}, "claimed_after must be seconds or a timedelta, not '5'"),
        ({"running_after": -SECOND}, "running_after must be zero or more, not -1 seconds"),
        (
            {"running_after": float("nan")},
            "running_after must be a finite number of seconds, not nan",
        ),
        (
            {"claimed_after": 1e12},
            "claimed_after must be at most 36,500 days, not 11574074 days, 1:46:40",
        ),
        ({"batch_size": 0}, "batch_size must be an integer from 1 to 10000, not 0"),
        ({"batch_size": 10_001}, "batch_size must be an integer from 1 to 10000, not 10001"),
        ({"batch_size": True}, "batch_size must be an integer from 1 to 10000, not True"),
        ({"limit": 0}, "limit must be an integer from 1 to 2147483648, not 0"),
        ({"limit": 1.5}, "limit must be an integer from 1 to 2147483648, not 1.5"),
        ({"queues": "default"}, "queues must be a list of names, not 'default'"),
    ],
)
def test_bad_argument_is_named_and_nothing_is_done(alias, arguments, why):
    worker = live_worker(silent=True)
    job_in("claimed")
    with pytest.raises(InvalidJob, match=exactly(why)):
        sweep_stale_jobs(**arguments)
    assert Worker.objects.get(pk=worker).state == "alive"
    assert Job.objects.get().state == "claimed"


def test_report_as_a_dict():
    report = SweepReport(
        examined=9, dead_workers=1, released=1, retried=2, failed=1, cancelled=1, errors=2
    )
    assert report.as_dict() == {
        "examined": 9,
        "dead_workers": 1,
        "released": 1,
        "retried": 2,
        "failed": 1,
        "cancelled": 1,
        "conflicts": 0,
        "errors": 2,
    }
    assert report.taken == 5


# -- outcomes


def test_rescued_job_waits_for_its_own_backoff(alias):
    """graphile/worker#313: it does not come first again, before all that waited meanwhile."""
    backoff = {"base": 3600, "factor": 2, "cap": 86400, "jitter": 0}
    job = job_in("running", attempt=3, excused=1, max_attempts=5, backoff=backoff)
    before = db.now(alias)
    sweep_stale_jobs()
    after = row(job)
    assert before <= after["run_after"] - 2 * HOUR <= db.now(alias)
    assert (after["attempt"], after["excused"], after["claimed_by"]) == (3, 1, None)
    event = JobEvent.objects.get()
    assert (event.kind, event.attempt) == ("rescued", 3)


def test_without_a_backoff_it_waits_again_at_once(alias):
    """A job whose backoff is 0 is waiting, and still counted as retried."""
    job = job_in("running", backoff={"base": 0})
    assert sweep_stale_jobs() == SweepReport(examined=1, retried=1)
    assert row(job)["state"] == "waiting"


def test_unreadable_backoff_is_no_error_of_the_sweep(alias):
    """threadmill#47: the default stands in, and the event says so."""
    job = job_in("running", backoff={"base": "soon"})
    assert sweep_stale_jobs() == SweepReport(examined=1, retried=1)
    assert row(job)["run_after"] > db.now(alias)
    assert JobEvent.objects.get().detail == {
        "backoff": "backoff base must be a number, not 'soon'; used the default"
    }


@pytest.mark.parametrize("excused", [0, 2])
def test_last_attempt_ends_as_failed(alias, excused):
    """sidequest#155, faktory#409: with an event that says why, and the key free for another."""
    job = job_in("running", attempt=3 + excused, excused=excused, max_attempts=3, unique_key="k")
    assert sweep_stale_jobs() == SweepReport(examined=1, failed=1)
    after = row(job)
    assert (after["state"], after["attempt"], after["unique_key"]) == ("failed", 3 + excused, None)
    assert after["finished_at"] is not None
    assert kinds(job) == ["failed"]
    assert JobEvent.objects.get().message == f"its worker {job.claimed_by} is gone"


def test_claimed_job_has_used_no_attempt(alias):
    """However often it was claimed by workers that died."""
    job = job_in("claimed", attempt=3, max_attempts=3)
    assert sweep_stale_jobs() == SweepReport(examined=1, released=1)
    assert (row(job)["state"], row(job)["attempt"], row(job)["excused"]) == ("waiting", 3, 0)


def test_second_sweep_finds_nothing(alias):
    worker = live_worker(silent=True)
    job_in("running", claimed_by=worker)
    job_in("claimed", claimed_by=worker)
    assert sweep_stale_jobs().taken == 2
    assert sweep_stale_jobs() == SweepReport()


def test_a_row_that_is_refused_leaves_the_transaction_of_a_caller_whole(alias: str) -> None:
    """Whoever catches the error can go on; what the sweep had done is undone."""
    jobs = [JobFactory(running=True) for _ in range(3)]
    with stubborn(alias, jobs[1]), transaction.atomic(using=alias):
        with pytest.raises(DatabaseError, match="stubborn"):
            sweep_stale_jobs()
        assert Job.objects.filter(state="running").count() == 3
