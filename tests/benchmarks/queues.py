"""The benchmarks that all systems take part in: enqueue, drain, latency."""

from __future__ import annotations

from collections.abc import Iterator

from tests.benchmarks.measuring import DRAIN_TIMEOUT, counter, percentile, rate, watch
from tests.benchmarks.report import NotRun, Reading
from tests.benchmarks.running import PROCESSES, Run, stamps_of
from tests.benchmarks.system import Prepared

# Seconds of work that a system is given, and threads per process in tuned settings, by handler.
SECONDS = 5
THREADS = {"noop": 4, "1 ms": 16, "10 ms": 50}
DURATIONS = {"noop": 0.0, "1 ms": 0.001, "10 ms": 0.01}
HANDLERS = tuple(THREADS)
SETTINGS = ("default", "tuned")
FEWEST = 500
# What has psycopg prepare a statement on the server that it has sent five times: Django's default
# is to write each value into the SQL, and to have each statement parsed and planned anew.
PREPARING = {"server_side_binding": True, "prepare_threshold": 5}


def enqueue(run: Run) -> None:
    """Store jobs one by one, each with its commit, and in bulk; seconds by the producer's clock.

    Where the connections are Django's, at its defaults, and once more told to prepare statements.
    """

    def measure(prepared: Prepared) -> Iterator[Reading]:
        about = prepared.system.about
        settings = {"": {}, ", prepared": {"options": PREPARING}}
        for metric, single, number in (
            ("single", True, min(run.jobs // 10, about["enqueues"] // 2)),
            ("bulk", False, min(run.jobs, about["enqueues"] * 10)),
        ):
            for name, asked in settings.items() if about.get("prepares") else [("", {})]:
                with prepared.fresh() as place:
                    run.stores.settle_down(place)
                    options = {"place": {**place, **asked}, "jobs": max(number, 1)}
                    done = prepared.system.call("enqueue", **options, single=single)
                    yield Reading(f"{metric}{name}", done["jobs"] / done["seconds"], "jobs/s")

    run.take_turns(measure)


def drain(run: Run) -> None:
    """Have two worker processes work off jobs that are all there when they start."""
    run.take_turns(lambda prepared: _drain(run, prepared))


def sqlite(run: Run) -> None:
    """Drain, on SQLite."""
    run.take_turns(lambda prepared: _drain(run, prepared), store="sqlite")


def _drain(run: Run, prepared: Prepared) -> Iterator[Reading]:
    for handler in run.handlers:
        for settings in prepared.system.about["settings"]:
            # A peer's further settings ("tuned, ...") count as tuned.
            if settings.split(",")[0] in run.settings:
                speed = _drain_once(run, prepared, handler, settings)
                yield Reading(f"{handler}, {settings}", speed, "jobs/s")


def _drain_once(run: Run, prepared: Prepared, handler: str, settings: str) -> float:
    system = prepared.system
    number = _enough(run.jobs, system.about["rate"], handler)
    with prepared.filled(number, handler) as place:
        options = {"handler": handler, "settings": settings}
        run.stores.write_down()
        done = system.about["done"][prepared.store]
        with (
            counter(run.stores, place, done, number) as count,
            system.working(
                place=place, processes=PROCESSES, threads=THREADS[handler], **options
            ) as workers,
        ):
            return rate(watch(count, number, workers, DRAIN_TIMEOUT))


def _enough(jobs: int, speed: int, handler: str) -> int:
    """Return a number of jobs that is work for some seconds, and no more than was asked for."""
    if DURATIONS[handler]:
        speed = min(speed, int(PROCESSES * THREADS[handler] / DURATIONS[handler]))
    return min(jobs, max(FEWEST, speed * SECONDS))


def latency(run: Run) -> None:
    """Store jobs one by one beside an idle worker; time from the call to the handler's begin."""

    def measure(prepared: Prepared) -> Iterator[Reading]:
        system = prepared.system
        stamps = run.stores.directory / f"{system.name}.stamps"
        common = {"stamps": str(stamps)}
        with prepared.fresh() as place:
            run.stores.settle_down(place)
            options = {"processes": 1, "threads": THREADS["noop"], "settings": "tuned"}
            with system.working(place=place, handler="stamp", **options, **common):
                sent = system.call("latency", place=place, jobs=run.jobs, **common)["sent"]
                begun = stamps_of(stamps)
                if not begun or len(begun) < 0.9 * sent:
                    raise NotRun(f"{len(begun)} of {sent} jobs began in time")
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
            yield Reading(name, percentile(begun, share), "ms")

    run.take_turns(measure)
