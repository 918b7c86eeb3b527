"""Dramatiq on Redis.

default: a process for each core, with 8 threads (its command line), which prefetch 2 jobs each
(dramatiq/worker.py). tuned, by the variables in its page reference.html: more prefetched, and no
more than 0.05 seconds between two looks when idle; and more threads where jobs wait.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import child
import dramatiq
import handlers
from dramatiq.brokers.redis import RedisBroker

ABOUT = {
    "name": "dramatiq",
    "requires": ["dramatiq[redis]>=2,<3"],
    "python": "3.10",
    "rate": 6000,
    "enqueues": 2000,
    # A message goes away when it is acknowledged.
    "done": {"redis": {"command": ["HLEN", "dramatiq:default.msgs"], "counts": "left"}},
    "benchmarks": ["enqueue", "drain", "latency"],
    "settings": ["default", "tuned"],
}
path = json.loads(os.environ.get("BENCH_PLACE") or "{}").get("socket", "")
broker = RedisBroker(url=f"unix://{path}")
dramatiq.set_broker(broker)
ACTORS = {
    name: dramatiq.actor(handle, actor_name=handle.__name__)
    for name, handle in handlers.BLOCKING.items()
}


def enqueue(place, jobs, handler="noop", single=False):
    actor = ACTORS[handler]

    def store(numbers):  # It has no verb for many.
        for number in [numbers] if single else numbers:
            actor.send(number)

    return child.timed(jobs, store, single)


def worker(place, processes, threads, settings, handler):
    words = ["run_dramatiq", "--processes", str(processes)]
    variables = dict(os.environ)
    if settings != "default":  # never fewer than its default of 8
        words += ["--threads", str(max(threads, 8))]
        variables |= {"dramatiq_queue_prefetch": "1000", "dramatiq_worker_timeout": "50"}
    os.chdir(Path(__file__).resolve().parent)
    os.execve(sys.executable, [sys.executable, "-m", "dramatiq", *words], variables)


def latency(place, jobs, stamps):
    return child.one_at_a_time(jobs, stamps, ACTORS["stamp"].send)


if __name__ == "__main__":
    child.main({verb.__name__: verb for verb in (enqueue, worker, latency)}, supervises=True)
