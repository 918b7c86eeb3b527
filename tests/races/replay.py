"""Run one race again, and show each statement: ``python -m tests.races.replay "<schedule>"``."""

from __future__ import annotations

import os
import sys

import pytest

from tests.races.schedule import Schedule

TEST = "tests/races/test_every_pair.py::test_schedule_gives_the_same_race_again"


def main(arguments: list[str]) -> int:
    """Run the schedule; 0 if it ends as the model says."""
    try:
        (line,) = arguments
        os.environ["JOBQUEUE_SCHEDULE"] = str(Schedule.parse(line))
    except ValueError as error:
        sys.stderr.write(f"{error}\n\n{__doc__}\n")
        return 2
    return int(pytest.main(["-q", "-s", "-p", "no:cacheprovider", TEST]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
