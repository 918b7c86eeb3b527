"""How many jobs a worker has in hand, by how quick they are."""

from __future__ import annotations

import pytest

from jobqueue.worker.pace import GROWTH, HORIZON, Pace


def after(pace: Pace, seconds: float, *, times: int = 10, stuck: int = 0) -> int:
    """Return the limit once jobs have been seen to take so long each."""
    for _ in range(times):
        pace.note(10, seconds * 10)
        limit = pace.limit(stuck)
    return limit


def test_nothing_is_claimed_ahead_before_anything_is_known():
    assert Pace(4, 500).limit(stuck=0) == 4


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        (1.0, 4),  # no thread would come to another within the horizon
        (HORIZON, 4 + 4),
        (0.01, 4 + 40),
        (0.000_01, 500),
        (0.0, 500),
    ],
)
def test_as_many_are_claimed_ahead_as_are_begun_within_the_horizon(seconds, limit):
    assert after(Pace(4, 500), seconds) == limit


def test_it_grows_by_steps_and_falls_at_once():
    pace = Pace(2, 500)
    pace.note(2, 0.0)
    limits = [pace.limit(stuck=0) for _ in range(5)]
    assert limits == [2 * GROWTH, 2 * GROWTH**2, 2 * GROWTH**3, 500, 500]
    pace.note(1, 1.0)
    assert pace.limit(stuck=0) == 2


def test_a_quick_batch_after_a_slow_one_counts_by_half():
    pace = Pace(1, 500)
    pace.note(1, 0.4 * HORIZON)
    assert pace.limit(stuck=0) == 1 + 2
    pace.note(1, 0.0)
    assert pace.limit(stuck=0) == 1 + 4


def test_threads_with_slow_jobs_do_not_count():
    pace = Pace(4, 500)
    assert after(pace, 0.01, stuck=3) == 4 + 10
    assert after(pace, 0.01, stuck=4) == 4


def test_a_batch_below_the_number_of_threads_still_fills_them():
    assert after(Pace(8, 1), 0.0) == 8


def test_slowing_down_forgets_what_was_known():
    pace = Pace(4, 500)
    after(pace, 0.0)
    pace.slow_down()
    assert pace.limit(stuck=0) == 4


def test_no_jobs_teach_nothing():
    pace = Pace(4, 500)
    pace.note(0, 0.0)
    assert pace.limit(stuck=0) == 4
