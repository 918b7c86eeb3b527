"""Which explorations are made, the mutation gate, and what is printed of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from tests.explorer.actors import Bounds
from tests.explorer.explore import Explorer, Found
from tests.explorer.mutants import FICKLE, MUTANTS, RERUN, SMALL, TINY, Mutant

SURVIVED: Final = "SURVIVED"

# Each looks into another direction; what is not said is as in ``Bounds``.
EXPLORATIONS: Final[Mapping[str, Bounds]] = {
    "two sweeps, three claims": Bounds(
        hands=1, claims=3, acts=1, sweeps=2, timeout=None, progress=False
    ),
    "two executions in hand, three claims": Bounds(
        hands=2, claims=3, acts=1, sweeps=1, max_attempts=1, progress=False
    ),
    "nothing forgotten, two claims": SMALL,
    "three acts of an operator, two claims": Bounds(
        hands=1, claims=2, acts=3, sweeps=1, max_attempts=1, progress=False
    ),
}

# Within these, and ``SMALL``, the mutants are looked for: so all must hold there with every guard.
GATES: Final[Mapping[str, Bounds]] = {
    "the gate, to the end": TINY,
    "the gate, with reruns": RERUN,
    "the gate, with owners who change their minds": FICKLE,
}


@dataclass(frozen=True, slots=True)
class Death:
    """What became of one mutant: the invariant that it broke, if any, and the way there."""

    guard: str
    mutant: Mutant
    found: Found

    @property
    def killer(self) -> str:
        """What killed it, in words."""
        return self.found.broken or self.mutant.dies or SURVIVED


def explore(bounds: Bounds) -> Found:
    """Explore within bounds, with the guards as they are."""
    return Explorer(bounds).run()


def kill(guard: str) -> Death:
    """Drop one guard and look for what breaks; in vain where it is said to die elsewhere."""
    mutant = MUTANTS[guard]
    bounds = replace(mutant.bounds, claims=1, acts=0) if mutant.dies else mutant.bounds
    with mutant.drop():
        return Death(guard, mutant, explore(bounds))


def kill_all() -> Iterator[Death]:
    """Drop each guard in turn."""
    return map(kill, MUTANTS)


def figures(name: str, found: Found) -> str:
    """Return one exploration as a line."""
    broken = found.broken or "all invariants hold"
    return (
        f"{name}: {found.states:,} states, {found.transitions:,} transitions,"
        f" {found.seconds:.1f} s: {broken}"
    )


def table(deaths: list[Death]) -> list[str]:
    """Return the table of guards and of what killed each, as lines."""
    width = max(len(death.guard) for death in deaths)
    head = [f"{'guard':{width}}  killed by", f"{'-' * width}  {'-' * 40}"]
    return head + [f"{death.guard:{width}}  {death.killer}" for death in deaths]
