"""The explorer: every invariant holds in every state, and each guard that is dropped is missed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext

import pytest

from jobqueue import guards
from jobqueue.lifecycle import RULES, Completed, Released, State, Verb
from tests.explorer import invariants, model
from tests.explorer.explore import Found
from tests.explorer.mutants import MUTANTS, Mutant
from tests.explorer.report import (
    EXPLORATIONS,
    GATES,
    SURVIVED,
    Death,
    explore,
    figures,
    kill,
    table,
)
from tests.explorer.values import Answer, Row, World

# What was visited when this was written was a little more.
STATES = 400_000
TRANSITIONS = 2_500_000


@pytest.fixture(scope="module")
def explored() -> dict[str, Found]:
    """Explore once; show the figures with ``pytest -s``."""
    found = {name: explore(bounds) for name, bounds in EXPLORATIONS.items()}
    for name, one in found.items():
        sys.stdout.write(f"\n{figures(name, one)}")
    return found


@pytest.mark.timeout(600)
def test_every_invariant_holds_in_every_state(explored):
    """Interleavings of workers, sweeps, operators and lost replies break nothing."""
    ways = {name: [found.broken, *found.way] for name, found in explored.items() if found.broken}

    assert not ways, "\n".join(line for way in ways.values() for line in way)


def test_explorations_are_large(explored):
    """A model that lost most of its steps would hold everything."""
    assert sum(found.states for found in explored.values()) > STATES
    assert sum(found.transitions for found in explored.values()) > TRANSITIONS


def test_every_state_of_a_job_is_visited(explored):
    """Each exploration comes to each of them, and to the job's deletion."""
    for found in explored.values():
        assert set(found.reached) == {*State, "gone"}


def test_every_verb_is_accepted_and_refused(explored):
    """Each verb gets every answer that it can get."""
    answers = set().union(*(found.answers for found in explored.values()))
    verbs = {*Verb, "progress", "request cancel"}
    settling = {"complete", "fail", "retry", "snooze", "release", "cancel"}

    assert {verb for verb, answer in answers if answer == Answer.APPLIED} == verbs
    assert {verb for verb, answer in answers if answer == Answer.ALREADY_APPLIED} == settling
    refused = {verb for verb, answer in answers if answer == Answer.CONFLICT}
    assert refused >= settling | {"start", "progress"}
    assert ("claim", Answer.LEASE_LOST) in answers


@pytest.mark.parametrize("name", GATES)
def test_guards_hold_within_the_bounds_of_the_gate(name):
    """What kills a mutant there is that its guard is gone, and nothing else."""
    found = explore(GATES[name])

    assert not found.broken, found.way


@pytest.mark.parametrize("guard", [name for name, mutant in MUTANTS.items() if not mutant.dies])
def test_dropped_guard_is_missed(guard):
    """Without it some invariant breaks, and the shortest way there can be shown."""
    death = kill(guard)

    assert death.killer != SURVIVED
    assert death.found.way


@pytest.mark.parametrize(
    ("guard", "invariant"),
    [
        ("fingerprint: version", invariants.STALE_WRITE),
        ("cancel: in fail", invariants.ENDS_CANCELLED),
        ("cancel: in retry", invariants.NO_ATTEMPT),
        ("cancel: in snooze", invariants.NO_ATTEMPT),
        ("cancel: in release", invariants.NO_ATTEMPT),
        ("sweep: staleness cutoff", invariants.ONLY_SILENT),
        ("sweep: worker fence", invariants.KEEPS),
        ("sweep: worker first", invariants.KEEPS),
        ("settled version", invariants.NOT_APPLIED),
        ("lost reply: looked for", invariants.APPLIED),
        ("reconciliation: unknown rows", invariants.VISIBLE),
        ("claim: liveness", invariants.LIVE_CLAIM),
        ("progress: Greatest", invariants.PROGRESS),
    ],
)
def test_guard_is_missed_for_what_it_is_for(guard, invariant):
    """It isn't by luck that a mutant dies: it breaks what its guard is there to hold."""
    assert kill(guard).killer == invariant


@pytest.mark.parametrize("guard", [name for name, mutant in MUTANTS.items() if mutant.dies])
def test_guard_against_what_the_model_has_not_is_not_missed_by_it(guard):
    """These are killed elsewhere, as the table says: no writer here breaks the rules."""
    assert kill(guard).found.broken is None


def test_guards_stand_again_after_a_mutant():
    """What was dropped for one mutant doesn't help to kill the next."""
    before = (dict(RULES), {name: getattr(guards, name) for name in dir(guards)})
    for mutant in MUTANTS.values():
        with mutant.drop():
            pass

    assert (dict(RULES), {name: getattr(guards, name) for name in dir(guards)}) == before


def test_every_guard_has_its_mutant():
    """Each public name of ``jobqueue.guards``, each verb, each write that yields to a cancel."""
    public = {
        name
        for name, value in vars(guards).items()
        if getattr(value, "__module__", "") == guards.__name__ and not isinstance(value, type)
    } | {"FINGERPRINT"}
    dropped = {name for mutant in MUTANTS.values() for name in mutant.guards}

    assert dropped == public
    assert all(any(name.startswith(f"verb: {verb} ") for name in MUTANTS) for verb in Verb)
    yielding = {f"cancel: in {verb}" for verb, rule in RULES.items() if rule.yields_to_cancel}
    assert yielding == {name for name in MUTANTS if name.startswith("cancel: ")}
    columns = {f"fingerprint: {name}" for name in guards.FINGERPRINT}
    assert columns == {name for name in MUTANTS if name.startswith("fingerprint: ")}


def test_invariants_have_the_table_of_verbs():
    """They state it on their own, so that one that was changed by mistake is noticed here."""
    assert {verb: invariants.TABLE[verb][0] for verb in Verb} == {
        verb: rule.sources for verb, rule in RULES.items()
    }


def test_counterexample_can_be_read():
    """A line per step: who, what, on which row, and the answer."""
    assert kill("settled version: left by the owner").found.way == [
        "A claims and starts",
        "A wants to complete [running by A, attempt 1, version 1]"
        " -> applied, and the reply is lost",
        "A again wants to complete [running by A, attempt 1, version 1] -> conflict",
    ]


def test_survivor_stands_out_in_the_table():
    """A guard that nobody misses, and that isn't said to be missed elsewhere."""
    survivor = Death("a guard", Mutant(nullcontext), Found())
    elsewhere = Death("another", Mutant(nullcontext, dies="raw SQL"), Found())

    assert table([survivor, elsewhere])[2:] == ["a guard  SURVIVED", "another  raw SQL"]


def test_mark_of_an_earlier_execution_is_not_taken_for_a_completion():
    """A release's mark outlives it; with a clock that stood still, only the version tells."""
    world = model.register(World(Row()), "A")
    world, first = model.claim(world, "A")
    world, _ = model.settle(world, first, Released())
    world, second = model.claim(world, "A")
    world, _ = model.settle(world, second, Completed("done"), actor="operator")

    assert model.settle(world, first, Completed("done"))[1] == Answer.CONFLICT


def test_table_is_printed():
    """``python -m tests.explorer`` is there for people; its options are its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.explorer", "--help"],
        check=True,
        capture_output=True,
        text=True,
    )

    assert "counterexample" in done.stdout
