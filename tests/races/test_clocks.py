"""Whose clock counts: the database's, in whatever time zone it, Django or the session lives."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
from django.core.checks import run_checks
from django.db import connections
from django.test import override_settings
from django.utils import timezone

from jobqueue import broker, db, dispatch, transitions
from jobqueue.enqueue import enqueue
from jobqueue.models import Job, Worker
from jobqueue.sweep import SweepReport, sweep_stale_jobs
from jobqueue.testing.factories import TASK, JobFactory, WorkerFactory
from tests.asserting import servers_only
from tests.helpers import engine
from tests.races.scenes import job_in, row

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
ZONES = ["UTC", "Asia/Tokyo", "Etc/GMT+8"]  # +9, and, signs being what they are in POSIX, -8


@pytest.fixture(params=ZONES)
def naive_times(request, alias):
    """Django without time zone support, in one zone or another; the connection follows."""
    with override_settings(USE_TZ=False, TIME_ZONE=request.param):
        yield
    connections[alias].close()


def live_through_a_claim(alias):
    """Claim, beat and finish a job, with a sweep after each step; nothing is ever stale."""
    worker = broker.register(["default"])
    job = enqueue(TASK)
    held = SweepReport(examined=1)
    (job,) = broker.claim(worker.pk, 1, start=False)
    assert sweep_stale_jobs() == held
    running = transitions.start(job)
    assert Job.objects.get().fingerprint == running.fingerprint
    broker.heartbeat(worker.pk, {job.pk: running})
    assert sweep_stale_jobs() == held
    transitions.snooze(running, 0)
    (again,) = broker.claim(worker.pk, 1)
    done = transitions.complete(again)
    assert done.finished_at - job.claimed_at < 30 * SECOND
    assert sweep_stale_jobs() == SweepReport()


def recover_dead_claims(alias):
    """Each kind of stale job is seen, at the time at which it becomes stale and not before."""
    now = db.now(alias)
    live = WorkerFactory().pk
    WorkerFactory(last_seen_at=now - 25 * SECOND)
    dead = WorkerFactory(last_seen_at=now - 35 * SECOND).pk
    stale = [
        job_in("running", claimed_by=dead),
        job_in("claimed", claimed_by=live, claimed_at=now - 70 * SECOND),
        job_in("running", claimed_by=live, timeout=HOUR, attempted_at=now - HOUR - 40 * SECOND),
    ]
    fresh = [
        job_in("claimed", claimed_by=live, claimed_at=now - 50 * SECOND),
        job_in("running", claimed_by=live, timeout=HOUR, attempted_at=now - HOUR - 20 * SECOND),
    ]
    report = sweep_stale_jobs()
    assert report == SweepReport(examined=5, dead_workers=1, released=1, retried=2)
    assert {row(job)["claimed_by"] for job in stale} == {None}
    assert {row(job)["claimed_by"] for job in fresh} == {live}


def test_fresh_claim_is_never_stale_without_use_tz(alias, naive_times):
    """django-ox#16 (USE_TZ): naive local times are compared with naive local times."""
    live_through_a_claim(alias)


def test_dead_claim_is_recovered_without_use_tz(alias, naive_times):
    """django-ox#16 (USE_TZ): and in time, be the zone before or behind UTC."""
    recover_dead_claims(alias)


def test_due_times_without_use_tz(alias, naive_times):
    """What is due in a minute is not due now, and what was due is."""
    later = enqueue(TASK, run_after=60)
    due = job_in("scheduled", run_after=db.now(alias) - SECOND)
    assert later.run_after.tzinfo is None
    assert dispatch.promote_due(None, 10, using=alias) == 1
    assert [row(job)["state"] for job in (later, due)] == ["scheduled", "waiting"]


@pytest.mark.parametrize("zone", ZONES)
def test_time_zone_of_the_site_does_not_matter(alias, zone):
    with override_settings(TIME_ZONE=zone):
        live_through_a_claim(alias)
        recover_dead_claims(alias)


