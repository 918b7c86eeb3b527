"""No write lands on an execution that it was not meant for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import connections, transaction

from jobqueue import transitions
from jobqueue.claim import claim_jobs
from jobqueue.exceptions import TransitionConflict, TransitionNotAllowed
from jobqueue.lifecycle import Completed, Settled
from jobqueue.models import EventKind, Job
from jobqueue.sweep import prune_jobs
from jobqueue.testing.conformance.base import WRITES, Bench


class Fence(Bench):
    """Writes that come late, twice, or to nothing."""

    def test_late_writes_change_nothing(self) -> None:
        """Of an executor whose job another worker, or its own, has begun again."""
        for worker_id in (None, self.worker):
            job = self.held(max_attempts=100)
            newer = self.run_again(job, worker_id)
            for name, late in WRITES.items():
                with self.subTest(name, worker_id=worker_id):
                    self.assert_refused(late, job)
            self.assertEqual(transitions.complete(newer, "mine").result, "mine")
            for name, late in WRITES.items():
                with self.subTest(name, worker_id=worker_id, newer="completed"):
                    self.assert_refused(late, job)

    def test_claim_that_was_released_is_not_started(self) -> None:
        """Not even once the same worker has claimed the job again."""
        job = self.held("claimed")
        transitions.release(job, actor="operator")
        self.assert_refused(transitions.start, job)
        (again,) = claim_jobs(self.worker, ["default"], 1)
        for late in (transitions.start, transitions.release, transitions.cancel):
            self.assert_refused(late, job)
        self.assertEqual(transitions.start(again).attempt, 1)

    def test_snooze_and_restart_is_another_execution(self) -> None:
        """By the same worker too: the first one's writes are late."""
        job = self.held()
        transitions.snooze(job, 0)
        (again,) = claim_jobs(self.worker, ["default"], 1, start=True)
        for name in ("complete", "fail", "retry", "release", "progress"):
            with self.subTest(name):
                self.assert_refused(WRITES[name], job)
        transitions.complete(again)

    def test_late_write_that_waited_for_the_row_changes_nothing(self) -> None:
        """What counts is the row as it is after the wait."""
        for name, late in WRITES.items():
            job = self.held(max_attempts=100)
            with ThreadPoolExecutor(1) as pool:
                with transaction.atomic(using=self.using):
                    newer = self.run_again(job, self.worker)
                    begun = threading.Event()
                    waiting = pool.submit(self._write_late, late, job, begun)
                    begun.wait(30)
                    begun.clear()
                with self.subTest(name):
                    self.assertRaises(TransitionConflict, waiting.result, 30)
                    self.assertEqual(Job.objects.get(pk=job.pk).fingerprint, newer.fingerprint)

    def _write_late(self, late: Callable[[Job], Any], job: Job, begun: threading.Event) -> None:
        try:
            connections[self.using].ensure_connection()
            begun.set()
            late(job)
        finally:
            connections.close_all()

    def test_write_that_changes_no_value_is_no_conflict(self) -> None:
        """Rows matched are counted, not rows changed."""
        job = self.held()
        for _ in range(2):
            transitions.record_progress(job, 40, "page 4")
            transitions.request_cancel(job, actor="operator")
        asked = self.row(job)["cancel_requested_at"]
        transitions.request_cancel(job, actor="somebody else")
        self.assertEqual(self.row(job)["cancel_requested_at"], asked)
        self.assertEqual(self.kinds(job), [EventKind.CANCEL_REQUESTED] * 3)

    def test_progress_never_falls(self) -> None:
        """Reports that overtake each other leave the highest, with its note."""
        job = self.held()
        for percent in (30, 80, 50, 0):
            transitions.record_progress(job, percent, f"at {percent}")
        self.assertEqual((self.row(job)["progress"], self.row(job)["progress_note"]), (80, "at 80"))
        self.assertEqual(transitions.complete(job).version, job.version + 1)

    def test_same_outcome_again_is_already_applied(self) -> None:
        """The reply to the first may have been lost; another outcome is refused."""
        job = self.held()
        result = {"pages": [1, 2.5, "é"]}
        transitions.complete(job, result)
        before = self.row(job)
        (again,) = transitions.settle_many([(job, Completed(result))])
        self.assertEqual(again.status, Settled.ALREADY_APPLIED)
        (other,) = transitions.settle_many([(job, Completed("other"))])
        self.assertEqual(other.status, Settled.CONFLICT)
        self.assertEqual(self.row(job), before)

    def test_row_that_is_gone_is_a_conflict(self) -> None:
        """There is nothing left to write an event about."""
        job = self.held()
        transitions.cancel(job, actor="operator")
        self.assertEqual(prune_jobs(0).jobs, 1)
        for name, late in WRITES.items():
            with self.subTest(name), self.assertRaises(TransitionConflict) as caught:
                late(job)
            self.assertIsNone(caught.exception.found)

    def test_verb_that_does_not_fit_the_state_is_not_allowed(self) -> None:
        """Whoever holds the row in hand is told before the database is asked."""
        for state in ("waiting", "completed"):
            job = self.job(state)
            with self.subTest(state), self.assertRaises(TransitionNotAllowed):
                transitions.complete(job)
