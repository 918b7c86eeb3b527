"""One benchmark under way: which systems, how often, how large; and the turns that they take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from tests.benchmarks.report import NotRun, Reading, Report, tell
from tests.benchmarks.stores import Place, Stores
from tests.benchmarks.system import Prepared, System

# Two, as in the figures that the issue asks for.
PROCESSES = 2


@dataclass
class Run:
    """What the command line asked for, and what has been found so far.

    Attributes:
        jobs: how many, as far as a system gets through them.
        rows: how many rows stand beside the jobs at hand, where that matters.
        own: this project, which also fills the tables that plain SQL works on.
    """

    report: Report
    stores: Stores
    systems: list[System]
    own: System
    repeat: int
    jobs: int
    rows: int
    handlers: list[str]
    settings: list[str]
    _prepared: dict[tuple[str, str], Prepared] = field(default_factory=dict)

    def take_turns(
        self, measure: Callable[[Prepared], Iterable[Reading]], store: str = "postgresql"
    ) -> None:
        """Measure each system once, then each once more, ``repeat`` times.

        So whatever else the machine does while this runs meets all of them. One that fails is left
        out from then on, and the report says why.
        """
        for turn in range(self.repeat):
            tell(f"{self.report.benchmark}: round {turn + 1} of {self.repeat}")
            for prepared in list(self.taking_part(store)):
                name = prepared.system.name
                try:
                    self.report.add(name, measure(prepared))
                except NotRun as reason:
                    self.report.leave_out(name, str(reason))

    def taking_part(self, store: str) -> Iterator[Prepared]:
        """Yield the systems that can keep jobs on ``store``, and have not failed."""
        for system in self.systems:
            if system.name in self.report.not_run:
                continue
            kept_on = system.store(store)
            if kept_on is None:
                self.report.leave_out(system.name, f"it can't keep jobs on {store}")
                continue
            key = (system.name, kept_on)
            if key not in self._prepared:
                self._prepared[key] = Prepared(system, self.stores, kept_on)
            yield self._prepared[key]

    def filled(self, place: Place, number: int, **columns: str) -> None:
        """Add rows like one that this project has stored, but for ``columns``, which are SQL."""
        with self.stores.connect(place["dbname"]) as connection:
            if not _has_sample(connection):
                self.own.call("enqueue", place=place, jobs=1)
            fill(connection, number, columns)


def _has_sample(connection: psycopg.Connection[Any]) -> bool:
    return connection.execute("SELECT FROM jobqueue_job LIMIT 1").fetchone() is not None


def fill(connection: psycopg.Connection[Any], number: int, columns: dict[str, str]) -> None:
    """Insert ``number`` copies of the first job, but for ``columns``, which are SQL."""
    names = [
        name
        for (name,) in connection.execute(
            "SELECT column_name::text FROM information_schema.columns "
            "WHERE table_name = 'jobqueue_job' AND column_name <> 'id' ORDER BY ordinal_position"
        )
    ]
    values = {"queue": "'default'", **columns}
    connection.execute(
        f"INSERT INTO jobqueue_job ({', '.join(names)}) "
        f"SELECT {', '.join(values.get(name, f'sample.{name}') for name in names)} "
        "FROM (SELECT * FROM jobqueue_job ORDER BY id LIMIT 1) AS sample, "
        f"generate_series(1, {int(number)}) AS series (number)"
    )


FINISHED = {
    "state": "'completed'",
    "claimed_by": "'host:1:00000000'",
    "claimed_at": "now() - interval '1 day'",
    "attempted_at": "now() - interval '1 day'",
    "finished_at": "now() - interval '1 day' + series.number * interval '1 ms'",
    "attempt": "1",
    "version": "2",
}
SCHEDULED = {
    "state": "'scheduled'",
    "run_after": "now() + interval '1 day' + series.number * interval '1 ms'",
}
WAITING_ELSEWHERE = {"queue": "'other-' || series.number % 10"}
# By a worker that has no row: nobody's.
STALE = {
    "state": "'running'",
    "claimed_by": "'host:1:00000000'",
    "claimed_at": "now() - interval '1 hour'",
    "attempted_at": "now() - interval '1 hour'",
    "attempt": "1",
    "version": "1",
}


def stamps_of(path: Path) -> list[float]:
    """Return the milliseconds from enqueueing to beginning that handlers wrote down."""
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    with suppress(OSError):
        path.unlink()
    # The first found the workers starting.
    return [1000 * (float(began) - float(sent)) for sent, began in lines[1:]]
