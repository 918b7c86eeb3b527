"""The verbs of every backend of ``django.tasks``; a script adds its settings and its worker."""

from __future__ import annotations

import child
import django_child

CHUNK = 1000


class Backend:
    """One backend.

    Args:
        apps: what to install.
        options: Django's settings, from the names of settings and what ``worker`` is given.
        store_many: ``(task, list of argument lists)``, where the backend can; others store 1,000
            in a transaction.
    """

    def __init__(self, apps, options, store_many=None):
        self.apps = apps
        self.options = options
        self.store_many = store_many

    def configure(self, place, settings="tuned", **asked):
        django_child.configure(
            place,
            self.apps,
            # Django's default closes the connection after each job.
            keep_connections=settings != "default",
            settings=self.options(settings, **asked),
        )

    def setup(self, place):
        self.configure(place)
        django_child.migrate()

    def _tasks(self, place):
        self.configure(place)
        django_child.start()
        from bench_tasks import TASKS

        return TASKS

    def enqueue(self, place, jobs, handler="noop", single=False):
        from django.db import transaction

        task = self._tasks(place)[handler]

        def store(numbers):
            if single:
                task.enqueue(numbers)
            elif self.store_many:
                self.store_many(task, [[number] for number in numbers])
            else:
                with transaction.atomic():
                    for number in numbers:
                        task.enqueue(number)

        return child.timed(jobs, store, single, chunk=CHUNK)

    def latency(self, place, jobs, stamps):
        task = self._tasks(place)["stamp"]
        return child.one_at_a_time(jobs, stamps, task.enqueue)

    def main(self, worker, *, supervises=False):
        verbs = (self.setup, self.enqueue, self.latency, worker)
        child.main({verb.__name__: verb for verb in verbs}, supervises=supervises)
