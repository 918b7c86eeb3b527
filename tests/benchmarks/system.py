"""A system under measurement: a script in ``systems/``, run in an environment of its own."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from tests.benchmarks import venvs
from tests.benchmarks.report import LIMIT, OURS, NotRun
from tests.benchmarks.stores import Place, Stores

SCRIPTS = Path(__file__).parent / "systems"
ROOT = Path(__file__).parents[2]
CALL_TIMEOUT = 1800


@dataclass(frozen=True)
class System:
    """What its script says about it in ``ABOUT``.

    Attributes:
        name: as it stands in the report.
        script: the file.
        about: ``requires``, for pip; ``python``, the oldest; ``done``, by store the query or the
            Redis command that counts the jobs recorded done; ``benchmarks`` that it takes part
            in; ``settings``, the names of its configurations; ``prepares``, whether its connections
            are Django's, which can be told to prepare statements; ``rate``, about how many jobs a
            second it drains, to be given a number of jobs that it gets through; ``enqueues``, how
            many it can be given one by one in a reasonable time.
    """

    name: str
    script: Path
    about: dict[str, Any]
    cache: Path

    @property
    def is_own(self) -> bool:
        """Whether it is run by this interpreter, with this project in reach."""
        return self.name in (OURS, LIMIT)

    @cached_property
    def python(self) -> str:
        """Its interpreter; ``NotRun`` if there is none."""
        if self.is_own:
            return sys.executable
        about = self.about
        return venvs.python_of(self.cache, self.name, about["requires"], about["python"])

    def store(self, wanted: str) -> str | None:
        """Return where it keeps its jobs when others are on ``wanted``, ``None`` if nowhere."""
        if wanted in self.about["done"]:
            return wanted
        is_broker = wanted == "postgresql" and "redis" in self.about["done"]
        return "redis" if is_broker else None

    def call(self, verb: str, **options: Any) -> dict[str, Any]:
        """Run the script to its end and return what it prints."""
        with self._errors() as errors:
            try:
                done = subprocess.run(
                    self._command(verb, options),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=self._environment(options),
                    timeout=CALL_TIMEOUT,
                    text=True,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise NotRun(f"{verb} took longer than {CALL_TIMEOUT} s") from None
            if done.returncode:
                raise NotRun(f"{verb} failed: {_last_line(errors)}")
        return dict(json.loads(done.stdout))

    @contextmanager
    def working(self, **options: Any) -> Iterator[subprocess.Popen[str]]:
        """Have workers at work; they and all that they started end with the block."""
        with self._errors() as errors:
            process = subprocess.Popen(
                self._command("work", {k: v for k, v in options.items() if k != "stamps"}),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=self._environment(options),
                start_new_session=True,
                text=True,
            )
            try:
                yield process
            except NotRun as reason:
                raise NotRun(f"{reason}: {_last_line(errors)}") from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def _command(self, verb: str, options: dict[str, Any]) -> list[str]:
        return [self.python, str(self.script), verb, json.dumps(options)]

    def _environment(self, options: dict[str, Any]) -> dict[str, str]:
        drop = ("DJANGO_SETTINGS_MODULE", "PYTHONPATH", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in drop}
        if self.is_own:
            environment["PYTHONPATH"] = str(ROOT)
        environment["BENCH_STAMPS"] = options.get("stamps", os.devnull)
        environment["BENCH_PLACE"] = json.dumps(options.get("place", {}))
        return environment

    @contextmanager
    def _errors(self) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile() as file:
            yield file


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else "nothing on stderr"


def all_systems(cache: Path) -> dict[str, System]:
    """Return every system by name: this project, the limit, the peers."""
    found = [_read(script, cache) for script in sorted(SCRIPTS.glob("run_*.py"))]
    order = {OURS: 0, LIMIT: 1}
    found.sort(key=lambda system: (order.get(system.name, 2), -system.about["rate"]))
    return {system.name: system for system in found}


def _read(script: Path, cache: Path) -> System:
    """Read what a script says about itself, without its imports, which are not installed here."""
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ABOUT":
            about = ast.literal_eval(node.value)
            return System(about["name"], script, about, cache)
    raise AssertionError(f"{script} says nothing about itself")


class Prepared:
    """A system with its tables made once, and filled once: each run gets a copy of them."""

    def __init__(self, system: System, stores: Stores, store: str) -> None:
        self.system = system
        self.store = store
        self._stores = stores
        self._filled: dict[tuple[int, str], Place] = {}

    @cached_property
    def _template(self) -> Place:
        place = self._stores.create(self.store)
        if self.store != "redis":
            self.system.call("setup", place=place)
            self._stores.settle_down(place)
        return place

    @contextmanager
    def fresh(self) -> Iterator[Place]:
        """Give a place with empty tables, and remove it at the end."""
        with self._copied(self._template) as place:
            yield place

    @contextmanager
    def filled(self, jobs: int, handler: str) -> Iterator[Place]:
        """Give a place with ``jobs`` jobs, and remove it at the end."""
        if self.store == "redis":  # There is no copying it.
            with self.fresh() as place:
                with self._stores.hasty_redis():
                    self.system.call("enqueue", place=place, jobs=jobs, handler=handler)
                yield place
            return
        key = jobs, handler
        if key not in self._filled:
            place = self._stores.create(self.store, self._template)
            self.system.call("enqueue", place=place, jobs=jobs, handler=handler)
            self._stores.settle_down(place)
            self._filled[key] = place
        with self._copied(self._filled[key]) as place:
            yield place

    @contextmanager
    def _copied(self, template: Place) -> Iterator[Place]:
        place = self._stores.create(self.store, template)
        try:
            yield place
        finally:
            self._stores.drop(place)
