"""What the jobs do, in threads and in event loops. Imports nothing but the standard library."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path


def noop(number=0):
    """Do nothing."""


def sleep_1ms(number=0):
    """Wait, as for a network."""
    time.sleep(0.001)


def sleep_10ms(number=0):
    """Wait, as for a network."""
    time.sleep(0.01)


def stamp(sent):
    """Write down when this began."""
    began = time.monotonic()
    with Path(os.environ["BENCH_STAMPS"]).open("a") as file:
        file.write(f"{sent} {began}\n")


async def async_noop(number=0):
    """Do nothing."""


async def async_sleep_1ms(number=0):
    """Wait, as for a network."""
    await asyncio.sleep(0.001)


async def async_sleep_10ms(number=0):
    """Wait, as for a network."""
    await asyncio.sleep(0.01)


async def async_stamp(sent):
    """Write down when this began."""
    stamp(sent)


BLOCKING = {"noop": noop, "1 ms": sleep_1ms, "10 ms": sleep_10ms, "stamp": stamp}
ASYNC = {
    "noop": async_noop,
    "1 ms": async_sleep_1ms,
    "10 ms": async_sleep_10ms,
    "stamp": async_stamp,
}
