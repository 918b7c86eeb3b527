"""django-ox.

Its README: threads by ``--concurrency``, 1 by default, for jobs that wait; ``--processes`` for
others; persistent connections; ``enqueue_many``. With 2 to 8 threads it does fewer jobs that only
compute than with 1.
"""

from __future__ import annotations

import django_child
from django_tasks_child import Backend

ABOUT = {
    "name": "django-ox",
    "requires": ["django-ox>=1.9,<2", "Django>=6,<7", "psycopg[binary]>=3.2,<4"],
    "python": "3.12",
    "rate": 800,
    "enqueues": 2000,
    "done": {
        "postgresql": "SELECT count(*) FROM django_ox_oxtask WHERE status = 'SUCCESSFUL'",
        "sqlite": "SELECT count(*) FROM django_ox_oxtask WHERE status = 'SUCCESSFUL'",
    },
    "benchmarks": ["enqueue", "drain", "sqlite", "latency"],
    "settings": ["default", "tuned"],
    "prepares": True,
}


def options(settings, **asked):
    return {"TASKS": {"default": {"BACKEND": "django_ox.backend.OxBackend"}}}


def store_many(task, rows):
    from django_ox.bulk import enqueue_many

    enqueue_many(task, [(arguments, {}) for arguments in rows])


backend = Backend(["django_ox"], options, store_many)


def worker(place, processes, threads, settings, handler):
    backend.configure(place, settings)
    words = [] if settings == "default" else ["--interval", "0.05"]
    if settings != "default" and handler != "noop":
        words += ["--concurrency", str(threads)]
    django_child.run("ox_worker", "--processes", str(processes), *words)


if __name__ == "__main__":
    backend.main(worker, supervises=True)
