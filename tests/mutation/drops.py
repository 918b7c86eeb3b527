"""How each guard is dropped from the real code: by its production name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from django.db.models import F, Q, Value

from jobqueue import (
    broker,
    claim,
    coordinator,
    db,
    dispatch,
    fence,
    groups,
    guards,
    lifecycle,
    querysets,
    settlement,
    sweep,
    transitions,
)
from jobqueue.lifecycle import ExecutionFingerprint, State, Verb
from jobqueue.models import Job, Worker
from tests.mutation import batches
from tests.mutation.gate import Drop

Patch = pytest.MonkeyPatch


def both(*drops: Drop) -> Drop:
    """Drop several at once: what one of them lets through the other would catch."""

    def drop(patch: Patch) -> None:
        for each in drops:
            each(patch)

    return drop


# -- jobqueue.guards


def answering(name: str, answer: Any) -> Drop:
    """Let a guard say the same to everybody; ``{}`` is a condition that all rows meet."""
    return lambda patch: patch.setattr(guards, name, lambda *asked: answer)


def without_key(name: str, key: str) -> Drop:
    """Let a guard's condition leave out one of its lookups."""
    whole = getattr(guards, name)

    def guard(*asked: Any) -> guards.Where:
        return {lookup: value for lookup, value in whole(*asked).items() if lookup != key}

    return lambda patch: patch.setattr(guards, name, guard)


def without_column(column: str) -> Drop:
    """Compare one column less."""
    rest = tuple(name for name in guards.FINGERPRINT if name != column)
    return lambda patch: patch.setattr(guards, "FINGERPRINT", rest)


def without_states(*dropped: State) -> Drop:
    """Let batches that were chosen in just these states be written in whatever state they are."""
    whole = guards.in_states

    def in_states(*states: str) -> guards.Where:
        return {} if states == dropped else whole(*states)

    return lambda patch: patch.setattr(guards, "in_states", in_states)


def comparing_presence_only(patch: Patch) -> None:
    """Let what a worker holds and what the database gives it be the same by the id alone."""
    patch.setattr(guards, "is_same_execution", lambda one, other: None not in (one, other))


def skipping_nulls(patch: Patch) -> None:
    """Compare no column that was NULL in the copy: so do ORMs that drop what is empty."""
    whole = guards.unchanged

    def unchanged(fingerprint: ExecutionFingerprint) -> guards.Where:
        where = whole(fingerprint)
        return {name: value for name, value in where.items() if not name.endswith("__isnull")}

    patch.setattr(guards, "unchanged", unchanged)


# -- The table of verbs


def from_any_state(verb: Verb) -> Drop:
    """Let a verb happen to a job in whatever state."""
    rule = replace(lifecycle.RULES[verb], sources=frozenset(State))
    return lambda patch: patch.setitem(lifecycle.RULES, verb, rule)  # type: ignore[arg-type]


def deaf_to_cancel(verb: Verb) -> Drop:
    """Let a setback be written whether or not somebody asked for the job to be cancelled."""
    rule = replace(lifecycle.RULES[verb], yields_to_cancel=False)
    return lambda patch: patch.setitem(lifecycle.RULES, verb, rule)  # type: ignore[arg-type]


def choosing_from_any_state(question: str) -> Drop:
    """Let claims or promotions choose rows without asking for their state."""
    order = {"claimable": ("-priority", "run_after", "pk"), "due": ("run_after", "pk")}[question]

    def choose(rows: Any, *asked: Any) -> Any:
        *queue, now = asked
        of_queue = {"queue": queue[0]} if queue else {}
        return rows.filter(**of_queue, **guards.due(now)).order_by(*order)

    return lambda patch: patch.setattr(querysets.JobQuerySet, question, choose)


# -- The sweep


def judging(verdict: str | None) -> Drop:
    """Let the sweep say the same of every held job."""
    return lambda patch: patch.setattr(
        sweep.StaleRules, "verdict", lambda self, job, alive: verdict
    )


def taking_jobs_without_the_worker(patch: Patch) -> None:
    """Let the sweep take a silent worker's jobs and leave its lease as it is."""
    patch.setattr(sweep._Sweep, "_fence", lambda self, worker, cutoff: True)


