"""A job is born whole, once, and in the caller's transaction."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from jobqueue import transitions
from jobqueue.enqueue import enqueue, enqueue_many
from jobqueue.exceptions import InvalidJob
from jobqueue.models import Job
from jobqueue.testing.conformance.base import Bench
from jobqueue.testing.factories import TASK


class Births(Bench):
    """Enqueueing."""

    def test_job_is_born_in_the_callers_transaction(self) -> None:
        """It is rolled back with the rest, and committed with the rest."""
        with self.assertRaises(ZeroDivisionError), transaction.atomic(using=self.using):
            enqueue(TASK)
            raise ZeroDivisionError
        self.assertFalse(Job.objects.exists())
        job = enqueue(TASK)
        self.assertEqual(Job.objects.get().fingerprint, job.fingerprint)

    def test_payload_comes_back_as_it_was_given(self) -> None:
        """Unicode beyond the basic plane, large integers, fractions, order of lists, types."""
        value: Any = {"é😀": [2**63 - 1, -(2**63) + 1, 0.1, 1e-9, True, None, "", [], {}, " x "]}
        job = enqueue(TASK, args=[value], kwargs={"k": value}, metadata=value)
        stored = Job.objects.get(pk=job.pk)
        self.assertEqual((stored.args, stored.kwargs), ([value], {"k": value}))
        self.assertEqual(stored.metadata, value)

    def test_many_jobs_are_born_all_or_none(self) -> None:
        """One that can't be stored keeps all of them out."""
        with self.assertRaises(InvalidJob):
            enqueue_many([{"task": TASK}, {"task": TASK, "args": [float("nan")]}])
        self.assertFalse(Job.objects.exists())
        jobs = enqueue_many([{"task": TASK, "args": [n]} for n in range(100)], batch_size=30)
        self.assertEqual([job.args for job in jobs], [[n] for n in range(100)])
        self.assertEqual(Job.objects.count(), 100)

    def test_unique_key_is_free_once_its_job_is_finished(self) -> None:
        """One unfinished job per key; any number of jobs without one."""
        first = enqueue(TASK, unique_key="k")
        self.assertEqual(enqueue(TASK, unique_key="k").pk, first.pk)
        self.assertNotEqual(enqueue(TASK).pk, enqueue(TASK).pk)
        transitions.cancel(first)
        self.assertNotEqual(enqueue(TASK, unique_key="k").pk, first.pk)

    def test_one_job_for_a_key_that_many_enqueue_at_once(self) -> None:
        """The database decides."""
        jobs = self.at_once([lambda: enqueue(TASK, unique_key="k").pk] * 4)
        self.assertEqual(len(set(jobs)), 1)
        self.assertEqual(Job.objects.count(), 1)
