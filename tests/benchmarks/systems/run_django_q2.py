"""Django Q2 with its ORM broker.

Its page configure.html: ``bulk`` takes several from the broker at a time, 1 by default;
``queue_limit`` is how many wait in memory; workers are recycled after 500 jobs. Of 10, 50 and 500
at a time all are as fast, and 4 workers on two cores slower than 2.
"""

from __future__ import annotations

import child
import django_child

ABOUT = {
    "name": "django-q2",
    "requires": ["django-q2>=1.11,<2", "Django>=5.2,<7", "psycopg[binary]>=3.2,<4"],
    "python": "3.10",
    "rate": 900,
    "enqueues": 800,
    "done": {
        "postgresql": "SELECT count(*) FROM django_q_task WHERE success",
        "sqlite": "SELECT count(*) FROM django_q_task WHERE success",
    },
    "benchmarks": ["enqueue", "drain", "sqlite", "latency"],
    "settings": ["default", "tuned"],
    "prepares": True,
}
FUNCTIONS = {
    "noop": "handlers.noop",
    "1 ms": "handlers.sleep_1ms",
    "10 ms": "handlers.sleep_10ms",
    "stamp": "handlers.stamp",
}


def configure(place, settings="tuned", processes=2, threads=4):
    # Without a limit it prunes what it has stored after each job, and can't be counted.
    cluster = {"orm": "default", "workers": processes, "save_limit": 0, "log_level": "ERROR"}
    if settings != "default":
        cluster |= {"bulk": 50, "poll": 0.05, "queue_limit": 200, "recycle": 1_000_000}
        if threads > 4:  # It has no threads: more processes, for jobs that wait.
            cluster["workers"] = 4 * processes
    django_child.configure(
        place,
        ["django.contrib.contenttypes", "django_q"],
        keep_connections=settings != "default",
        settings={"Q_CLUSTER": cluster},
    )


def setup(place):
    configure(place)
    django_child.migrate()


def enqueue(place, jobs, handler="noop", single=False):
    configure(place)
    django_child.start()
    from django.db import transaction
    from django_q.tasks import async_task

    def store(numbers):
        if single:
            async_task(FUNCTIONS[handler], numbers)
        else:  # It has no verb for many.
            with transaction.atomic():
                for number in numbers:
                    async_task(FUNCTIONS[handler], number)

    return child.timed(jobs, store, single, chunk=1000)


def worker(place, processes, threads, settings, handler):
    configure(place, settings, processes, threads)
    django_child.run("qcluster")


def latency(place, jobs, stamps):
    configure(place)
    django_child.start()
    from django_q.tasks import async_task

    return child.one_at_a_time(jobs, stamps, lambda sent: async_task(FUNCTIONS["stamp"], sent))


if __name__ == "__main__":
    child.main({verb.__name__: verb for verb in (setup, enqueue, worker, latency)}, supervises=True)
