"""The play: workers checksum a tree; one is killed and one frozen while they run jobs."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from django.db import DatabaseError, connections, transaction
from django.db.models import QuerySet

from example_project.crew import Crew, DemoError
from jobqueue import db, transitions
from jobqueue.enqueue import enqueue_many
from jobqueue.lifecycle import FINAL, HELD, QUEUED, Cancelled, State
from jobqueue.models import EventKind, Job, JobEvent, Worker
from jobqueue.sweep import sweep_stale_jobs

HANDLER: Final = "example_project.files.checksum"
WORKERS: Final = 4  # one to be killed, one to be frozen, and others to take over
THREADS: Final = 4
LEASE: Final = 2.0
BACKOFF: Final = 0.1
# Enough for a machine so slow that leases of two seconds keep running out.
MAX_ATTEMPTS: Final = 50

# How long the paced work takes with one worker gone, and how long any file takes at most.
WORK_SECONDS: Final = 16.0
MAX_PACE: Final = 1.0

TICK: Final = 0.1
SWEEP_EVERY: Final = 1.0
LOCK_TIMEOUT: Final = 0.5
PATIENCE: Final = 40.0


class Narrator(Protocol):
    """Who tells what happens."""

    def say(self, line: str) -> None:
        """Tell what has just happened."""

    def show(self, done: int) -> None:
        """Show how many jobs have ended."""


def pace_for(files: int) -> float:
    """Return how long each job sleeps, so that some are always running for about 16 seconds."""
    return min(MAX_PACE, WORK_SECONDS * (WORKERS - 1) * THREADS / files)


def worker_arguments(run: Run) -> list[str]:
    """Return what the workers' ``run_worker`` is given."""
    options = {
        "--queue": run.name,
        "--threads": THREADS,
        "--lease": LEASE,
        "--poll": 0.2,
        "--grace": 5,
        "--database": run.using,
    }
    return [str(word) for option in options.items() for word in option]


