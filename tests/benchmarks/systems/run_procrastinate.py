"""Procrastinate.

default: one job at a time (``WORKER_CONCURRENCY`` in procrastinate/worker.py). tuned: many
coroutines (its page howto/production/concurrency), and connections for them, of which psycopg's
pool has four by default. With 10 to 200 coroutines and 4 to 20 connections it is equally fast.
"""

from __future__ import annotations

import asyncio

import child
import handlers
from procrastinate import App, PsycopgConnector, SyncPsycopgConnector

ABOUT = {
    "name": "procrastinate",
    "requires": ["procrastinate>=3,<4", "psycopg[binary]>=3.2,<4"],
    "python": "3.10",
    "rate": 1500,
    "enqueues": 3000,
    "done": {"postgresql": "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'"},
    "benchmarks": ["enqueue", "drain", "latency"],
    "settings": ["default", "tuned"],
}


def arguments(place):
    return {"host": place["host"], "user": place["user"], "dbname": place["dbname"]}


def app_of(connector):
    app = App(connector=connector)
    for name, handle in handlers.ASYNC.items():
        app.task(handle, name=name)
    return app


def setup(place):
    with app_of(SyncPsycopgConnector(kwargs=arguments(place))).open() as app:
        app.schema_manager.apply_schema()


def enqueue(place, jobs, handler="noop", single=False):
    with app_of(SyncPsycopgConnector(kwargs=arguments(place))).open() as app:
        task = app.tasks[handler]

        def store(numbers):
            if single:
                task.defer(number=numbers)
            else:
                task.batch_defer(*({"number": number} for number in numbers))

        return child.timed(jobs, store, single, chunk=1000)


def worker(place, processes, threads, settings, handler):
    asyncio.run(serve(place, settings, threads))


async def serve(place, settings, threads):
    pool = {"max_size": 10} if settings == "tuned" else {}
    async with app_of(PsycopgConnector(kwargs=arguments(place), **pool)).open_async() as app:
        more = {"concurrency": max(threads, 20)} if settings == "tuned" else {}
        await app.run_worker_async(**more)


def latency(place, jobs, stamps):
    with app_of(SyncPsycopgConnector(kwargs=arguments(place))).open() as app:
        task = app.tasks["stamp"]
        return child.one_at_a_time(jobs, stamps, lambda sent: task.defer(sent=sent))


if __name__ == "__main__":
    child.main({verb.__name__: verb for verb in (setup, enqueue, worker, latency)})
