"""The load of a chaos run: what enqueues jobs, and the operator who meddles with them."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from django.db import DatabaseError, transaction

from jobqueue import coordinator, db
from jobqueue.enqueue import enqueue, enqueue_many
from jobqueue.exceptions import JobQueueError
from jobqueue.lifecycle import FINAL, State
from jobqueue.models import Job
from tests.chaos import handlers, recording
from tests.chaos.scene import Scene

USING = "default"
HANDLERS = handlers.__name__
# As many jobs as may wait: the run must be able to end.
BACKLOG = 200
# Of quick jobs only, before all others, so that workers claim them by the dozen.
BURST = (100, 250)
BURST_PRIORITY = 50
SHARE_DEADLY = 0.15
MAX_BATCH = 12
SHARE_ROLLED_BACK = 0.15
PAUSE = 0.2

# How many of a hundred or so jobs are of each kind, and what each is given beside its token.
Extra = Callable[[random.Random], dict[str, Any]]
MIX: Final[Mapping[str, tuple[int, Extra]]] = {
    "quick": (450, lambda r: {"priority": r.randint(-5, 5)}),
    "nap": (150, lambda r: {"run_after": r.choice([None, None, 0.4])}),
    "fail": (120, lambda r: {"args": [r.randint(1, 5)]}),
    "snooze": (80, lambda r: {"args": [r.randint(1, 3)]}),
    "effect": (150, lambda r: {}),
    "report": (20, lambda r: {}),
    "outlast": (6, lambda r: {"args": [Scene.read().lease * 1.3]}),
    "overtime": (5, lambda r: {"timeout": handlers.OVERTIME_TIMEOUT, "max_attempts": 2}),
    "kill": (3, lambda r: {}),
}


class _RolledBack(Exception):
    """Raised to undo a transaction on purpose."""


def _until_told() -> Iterator[None]:
    """Yield until SIGTERM."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    while not told:
        yield


# -- Enqueuing


def enqueue_jobs(seed: int, per_second: str) -> None:
    """Enqueue jobs in transactions, of which some are rolled back."""
    dice = random.Random(seed)
    tokens = (f"{os.getpid()}-{number}" for number in itertools.count(1))
    pause = MAX_BATCH / 2 / float(per_second)
    for _ in _until_told():
        time.sleep(pause * dice.uniform(0.5, 1.5))
        with suppress(DatabaseError, _RolledBack):
            db.revive(USING)
            if Job.objects.filter(state=State.WAITING).count() < BACKLOG:
                _enqueue_some(dice, tokens)


def _enqueue_some(dice: random.Random, tokens: Iterator[str]) -> None:
    specs = [_spec(dice, next(tokens)) for _ in range(dice.randint(1, MAX_BATCH))]
    way = dice.choice([_one_by_one, enqueue_many])
    rolls_back, has_savepoint = dice.random() < SHARE_ROLLED_BACK, dice.random() < 0.3
    with transaction.atomic():
        if has_savepoint:
            _undo_savepoint(_spec(dice, next(tokens)))
        number = recording.born(way(specs))
        recording.await_commit(number, USING)
        if rolls_back:
            raise _RolledBack


def burst(seed: int, per_second: str) -> None:
    """Enqueue many quick jobs at once; now and then one among them kills whoever has them."""
    dice = random.Random(seed)
    tokens = (f"{os.getpid()}-{number}" for number in itertools.count(1))
    for _ in _until_told():
        time.sleep(dice.uniform(0.5, 1.5) / float(per_second))
        tasks = ["brisk"] * dice.randint(*BURST)
        if dice.random() < SHARE_DEADLY:
            tasks.insert(dice.randrange(len(tasks) // 2), "kill")
        specs = [{"task": f"{HANDLERS}.{task}", "args": [next(tokens)]} for task in tasks]
        with suppress(DatabaseError):
            db.revive(USING)
            if Job.objects.filter(state=State.WAITING).count() < BACKLOG:
                with transaction.atomic():
                    number = recording.born(enqueue_many(specs, priority=BURST_PRIORITY))
                    recording.await_commit(number, USING)


def _one_by_one(specs: list[dict[str, Any]]) -> list[Job]:
    return [enqueue(**spec) for spec in specs]


def _undo_savepoint(spec: dict[str, Any]) -> None:
    """Enqueue in a savepoint that is undone, in a transaction that may well be committed."""
    with suppress(_RolledBack), transaction.atomic():
        number = recording.born(_one_by_one([spec]))
        recording.log().answer("undone", [number])
        raise _RolledBack


def _spec(dice: random.Random, token: str) -> dict[str, Any]:
    (task,) = dice.choices(list(MIX), [weight for weight, _ in MIX.values()])
    extra = MIX[task][1](dice)
    arguments = [token, *extra.pop("args", ())]
    return {"task": f"{HANDLERS}.{task}", "args": arguments, **extra}


# -- Meddling


def meddle(seed: int, per_second: str) -> None:
    """Cancel, release, edit, rerun and delete jobs, by the coordinator."""
    dice = random.Random(seed)
    for _ in _until_told():
        time.sleep(dice.uniform(0.5, 1.5) / float(per_second))
        with suppress(DatabaseError, JobQueueError):
            db.revive(USING)
            _meddle_with_one(dice)


Act = Callable[..., object]
_ACTS: Final[Mapping[str, tuple[int, frozenset[str], Act]]] = {
    "cancel": (30, frozenset(State) - FINAL, coordinator.cancel),
    "ask to stop": (15, frozenset({State.RUNNING}), coordinator.cancel),
    "force": (
        15,
        frozenset({State.RUNNING}),
        lambda pk, **c: coordinator.cancel(pk, force=True, **c),
    ),
    "release": (15, frozenset({State.RUNNING, State.CLAIMED}), coordinator.release),
    "complete": (5, frozenset({State.RUNNING}), coordinator.complete),
    "edit": (
        10,
        frozenset({State.WAITING, State.SCHEDULED}),
        lambda pk, **c: coordinator.edit(pk, priority=7, **c),
    ),
    "rerun": (20, FINAL, coordinator.rerun),
    "delete": (5, FINAL, coordinator.delete),
}


def _meddle_with_one(dice: random.Random) -> None:
    (name,) = dice.choices(list(_ACTS), [weight for weight, _, _ in _ACTS.values()])
    _, states, act = _ACTS[name]
    rows = Job.objects.filter(state__in=states).order_by("-pk")[:100]
    if jobs := list(rows.values_list("pk", "version")):
        job_id, version = dice.choice(jobs)
        caller: dict[str, Any] = {"actor": "operator", "reason": "chaos"}
        if dice.random() < 0.3:
            caller["expected_version"] = version
        act(job_id, **caller)


ROLES = {"enqueue": enqueue_jobs, "burst": burst, "operator": meddle}
