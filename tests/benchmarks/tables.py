"""The benchmarks of this project's tables and statements, beside plain SQL on the same tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import psycopg

from tests.benchmarks.measuring import counter
from tests.benchmarks.report import OURS, NotRun, Reading, tell
from tests.benchmarks.running import FINISHED, SCHEDULED, STALE, WAITING_ELSEWHERE, Run
from tests.benchmarks.stores import Place
from tests.benchmarks.system import Prepared

BATCH = 500
CLAIM = 100
CLAIMS = 30
TIMES = 10
# For what a script tries beside what it measures.
SPARE = 10
FEW = 10_000


def sweep(run: Run) -> None:
    """Take back jobs whose worker is gone, in batches of 500; plain SQL updates them by id."""

    def measure(prepared: Prepared) -> Iterator[Reading]:
        with prepared.fresh() as place:
            run.filled(place, run.jobs, **STALE)
            run.stores.settle_down(place)
            done = prepared.system.call("sweep", place=place, batch=BATCH)
        if done["jobs"] != run.jobs:
            raise NotRun(f"it took {done['jobs']:,} of {run.jobs:,} stale jobs")
        yield Reading("stale jobs taken back", done["jobs"] / done["seconds"], "jobs/s")

    run.take_turns(measure)


def growth(run: Run) -> None:
    """Claim 100 jobs beside few and beside very many rows that aren't to be claimed."""
    few = min(FEW, run.rows)
    scenes = {
        f"{few:,} finished": (few, FINISHED),
        f"{run.rows:,} finished": (run.rows, FINISHED),
        f"{run.rows:,} scheduled": (run.rows, SCHEDULED),
        f"{run.rows:,} waiting in other queues": (run.rows, WAITING_ELSEWHERE),
    }
    systems = list(run.taking_part("postgresql"))
    with ExitStack() as stack:
        places = {}
        for name, (number, columns) in scenes.items():
            tell(f"growth: making {name}")
            place = places[name] = stack.enter_context(systems[0].fresh())
            run.filled(place, number, **columns)
            run.filled(place, run.repeat * len(systems) * CLAIM * (CLAIMS + 1))
            run.stores.settle_down(place)
        base = next(iter(scenes))
        costs: dict[tuple[str, str], float] = {}

        def measure(prepared: Prepared) -> Iterator[Reading]:
            name = prepared.system.name
            for scene, place in places.items():
                costs[name, scene] = cost = _claim_cost(prepared, place)
                yield Reading(f"claim of {CLAIM}, {scene}", cost, "ms")
                if scene != base:
                    times = cost / costs[name, base]
                    yield Reading(f"{scene}, times {base}", times, "x")

        run.take_turns(measure)


def _claim_cost(prepared: Prepared, place: Place) -> float:
    done = prepared.system.call("claim", place=place, size=CLAIM, times=CLAIMS)
    return 1000 * statistics.median(done["seconds"])


