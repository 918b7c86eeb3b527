"""PgQueuer, on asyncpg and uvloop, which its package brings along and ``pgq run`` uses.

Its page docs/guides/performance-tuning.md: a larger ``batch_size`` for short jobs, which is 10 by
default; one connection for each ``PgQueuer``; and tables that lose no job in a crash, as they are
by default. Of batches of 100 to 2,000 those from 250 on are equally fast.
Handlers are coroutines; for others it says ``asyncio.to_thread`` (pgqueuer/core/executors.py),
which has six threads on two cores unless it is given as many as the other systems have.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import child
import handlers
import psycopg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver, SyncPsycopgDriver
from pgqueuer.queries import Queries, SyncQueries

ABOUT = {
    "name": "pgqueuer",
    "requires": ["pgqueuer[asyncpg,psycopg]>=1.6,<2"],
    "python": "3.11",
    "rate": 40000,
    "enqueues": 5000,
    "done": {"postgresql": "SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'"},
    "benchmarks": ["enqueue", "drain", "latency"],
    "settings": ["default", "tuned", "tuned, in threads"],
}


@contextlib.asynccontextmanager
async def driver(place):
    """Its fastest driver, on one connection."""
    import asyncpg

    connection = await asyncpg.connect(
        host=place["host"], user=place["user"], database=place["dbname"]
    )
    try:
        yield AsyncpgDriver(connection)
    finally:
        await connection.close()


def setup(place):
    async def install():
        async with driver(place) as found:
            await Queries(found).install()

    asyncio.run(install())


def enqueue(place, jobs, handler="noop", single=False):
    async def run():
        async with driver(place) as found:
            queries = Queries(found)
            await queries.enqueue("warm", b"0", 0)
            loop = asyncio.get_running_loop()
            began = loop.time()
            if single:
                for number in range(jobs):
                    await queries.enqueue("job", str(number).encode(), 0)
            else:
                for first in range(0, jobs, child.CHUNK):
                    numbers = range(first, min(first + child.CHUNK, jobs))
                    size = len(numbers)
                    payloads = [str(number).encode() for number in numbers]
                    await queries.enqueue(["job"] * size, payloads, [0] * size)
            return {"jobs": jobs, "seconds": loop.time() - began}

    return asyncio.run(run())


def worker(place, processes, threads, settings, handler):
    import uvloop

    uvloop.run(serve(place, settings, threads, handler))


async def serve(place, settings, threads, handler):
    async with driver(place) as found:
        queue = PgQueuer(found)
        in_threads = settings.endswith("threads")
        if in_threads and handler != "noop":
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
        handle = handlers.BLOCKING[handler] if in_threads else handlers.ASYNC[handler]

        @queue.entrypoint("job")
        async def job(job):
            argument = float(job.payload)
            if in_threads:
                await asyncio.to_thread(handle, argument)
            else:
                await handle(argument)

        @queue.entrypoint("warm")
        async def warm(job):
            pass

        await queue.run(**({} if settings == "default" else {"batch_size": 500}))


def latency(place, jobs, stamps):
    connection = psycopg.connect(
        host=place["host"], user=place["user"], dbname=place["dbname"], autocommit=True
    )

    queries = SyncQueries(SyncPsycopgDriver(connection))
    store = lambda sent: queries.enqueue("job", repr(sent).encode(), 0)  # noqa: E731
    return child.one_at_a_time(jobs, stamps, store)


if __name__ == "__main__":
    os.environ.setdefault("PGQUEUER_LOG_LEVEL", "WARNING")
    child.main({verb.__name__: verb for verb in (setup, enqueue, worker, latency)})