@servers_only
@pytest.mark.parametrize("offset", ["+09:00", "-08:00"])
def test_time_zone_of_the_session_does_not_matter(alias, offset):
    """Django sets it on PostgreSQL; on MySQL it is the server's, or whoever set it last."""
    set_zone = {
        "postgresql": f"SET TIME ZONE INTERVAL '{offset}' HOUR TO MINUTE",
        "mariadb": f"SET time_zone = '{offset}'",
    }
    with connections[alias].cursor() as cursor:
        cursor.execute(set_zone[alias])
    try:
        assert abs(db.now(alias) - datetime.now(UTC)) < HOUR / 2
        live_through_a_claim(alias)
        recover_dead_claims(alias)
    finally:
        connections[alias].close()


@pytest.mark.parametrize("zone", ["America/New_York", "Australia/Sydney"])
@pytest.mark.parametrize("use_tz", [True, False])
def test_now_is_what_django_stores(alias, zone, use_tz):
    """Aware in UTC, or naive in the site's zone; to be compared with what is read back."""
    with override_settings(USE_TZ=use_tz, TIME_ZONE=zone):
        now = db.now(alias)
        job = JobFactory(running=True, claimed_at=now, attempted_at=now)
        assert (now.tzinfo is UTC) is use_tz
        assert abs(now - timezone.now()) < HOUR / 2
        assert Job.objects.get(pk=job.pk).claimed_at == now
        assert Job.objects.matching(job.pk, job.fingerprint).count() == 1
    connections[alias].close()


@pytest.mark.parametrize("alias", [engine("mariadb")], indirect=True)
@pytest.mark.parametrize("column", ["claimed_at", "attempted_at"])
def test_times_without_fractions_are_refused_at_the_start(alias, column):
    """delayed_job_active_record#95: no claim would find its own time again in such a column."""
    with connections[alias].cursor() as cursor:
        cursor.execute(f"ALTER TABLE jobqueue_job MODIFY {column} DATETIME(0) NULL")
        try:
            messages = run_checks(databases=[alias])
        finally:
            cursor.execute(f"ALTER TABLE jobqueue_job MODIFY {column} DATETIME(6) NULL")
    assert [message for message in messages if message.is_serious() and column in message.msg]
    assert not [message for message in run_checks(databases=[alias]) if message.is_serious()]


# -- a host whose clock is wrong


@pytest.fixture(params=[-HOUR, HOUR], ids=["host behind", "host ahead"])
def skewed_host(request, monkeypatch):
    """A host whose clock is an hour off, in all that Python can ask it."""
    skew, right = request.param, time.time

    class Skewed(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + skew

    monkeypatch.setattr(db, "datetime", Skewed)
    monkeypatch.setattr("django.utils.timezone.now", lambda: Skewed.now(UTC))
    monkeypatch.setattr(time, "time", lambda: right() + skew.total_seconds())


@servers_only
def test_skewed_host_never_takes_a_fresh_claim(alias, skewed_host):
    """absurd#122: every decision follows the database's clock."""
    live_through_a_claim(alias)
    assert abs(Worker.objects.get().last_seen_at - db.now(alias)) < HOUR / 2


@servers_only
def test_skewed_host_recovers_dead_claims_in_time(alias, skewed_host):
    recover_dead_claims(alias)


@servers_only
def test_skewed_host_keeps_delays(alias, skewed_host):
    """absurd#122: a short snooze is neither always due nor an hour late."""
    worker = WorkerFactory().pk
    job = job_in("running", claimed_by=worker)
    snoozed = transitions.snooze(job, 60)
    retried = transitions.retry(job_in("running", claimed_by=worker), "no", 60)
    for each in (snoozed, retried):
        assert 0 < (each.run_after - db.now(alias)).total_seconds() <= 60
    assert broker.claim(worker, 10) == []


@servers_only
def test_wrong_times_are_shown_by_the_skewed_host_itself(skewed_host, alias):
    """So that the tests above can fail: by that host's clock each of their times is off."""
    assert abs(timezone.now() - db.now(alias)) > HOUR / 2
