"""Awa, whose engine is in Rust. Jobs are stored by COPY in bulk, as its README says.

default: 50 workers, the default of a ``QueueConfig`` (docs/configuration.md). tuned: more of them,
and larger claims, for "hot queues" (the docstring of ``AsyncClient.start``). That says to try more
claimers, too, but with 2 or 4 it is no faster here, and slower with 128 or 200 workers.
"""

from __future__ import annotations

import asyncio
import dataclasses

import awa
import child
import handlers

ABOUT = {
    "name": "awa-pg",
    "requires": ["awa-pg>=0.6.9,<0.7"],
    "python": "3.10",
    "rate": 8000,
    "enqueues": 3000,
    # Completions are recorded in batches; old ones are summed up.
    "done": {
        "postgresql": (
            "SELECT (SELECT coalesce(sum(completed_count), 0) FROM awa.receipt_completion_batches)"
            " + (SELECT coalesce(sum(pruned_completed_count), 0) FROM awa.queue_terminal_rollups)"
        )
    },
    "benchmarks": ["enqueue", "drain", "latency"],
    "settings": ["default", "tuned"],
}


@dataclasses.dataclass
class Bench:
    argument: float
    handler: str = "noop"


def url(place):
    return f"postgres://{place['user']}@localhost/{place['dbname']}?host={place['host']}"


def setup(place):
    with awa.Client(url(place)) as client:
        client.migrate()
        client.install_queue_storage()


def enqueue(place, jobs, handler="noop", single=False):
    with awa.Client(url(place)) as client:

        def store(numbers):
            if single:
                client.insert(Bench(numbers, handler), queue="bench")
            else:
                client.enqueue_many_copy([Bench(n, handler) for n in numbers], queue="bench")

        return child.timed(jobs, store, single)


def worker(place, processes, threads, settings, handler):
    asyncio.run(serve(place, settings, threads, handler))


async def serve(place, settings, threads, handler):
    client = awa.AsyncClient(url(place))
    handle = handlers.ASYNC[handler]

    @client.task(Bench, queue="bench")
    async def job(job):
        await handle(job.args.argument)

    if settings == "default":
        await client.start([("bench", 50)])
    else:
        await client.start(
            [{"name": "bench", "max_workers": 512, "claim_batch_size": 512}], poll_interval_ms=20
        )
    await asyncio.Event().wait()


def latency(place, jobs, stamps):
    with awa.Client(url(place)) as client:
        store = lambda sent: client.insert(Bench(sent, "stamp"), queue="bench")  # noqa: E731
        return child.one_at_a_time(jobs, stamps, store)


if __name__ == "__main__":
    child.main({verb.__name__: verb for verb in (setup, enqueue, worker, latency)})
