"""The admin's action *release*: fenced on what the page showed, and it tells what it did."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import transaction
from django.test import Client, override_settings

from jobqueue import db, dispatch, transitions
from jobqueue.models import EventKind, Job, JobEvent
from jobqueue.testing.factories import JobFactory, WorkerFactory
from tests.asserting import servers_only, stored
from tests.helpers import other_connection, run_in_thread, use_connection
from tests.servers import missing_engines
from tests.site import page, release, superuser, versions


@pytest.fixture
def client(alias: str) -> Client:
    return superuser()


def test_claimed_and_stale_running_jobs_are_released(client: Client, alias: str) -> None:
    claimed = JobFactory(claimed=True)
    orphan = JobFactory(running=True)
    WorkerFactory(id="alive")
    overdue = JobFactory(
        running=True,
        claimed_by="alive",
        timeout=timedelta(seconds=1),
        attempted_at=db.now(alias) - timedelta(hours=1),
    )

    told = release(client, claimed, orphan, overdue, seen=versions(page(client)))

    assert told == ["3 jobs were released."]
    for job in (claimed, orphan, overdue):
        row = Job.objects.get(pk=job.pk)
        assert (row.state, row.claimed_by) == ("waiting", None)
        event = row.events.get()
        assert (event.kind, event.actor) == (EventKind.RELEASED, "admin ann")
        assert event.message == "released in the admin"


def test_a_job_that_runs_on_a_worker_that_lives_is_left_alone(client: Client) -> None:
    WorkerFactory(id="alive")
    jobs = JobFactory.create_batch(2, running=True, claimed_by="alive")
    before = [stored(job) for job in jobs]

    told = release(client, *jobs, seen=versions(page(client)))

    assert told == ["2 jobs are running on workers that live, and were left alone."]
    assert [stored(job) for job in jobs] == before


def test_a_job_of_a_silent_worker_is_released_before_any_sweep_has_looked(client: Client) -> None:
    WorkerFactory(id="silent", silent=True)
    job = JobFactory(running=True, claimed_by="silent")
    assert release(client, job, seen=versions(page(client))) == ["1 job was released."]
    assert stored(job)["state"] == "waiting"


@servers_only
def test_a_job_that_is_locked_keeps_no_other_from_its_release(alias: str, client: Client) -> None:
    jobs = JobFactory.create_batch(3, claimed=True)
    seen = versions(page(client))
    with other_connection(alias) as other, use_connection(other), transaction.atomic(using=alias):
        Job.objects.select_for_update().get(pk=jobs[1].pk)
        told = run_in_thread(release, client, *jobs, seen=seen).result()
    assert told == [
        "2 jobs were released.",
        "1 job is locked by another transaction, and was left alone.",
    ]
    assert [stored(job)["state"] for job in jobs] == ["waiting", "claimed", "waiting"]


@pytest.mark.parametrize("state", ["scheduled", "waiting", "completed", "failed", "cancelled"])
def test_a_job_that_nobody_holds_is_left_alone(client: Client, state: str) -> None:
    job = JobFactory(**({} if state == "waiting" else {state: True}))
    before = stored(job)
    told = release(client, job, seen=versions(page(client)))
    assert told == ["1 job had moved on and was left alone."]
    assert stored(job) == before


def test_a_stale_page_releases_nothing_that_moved_on(client: Client) -> None:
    """statianzo/que-web#28: between the page and the click, one finished and one was re-claimed."""
    finished, reclaimed, deleted, still = JobFactory.create_batch(4, running=True)
    seen = versions(page(client))
    transitions.complete(finished, "done")
    again = transitions.release(reclaimed)
    using = again._state.db
    WorkerFactory(id="other")
    dispatch.claim("default", "other", db.now(using), 1, start=True, using=using)
    Job.objects.filter(pk=deleted.pk).delete()
    before = [stored(finished), stored(reclaimed)]

    told = release(client, finished, reclaimed, deleted, still, seen=seen)

    assert told == ["1 job was released.", "3 jobs had moved on and were left alone."]
    assert [stored(finished), stored(reclaimed)] == before
    assert stored(still)["state"] == "waiting"


def test_a_job_that_left_the_page_s_filter_is_told_of(client: Client) -> None:
    job = JobFactory(running=True)
    query = "?state__exact=running"
    seen = versions(page(client, state__exact="running"))
    transitions.complete(job)
    assert release(client, job, seen=seen, query=query) == [
        "1 job had moved on and was left alone."
    ]


def test_all_jobs_of_all_pages_can_be_released(client: Client) -> None:
    """The versions of those on other pages are unknown; these go by what is found."""
    jobs = JobFactory.create_batch(55, claimed=True)
    seen = versions(page(client))
    assert len(seen) == 50

    told = release(client, *jobs[5:], seen=seen | {"select_across": "1"})

    assert told == ["55 jobs were released."]
    assert not Job.objects.exclude(state="waiting").exists()


@pytest.mark.parametrize("version", ["", "x", "²", "9" * 5000, "-1"])
def test_a_version_that_is_nonsense_is_no_version(client: Client, version: str) -> None:
    job = JobFactory(claimed=True)
    told = release(client, job, seen={f"_version_{job.pk}": version})
    assert told == ["1 job was released."]


class ReplicaRouter:
    """Reads from a replica, writes jobs to the primary."""

    def db_for_read(self, model: type, **hints: Any) -> str:
        return "default"

    def db_for_write(self, model: type, **hints: Any) -> str:
        return "postgresql" if model in (Job, JobEvent) else "default"

    def allow_relation(self, *args: Any, **hints: Any) -> bool:
        return True


@pytest.mark.skipif("postgresql" in missing_engines(), reason="it takes two databases")
@pytest.mark.django_db(transaction=True, databases=["default", "postgresql"])
@override_settings(DATABASE_ROUTERS=[ReplicaRouter()])
def test_a_release_goes_to_where_jobs_are_written() -> None:
    """Not to the replica that the list was read from."""
    replica, primary = (
        JobFactory(using=using, id=7, claimed=True) for using in ("default", "postgresql")
    )
    client = superuser()

    assert release(client, replica, seen=versions(page(client))) == ["1 job was released."]

    assert Job.objects.using("postgresql").get(pk=primary.pk).state == "waiting"
    assert Job.objects.using("default").get(pk=replica.pk).state == "claimed"
