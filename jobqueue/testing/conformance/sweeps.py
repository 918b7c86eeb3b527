"""A sweep takes what nobody works on any more, and nothing else."""

from __future__ import annotations

from datetime import timedelta

from jobqueue import transitions
from jobqueue.claim import claim_jobs
from jobqueue.enqueue import enqueue
from jobqueue.lifecycle import FINAL
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.sweep import PruneReport, SweepReport, prune_jobs, sweep_stale_jobs
from jobqueue.testing.conformance.base import Bench
from jobqueue.testing.factories import TASK

HOUR = timedelta(hours=1)


class Sweeps(Bench):
    """Stale recovery and pruning."""

    def test_jobs_of_a_silent_worker_are_taken(self) -> None:
        """Each to the end that the table of verbs has for it."""
        worker = self.another_worker(silent=True)
        claimed = self.job("claimed", claimed_by=worker)
        running, last, asked = (
            self.job("running", claimed_by=worker, max_attempts=budget) for budget in (2, 1, 2)
        )
        transitions.request_cancel(asked, actor="operator")
        report = sweep_stale_jobs()
        self.assertEqual(
            report,
            SweepReport(examined=4, dead_workers=1, released=1, retried=1, failed=1, cancelled=1),
        )
        states = [self.state(job) for job in (claimed, running, last, asked)]
        self.assertEqual(states, ["waiting", "scheduled", "failed", "cancelled"])
        self.assertGreater(self.row(running)["run_after"], running.attempted_at)
        self.assertEqual(Worker.objects.get(pk=worker).state, Worker.State.DEAD)
        events = JobEvent.objects.filter(job__in=[claimed, running, last, asked])
        events = events.exclude(kind=EventKind.CANCEL_REQUESTED)
        self.assertEqual({event.attempt for event in events}, {0, 1})
        for event in events:
            self.assertIn(f"its worker {worker} is gone", event.message)

    def test_jobs_of_a_live_worker_are_left_alone(self) -> None:
        """However long they run, without a timeout; and what only waits is not looked at."""
        kept = [
            self.held(attempted_at=self.ago(1000 * HOUR), claimed_at=self.ago(1000 * HOUR)),
            self.held("claimed"),
            self.held(timeout=HOUR),
            self.job(run_after=self.ago(1000 * HOUR)),
            self.job("scheduled"),
        ]
        before = [self.row(job) for job in kept]
        self.assertEqual(sweep_stale_jobs(), SweepReport(examined=3))
        self.assertEqual([self.row(job) for job in kept], before)

    def test_overdue_jobs_of_a_live_worker_are_taken(self) -> None:
        """Claimed and never started, and running past their own timeout and the grace."""
        claimed = self.held("claimed", claimed_at=self.ago(HOUR))
        running = self.held(timeout=timedelta(minutes=1), attempted_at=self.ago(HOUR))
        self.assertEqual(sweep_stale_jobs(), SweepReport(examined=2, released=1, retried=1))
        self.assertEqual((self.state(claimed), self.state(running)), ("waiting", "scheduled"))
        for late in (transitions.start, transitions.release):
            self.assert_refused(late, claimed)
        self.assert_refused(transitions.complete, running)

    def test_lease_that_was_renewed_is_kept(self) -> None:
        """A heartbeat and a sweep meet on the worker's row."""
        worker = self.another_worker(silent=True)
        job = self.job("running", claimed_by=worker)
        self.broker.heartbeat(worker)
        self.assertEqual(sweep_stale_jobs(), SweepReport(examined=1))
        self.assertEqual(self.state(job), "running")

    def test_dry_run_counts_and_writes_nothing(self) -> None:
        """What it counts is what a sweep then does."""
        worker = self.another_worker(silent=True)
        jobs = [
            self.job("claimed", claimed_by=worker),
            self.job("running", claimed_by=worker),
            self.job("running", claimed_by=worker, max_attempts=1),
        ]
        before = [self.row(job) for job in jobs]
        foreseen = sweep_stale_jobs(dry_run=True)
        self.assertEqual([self.row(job) for job in jobs], before)
        self.assertEqual(Worker.objects.get(pk=worker).state, Worker.State.ALIVE)
        self.assertEqual(sweep_stale_jobs(), foreseen)

    def test_pages_beyond_one_that_cant_be_taken_are_reached(self) -> None:
        """By id, however small the page."""
        for _ in range(5):
            self.held()
        orphans = self.jobs(5, "running")
        report = sweep_stale_jobs(batch_size=2)
        self.assertEqual((report.examined, report.retried), (10, 5))
        self.assertEqual({self.state(job) for job in orphans}, {"scheduled"})

    def test_job_that_kills_its_workers_ends_as_failed(self) -> None:
        """After its budget of attempts, with a reason for each."""
        job = enqueue(TASK, max_attempts=3, backoff=0)
        for _ in range(3):
            self.assertEqual(self.state(job), "waiting")
            claim_jobs(self.another_worker(), ["default"], 1, start=True)
            Worker.objects.exclude(pk=self.worker).update(last_seen_at=self.ago(HOUR))
            self.assertEqual(sweep_stale_jobs().taken, 1)
        self.assertEqual((self.state(job), self.row(job)["attempt"]), ("failed", 3))
        self.assertEqual(self.kinds(job), ["rescued", "rescued", "failed"])

    def test_pruning_deletes_what_is_long_finished(self) -> None:
        """With its history, and with workers that are long gone; nothing else."""
        old = [self.job(state, finished_at=self.ago(2 * HOUR)) for state in FINAL]
        recent = self.job("completed")
        kept = [recent, self.job(), self.held()]
        self.run_again(transitions.start(self.held("claimed")))
        gone = self.another_worker(dead=True, last_seen_at=self.ago(2 * HOUR))
        self.another_worker(dead=True)
        report = prune_jobs(HOUR, batch_size=2)
        self.assertEqual(report, PruneReport(jobs=len(old), workers=1))
        self.assertEqual(Job.objects.filter(pk__in=[job.pk for job in old]).count(), 0)
        self.assertEqual(Job.objects.filter(pk__in=[job.pk for job in kept]).count(), len(kept))
        self.assertFalse(Worker.objects.filter(pk=gone).exists())
