"""django-tasks-db: one job at a time and process, so there is little to tune.

tuned: connections are kept, and an idle worker looks every 0.05 seconds rather than every second
(``--interval`` in its command db_worker).
"""

from __future__ import annotations

import django_child
from django_tasks_child import Backend

ABOUT = {
    "name": "django-tasks-db",
    "requires": ["django-tasks-db>=0.13,<1", "Django>=6,<7", "psycopg[binary]>=3.2,<4"],
    "python": "3.12",
    "rate": 500,
    "enqueues": 1200,
    "done": {
        "postgresql": (
            "SELECT count(*) FROM django_tasks_database_dbtaskresult WHERE status = 'SUCCESSFUL'"
        ),
        "sqlite": (
            "SELECT count(*) FROM django_tasks_database_dbtaskresult WHERE status = 'SUCCESSFUL'"
        ),
    },
    "benchmarks": ["enqueue", "drain", "sqlite", "latency"],
    "settings": ["default", "tuned"],
    "prepares": True,
}


def options(settings, **asked):
    return {"TASKS": {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}}


backend = Backend(["django_tasks_db"], options)


def worker(place, processes, threads, settings, handler):
    backend.configure(place, settings)
    django_child.run("db_worker", *([] if settings == "default" else ["--interval", "0.05"]))


if __name__ == "__main__":
    backend.main(worker)
