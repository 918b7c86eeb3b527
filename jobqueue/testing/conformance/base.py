"""What the parts of the suite have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connections
from django.test import override_settings

from jobqueue import broker, coordinator, db, transitions
from jobqueue.claim import claim_jobs
from jobqueue.exceptions import TransitionConflict
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.testing.factories import JobFactory, WorkerFactory

if TYPE_CHECKING:
    from django.test import TransactionTestCase as Base
else:
    Base = object

Result = TypeVar("Result")

# Whatever an executor may want to do with a job that it runs.
WRITES: dict[str, Callable[[Job], Any]] = {
    "complete": lambda job: transitions.complete(job, "late"),
    "fail": lambda job: transitions.fail(job, "late"),
    "retry": lambda job: transitions.retry(job, "late"),
    "snooze": lambda job: transitions.snooze(job, 60),
    "release": lambda job: transitions.release(job, "late"),
    "cancel": lambda job: transitions.cancel(job, "late"),
    "progress": lambda job: transitions.record_progress(job, 99, "late"),
}


class _Router:
    """Sends every query to one alias."""

    def __init__(self, using: str) -> None:
        self._using = using

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return self._using

    db_for_write = db_for_read


class Bench(Base):
    """Routes all queries to ``using``, registers a worker, and has tools to set a scene."""

    using = "default"
    broker: Any = broker

    def setUp(self) -> None:
        super().setUp()
        self.enterContext(override_settings(DATABASE_ROUTERS=[_Router(self.using)], JOBQUEUE={}))
        self.worker: str = self.broker.register(["default"]).pk

    def job(self, state: str = "waiting", **columns: Any) -> Job:
        """Return a job in ``state``, held by nobody that lives."""
        make: Any = JobFactory
        job: Job = make(**({} if state == "waiting" else {state: True}), **columns)
        return job

    def jobs(self, number: int, state: str = "waiting", **columns: Any) -> list[Job]:
        """Return so many."""
        return [self.job(state, **columns) for _ in range(number)]

    def held(self, state: str = "running", **columns: Any) -> Job:
        """Return a job that the worker holds."""
        return self.job(state, **{"claimed_by": self.worker, **columns})

    def another_worker(self, **columns: Any) -> str:
        """Return the id of a worker that lives, or is ``silent=True`` or ``dead=True``."""
        make: Any = WorkerFactory
        worker: Worker = make(**columns)
        return str(worker.pk)

    def ago(self, age: timedelta) -> datetime:
        """Return a time past, by the database's clock."""
        return db.now(self.using) - age

    def row(self, job: Job) -> dict[str, Any]:
        """Return the job as it is stored."""
        return {**Job.objects.filter(pk=job.pk).values().get()}

    def state(self, job: Job) -> str:
        """Return the state that is stored."""
        return Job.objects.values_list("state", flat=True).get(pk=job.pk)

    def kinds(self, job: Job) -> list[str]:
        """Return the kinds of the job's events, oldest first."""
        return list(JobEvent.objects.filter(job=job).values_list("kind", flat=True))

    def run_again(self, job: Job, worker_id: str | None = None) -> Job:
        """Have an operator release ``job``, and a worker (another, by default) run it again."""
        coordinator.release(job.pk, actor="operator")
        (newer,) = claim_jobs(worker_id or self.another_worker(), [job.queue], 1, start=True)
        return newer

    def at_once(self, calls: list[Callable[[], Result]]) -> list[Result]:
        """Call each in a thread, on a connection of its own, all at the same time."""
        together = threading.Barrier(len(calls))

        def run(call: Callable[[], Result]) -> Result:
            try:
                connections[self.using].ensure_connection()
                together.wait(30)
                return call()
            finally:
                connections.close_all()

        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(run, calls))

    def assert_refused(self, late: Callable[[Job], Any], job: Job) -> None:
        """Fail unless ``late`` is refused, and nothing but one event tells of it."""
        before, conflicts = self.row(job), self.kinds(job).count(EventKind.CONFLICT)
        with self.assertRaises(TransitionConflict) as caught:
            late(job)
        self.assertEqual(caught.exception.expected, job.fingerprint)
        self.assertEqual(self.row(job), before)
        self.assertEqual(self.kinds(job).count(EventKind.CONFLICT), conflicts + 1)