@dataclass(frozen=True, slots=True)
class Run:
    """One run's jobs: a queue and a workspace of their own, both by the name of the run."""

    name: str
    using: str
    files: Sequence[Path]
    ids: tuple[int, int]
    pace: float

    @classmethod
    def enqueue(cls, files: Sequence[Path], using: str) -> Run:
        """Store one job per file."""
        name = f"demo-{secrets.token_hex(4)}"
        pace = pace_for(len(files))
        specs = (
            # The earlier files come first, and so they do when they come back from a rescue.
            {"args": [str(file)], "priority": 100 - 200 * position // len(files)}
            for position, file in enumerate(files)
        )
        jobs = enqueue_many(
            specs,
            task=HANDLER,
            kwargs={"pace": pace},
            queue=name,
            workspace=name,
            backoff=BACKOFF,
            max_attempts=MAX_ATTEMPTS,
            using=using,
        )
        ids = [job.pk for job in jobs]
        return cls(name, using, files, (min(ids), max(ids)), pace)

    def jobs(self, **where: Any) -> QuerySet[Job]:
        """Return this run's jobs, found by id: nothing is indexed by workspace."""
        jobs = Job.objects.using(self.using).filter(pk__range=self.ids, workspace=self.name)
        return jobs.filter(**where)

    def events(self) -> QuerySet[JobEvent]:
        """Return what happened out of the ordinary to this run's jobs, oldest first."""
        events = JobEvent.objects.using(self.using).order_by("pk")
        return events.filter(job__in=self.jobs())

    def refusals(self) -> list[JobEvent]:
        """Return the events of this run's refused writes."""
        conflicts = self.events().filter(kind=EventKind.CONFLICT)
        # A heartbeat that misses a job leaves a conflict too, without having tried to write.
        return [event for event in conflicts if event.detail.get("wanted") != "hold"]

    def unfinished(self) -> bool:
        """Say whether there is a job that may still be run."""
        return self.jobs(state__in=QUEUED | HELD).exists()

    def call_off(self) -> None:
        """Cancel what is left, so that an interrupted run leaves no job to be run."""
        left = self.jobs(state__in=QUEUED | HELD)
        calls = [(job, Cancelled("the demo was called off")) for job in left]
        transitions.settle_many(calls, actor="demo", using=self.using)


@dataclass(frozen=True, slots=True)
class Caught:
    """A worker that stands still, and the jobs that it runs: attempts by the job's id."""

    worker_id: str
    pid: int
    jobs: Mapping[int, int]


class Play:
    """Kill one worker, freeze another past its lease, and see that the others do it all."""

    def __init__(self, run: Run, crew: Crew, narrator: Narrator) -> None:
        self._run = run
        self._crew = crew
        self._narrator = narrator
        self._sweep_at = 0.0

    def perform(self) -> None:
        """Play until every job is final and every worker has stopped.

        Raises:
            DemoError: something that must happen did not.
        """
        say = self._narrator.say
        self._crew.start(WORKERS)
        self._wait(lambda: self._ended() >= len(self._run.files) // 20, "the work is on its way")
        killed = self._catch()
        self._crew.kill(killed.pid)
        say(f"Killed worker {killed.worker_id} (SIGKILL) while it ran {_jobs(killed)}.")
        frozen = self._catch()
        say(
            f"Froze worker {frozen.worker_id} (SIGSTOP) while it ran {_jobs(frozen)}; "
            f"its lease of {LEASE:g} s runs out."
        )
        self._wait(lambda: self._are_done_by_others(frozen), "the frozen worker's jobs are done")
        say("The frozen worker's jobs have been rescued and completed by others.")
        self._crew.thaw(frozen.pid)
        say("Woke it (SIGCONT): it believes that the jobs are its own, and reports.")
        self._wait(lambda: self._is_back(frozen), "it has reported, and registers anew")
        say(f"Refused its reports on {self._refused(frozen)} of {_jobs(frozen)}.")
        self._wait(lambda: not self._run.unfinished(), "all jobs are done")
        self._crew.stop()
        say("All is done; the workers have stopped (SIGTERM).")

    # -- What is waited for, as the database has it

    def _ended(self) -> int:
        return self._run.jobs(state__in=FINAL).count()

    def _are_done_by_others(self, frozen: Caught) -> bool:
        done = self._run.jobs(pk__in=sorted(frozen.jobs), state=State.COMPLETED)
        return done.exclude(claimed_by=frozen.worker_id).count() == len(frozen.jobs)

    def _is_back(self, frozen: Caught) -> bool:
        """Say whether the process has taken a new lease, once done with all it held by the old."""
        workers = Worker.objects.using(self._run.using)
        began = workers.values_list("started_at", flat=True).get(pk=frozen.worker_id)
        later = workers.filter(pid=frozen.pid, started_at__gt=began)
        return [self._run.name] in later.values_list("queues", flat=True)

    def _refused(self, frozen: Caught) -> int:
        reports = {
            (e.job_id, e.attempt) for e in self._run.refusals() if e.actor == frozen.worker_id
        }
        return len(reports & set(frozen.jobs.items()))

    def _catch(self) -> Caught:
        """Freeze a worker at a moment when it runs jobs and is in no transaction."""
        for _ in self._ticks("a worker runs jobs"):
            for worker_id, pid in self._busy_workers():
                self._crew.freeze(pid)
                # Frozen within a transaction it would keep the others out until it wakes.
                if can_lock(worker_id, self._run.using) and (jobs := self._running(worker_id)):
                    return Caught(worker_id, pid, jobs)
                self._crew.thaw(pid)
            if not self._run.unfinished():
                raise DemoError("All jobs ended before a worker could be struck that ran one.")
        raise AssertionError("unreachable")

    def _busy_workers(self) -> list[tuple[str, int]]:
        running = self._run.jobs(state=State.RUNNING).values_list("claimed_by", flat=True)
        holders = sorted(holder for holder in set(running) if holder)
        workers = Worker.objects.using(self._run.using).filter(pk__in=holders)
        return list(workers.filter(pid__in=self._crew.pids).values_list("pk", "pid"))

    def _running(self, worker_id: str) -> dict[int, int]:
        jobs = self._run.jobs(state=State.RUNNING, claimed_by=worker_id)
        return dict(jobs.values_list("pk", "attempt"))

    # -- Time

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        for _ in self._ticks(what):
            if condition():
                return

    def _ticks(self, what: str) -> Iterator[None]:
        """Yield ten times a second; meanwhile sweep, and give up when nothing moves any more."""
        done, moved = -1, time.monotonic()
        while True:
            self._crew.check()
            self._sweep()
            now_done = self._ended()
            self._narrator.show(now_done)
            if now_done != done:
                done, moved = now_done, time.monotonic()
            if time.monotonic() - moved > PATIENCE:
                raise DemoError(f"Waited {PATIENCE:g} s in vain until {what}; {done} jobs ended.")
            yield
            time.sleep(TICK)

    def _sweep(self) -> None:
        if time.monotonic() >= self._sweep_at:
            sweep_stale_jobs(queues=[self._run.name], using=self._run.using)
            self._sweep_at = time.monotonic() + SWEEP_EVERY


def can_lock(worker_id: str, using: str) -> bool:
    """Say whether a frozen worker's rows can be locked, so that it was frozen in no transaction."""
    locked = threading.Event()

    def lock() -> None:
        try:
            with suppress(DatabaseError), transaction.atomic(using=using):
                list(db.lock_rows(Worker.objects.using(using).filter(pk=worker_id)))
                list(db.lock_rows(Job.objects.using(using).held_by(worker_id)))
                locked.set()
        finally:
            connections.close_all()

    # A thread that waits for a lock is not waited for: it gets through when the worker wakes.
    threading.Thread(target=lock, daemon=True).start()
    return locked.wait(LOCK_TIMEOUT)


def _jobs(caught: Caught) -> str:
    return "1 job" if len(caught.jobs) == 1 else f"{len(caught.jobs)} jobs"
