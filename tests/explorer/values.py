"""What the model is made of: a job's row, its history, leases, times, and how SQL compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from typing import Any, Final

from jobqueue.guards import Where
from jobqueue.lifecycle import State
from jobqueue.models import Job

EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)


class Answer(StrEnum):
    """What the caller of a write is told."""

    APPLIED = "applied"
    ALREADY_APPLIED = "already applied"
    CONFLICT = "conflict"
    NOT_ALLOWED = "not allowed"
    NOT_FOUND = "not found"
    LEASE_LOST = "lease lost"
    NOTHING = "nothing"


class Held(Enum):
    """What a worker says of the job in its hands, beside the job itself or ``None``."""

    UNKNOWN = "it can't say, since an outcome is on its way"
    NOT_JUDGED = "its handler may complete it at any moment"


UNKNOWN: Final = Held.UNKNOWN
NOT_JUDGED: Final = Held.NOT_JUDGED


@dataclass(frozen=True, slots=True)
class Row:
    """The columns of a job on which anything rests."""

    state: str = State.WAITING.value
    attempt: int = 0
    excused: int = 0
    max_attempts: int = 5
    claimed_by: str | None = None
    claimed_at: int | None = None
    attempted_at: int | None = None
    version: int = 0
    settled_version: int | None = None
    cancel_requested_at: int | None = None
    progress: int = 0
    run_after: int = 0
    result: str | None = None
    finished_at: int | None = None
    timeout: int | None = None
    backoff: int = 5

    pk = 1
    fingerprint = Job.fingerprint
    failures = Job.failures
    is_budget_spent = Job.is_budget_spent

    def __str__(self) -> str:
        marks = [str(self.fingerprint)]
        marks += ["cancel requested"] * (self.cancel_requested_at is not None)
        marks += [f"progress {self.progress}"] * bool(self.progress)
        return ", ".join(marks)


COLUMNS: Final = frozenset(field.name for field in fields(Row))


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the job's history; ``version`` is the one from which its write was decided."""

    kind: str
    version: int
    actor: str
    detail_settled_version: int | None
    from_state: str
    to_state: str


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker's row: alive, stopped or dead."""

    state: str = "alive"
    last_seen_at: int = 0
    lease: int = 30


@dataclass(frozen=True, slots=True)
class World:
    """What the database holds."""

    row: Row | None
    events: tuple[Event, ...] = ()
    workers: tuple[tuple[str, Lease], ...] = ()
    now: int = 0

    def lease_of(self, worker_id: str) -> Lease | None:
        """Return a worker's row, if it has one."""
        return dict(self.workers).get(worker_id)


# -- Times, and what SQL does


def at(now: int) -> datetime:
    """Return one of the model's times as production's."""
    return EPOCH + timedelta(seconds=now)


def tick(moment: datetime) -> int:
    """Return one of production's times as the model's."""
    return round((moment - EPOCH).total_seconds())


_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "exact": lambda have, want: have is not None and have == want,
    "isnull": lambda have, want: (have is None) == want,
    "in": lambda have, want: have in want,
    "lte": lambda have, want: have is not None and have <= want,
    "lt": lambda have, want: have is not None and have < want,
}


def matches(thing: Any, where: Where) -> bool:
    """Say whether a row, an event or a lease is found by these lookups."""
    for lookup, want in where.items():
        name, _, kind = lookup.rpartition("__")
        if kind not in _COMPARE:
            name, kind = lookup, "exact"
        if not _COMPARE[kind](getattr(thing, name.replace("__", "_")), want):
            return False
    return True
