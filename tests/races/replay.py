"""Run one race again, and show each statement: ``python -m tests.races.replay "<schedule>"``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import django
import pytest

from tests import servers
from tests.helpers import ENGINES
from tests.races.schedule import Schedule

TEST = "tests/races/test_every_pair.py::test_schedule_gives_the_same_race_again"


def main(arguments: list[str]) -> int:
    """Run the schedule; 0 if it ends as the model says, 2 if there is no such schedule."""
    if len(arguments) != 1:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    try:
        race = Schedule.parse(arguments[0])
        check(race)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    os.environ["JOBQUEUE_SCHEDULE"] = str(race)
    # ``check`` has imported more than pytest expects.
    quietly = [
        "-q",
        "-s",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    return int(pytest.main([*quietly, TEST]))


def check(race: Schedule) -> None:
    """Raise ``ValueError`` if there is nobody of that name, or the engine isn't to be had."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from tests.races import cast, tables

    _require("engine", race.engine, ENGINES)
    _require("state", race.state, tables.STATES)
    for actor in (race.first, race.second):
        _require("actor", actor, cast.ACTORS)
    if reason := servers.missing_engines().get(race.engine):
        raise ValueError(f"{race.engine} can't be run here: {reason}")


def _require(kind: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ValueError(f"there is no {kind} {name!r}; known are: {' | '.join(known)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
