"""Exceptions: one base, and messages that name what they are about."""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest

from jobqueue import exceptions
from jobqueue.exceptions import (
    Cancel,
    Fail,
    InvalidJob,
    JobBusy,
    JobNotFound,
    JobQueueError,
    LeaseLost,
    Retry,
    Snooze,
    TransitionConflict,
    TransitionNotAllowed,
    UnfencedWrite,
)
from jobqueue.lifecycle import ExecutionFingerprint

MINE = ExecutionFingerprint("running", 1, "host:1:ab", None, None, 2)
THEIRS = ExecutionFingerprint("running", 2, "host:2:cd", None, None, 5)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (JobNotFound(7), "There is no job 7."),
        (
            JobBusy(7, 4, "canceling statement due to lock timeout", "session 12"),
            "Job 7 was busy in each of 4 tries: canceling statement due to lock timeout. "
            "Look for session 12.",
        ),
        (JobBusy(7, 1, "locked", ""), "Job 7 was busy when it was tried: locked."),
        (TransitionNotAllowed(7, "start", "waiting"), "Job 7 is waiting: start is not allowed."),
        (
            TransitionConflict(7, "complete", MINE, THEIRS),
            "Job 7 moved on: complete was decided on running by host:1:ab, attempt 1, version 2; "
            "it is now running by host:2:cd, attempt 2, version 5.",
        ),
        (
            TransitionConflict(7, "release", 2, None),
            "Job 7 moved on: release was decided on version 2; it is gone.",
        ),
        (LeaseLost("host:1:ab"), "Worker host:1:ab holds no live lease."),
        (Snooze(timedelta(minutes=1)), "snoozed for 0:01:00"),
        (Retry(), "retry requested by the handler"),
        (Retry(5, "rate limit"), "rate limit"),
        (Fail(), "failed by the handler"),
        (Fail("no such account"), "no such account"),
        (Cancel(), "cancelled by the handler"),
        (Cancel("too late"), "too late"),
    ],
)
def test_messages(error: JobQueueError, message: str) -> None:
    assert str(error) == message


def test_everything_has_one_base() -> None:
    classes = [cls for _, cls in inspect.getmembers(exceptions, inspect.isclass)]
    ours = [cls for cls in classes if cls.__module__ == exceptions.__name__]
    assert len(ours) == 12
    assert all(issubclass(cls, JobQueueError) for cls in ours)


def test_each_can_also_be_caught_as_what_it_is_in_python() -> None:
    assert issubclass(InvalidJob, ValueError)
    assert issubclass(UnfencedWrite, TypeError)
    assert issubclass(JobNotFound, LookupError)
