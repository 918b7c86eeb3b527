"""Every guard by name, and how to drop it: by patching production, or by a switch of the model.

The same names stand in the gate on real engines. The five columns of the fingerprint beside the
version guard against writers outside the rules, of which the model has none: there they survive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from jobqueue import fence, guards
from jobqueue.lifecycle import RULES, State, Verb
from jobqueue.sweep import StaleRules
from tests.explorer import model
from tests.explorer.actors import Bounds

ELSEWHERE: Final = "raw SQL (conformance)"
FAILOVER: Final = "a failover that lost commits"

# Small, since what is dropped shows soon; and nothing of the past is forgotten.
SMALL: Final = Bounds(hands=1, claims=2, acts=1, sweeps=1, timeout=None, forgets=False)
# An owner whose reply was lost may want something else the next time.
FICKLE: Final = replace(SMALL, claims=1, changes_mind=True)
RERUN: Final = replace(SMALL, claims=1, acts=2)
# What is never seen again shows only once every state has been visited.
TINY: Final = replace(SMALL, claims=1, acts=0)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One guard dropped.

    Attributes:
        drop: a context in which the guard doesn't stand.
        guards: the names in ``jobqueue.guards`` that this drops, wholly or in one of their places.
        dies: where it is killed, if not by the model.
        bounds: within which it is looked for.
    """

    drop: Callable[[], AbstractContextManager[None]]
    guards: tuple[str, ...] = ()
    dies: str = ""
    bounds: Bounds = SMALL


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    model.forget()
    try:
        yield
    finally:
        setattr(owner, name, before)
        model.forget()


@contextmanager
def _rule(verb: Verb, **changes: Any) -> Iterator[None]:
    rules: dict[Verb, Any] = RULES
    before = rules[verb]
    rules[verb] = replace(before, **changes)
    model.forget()
    try:
        yield
    finally:
        rules[verb] = before
        model.forget()


def _guard(name: str, value: Callable[..., Any], *more: str) -> Mutant:
    return Mutant(lambda: _patched(guards, name, value), (name, *more))


def _switch(name: str, *names: str, bounds: Bounds = SMALL) -> Mutant:
    return Mutant(lambda: model.without(name), names, bounds=bounds)


def _column(name: str, dies: str = ELSEWHERE) -> Mutant:
    rest = tuple(column for column in guards.FINGERPRINT if column != name)
    return Mutant(lambda: _patched(guards, "FINGERPRINT", rest), ("FINGERPRINT", "unchanged"), dies)


def _less(name: str, key: str, bounds: Bounds = SMALL) -> Mutant:
    """A lookup guard without one of its conditions."""
    whole = getattr(guards, name)

    def rest(*args: Any) -> guards.Where:
        return {lookup: value for lookup, value in whole(*args).items() if lookup != key}

    return Mutant(lambda: _patched(guards, name, rest), (name,), bounds=bounds)


def _nothing(*args: Any) -> guards.Where:
    return {}


def _any_state(verb: Verb) -> Mutant:
    return Mutant(lambda: _rule(verb, sources=frozenset(State)))


def _no_yield(verb: Verb) -> Mutant:
    return Mutant(lambda: _rule(verb, yields_to_cancel=False), ("cancel_requested",))


def _sources(verb: Verb) -> str:
    return " or ".join(state for state in State if state in RULES[verb].sources)


MUTANTS: Final[Mapping[str, Mutant]] = {
    # The fence
    "fingerprint: version": _column("version", dies=""),
    **{f"fingerprint: {name}": _column(name) for name in guards.FINGERPRINT if name != "version"},
    "fence: version rises": _switch("fence: version rises"),
    # The table of verbs
    **{f"verb: {verb} only from {_sources(verb)}": _any_state(verb) for verb in Verb},
    "progress: only while running": _switch("progress: only while running"),
    "cancel request: only while running": _switch("cancel request: only while running"),
    "batch: state": _guard("in_states", _nothing),
    # Cancelling
    **{f"cancel: in {verb}": _no_yield(verb) for verb in Verb if RULES[verb].yields_to_cancel},
    # Leases and sweeps
    "lease: alive": _guard("alive", _nothing),
    "claim: liveness": _switch("claim: liveness", "alive"),
    "renewal: only while alive": _switch("renewal: only while alive", "alive"),
    "sweep: staleness cutoff": _guard("silent_since", _nothing),
    "sweep: worker fence": _switch("sweep: worker fence"),
    "sweep: worker first": _switch("sweep: worker first"),
    "sweep: the holder's lease": Mutant(
        lambda: _patched(StaleRules, "verdict", lambda rules, job, alive: "taken from anybody")
    ),
    # Reconciliation
    "reconciliation: unknown rows": _switch("reconciliation: unknown rows", bounds=TINY),
    "reconciliation: same execution": _guard(
        "is_same_execution", lambda one, other: one is not None and other is not None
    ),
    # Versions come again only after a failover that lost commits, of which the model has none.
    "same claim": replace(_guard("is_same_claim", lambda one, other: True), dies=FAILOVER),
    # Lost replies
    "settled version": _guard("is_settled_from", lambda settled_version, version: True),
    "settled version: left by the owner": Mutant(
        lambda: _patched(fence, "mark_of", lambda job, actor: {})
    ),
    "settled version: only the owner's": Mutant(
        lambda: _patched(fence, "mark_of", lambda job, actor: {"settled_version": job.version})
    ),
    "settling event: version": _less("settling_event", "version"),
    "settling event: actor": _less("settling_event", "actor"),
    "settling event: kind": _less("settling_event", "kind__in", FICKLE),
    "rerun event: settled version": _less("rerun_event", "detail__settled_version", RERUN),
    "rerun event: state": _less("rerun_event", "from_state", FICKLE),
    # That it is a rerun's follows from its detail: no other event has such a one.
    "lost reply: looked for": Mutant(
        lambda: _patched(fence, "has_traces", lambda job, writes, found, has_event: False)
    ),
    # Times and figures
    "due time: claim": _switch("due time: claim", "due"),
    "due time: promote": _switch("due time: promote", "due"),
    "prune: finished before": _guard("finished_before", _nothing),
    "progress: Greatest": _switch("progress: Greatest"),
    # Coordinators
    "coordinator: expected version": _switch("coordinator: expected version"),
}
