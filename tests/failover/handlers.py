"""Handlers whose effects can be counted, run by worker processes and by the test's own."""

from __future__ import annotations

import os
import time
from pathlib import Path

from django.db import connections, router

from jobqueue.exceptions import Retry
from jobqueue.models import Job
from jobqueue.worker.context import current_context
from tests.failover.standby import PATIENCE

PREFIX = f"{__name__}."
EFFECT = "INSERT INTO effect (job_id, attempt, pid) VALUES (%s, %s, %s)"


def write_effect(job_id: int, attempt: int) -> None:
    """Leave a row; nothing but the fence keeps there from being two."""
    with connections[router.db_for_write(Job)].cursor() as cursor:
        cursor.execute(EFFECT, [job_id, attempt, os.getpid()])


def work(failures: int = 0) -> None:
    """Fail so many times; then have an effect, in one transaction with the completion."""
    context = current_context()
    if context.attempt <= failures:
        raise Retry(0.05)
    with context.atomic():
        write_effect(context.job_id, context.attempt)


def work_when_told(directory: str) -> None:
    """Say that it has begun, wait for the test's word to all or to this process, have an effect."""
    context = current_context()
    log(directory, "begins")
    deadline = time.monotonic() + 2 * PATIENCE
    words = Path(directory) / "go", Path(directory) / f"go-{os.getpid()}"
    while not any(word.exists() for word in words):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    log(directory, "goes-on")
    with context.atomic():
        write_effect(context.job_id, context.attempt)


def log(directory: str, word: str) -> None:
    """Add a line to the log that the test reads; see ``load.Line``."""
    context = current_context()
    with (Path(directory) / "log").open("a") as file:
        file.write(f"{os.getpid()} {context.job_id} {context.attempt} {word}\n")
