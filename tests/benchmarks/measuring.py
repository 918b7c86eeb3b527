"""Counting what is recorded done, and rates from that; the same way for every system."""

from __future__ import annotations

import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from tests.benchmarks.report import NotRun
from tests.benchmarks.stores import Place, Stores, redis_command

Sample = tuple[float, int]
# At most this share of one core's time goes into counting.
SHARE = 0.05
FIRST_JOB_TIMEOUT = 30.0
# What is slower than was reckoned with is measured by what it does in this time.
DRAIN_TIMEOUT = 8.0
# The share of all jobs at which the clock starts and stops.
FROM, TO = 0.1, 0.9


@contextmanager
def counter(stores: Stores, place: Place, done: Any, total: int) -> Iterator[Callable[[], int]]:
    """Give a function that counts the jobs that are recorded done in a place."""
    if place["store"] == "postgresql":
        with stores.connect(place["dbname"]) as connection:
            yield lambda: int(connection.execute(done).fetchone()[0])
    elif place["store"] == "redis":
        path = place["socket"]
        answer = partial(redis_command, path, *done["command"], database=done.get("database", 0))
        if done.get("counts") == "left":
            yield lambda: total - int(answer())
        else:
            yield lambda: int(answer())
    else:
        with closing(sqlite3.connect(place["path"], timeout=20)) as file:
            yield lambda: int(file.execute(done).fetchone()[0])


def watch(
    count: Callable[[], int], total: int, workers: subprocess.Popen[str], timeout: float
) -> list[Sample]:
    """Count again and again until ``total`` are done, or time is up; return time and count.

    Raises:
        NotRun: the workers ended, or did nothing at all.
    """
    began = time.monotonic()
    samples: list[Sample] = []
    while not samples or samples[-1][1] < total:
        asked = time.monotonic()
        number = count()
        now = time.monotonic()
        samples.append(((asked + now) / 2, number))
        if not number and now - began > FIRST_JOB_TIMEOUT:
            raise NotRun(f"no job was done within {FIRST_JOB_TIMEOUT:g} s")
        if workers.poll() is not None:
            raise NotRun(f"its workers ended with status {workers.returncode}")
        started = next((at for at, done in samples if done), now)
        if now - started > timeout:
            break
        time.sleep(max(0.02, (now - asked) / SHARE))
    return samples


def rate(samples: Sequence[Sample]) -> float:
    """Return jobs per second, from 10 % to 90 % of what was done, between samples by proportion.

    So neither the start of interpreters nor the last jobs of the slower process count.
    """
    final = samples[-1][1]
    began, ended = (_when(samples, share * final) for share in (FROM, TO))
    if final == 0 or ended <= began:
        raise NotRun("it was done too fast to be measured: give it more jobs")
    return (TO - FROM) * final / (ended - began)


def _when(samples: Sequence[Sample], number: float) -> float:
    """Return the time at which ``number`` were done."""
    before_at, before = samples[0]
    for at, done in samples:
        if done >= number:
            share = (number - before) / (done - before) if done > before else 0.0
            return before_at + share * (at - before_at)
        before_at, before = at, done
    return samples[-1][0]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
