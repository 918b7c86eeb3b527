"""A claim takes the right jobs, each for one worker that is alive."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from jobqueue import transitions
from jobqueue.claim import claim_jobs
from jobqueue.enqueue import enqueue
from jobqueue.exceptions import LeaseLost
from jobqueue.models import Job, Queue
from jobqueue.testing.conformance.base import Bench
from jobqueue.testing.factories import TASK

HOUR = timedelta(hours=1)


class Claims(Bench):
    """Claiming and promoting."""

    def test_claim_takes_the_highest_priority_then_the_oldest(self) -> None:
        """Within one queue; queues in the order given; paused ones not at all."""
        Queue.objects.create(name="paused", paused_at=self.ago(HOUR))
        self.job(queue="paused", priority=100)
        low, old, new, high = (self.job(priority=priority) for priority in (-1, 0, 0, 1))
        other = self.job(queue="other", priority=100)
        queues = ["paused", "default", "other"]
        claimed = claim_jobs(self.worker, queues, 3) + claim_jobs(self.worker, queues, 3)
        self.assertEqual([job.pk for job in claimed], [j.pk for j in (high, old, new, low, other)])

    def test_job_is_not_claimed_before_its_time(self) -> None:
        """And is promoted by whoever claims after it."""
        due = enqueue(TASK, run_after=0)
        enqueue(TASK, run_after=HOUR)
        scheduled = self.job("scheduled", run_after=due.run_after)
        claimed = claim_jobs(self.worker, ["default"], 10)
        self.assertEqual([job.pk for job in claimed], [due.pk, scheduled.pk])

    def test_what_a_claim_returns_is_what_is_stored(self) -> None:
        """To the microsecond, or no later write of the claimer would match."""
        self.jobs(2)
        for start in (False, True):
            (job,) = self.broker.claim(self.worker, 1, start=start)
            self.assertEqual(job.fingerprint, Job.objects.get(pk=job.pk).fingerprint)
            self.assertEqual((job.claimed_by, job.attempt), (self.worker, int(start)))
            running = job if start else transitions.start(job)
            self.assertEqual(running.fingerprint, Job.objects.get(pk=job.pk).fingerprint)
            done = transitions.complete(running)
            self.assertEqual(done.fingerprint, Job.objects.get(pk=job.pk).fingerprint)

    def test_no_job_is_claimed_twice(self) -> None:
        """By workers that look for jobs at the same time, or by threads of one worker."""
        self.jobs(20)
        workers = [self.worker, self.worker, self.another_worker(), self.another_worker()]
        claim = partial(claim_jobs, queues=["default"], limit=5, start=True)
        claims = self.at_once([partial(claim, worker) for worker in workers])
        while more := claim(self.worker):
            claims.append(more)
        taken = [job.pk for jobs in claims for job in jobs]
        self.assertEqual(len(taken), 20)
        self.assertEqual(len(set(taken)), 20)

    def test_only_a_live_worker_claims(self) -> None:
        """Not one that was declared dead, left or never registered."""
        job = self.job()
        left = self.broker.register(["default"]).pk
        self.broker.leave(left)
        for worker_id in (self.another_worker(dead=True), left, "nobody:0:0"):
            with self.subTest(worker_id), self.assertRaises(LeaseLost):
                self.broker.claim(worker_id, 1)
        self.assertEqual(self.state(job), "waiting")