def fencing_by_an_old_lease(patch: Patch) -> None:
    """Let the sweep fence a worker whose lease isn't the one that it reckoned with."""

    def fence_worker(self: Any, worker: Worker, cutoff: datetime) -> bool:
        alive = Worker.objects.using(self.using).alive().filter(pk=worker.pk)
        silent = alive.filter(**guards.silent_since(cutoff))
        return silent.update(state=Worker.State.DEAD) == 1

    patch.setattr(sweep._Sweep, "_fence", fence_worker)


def worker_last(patch: Patch) -> None:
    """Let the sweep take the jobs of silent workers first, and declare those dead at its end."""
    fence_them = sweep._Sweep.fence_dead_workers
    end = sweep._Sweep.raise_if_nothing_worked

    def find(self: Any) -> None:
        alive = Worker.objects.using(self.using).alive()
        self.fenced = {each.pk for each in alive if not self.rules.lives(each)}

    def fence_at_last(self: Any) -> None:
        fence_them(self)
        end(self)

    patch.setattr(sweep._Sweep, "fence_dead_workers", find)
    patch.setattr(sweep._Sweep, "raise_if_nothing_worked", fence_at_last)


def asking_who_lives_first(patch: Patch) -> None:
    """Let the sweep read who lives once, before it reads any page of jobs."""
    fence_them = sweep._Sweep.fence_dead_workers

    def fence_then_ask(self: Any) -> None:
        fence_them(self)
        alive = set(Worker.objects.using(self.using).alive().values_list("pk", flat=True))
        patch.setattr(sweep._Sweep, "_holders_alive", lambda self, page: alive)

    patch.setattr(sweep._Sweep, "fence_dead_workers", fence_then_ask)


# -- The others


def claiming_without_a_lease(patch: Patch) -> None:
    """Let a claim not ask whether its worker lives, and keep nobody from declaring it dead."""

    def look(worker_id: str, *_: Any) -> claim.Known:
        return claim.Known(Worker.objects.get(pk=worker_id).queues, 0.0)

    patch.setattr(claim, "_look", look)
    writing_without_a_lease(patch)


def writing_without_a_lease(patch: Patch) -> None:
    """Let a claim ask whether its worker lives before it writes, and not while it does."""

    def using(alias: str) -> Any:
        return SimpleNamespace(alive=lambda: Worker.objects.using(alias))

    shim = SimpleNamespace(objects=SimpleNamespace(using=using))
    lock_rows = db.lock_rows
    patch.setattr(dispatch, "Worker", shim)
    patch.setattr(
        db,
        "lock_rows",
        lambda rows, **how: rows if rows.model is Worker else lock_rows(rows, **how),
    )


def renewing_whatever_the_lease(patch: Patch) -> None:
    """Let the broker's own statements not ask whether the worker lives; all others do."""

    def using(alias: str) -> Any:
        workers = Worker.objects.using(alias)
        return SimpleNamespace(alive=workers.all, create=workers.create)

    shim = SimpleNamespace(State=Worker.State, objects=SimpleNamespace(using=using))
    patch.setattr(broker, "Worker", shim)


def releasing_nothing_unknown(patch: Patch) -> None:
    """Let a heartbeat not see the rows that the worker doesn't know of."""
    compare = broker.compare
    patch.setattr(broker, "compare", lambda held, rows: ([], compare(held, rows)[1]))


def ignoring_the_expected_version(patch: Patch) -> None:
    """Let a coordinator act on what it finds, whatever its caller saw."""
    find = coordinator._Act._find

    def find_any(act: Any, verb: str) -> Job:
        act.expected_version = None
        return find(act, verb)

    patch.setattr(coordinator._Act, "_find", find_any)


def marking_for_anybody(patch: Patch) -> None:
    """Let whoever settles a job leave the mark that is the owner's."""
    mark_of = fence.mark_of
    patch.setattr(fence, "mark_of", lambda job, actor: mark_of(job, None))


def marking_nothing(patch: Patch) -> None:
    """Let the owner of a job settle it without a mark."""
    patch.setattr(fence, "mark_of", lambda job, actor: {})


