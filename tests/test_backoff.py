"""Retry policies: bounded, spread, and never overflowing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobqueue import db, transitions
from jobqueue.backoff import MAX_SECONDS, Backoff, Drawn
from jobqueue.models import Job
from jobqueue.testing.factories import JobFactory
from tests.asserting import exactly


def seconds(policy: Backoff, failures: int, drawn: float = 0.0) -> float:
    return policy.delay(failures, lambda: drawn).total_seconds()


def test_doubles_up_to_the_cap() -> None:
    waits = [seconds(Backoff(base=5, cap=60), failures) for failures in range(1, 7)]
    assert waits == [5, 10, 20, 40, 60, 60]


@pytest.mark.parametrize("failures", [0, -1])
def test_a_job_that_never_failed_waits_as_after_its_first_failure(failures: int) -> None:
    assert seconds(Backoff(base=5), failures) == 5


@pytest.mark.parametrize("failures", [13, 47, 305, 720, 1024, 1025, 10_000, 10**400])
def test_high_counts_wait_for_the_cap(failures: int) -> None:
    """codingjoe/threadmill#47, riverqueue/river#697: the power overflows before the cap is met."""
    assert seconds(Backoff(base=1, factor=2, cap=3600), failures) == 3600


@pytest.mark.parametrize("failures", [1, 2, 10_000])
def test_the_same_wait_each_time(failures: int) -> None:
    assert seconds(Backoff(base=7, factor=1, cap=60), failures) == 7
    assert seconds(Backoff.parse(7), failures) == 7
    assert seconds(Backoff.parse(timedelta(seconds=7)), failures) == 7
    assert seconds(Backoff.parse(0), failures) == 0


def test_a_cap_below_the_base_is_the_wait() -> None:
    assert seconds(Backoff(base=60, cap=10), 1) == 10


def test_jitter_takes_its_share_at_most() -> None:
    policy = Backoff(base=100, cap=100, jitter=0.2)
    assert [seconds(policy, 1, drawn) for drawn in (0.0, 0.5, 1.0)] == [100, 90, 80]
    drawn = {policy.delay(1) for _ in range(50)}
    assert len(drawn) > 25
    assert timedelta(seconds=80) <= min(drawn) <= max(drawn) <= timedelta(seconds=100)


def test_due_between_the_shortest_and_the_longest_wait() -> None:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    due = Backoff(base=100, jitter=0.2).due(2, now)
    assert due == Drawn(now + timedelta(seconds=160), now + timedelta(seconds=200))
    drawn = {due.draw() for _ in range(50)}
    assert len(drawn) > 25
    assert due.earliest <= min(drawn) <= max(drawn) <= due.latest


@pytest.mark.parametrize("policy", [Backoff(base=7, jitter=0), Backoff(base=0, jitter=1)])
def test_due_at_one_time_without_a_spread(policy: Backoff) -> None:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    assert policy.due(1, now) == now + timedelta(seconds=policy.base)


limits = st.floats(0, MAX_SECONDS)


@given(limits, st.floats(1, 1000), limits, st.floats(0, 1), st.integers(1, 20_000), st.floats(0, 1))
@example(5e-324, 2.0, MAX_SECONDS, 0.0, 2000, 0.0)
@example(1.0, 1.1, 3.138428376721, 0.0, 13, 0.0)
@example(0.0, 1000.0, MAX_SECONDS, 0.0, 20_000, 0.0)
def test_every_wait_is_within_its_bounds(
    base: float, factor: float, cap: float, jitter: float, failures: int, drawn: float
) -> None:
    policy = Backoff(base, factor, cap, jitter)
    full = seconds(policy, failures)
    wait = seconds(policy, failures, drawn)
    microsecond = 1e-6
    assert 0 <= wait <= full <= cap + microsecond
    assert wait >= full * (1 - jitter) - microsecond
    assert full >= min(base, cap) - microsecond


@given(st.builds(Backoff, base=limits, cap=limits, jitter=st.floats(0, 1)))
def test_figures_survive_storage(policy: Backoff) -> None:
    assert Backoff.parse(policy.as_dict()) == policy
    assert Backoff.parse(policy) is policy


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "backoff base must be 0 to 31,536,000, not -1"),
        (float("nan"), "backoff base must be 0 to 31,536,000, not nan"),
        (float("inf"), "backoff base must be 0 to 31,536,000, not inf"),
        (1e9, "backoff base must be 0 to 31,536,000, not 1000000000.0"),
        (timedelta(days=366), "backoff base must be 0 to 31,536,000, not 31622400.0"),
        ({"cap": -5}, "backoff cap must be 0 to 31,536,000, not -5"),
        ({"factor": 0.5}, "backoff factor must be 1 to 1,000, not 0.5"),
        ({"jitter": 1.5}, "backoff jitter must be 0 to 1, not 1.5"),
        ({"base": "5"}, "backoff base must be a number, not '5'"),
        ({"base": None}, "backoff base must be a number, not None"),
        ({"base": True}, "backoff base must be a number, not True"),
        ({"bass": 1, 7: 2}, "backoff has no figure 'bass', 7"),
        (True, "backoff must be a Backoff, seconds or a mapping, not True"),
        ("5", "backoff must be a Backoff, seconds or a mapping, not '5'"),
        ([5], "backoff must be a Backoff, seconds or a mapping, not [5]"),
        (None, "backoff must be a Backoff, seconds or a mapping, not None"),
    ],
)
def test_a_bad_policy_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=exactly(message)):
        Backoff.parse(value)


def test_a_number_beyond_floats_is_out_of_range_too() -> None:
    with pytest.raises(ValueError, match=r"^backoff base must be 0 to 31,536,000, not 1000000"):
        Backoff.parse(10**400)


def test_a_broken_policy_on_the_row_falls_back_and_is_told(alias: str) -> None:
    """codingjoe/threadmill#47: a broken policy must not end the chain of retries early."""
    job = JobFactory(running=True, backoff={"base": -1})

    transitions.retry(job, "no")

    row = Job.objects.get(pk=job.pk)
    assert row.state == "scheduled"
    wait = (row.run_after - db.now(alias)).total_seconds()
    assert 0 < wait <= Backoff().base
    assert row.events.get().detail["backoff"] == (
        "backoff base must be 0 to 31,536,000, not -1; used the default"
    )


def test_attempt_305_of_1024_is_scheduled_within_the_cap(alias: str) -> None:
    """riverqueue/river#697: now < next run <= now + cap."""
    policy = Backoff(base=1, cap=3600).as_dict()
    job = JobFactory(running=True, attempt=305, max_attempts=1024, backoff=policy)
    before = db.now(alias)

    transitions.retry(job, "no")

    run_after = Job.objects.get(pk=job.pk).run_after
    assert before < run_after <= db.now(alias) + timedelta(seconds=3600)
