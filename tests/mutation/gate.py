"""What a mutant is, and what counts as killing it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers import assert_threads_done
from tests.races.scenes import statements_made_anew

Killer = Callable[[str], None]
Drop = Callable[[pytest.MonkeyPatch], None]

ROOT = Path(__file__).resolve().parents[2]
# Whose assertions are a verdict. A wait that timed out, an ``assert`` of production's own or a
# TypeError of the patch are none: they say that the scene broke down, not that a promise did.
JUDGES = (
    "tests/mutation/batches.py",
    "tests/mutation/killers.py",
    "tests/mutation/races.py",
    "jobqueue/testing/conformance/",
)


@dataclass(frozen=True)
class Mutant:
    """The real code without one guard, and the tests that must fail then, each for itself.

    Attributes:
        drop: patches the guard out of production.
        killers: take an alias, begin with empty tables, and assert.
        excused: engines on which the guard can't be told from what the engine does by itself,
            each with the reason; the killers are not run there.
        note: which part of the guard this is, where it has several.
    """

    drop: Drop
    killers: tuple[Killer, ...]
    excused: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def failed(killer: Killer, alias: str) -> str | None:
    """Run a killer; return the message of its own assertion that failed, None if it passed.

    Raises:
        BaseException: whatever else came out of it, which is no verdict.
    """
    try:
        killer(alias)
    except (AssertionError, pytest.fail.Exception) as error:
        if not is_verdict(error):
            raise
        return str(error).partition("\n")[0] or "an assertion failed"
    finally:
        assert_threads_done()
    return None


def survives(mutant: Mutant, killer: Killer, alias: str) -> bool:
    """Drop the mutant's guard and say whether the killer passes all the same."""
    with pytest.MonkeyPatch.context() as patch, statements_made_anew():
        mutant.drop(patch)
        return failed(killer, alias) is None


def is_verdict(error: BaseException) -> bool:
    """Say whether the assertion was a killer's, or the conformance suite's, and nobody else's."""
    files = (Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__))
    ours = [
        name
        for file in files
        if file.is_relative_to(ROOT)
        and (name := file.relative_to(ROOT).as_posix()).startswith(("tests/", "jobqueue/"))
    ]
    return bool(ours) and ours[-1].startswith(JUDGES)