def looking_for_no_trace(patch: Patch) -> None:
    """Take every write that found no row for a conflict."""
    patch.setattr(fence, "has_traces", lambda *asked: False)


def taking_any_outcome(patch: Patch) -> None:
    """Take any outcome of the owner's for the one that it asks about."""
    whole = fence.has_traces

    def has_traces(job: Job, writes: Any, found: Job, has_event: Any) -> bool:
        alike = copy.copy(found)
        vars(alike).update(writes[0].changes)
        return whole(job, writes, alike, has_event)

    patch.setattr(fence, "has_traces", has_traces)


def in_any_state(patch: Patch) -> None:
    """Let what is written within an execution be written to a job that doesn't run."""
    patch.setattr(transitions, "_require_running", lambda job, verb: None)


def keeping_the_version(patch: Patch) -> None:
    """Let a verb be written without a new version."""

    def update(job: Job, changes: dict[str, Any], where: Q, using: str) -> bool:
        rows = Job.objects.using(using).matching(job.pk, job.fingerprint).filter(where)
        return rows.update(**changes) == 1

    patch.setattr(fence, "update", update)


Statement = tuple[Any, Sequence[str], dict[str, Any], Sequence[str]]


def in_batches(form: str, change: Callable[..., Statement]) -> Drop:
    """Let the statement for many rows compare less than that for one, or write less."""
    whole = db.UpdateEach

    def make(rows: Any, match: Any, changes: Any, each: Any, *events: Any) -> db.UpdateEach:
        asked = (rows, match, changes, each)
        is_alike = not each and not match
        asked = change(*asked) if is_alike == (form == batches.ALIKE) else asked
        return whole(*asked, *events)

    return lambda patch: patch.setattr(db, "UpdateEach", make)


def ids_alone(rows: Any, match: Any, changes: Any, each: Any) -> Statement:
    """Compare nothing else."""
    return Job.objects.using(rows.db), (), changes, each


def no_versions(rows: Any, match: Any, changes: Any, each: Any) -> Statement:
    """Compare what the jobs have in common, and not what each has of its own."""
    return rows, (), changes, each


def leaving(column: str) -> Callable[..., Statement]:
    """Return the change that doesn't write a column."""

    def leave(rows: Any, match: Any, changes: Any, each: Any) -> Statement:
        left = {name: value for name, value in changes.items() if name != column}
        return rows, match, left, [name for name in each if name != column]

    return leave


def putting_all_in_one_statement(patch: Patch) -> None:
    """Let the first job's claim stand for that of all the others in the batch."""
    patch.setattr(groups, "_is_one_value", lambda values: True)


def settling_all_completions_as_one(patch: Patch) -> None:
    """Let the first job's execution stand for those of all that complete without a result."""
    patch.setattr(settlement, "_execution", lambda job: None)


def sweeping_without_column(column: str) -> Drop:
    """Let jobs of a sweep's page be alike that differ in a column."""
    rest = tuple(name for name in sweep.SWEPT_COLUMNS if name != column)
    return lambda patch: patch.setattr(sweep, "SWEPT_COLUMNS", rest)


def claiming_without_a_new_version(patch: Patch) -> None:
    """Let claims and promotions leave the version as it is."""

    class Stuck(F):
        def __add__(self, other: Any) -> Any:
            return F("version") if self.name == "version" else super().__add__(other)

    patch.setattr(dispatch, "F", Stuck)


def last_report_wins(patch: Patch) -> None:
    """Let a report of progress write its figure, whatever the row's is."""
    patch.setattr(transitions, "Greatest", lambda current, new: Value(new))


def at_any_time(patch: Patch) -> None:
    """Let claims and promotions take jobs before their time, in the choice and in the write."""
    answering("due", {})(patch)


def writing_at_any_time(patch: Patch) -> None:
    """Let the choice alone ask for the time, and not the write."""
    whole = guards.due

    def choose(rows: Any, now: datetime) -> Any:
        return rows.filter(state=State.SCHEDULED, **whole(now)).order_by("run_after", "pk")

    answering("due", {})(patch)
    patch.setattr(querysets.JobQuerySet, "due", choose)
