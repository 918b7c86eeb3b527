"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tests.benchmarks import chart, queues, tables, venvs
from tests.benchmarks.report import OURS, NotRun, Report, tell
from tests.benchmarks.running import Run
from tests.benchmarks.stores import opened
from tests.benchmarks.system import System, all_systems


@dataclass(frozen=True)
class Benchmark:
    """One benchmark and its usual size."""

    run: Callable[[Run], None]
    jobs: int
    rows: int = 1_000_000


BENCHMARKS = {
    "enqueue": Benchmark(queues.enqueue, 50_000),
    "drain": Benchmark(queues.drain, 300_000),
    "sqlite": Benchmark(queues.sqlite, 10_000),
    "latency": Benchmark(queues.latency, 200),
    "sweep": Benchmark(tables.sweep, 100_000),
    "growth": Benchmark(tables.growth, 0),
    "fence": Benchmark(tables.fence, 200_000),
    "bloat": Benchmark(tables.bloat, 100_000),
    "memory": Benchmark(tables.memory, 100_000),
}


def main(argv: Sequence[str]) -> int:
    """Run what is asked for; return the exit status."""
    if argv[:1] == ["chart"]:
        return chart.main(argv[1:])
    parser = _parser()
    options = parser.parse_args(argv)
    systems = all_systems(options.cache)
    chosen = _choose(parser, options.name, options.only, systems)
    benchmark = BENCHMARKS[options.name]
    report = Report(options.name)
    try:
        with opened(options.socket) as stores:
            if options.socket and not stores.is_durable():
                tell("This server does not write commits to the disk: its figures mean little.")
            benchmark.run(
                Run(
                    report=report,
                    stores=stores,
                    systems=chosen,
                    own=systems[OURS],
                    repeat=options.repeat,
                    jobs=options.jobs or benchmark.jobs,
                    rows=options.rows or benchmark.rows,
                    handlers=options.handlers or list(queues.HANDLERS),
                    settings=options.settings or list(queues.SETTINGS),
                )
            )
    except (NotRun, psycopg.OperationalError) as reason:
        tell(f"{options.name} could not be run: {reason}")
        return 1
    print(report.as_json() if options.as_json else report.as_table())  # noqa: T201
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description="Measure this project beside plain SQL and other queues, in one run. "
        "See docs/explanation/performance.md. 'chart FILE.json... -o FILE.svg' draws what --json "
        "has printed.",
    )
    parser.add_argument("name", choices=[*BENCHMARKS], metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument(
        "--json",
        action="store_true",
        dest="as_json",
        help="Print one JSON object on stdout and nothing else.",
    )
    parser.add_argument(
        "--only",
        action="extend",
        nargs="+",
        metavar="SYSTEM",
        help="Measure only these; repeatable. Ratios need 'limit' among them.",
    )
    for name, kind, text in (
        ("--repeat", _positive, "Rounds of which the median is taken; default 3."),
        ("--jobs", _positive, "At most this many jobs a run."),
        ("--rows", _positive, "growth: rows beside the jobs to claim; default 1,000,000."),
    ):
        parser.add_argument(name, type=kind, metavar="N", help=text)
    parser.set_defaults(repeat=3)
    parser.add_argument(
        "--handler",
        action="append",
        dest="handlers",
        choices=queues.HANDLERS,
        help="drain, sqlite: what the jobs do; repeatable; default all.",
    )
    parser.add_argument(
        "--settings",
        action="append",
        choices=queues.SETTINGS,
        help="drain, sqlite: how the systems are configured; repeatable; default both.",
    )
    parser.add_argument(
        "--socket",
        type=Path,
        metavar="DIR",
        help="Use the PostgreSQL whose socket is in this directory and that lets user 'postgres' "
        "in, rather than start the wheel's.",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=venvs.default_cache(),
        metavar="DIR",
        help="Where the peers' virtual environments are kept; default %(default)s.",
    )
    return parser


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return number


def _choose(
    parser: argparse.ArgumentParser,
    benchmark: str,
    only: Sequence[str] | None,
    systems: dict[str, System],
) -> list[System]:
    """Return the systems that are asked for and take part, or end with status 2."""
    able = [name for name, system in systems.items() if benchmark in system.about["benchmarks"]]
    unable = sorted(set(only or ()) - set(able))
    if unable:
        known = ", ".join(able)
        parser.error(f"{', '.join(unable)}: no such system in {benchmark}; there are {known}")
    return [systems[name] for name in able if only is None or name in only]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
