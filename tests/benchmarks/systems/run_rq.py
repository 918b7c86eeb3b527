"""RQ on Redis.

default: a process is forked for each job. tuned: ``SimpleWorker``, which forks none (its page
docs/workers). It runs one job at a time, so two processes run two.
"""

from __future__ import annotations

import child
import handlers
import redis
from rq import Queue, SimpleWorker, Worker

ABOUT = {
    "name": "rq",
    "requires": ["rq>=2,<4"],
    "python": "3.10",
    "rate": 400,
    "enqueues": 1500,
    "done": {"redis": {"command": ["ZCARD", "rq:finished:default"]}},
    "benchmarks": ["enqueue", "drain", "latency"],
    "settings": ["default", "tuned"],
}


def queue_at(place):
    return Queue(connection=redis.Redis(unix_socket_path=place["socket"]))


def enqueue(place, jobs, handler="noop", single=False):
    queue, function = queue_at(place), handlers.BLOCKING[handler]

    def store(numbers):
        if single:
            queue.enqueue(function, numbers)
        else:
            queue.enqueue_many([Queue.prepare_data(function, (n,)) for n in numbers])

    return child.timed(jobs, store, single, chunk=1000)


def worker(place, processes, threads, settings, handler):
    kind = Worker if settings == "default" else SimpleWorker
    queue = queue_at(place)
    kind([queue], connection=queue.connection).work(logging_level="ERROR")


def latency(place, jobs, stamps):
    queue = queue_at(place)
    store = lambda sent: queue.enqueue(handlers.stamp, sent)  # noqa: E731
    return child.one_at_a_time(jobs, stamps, store)


if __name__ == "__main__":
    child.main({verb.__name__: verb for verb in (enqueue, worker, latency)})
