"""What the rules draw: few values of each kind, so that they meet, and the bounds among them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hypothesis import strategies as st

from jobqueue.lifecycle import (
    Cancelled,
    Completed,
    Error,
    Failed,
    Outcome,
    Released,
    Report,
    Retry,
    Snoozed,
)

QUEUES = ("mail", "print")
ACTORS = ("operator", "robot")

# In seconds. The settings' defaults are among what they cross: a lease of 30, 60 to start a claim,
# a grace of 30 past a timeout.
skews = st.just(0) | st.sampled_from([-7200, -61, -31, -1, 1, 31, 61, 7200])
# For whoever looks for what is old: late more often than early.
late_skews = st.sampled_from([0, 1, 31, 61, 7200, -61])
steps = st.sampled_from([1, 31, 61, 7200, -1, -31, -61, -7200])
delays = st.sampled_from([0, 1, 45, 3600])
leases = st.sampled_from([30, 1, 86400])
ages = st.sampled_from([0, 1, 60])

queue_names = st.sampled_from(QUEUES)
queue_lists = st.lists(queue_names, min_size=1, max_size=2, unique=True)
some_queues = st.none() | queue_lists
actors = st.none() | st.sampled_from(ACTORS)
operators = st.sampled_from(ACTORS)
percents = st.sampled_from([0, 30, 60, 100])
notes = st.sampled_from(["", "half", "done"])
workers = st.integers(0, 3)
limits = st.none() | st.integers(1, 3)


def births() -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of ``enqueue``; without ``run_after`` the column's default tells the time."""
    return st.fixed_dictionaries(
        {
            "queue": queue_names,
            "max_attempts": st.integers(1, 3),
            "priority": st.sampled_from([0, 100, -100]),
            "timeout": st.none() | st.sampled_from([1, 60]),
            "unique_key": st.none() | st.sampled_from(["a", "A"]),
        },
        optional={"run_after": st.sampled_from([0, 1, 45])},
    )


def outcomes() -> st.SearchStrategy[Outcome]:
    """Everything that can become of an execution."""
    error = Error("no")
    waits = delays.map(lambda seconds: timedelta(seconds=seconds))
    return st.one_of(
        st.sampled_from([1, 2]).map(Completed),
        st.just(Retry(error)),
        waits.map(lambda wait: Retry(error, wait)),
        st.just(Released()),
        waits.map(Snoozed),
        st.just(Failed(error)),
        st.just(Cancelled()),
    )


def reports() -> st.SearchStrategy[Report]:
    """What an execution says about itself."""
    figures = st.builds(Report, percents, notes)
    checkpoints = st.builds(Report, checkpoint=st.integers(1, 2), has_checkpoint=st.just(True))
    return figures | checkpoints


def edits() -> st.SearchStrategy[dict[str, Any]]:
    """What a coordinator can change of a queued job, at least one of it."""
    values = {
        "priority": st.sampled_from([0, 100]),
        "queue": queue_names,
        "run_after": delays,
        "max_attempts": st.integers(1, 3),
    }
    several = st.fixed_dictionaries({"priority": values.pop("priority")}, optional=values)
    return several | st.fixed_dictionaries({"max_attempts": values["max_attempts"]})
