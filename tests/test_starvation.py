"""No job keeps others from being found: those in front, in other hands, or not to be helped."""

from __future__ import annotations

from django.db import transaction

from jobqueue.claim import claim_jobs
from jobqueue.models import Job
from jobqueue.sweep import SweepReport, sweep_stale_jobs
from jobqueue.testing.factories import JobFactory, WorkerFactory
from tests.asserting import fresh_connection, servers_only
from tests.races.scenes import row

PAGE = 3


def test_a_sweep_gets_past_a_page_of_jobs_that_are_not_to_be_taken(alias: str) -> None:
    """riverqueue/river#1318."""
    JobFactory.create_batch(PAGE, running=True, claimed_by=WorkerFactory().pk)
    last = JobFactory(running=True)
    report = sweep_stale_jobs(batch_size=PAGE)
    assert report == SweepReport(examined=PAGE + 1, retried=1)
    assert row(last)["state"] == "scheduled"


@servers_only
def test_a_claim_locks_no_more_than_it_takes(alias: str) -> None:
    """OneUptime/oneuptime#3117: to sort a thousand rows, to take one, would lock them all."""
    for name in ("v", "w"):
        WorkerFactory(id=name)
    Job.objects.bulk_create(JobFactory.build(priority=number % 3) for number in range(1000))
    first, second = Job.objects.order_by("-priority", "run_after", "pk")[:2]
    with transaction.atomic(using=alias):
        assert claim_jobs("v", ["default"], 1) == [first]
        with fresh_connection(alias):
            assert claim_jobs("w", ["default"], 1) == [second]
