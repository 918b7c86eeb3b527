"""Each outcome writes what the table of verbs says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db import transaction

from jobqueue import signals, transitions
from jobqueue.claim import claim_jobs
from jobqueue.enqueue import enqueue
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
from jobqueue.models import Job, JobEvent
from jobqueue.testing.conformance.base import WRITES, Bench
from jobqueue.testing.factories import TASK

HOUR = timedelta(hours=1)
ERROR = Error("ValueError: no")


class Outcomes(Bench):
    """Settling, one at a time and in batches."""

    def test_batch_tells_what_became_of_each(self) -> None:
        """In the order given; one that moved on keeps nobody out."""
        outcomes = {
            "completed": Completed({"n": 1}),
            "failed": Failed(ERROR),
            "scheduled": Retry(ERROR),
            "waiting": Released("stopped"),
            "cancelled": Cancelled("no longer wanted"),
        }
        jobs = [self.held() for _ in outcomes]
        snoozed, moved = self.held(), self.held()
        self.run_again(moved)
        items = [*zip(jobs, outcomes.values(), strict=True), (snoozed, Snoozed(HOUR))]
        results = self.broker.settle(self.worker, [(moved, Completed()), *reversed(items)])
        self.assertEqual([r.status for r in results], [Settled.CONFLICT] + [Settled.APPLIED] * 6)
        self.assertEqual([self.state(job) for job in jobs], list(outcomes))
        self.assertEqual((self.state(snoozed), self.state(moved)), ("scheduled", "running"))
        self.assertEqual(self.row(jobs[0])["result"], {"n": 1})

    def test_result_that_cant_be_stored_fails_its_own_attempt(self) -> None:
        """With a reason, and without keeping the others of the batch out."""
        bad, good = self.held(), self.held()
        items = [(bad, Completed(float("nan"))), (good, Completed(1))]
        self.broker.settle(self.worker, items)
        self.assertEqual((self.state(bad), self.state(good)), ("scheduled", "completed"))
        event = JobEvent.objects.get(job=bad)
        self.assertIn("result is nan, which JSON can't hold", event.message)

    def test_failed_attempts_use_up_the_budget(self) -> None:
        """Snoozed and released ones are excused; the last failure ends the job."""
        job = enqueue(TASK, max_attempts=2, backoff=0)
        ends: list[Callable[[Job], Job]] = [
            lambda job: transitions.retry(job, "first"),
            lambda job: transitions.snooze(job, 0),
            transitions.release,
            lambda job: transitions.retry(job, "second"),
        ]
        for end in ends:
            (running,) = claim_jobs(self.worker, ["default"], 1, start=True)
            ended = end(running)
        self.assertEqual((ended.state, ended.attempt, ended.excused), ("failed", 4, 2))
        self.assertEqual(self.kinds(job), ["retried", "snoozed", "released", "failed"])

    def test_cancel_request_wins_over_a_setback_and_not_over_success(self) -> None:
        """Also when it was made after the executor read the row."""
        for name, late in WRITES.items():
            if name in ("progress", "cancel"):
                continue
            job = self.held(unique_key=name)
            transitions.request_cancel(job, actor="operator")
            late(job)
            with self.subTest(name):
                expected = "completed" if name == "complete" else "cancelled"
                self.assertEqual(self.state(job), expected)
                self.assertIsNone(self.row(job)["unique_key"])

    def test_transitions_are_told_after_commit(self) -> None:
        """And not at all when the transaction is rolled back."""
        heard: list[str] = []

        def hear(*, verb: str, job: Job, **kwargs: Any) -> None:
            heard.append(f"{verb}: {job.state}")

        signals.job_transitioned.connect(hear)
        self.addCleanup(signals.job_transitioned.disconnect, hear)
        job = self.held()
        with self.assertRaises(ZeroDivisionError), transaction.atomic(using=self.using):
            transitions.complete(job)
            raise ZeroDivisionError
        with transaction.atomic(using=self.using):
            transitions.fail(job)
            self.assertEqual(heard, [])
        self.assertEqual(heard, ["fail: failed"])
