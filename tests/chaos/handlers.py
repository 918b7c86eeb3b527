"""The jobs of a chaos run. Each logs that it runs, with its token and its execution."""

from __future__ import annotations

import os
import random
import signal
import time

from jobqueue.exceptions import Snooze
from jobqueue.worker.context import JobContext, current_context
from tests.chaos import recording
from tests.chaos.models import Effect

NAP = 0.15
# Quick enough for dozens to be claimed ahead, and slow enough to be struck with those in hand.
BRISK = 0.004
# Beyond the timeout that such jobs are given, and the grace of the settings.
OVERTIME_TIMEOUT = 0.5
OVERTIME = 2.5


class Trouble(Exception):
    """What a handler raises that is to fail."""


def _begin(token: str) -> JobContext:
    context = current_context()
    recording.log().write(
        "run", job=context.job_id, v=context.fencing_token, attempt=context.attempt, token=token
    )
    return context


def quick(token: str) -> str:
    """Do nothing."""
    _begin(token)
    return token


def nap(token: str) -> str:
    """Take a little while."""
    _begin(token)
    time.sleep(random.uniform(0, NAP))
    return token


def brisk(token: str) -> str:
    """Take next to no time."""
    _begin(token)
    time.sleep(random.uniform(0, BRISK))
    return token


def fail(token: str, times: int) -> str:
    """Fail so many times, and then succeed."""
    context = _begin(token)
    if context.attempt <= times:
        raise Trouble(f"attempt {context.attempt} of {times} that fail")
    return token


def snooze(token: str, times: int) -> str:
    """Ask to be run again later, so many times."""
    if _begin(token).attempt <= times:
        raise Snooze(random.choice([0, 0.05, 0.3]))
    return token


def effect(token: str) -> None:
    """Write one row in the transaction that completes the job."""
    context = _begin(token)
    with context.atomic() as effects:
        Effect.objects.create(job_id=context.job_id, version=context.fencing_token, token=token)
        effects.result = token


def report(token: str) -> str:
    """Say how far it has come, and stop if asked to."""
    context = _begin(token)
    for percent in range(0, 101, 20):
        context.progress(percent, f"{percent} of 100")
        context.raise_if_cancelled()
        time.sleep(0.25)
    return token


def outlast(token: str, seconds: float) -> str:
    """Run for longer than a lease; the heartbeat keeps it."""
    _begin(token)
    time.sleep(seconds)
    return token


def overtime(token: str) -> str:
    """Run past its own timeout, so that a sweep gives the job away while it still runs."""
    _begin(token)
    time.sleep(OVERTIME)
    return token


def kill(token: str) -> str:
    """Take its whole worker with it, the first time."""
    if _begin(token).attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return token
