"""One run of chaos, from an empty directory to its verdict."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tests.chaos import checker, families, faults, history, log
from tests.chaos.proxy import Proxy
from tests.chaos.scene import Scene
from tests.chaos.stage import Stage
from tests.chaos.targets import TARGETS, Target
from tests.guard import GUARD

READY_TIMEOUT: Final = 90.0
# How long nothing may end, once all is quiet, before the rest is called stuck; and in all.
QUIET_TIMEOUT: Final = 45.0
DRAIN_TIMEOUT: Final = 300.0
LOOK_EVERY: Final = 0.05
ENQUEUERS: Final = 2
ENQUEUED_PER_SECOND: Final = "100"
BURSTS_PER_SECOND: Final = "0.7"
MEDDLED_PER_SECOND: Final = "8"


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for."""

    seed: int
    seconds: float = 120.0
    engine: str = "postgresql"
    workers: int = 4
    sweeps: int = 2
    keep: bool = False
    without_fence: bool = False


@dataclass(slots=True)
class Verdict:
    """What came of a run."""

    options: Options
    jobs: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    rescued: int = 0
    refused: int = 0
    violations: list[checker.Violation] = field(default_factory=list)
    directory: Path | None = None

    def count(self, what: str) -> int:
        """Return how many jobs were lost, doubled or stuck."""
        bad = [v for v in self.violations if checker.KINDS[v.kind] == what]
        return len({v.job_id for v in bad})


Tick = Callable[[float, str], None]


class ChaosError(Exception):
    """The run could not be made; it says nothing about the queue."""


def perform(options: Options, tick: Tick) -> Verdict:
    """Make a run, and judge it.

    Args:
        options: what is asked for.
        tick: called now and then with the seconds that have passed, and what is being done.
    """
    verdict = Verdict(options)
    with ExitStack() as stack:
        directory = stack.enter_context(_directory(options.keep))
        verdict.directory = directory if options.keep else None
        target: Target = TARGETS[options.engine](directory / "server")
        stack.callback(target.stop)
        target.start()
        proxy = stack.enter_context(Proxy(target.socket)) if target.socket else None
        logs = directory / "history"
        logs.mkdir()
        scene = Scene(
            database=target.entry(),
            history=str(logs),
            seed=options.seed,
            without_fence=options.without_fence,
        )
        _set_up_django(scene)
        from tests.chaos import tables

        tables.create()
        outside = replace(scene, database=target.entry(proxy.port if proxy else None))
        libfaketime = _libfaketime(options, verdict)
        crew = stack.enter_context(Stage(outside, directory / "output", libfaketime))
        _strike(options, crew, logs, target, proxy, verdict, tick)
        told = history.gather(log.read(logs))
        verdict.violations += checker.check(told, tables.read())
        verdict.jobs = tables.count_jobs(told)
        verdict.rescued = tables.count_rescued()
        verdict.refused = tables.count_refused() + told.quiet_conflicts
    return verdict


def _strike(
    options: Options,
    crew: Stage,
    logs: Path,
    target: Target,
    proxy: Proxy | None,
    verdict: Verdict,
    tick: Tick,
) -> None:
    """Run the processes, strike them for as long as was asked, and let them finish in peace."""
    from tests.chaos import tables

    parents = families.count(options.workers)
    kinds = set(faults.OF_PROCESSES) | target.STRIKES | (faults.OF_PROXY if proxy else set())
    kinds |= faults.OF_FAMILIES if parents else set()
    strikes = faults.schedule(options.seed, options.seconds, kinds)
    kin = families.Families(crew, logs)
    striker = faults.Striker(strikes, crew, kin, target, proxy, Scene().lease)
    crew.add("enqueue", ENQUEUERS, ENQUEUED_PER_SECOND)
    crew.add("operator", 1, MEDDLED_PER_SECOND)
    crew.add("burst", 1, BURSTS_PER_SECOND)
    alone = options.workers - parents * families.CHILDREN
    crew.add("worker", alone, "--processes", "0", skews=True)
    crew.add(families.ROLE, parents, "--processes", str(families.CHILDREN), skews=True)
    crew.add("sweep", options.sweeps, "--interval", "1", skews=True)
    _wait_for_first(tables.count_final, crew, tick)
    began = time.monotonic()
    while (now := time.monotonic() - began) < options.seconds:
        tick(now, "striking")
        striker.carry_out(now)
        crew.look()
        time.sleep(LOOK_EVERY)
    striker.heal()
    crew.stop("enqueue", "burst", "operator")
    _drain(tables.count_unfinished, crew, lambda: tick(options.seconds, "draining"))
    missing = list(kin.settle())
    kin.stop()
    crew.stop("worker", "sweep")
    verdict.violations += missing or kin.settle()
    verdict.faults = {kind: count for kind, count in sorted(striker.counts.items()) if count}
    verdict.violations += crew.ended


def _wait_for_first(count_final: Callable[[], int], crew: Stage, tick: Tick) -> None:
    """Wait until the processes are at work, so that there is something to strike."""
    deadline = time.monotonic() + READY_TIMEOUT
    while not count_final():
        tick(0, "starting")
        crew.look()
        if crew.ended or time.monotonic() > deadline:
            told = "\n".join(violation.what for violation in crew.ended)
            raise ChaosError(f"No job was done within {READY_TIMEOUT:g} s. {told}")
        time.sleep(LOOK_EVERY)


def _drain(count_unfinished: Callable[[], int], crew: Stage, tick: Callable[[], None]) -> None:
    """Wait until every job is final, or until nothing has ended for long."""
    least, began = None, time.monotonic()
    since = began
    while left := count_unfinished():
        tick()
        crew.look()
        now = time.monotonic()
        if least is None or left < least:
            least, since = left, now
        if now - since > QUIET_TIMEOUT or now - began > DRAIN_TIMEOUT:
            return
        time.sleep(LOOK_EVERY * 4)


def _set_up_django(scene: Scene) -> None:
    import django

    os.environ.update(scene.variables())
    django.setup()


def _libfaketime(options: Options, verdict: Verdict) -> Path | None:
    """Return the library, or note why there are no wrong clocks; nor is a disk filled up."""
    verdict.not_run["full_disk"] = "it can't be confined to the run's own files"
    if options.engine == "sqlite":
        verdict.not_run["skew"] = "the host's clock is the database's"
        return None
    library = find_libfaketime()
    if library is None:
        verdict.not_run["skew"] = "libfaketime is not installed"
    return library


def find_libfaketime() -> Path | None:
    """Return the library that gives a process a wrong clock, where Debian puts it."""
    return next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


@contextmanager
def _directory(keep: bool) -> Iterator[Path]:
    """Make the run's directory; remove it at the end, also should this process be killed."""
    directory = Path(tempfile.mkdtemp(prefix="jobqueue-chaos-"))
    directory.chmod(0o711)  # whoever PostgreSQL runs as must pass through
    guarded = directory / "server" if keep else directory
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", GUARD, str(guarded)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield directory
    finally:
        guard.communicate()
        shutil.rmtree(guarded, ignore_errors=True)
