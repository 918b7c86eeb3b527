"""Steady Queue.

Its README: worker processes, threads and polling in the setting STEADY_QUEUE; the defaults are 3
threads and ten times a second (steady_queue/configuration.py). With 2 threads it is slower than
with 4, and with 8 no faster.
"""

from __future__ import annotations

import django_child
from django_tasks_child import Backend

ABOUT = {
    "name": "steady-queue",
    "requires": ["steady-queue>=0.3,<1", "Django>=6,<7", "psycopg[binary]>=3.2,<4"],
    "python": "3.12",
    "rate": 300,
    "enqueues": 600,
    "done": {
        "postgresql": "SELECT count(*) FROM steady_queue_job WHERE finished_at IS NOT NULL",
        "sqlite": "SELECT count(*) FROM steady_queue_job WHERE finished_at IS NOT NULL",
    },
    "benchmarks": ["enqueue", "drain", "sqlite", "latency"],
    "settings": ["default", "tuned"],
    "prepares": True,
}


def options(settings, **asked):
    return {"TASKS": {"default": {"BACKEND": "steady_queue.backend.SteadyQueueBackend"}}}


backend = Backend(["django.contrib.contenttypes", "steady_queue"], options)


def worker(place, processes, threads, settings, handler):
    backend.configure(place, settings)
    workers = {"processes": processes}
    if settings != "default":
        workers |= {"threads": threads, "polling_seconds": 0.05}
    django_child.run("steady_queue", BENCH_STEADY_QUEUE=repr(workers))


if __name__ == "__main__":
    backend.main(worker, supervises=True)