def fence(run: Run) -> None:
    """Claim and complete batches of 500, by id and fenced, in pairs.

    Of this project the same code with its fence and without; of the limit plain SQL, so that
    nothing but the comparison differs.
    """

    def measure(prepared: Prepared) -> Iterator[Reading]:
        pairs = max(run.jobs // (2 * BATCH), 1)
        batch = min(BATCH, run.jobs)
        with prepared.fresh() as place:
            run.filled(place, 2 * (pairs + 1) * batch + SPARE)
            run.stores.settle_down(place)
            done = prepared.system.call("fence", place=place, pairs=pairs, batch=batch)
        by_id, fenced = done["by id"], done["fenced"]
        metric = f"claim and complete {batch}"
        yield Reading(f"{metric}, by id", 1000 * statistics.median(by_id), "ms")
        yield Reading(f"{metric}, fenced", 1000 * statistics.median(fenced), "ms")
        extra = statistics.median(f / b for f, b in zip(fenced, by_id, strict=True)) - 1
        yield Reading("what the fence adds", 100 * extra, "%")

    run.take_turns(measure)


def bloat(run: Run) -> None:
    """Let jobs pass while an old snapshot is open; then look at the table, and claim 100."""

    def measure(prepared: Prepared) -> Iterator[Reading]:
        with prepared.fresh() as place:
            run.filled(place, run.jobs + 4 * CLAIM * (CLAIMS + 1))
            run.stores.settle_down(place)
            fresh = _claim_cost(prepared, place)
            if prepared.system.name == OURS:
                yield from _reports(run, prepared, place, "")
            with run.stores.connect(place["dbname"]) as pin:
                pin.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                pin.execute("SELECT count(*) FROM jobqueue_job WHERE id = 0")
                prepared.system.call("run_through", place=place, jobs=run.jobs, batch=BATCH)
                after = _claim_cost(prepared, place)
                yield from _claims(run, fresh, after)
                with run.stores.connect(place["dbname"]) as connection:
                    yield from _table(connection)
                if prepared.system.name == OURS:
                    yield from _reports(run, prepared, place, ", under an old snapshot")

    run.take_turns(measure)


def _claims(run: Run, fresh: float, after: float) -> Iterator[Reading]:
    yield Reading(f"claim of {CLAIM}, fresh", fresh, "ms")
    under = f"claim of {CLAIM}, {run.jobs:,} jobs later under an old snapshot"
    yield Reading(under, after, "ms")
    yield Reading("the later one, times a fresh one", after / fresh, "x")


def _table(connection: psycopg.Connection[Any]) -> Iterator[Reading]:
    updates, hot, dead = _counted(connection)
    yield Reading("dead rows under an old snapshot", dead, "rows")
    yield Reading("HOT share of claims and completions", 100 * hot / max(updates, 1), "%")


def _reports(run: Run, prepared: Prepared, place: Place, when: str) -> Iterator[Reading]:
    """Progress changes no indexed column: what isn't HOT found no room on the row's page."""
    with run.stores.connect(place["dbname"]) as connection:
        updates, hot, _ = _counted(connection)
        prepared.system.call("report", place=place, size=CLAIM, times=TIMES)
        updates_later, hot_later, _ = _counted(connection)
    written = updates_later - updates - CLAIM  # the claim itself
    share = (hot_later - hot) / max(written, 1)
    yield Reading(f"HOT share of progress and heartbeats{when}", 100 * min(share, 1), "%")


def _counted(connection: psycopg.Connection[Any]) -> tuple[int, int, int]:
    row = connection.execute(
        "SELECT n_tup_upd, n_tup_hot_upd, n_dead_tup FROM pg_stat_user_tables "
        "WHERE relname = 'jobqueue_job'"
    ).fetchone()
    assert row is not None
    return row


def memory(run: Run) -> None:
    """Watch the resident memory of one worker process from a tenth of the jobs to all of them."""

    def measure(prepared: Prepared) -> Iterator[Reading]:
        system = prepared.system
        with prepared.fresh() as place:
            run.filled(place, run.jobs)
            run.stores.settle_down(place)
            done = system.about["done"][prepared.store]
            options = {"processes": 1, "threads": 4, "settings": "default", "handler": "noop"}
            with (
                counter(run.stores, place, done, run.jobs) as count,
                system.working(place=place, **options) as workers,
            ):
                early, late = _memory_at(count, run.jobs, workers.pid)
        yield Reading(f"RSS after {run.jobs // 10:,} jobs", early, "MB")
        yield Reading(f"growth to {run.jobs:,} jobs", late - early, "MB")

    run.take_turns(measure)


def _memory_at(count: Any, jobs: int, pid: int) -> tuple[float, float]:
    """Return the workers' memory in MB when a tenth was done, and when all were."""
    early, last, moved = 0.0, 0, time.monotonic()
    while True:
        number = count()
        if number >= jobs // 10 and not early:
            early = _memory(pid)
        if number >= jobs:
            return early, _memory(pid)
        if number > last:
            last, moved = number, time.monotonic()
        if time.monotonic() - moved > 60:
            raise NotRun(f"only {number:,} of {jobs:,} jobs were done")
        time.sleep(0.1)


def _memory(pid: int) -> float:
    """Sum up the processes below ``pid``, which itself only waits."""
    children = psutil.Process(pid).children(recursive=True)
    return sum(child.memory_info().rss for child in children) / 1_000_000
