"""dj-queue.

Its README: worker processes, threads, polling and prefetch in the backend's options; the defaults
are 3 threads and a prefetch of 2 for each (dj_queue/config.py). It listens for notifications. Of 1
to 8 threads and a prefetch of 8 to 64, 4 and 32 were the fastest.
"""

from __future__ import annotations

import django_child
from django_tasks_child import Backend

ABOUT = {
    "name": "dj-queue",
    "requires": ["dj-queue[postgres]>=0.14,<1", "Django>=6,<7", "psycopg[binary]>=3.2,<4"],
    "python": "3.12",
    "rate": 1500,
    "enqueues": 2000,
    "done": {
        "postgresql": "SELECT count(*) FROM dj_queue_jobs WHERE finished_at IS NOT NULL",
        "sqlite": "SELECT count(*) FROM dj_queue_jobs WHERE finished_at IS NOT NULL",
    },
    "benchmarks": ["enqueue", "drain", "sqlite", "latency"],
    "settings": ["default", "tuned"],
    "prepares": True,
}


def options(settings, processes=2, threads=4):
    worker = {"queues": ["*"], "processes": processes}
    if settings != "default":
        worker |= {"threads": threads, "polling_interval": 0.05, "prefetch_multiplier": 32}
    backend = {
        "BACKEND": "dj_queue.backend.DjQueueBackend",
        "QUEUES": [],
        "OPTIONS": {"workers": [worker]},
    }
    return {
        "TASKS": {"default": backend},
        "DATABASE_ROUTERS": ["dj_queue.routers.DjQueueRouter"],
    }


def store_many(task, rows):
    task.get_backend().enqueue_all([(task, arguments, {}) for arguments in rows])


backend = Backend(["dj_queue"], options, store_many)


def worker(place, processes, threads, settings, handler):
    backend.configure(place, settings, processes=processes, threads=threads)
    django_child.run("dj_queue", "--skip-recurring")


if __name__ == "__main__":
    backend.main(worker, supervises=True)
