"""Chancy.

default: what a ``Queue`` is made with: processes, as many as there are cores, that are given jobs
every five seconds or when one is stored. tuned: ``eager_polling``, for queues that always have jobs
(chancy/queue.py), and the executor for "large numbers of IO-bound jobs" (chancy/executors/
asyncex.py). With 200 to 2,000 at a time, and outcomes written every 0.1 or every second, which is
the default, it is equally fast.
"""

from __future__ import annotations

import asyncio
import logging

import child
import handlers
from chancy import Chancy, Job, Queue, Worker

ABOUT = {
    "name": "chancy",
    "requires": ["chancy>=0.26,<1", "psycopg[binary]>=3.2,<4"],
    "python": "3.11",
    "rate": 7000,
    "enqueues": 3000,
    "done": {"postgresql": "SELECT count(*) FROM chancy_jobs WHERE state = 'succeeded'"},
    "benchmarks": ["enqueue", "drain", "latency"],
    "settings": ["default", "tuned"],
}
QUIET = logging.getLogger("quiet")
QUIET.setLevel(logging.ERROR)


def app(place):
    dsn = f"postgresql://{place['user']}@/{place['dbname']}?host={place['host']}"
    return Chancy(dsn, log=QUIET)


def setup(place):
    async def migrate():
        async with app(place) as chancy:
            await chancy.migrate()

    asyncio.run(migrate())


def job(handler, argument):
    name = "sent" if handler == "stamp" else "number"
    function = f"handlers.{handlers.ASYNC[handler].__name__}"
    return Job(func=function, kwargs={name: argument}, queue="bench")


def enqueue(place, jobs, handler="noop", single=False):
    with app(place) as chancy:

        def store(numbers):
            if single:
                chancy.sync_push(job(handler, numbers))
            else:
                for _ in chancy.sync_push_many([job(handler, n) for n in numbers]):
                    pass

        return child.timed(jobs, store, single)


def worker(place, processes, threads, settings, handler):
    asyncio.run(serve(place, settings, threads))


async def serve(place, settings, threads):
    async with app(place) as chancy:
        if settings == "default":
            queue = Queue("bench")
        else:
            queue = Queue(
                "bench",
                executor=Chancy.Executor.Async,
                concurrency=max(threads, 500),
                eager_polling=True,
                polling_interval=1,
            )
        await chancy.declare(queue, upsert=True)
        async with Worker(chancy) as worker:
            await worker.wait_for_shutdown()


def latency(place, jobs, stamps):
    with app(place) as chancy:
        return child.one_at_a_time(jobs, stamps, lambda sent: chancy.sync_push(job("stamp", sent)))


if __name__ == "__main__":
    child.main({verb.__name__: verb for verb in (setup, enqueue, worker, latency)})
