"""This project, through its public commands and functions."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import child
import django_child

ABOUT = {
    "name": "jobqueue",
    "rate": 45000,
    "enqueues": 5000,
    "done": {
        "postgresql": "SELECT count(*) FROM jobqueue_job WHERE finished_at IS NOT NULL",
        "sqlite": "SELECT count(*) FROM jobqueue_job WHERE finished_at IS NOT NULL",
    },
    "benchmarks": [
        "enqueue", "drain", "sqlite", "latency", "sweep", "growth", "fence", "bloat", "memory",
    ],
    "settings": ["default", "tuned"],
    "prepares": True,
}  # fmt: skip
TASKS = {
    "noop": "handlers.noop",
    "1 ms": "handlers.sleep_1ms",
    "10 ms": "handlers.sleep_10ms",
    "stamp": "handlers.stamp",
}


def configure(place, **settings):
    # Connections as Django has them by default: a worker needs no setting to keep its own.
    django_child.configure(
        place, ["jobqueue"], keep_connections=False, settings={"JOBQUEUE": settings}
    )


def setup(place):
    configure(place)
    django_child.migrate()


def enqueue(place, jobs, handler="noop", single=False):
    configure(place)
    django_child.start()
    from jobqueue.enqueue import enqueue, enqueue_many

    task = TASKS[handler]
    enqueue(task, [0], queue="warm")

    def store(numbers):
        if single:
            enqueue(task, [numbers])
        else:
            enqueue_many([{"task": task, "args": [number]} for number in numbers])

    return child.timed(jobs, store, single)


def worker(place, processes, threads, settings, handler):
    """``--processes`` where the command has it; else ``work`` has started several of these."""
    configure(place)
    words = ["run_worker"]
    if settings == "tuned":
        words += ["--threads", str(threads)]
    if has_processes():
        words += ["--processes", str(processes)]
    django_child.run(*words)


def has_processes():
    done = subprocess.run(
        child.manage("run_worker", "--help"), capture_output=True, text=True, check=True
    )
    return "--processes" in done.stdout


def latency(place, jobs, stamps):
    configure(place)
    django_child.start()
    from jobqueue.enqueue import enqueue

    enqueue(TASKS["noop"])
    return child.one_at_a_time(jobs, stamps, lambda sent: enqueue(TASKS["stamp"], [sent]))


def sweep(place, batch):
    """Take back all stale jobs."""
    configure(place)
    django_child.start()
    from jobqueue.sweep import sweep_stale_jobs

    began = time.perf_counter()
    report = sweep_stale_jobs(batch_size=batch)
    return {"jobs": report.taken, "seconds": time.perf_counter() - began}


def claim(place, size, times):
    """Time claims of ``size`` jobs straight to running; what they take stays with the worker."""
    configure(place)
    django_child.start()
    from jobqueue import broker

    worker_id = broker.register(["default"], lease=3600).pk
    seconds = []
    for _ in range(times + 1):
        began = time.perf_counter()
        jobs = broker.claim(worker_id, size, start=True)
        seconds.append(time.perf_counter() - began)
        assert len(jobs) == size, f"{len(jobs)} of {size} claimed"
    return {"seconds": seconds[1:]}  # the first opened the connection


def run_through(place, jobs, batch):
    """Claim and complete ``jobs`` in batches, without a worker's threads; time each batch."""
    configure(place)
    django_child.start()
    from jobqueue import broker
    from jobqueue.lifecycle import Completed

    worker_id = broker.register(["default"], lease=3600).pk
    seconds, done = [], 0
    while done < jobs:
        began = time.perf_counter()
        claimed = broker.claim(worker_id, min(batch, jobs - done), start=True)
        assert claimed, f"{done} of {jobs} done"
        broker.settle(worker_id, [(job, Completed(None)) for job in claimed])
        seconds.append(time.perf_counter() - began)
        done += len(claimed)
    return {"seconds": seconds, "jobs": done}


def fence(place, pairs, batch):
    """Claim and complete batches as a worker does, and by the same code without its fence."""
    configure(place)
    django_child.start()
    from jobqueue import broker, guards
    from jobqueue.lifecycle import Completed

    worker_id = broker.register(["default"], lease=3600).pk
    columns, in_states = guards.FINGERPRINT, guards.in_states

    def compare(everything):
        """Beside the id: what a completion compares, and what a claim compares once more."""
        guards.FINGERPRINT = columns if everything else ()
        guards.in_states = in_states if everything else lambda *states: {}

    def complete(jobs):
        results = broker.settle(worker_id, [(job, Completed(None)) for job in jobs])
        return sum(result.conflict is None for result in results)

    for is_fenced in (False, True):
        compare(is_fenced)
        stale = broker.claim(worker_id, 2, start=True)
        for job in stale:
            job.attempt += 1
        assert complete(stale) == (0 if is_fenced else 2), "what is measured is not the fence"

    def once(is_fenced):
        compare(is_fenced)
        done = complete(broker.claim(worker_id, batch, start=True))
        assert done == batch, f"{done} of {batch} completed"

    return child.in_pairs(pairs, once)


def report(place, size, times):
    """Heartbeats of a worker, and progress of its ``size`` jobs, ``times`` times each."""
    configure(place)
    django_child.start()
    from jobqueue import broker
    from jobqueue.lifecycle import Report

    worker_id = broker.register(["default"], lease=3600).pk
    jobs = broker.claim(worker_id, size, start=True)
    held = {job.pk: job for job in jobs}
    for turn in range(times):
        broker.heartbeat(worker_id, held)
        said = Report().with_progress(turn % 101, "")
        broker.report(worker_id, [(job, said) for job in jobs])
    return {"jobs": len(jobs)}


if __name__ == "__main__":
    verbs = {
        verb.__name__: verb
        for verb in (setup, enqueue, worker, latency, sweep, claim, run_through, fence, report)
    }
    supervises = False
    if sys.argv[1] == "work":
        django_child.configure({"store": "sqlite", "path": os.devnull, "options": {}}, ["jobqueue"])
        supervises = has_processes()
    child.main(verbs, supervises=supervises)
