"""Celery on Redis.

default: a process for each core, which prefetches 4 jobs. tuned: its page userguide/optimizing.html
says to prefetch 64 or 128 short jobs; and without the messages between workers. With 4 to 256, and
in processes, threads or ``solo``, it is equally fast: each job is acknowledged by itself, on disk.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import child
import handlers
from celery import Celery

ABOUT = {
    "name": "celery",
    "requires": ["celery[redis]>=5.5,<6"],
    "python": "3.11",
    "rate": 1200,
    "enqueues": 600,
    # Results, in a database of their own.
    "done": {"redis": {"command": ["DBSIZE"], "database": 1}},
    "benchmarks": ["enqueue", "drain", "latency"],
    "settings": ["default", "tuned"],
}
place = json.loads(os.environ.get("BENCH_PLACE") or "{}")
path = place.get("socket", "")
app = Celery(
    "bench",
    broker=f"redis+socket://{path}?virtual_host=0",
    backend=f"redis+socket://{path}?virtual_host=1",
)
# A job that is acknowledged before it runs is lost with its worker: late, as everybody else here.
app.conf.update(task_acks_late=True, worker_hijack_root_logger=False)
TASKS = {name: app.task(handle, name=name) for name, handle in handlers.BLOCKING.items()}


def enqueue(place, jobs, handler="noop", single=False):
    task = TASKS[handler]

    def store(numbers):  # It has no verb for many.
        for number in [numbers] if single else numbers:
            task.apply_async((number,))

    return child.timed(jobs, store, single)


def worker(place, processes, threads, settings, handler):
    words = ["-A", "run_celery", "worker", "--loglevel", "ERROR", "--concurrency", str(processes)]
    if settings != "default":
        words += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        words += ["--prefetch-multiplier", "64", "-O", "fair"]
        if threads > 4:
            words += ["--pool", "threads"]
            words[words.index("--concurrency") + 1] = str(threads * processes)
    os.chdir(Path(__file__).resolve().parent)
    os.execv(sys.executable, [sys.executable, "-m", "celery", *words])


def latency(place, jobs, stamps):
    return child.one_at_a_time(jobs, stamps, lambda sent: TASKS["stamp"].apply_async((sent,)))


if __name__ == "__main__":
    child.main({verb.__name__: verb for verb in (enqueue, worker, latency)}, supervises=True)
