"""Rules of those who write without a claim, operators and sweeps, by copies fresh and old."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from jobqueue import coordinator, transitions
from jobqueue.arguments import check_edit
from jobqueue.lifecycle import (
    FINAL,
    HELD,
    QUEUED,
    Cancelled,
    Completed,
    Error,
    Failed,
    Outcome,
    Released,
    State,
)
from jobqueue.models import Job
from jobqueue.sweep import prune_jobs, sweep_stale_jobs
from tests.explorer import model
from tests.explorer.model import Answer, Row, World
from tests.properties import strategies as some
from tests.properties.base import Base, copies
from tests.properties.mirror import SWEEP, row_of

Written = tuple[World, Answer]
Changes = dict[str, Any]


def _edit(world: World, row: Row, actor: str, changes: Changes) -> Written:
    """Edit those of the columns that the model has; a delay becomes a time."""
    known = {name: changes[name] for name in ("run_after", "max_attempts") if name in changes}
    if "run_after" in known:
        known["run_after"] += world.now
    return model.edit(world, row, actor, **known)


def _cancel(world: World, row: Row, actor: str, changes: Changes) -> Written:
    if row.state == State.RUNNING:
        return model.request_cancel(world, row, actor)
    return model.settle(world, row, Cancelled(), actor)


def _to_waiting(world: World, row: Row, actor: str, changes: Changes) -> Written:
    if row.state in HELD:
        return model.settle(world, row, Released(), actor)
    return model.rerun(world, row, actor)


def _settling(outcome: Outcome) -> Callable[..., Written]:
    return lambda world, row, actor, _: model.settle(world, row, outcome, actor)


# A coordinator's verbs, and what they write in the model, given the row as it is found.
COORDINATED: Mapping[str, Callable[..., Any]] = {
    "complete": partial(coordinator.complete, result=3),
    "fail": coordinator.fail,
    "cancel": coordinator.cancel,
    "force-cancel": partial(coordinator.cancel, force=True),
    "release": coordinator.release,
    "rerun": coordinator.rerun,
    "edit": coordinator.edit,
    "delete": coordinator.delete,
    "to waiting": partial(coordinator.transition, to="waiting"),
}
WRITES: Mapping[str, Callable[[World, Row, str, Changes], Written]] = {
    "complete": _settling(Completed(3)),
    "fail": _settling(Failed(Error(""))),
    "cancel": _cancel,
    "force-cancel": _settling(Cancelled()),
    "release": _settling(Released()),
    "rerun": lambda world, row, actor, _: model.rerun(world, row, actor),
    "edit": _edit,
    "delete": lambda world, row, actor, _: model.delete(world, row, actor),
    "to waiting": _to_waiting,
}
GROUNDS = st.sampled_from(["what is found", "the copy", "the copy, unlocked"])


def _ground(copy: Job, ground: str) -> tuple[dict[str, Any], int | None]:
    """Return a coordinator's arguments for what it acts on, and the version that it expects."""
    if ground == "what is found":
        return {}, None
    unlocked = {"lock": False} if ground == "the copy, unlocked" else {}
    return {"expected_version": copy.version, **unlocked}, copy.version


class Operators(Base):
    """Those who hold no claim."""

    @rule(
        target=copies,
        copy=copies,
        verb=st.sampled_from(["rerun", "delete", "edit"]),
        is_fresh=st.booleans(),
        changes=some.edits(),
        actor=some.operators,
        skew=some.skews,
    )
    def decide(
        self, copy: Job, verb: str, is_fresh: bool, changes: Changes, actor: str, skew: int
    ) -> Any:
        """By a copy, of whatever age."""
        job = self.chosen(copy, is_fresh, QUEUED if verb == "edit" else FINAL)

        def real() -> Job | None:
            if verb != "edit":
                return getattr(transitions, verb)(job, actor=actor)
            return transitions.edit(job, check_edit(changes, self.alias), actor=actor)

        return self.one(
            f"transitions.{verb}",
            skew,
            job,
            real,
            lambda world: WRITES[verb](world, row_of(job), actor, changes),
            changes if verb == "edit" else {},
            actor=actor,
        )

    @rule(
        target=copies,
        copy=copies,
        verb=st.sampled_from(sorted(COORDINATED)),
        ground=GROUNDS,
        changes=some.edits(),
        actor=some.operators,
        skew=some.skews,
    )
    def coordinate(
        self, copy: Job, verb: str, ground: str, changes: Changes, actor: str, skew: int
    ) -> Any:
        """By id: on whatever is found, or only on the version that was seen."""
        caller, expected = _ground(copy, ground)
        edited = changes if verb == "edit" else {}
        return self.one(
            f"coordinator.{verb}",
            skew,
            copy,
            lambda: COORDINATED[verb](copy.pk, actor=actor, **edited, **caller),
            lambda world: model.coordinate(
                world, lambda w, row: WRITES[verb](w, row, actor, changes), expected
            ),
            edited,
            actor=actor,
            by_id=expected is None,
            opens_version=False,
        )


class Sweeps(Base):
    """Those who clean up."""

    @rule(
        queues=some.some_queues,
        claimed_after=st.none() | some.ages,
        running_after=st.none() | some.ages,
        batch_size=st.integers(1, 3),
        limit=some.limits,
        dry_run=st.sampled_from([False, False, True]),
        skew=some.late_skews,
    )
    def sweep(self, skew: int, **options: Any) -> None:
        self.both(
            "dry run" if options["dry_run"] else "sweep",
            skew,
            lambda: sweep_stale_jobs(**options),
            lambda now, _: self.mirror.sweep(now, **options),
            lambda report: report,
            decided_on=None,
            actor=SWEEP,
        )

    @precondition(lambda self: self.mirror.has(*FINAL))
    @rule(older_than=some.ages, batch_size=st.integers(1, 2), skew=some.late_skews)
    def prune(self, older_than: int, batch_size: int, skew: int) -> None:
        self.both(
            "prune",
            skew,
            lambda: prune_jobs(older_than, batch_size),
            lambda now, _: self.mirror.prune(now, older_than),
            lambda report: report,
            decided_on=None,
            actor=SWEEP,
        )
