"""The whole table as ``python -m tests.mutation`` prints it: every mutant on every engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Final

from django.db import connections
from django.test.utils import (
    setup_databases,
    setup_test_environment,
    teardown_databases,
    teardown_test_environment,
)

from jobqueue.models import Job, JobEvent, Queue, Worker
from tests import routers
from tests.explorer import report as explorer
from tests.helpers import ENGINES
from tests.mutation.gate import Killer, Mutant, failed, survives

KILLED: Final = "killed"
EXCUSED: Final = "excused"
SURVIVED: Final = "SURVIVED"
# A killer that fails with the guard in place would kill everything.
BROKEN: Final = "BROKEN"

Table = Mapping[str, tuple[Mutant, ...]]


@dataclass(frozen=True)
class Line:
    """One mutant: what must fail without its guard, and what became of that on each engine."""

    guard: str
    part: str
    model: str
    killers: tuple[str, ...]
    engines: Mapping[str, str]
    excuses: Mapping[str, str]

    @property
    def is_killed(self) -> bool:
        """Whether it is, in the model and on every engine where it can be."""
        return self.model != SURVIVED and set(self.engines.values()) <= {KILLED, EXCUSED}

    def as_dict(self) -> dict[str, object]:
        """Return the line, fit for JSON."""
        return asdict(self)


def killed_in_the_model(guard: str) -> str:
    """Return the invariant that a guard's absence breaks there, or where else it is missed."""
    death = explorer.kill(guard)
    if death.found.broken or not death.mutant.dies:
        return death.killer
    return f"outside of it: {death.mutant.dies}"


def lines(table: Table, engines: Iterable[str], model: Mapping[str, str]) -> list[Line]:
    """Run every mutant on these engines.

    ``model`` tells by what each guard is killed there, which drops it as its first mutant does.
    """
    mutants = [(guard, mutant) for guard, mutants in table.items() for mutant in mutants]
    fates: list[dict[str, str]] = [{} for _ in mutants]
    for engine in engines:
        with routers.use_alias(ENGINES[engine]):
            for (_, mutant), fate in zip(mutants, fates, strict=True):
                fate[engine] = fate_of(mutant, engine)
    return [
        Line(
            guard,
            mutant.note,
            model.get(guard, "") if mutant is table[guard][0] else "",
            tuple(killer.__name__ for killer in mutant.killers),
            fate,
            mutant.excused,
        )
        for (guard, mutant), fate in zip(mutants, fates, strict=True)
    ]


def fate_of(mutant: Mutant, engine: str) -> str:
    """Say what became of a mutant on the engine under test."""
    if engine in mutant.excused:
        return EXCUSED
    alias = ENGINES[engine]
    fates = [verdict(mutant, killer, alias) for killer in mutant.killers]
    return next((fate for fate in fates if fate != KILLED), KILLED)


def verdict(mutant: Mutant, killer: Killer, alias: str) -> str:
    """Run one killer with the guard in place, when it must pass, and without it."""
    _empty(alias)
    if failed(killer, alias):
        return BROKEN
    _empty(alias)
    return SURVIVED if survives(mutant, killer, alias) else KILLED


def _empty(alias: str) -> None:
    for model in (JobEvent, Job, Worker, Queue):
        model._default_manager.using(alias).all()._raw_delete(alias)


def as_text(table: Iterable[Line], engines: Iterable[str]) -> str:
    """Return the table for people, and below it why engines are excused."""
    rows = [("guard dropped", "killed in the model by", "killed in the code by", *engines)]
    rows.append(tuple("-" * len(name) for name in rows[0]))
    excuses: dict[str, None] = {}
    for line in table:
        guard = f"{line.guard} ({line.part})" if line.part else line.guard
        told = [line.engines[engine] for engine in rows[0][3:]]
        first = (guard, line.model, line.killers[0], *told)
        rows.append(first)
        rows += [("", "", killer, *[""] * len(told)) for killer in line.killers[1:]]
        excuses |= {f"{engine}: {why}.": None for engine, why in line.excuses.items()}
    widths = [max(map(len, column)) for column in zip_longest(*rows)]
    drawn = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*drawn, "", *(f"Excused on {excuse}" for excuse in excuses)]).rstrip()


@contextmanager
def databases(engines: Iterable[str]) -> Iterator[None]:
    """Create the test databases of these engines, and drop them at the end."""
    setup_test_environment()
    aliases = [ENGINES[engine] for engine in engines]
    old = setup_databases(verbosity=0, interactive=False, aliases=aliases)
    try:
        yield
    finally:
        connections.close_all()
        teardown_databases(old, verbosity=0)
        teardown_test_environment()
