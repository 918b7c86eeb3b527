"""The guards: each condition without which a write must not take place, by name. Values only.

Those that stand in a statement are lookups, as ``QuerySet.filter`` takes them. The proof reads them
from here as well: its model evaluates the same lookups on rows of its own, and drops each in turn.
The table of verbs (``lifecycle.RULES``) and the sweep's ``StaleRules`` have the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, Protocol

from jobqueue.lifecycle import ExecutionFingerprint

Where = dict[str, Any]

# What the fence compares.
FINGERPRINT: Final[tuple[str, ...]] = tuple(ExecutionFingerprint.__dataclass_fields__)


class Claimed(Protocol):
    """A copy of a job."""

    version: int
    claimed_by: str | None
    claimed_at: Any
    attempted_at: Any


# -- On a job


def unchanged(fingerprint: ExecutionFingerprint) -> Where:
    """The job is what ``fingerprint`` says: each field on its own, ``None`` as ``IS NULL``."""
    where: Where = {}
    for name in FINGERPRINT:
        value = getattr(fingerprint, name)
        where |= {f"{name}__isnull": True} if value is None else {name: value}
    return where


def in_states(*states: str) -> Where:
    """The job is still in one of these states, for batches chosen by ids."""
    return {"state__in": sorted(map(str, states))}


def due(now: datetime) -> Where:
    """The job's time has come."""
    return {"run_after__lte": now}


def cancel_requested(asked: bool) -> Where:
    """Somebody has asked for the running job to be cancelled, or nobody has."""
    return {"cancel_requested_at__isnull": not asked}


def finished_before(moment: datetime) -> Where:
    """The job has been final since before ``moment``."""
    return {"finished_at__lt": moment}


# -- On a worker


def alive() -> Where:
    """The lease holds: nobody has declared the worker dead, and it has not left."""
    return {"state": "alive"}


def silent_since(cutoff: datetime) -> Where:
    """The worker has not renewed its lease since ``cutoff``."""
    return {"last_seen_at__lt": cutoff}


# -- On what is held in memory


def is_same_execution(one: Claimed | None, other: Claimed | None) -> bool:
    """Whether what a worker holds is what the database gives it."""
    if one is None or other is None:
        return False
    return one.version == other.version and is_same_claim(one, other)


def is_same_claim(one: Claimed, other: Claimed) -> bool:
    """Whether both were claimed and begun as one, also where versions come again.

    They do when a failover loses the last commits: another history goes on from an older version.
    """
    names = ("claimed_by", "claimed_at", "attempted_at")
    return all(getattr(one, name) == getattr(other, name) for name in names)


# -- On the traces of a write whose COMMIT reply was lost


def is_settled_from(settled_version: int | None, version: int) -> bool:
    """Whether the job's mark says that its owner last settled it from ``version``."""
    return settled_version == version


def settling_event(version: int, owner: str | None, kinds: Iterable[str]) -> Where:
    """The event of the owner's own settling write from this version."""
    return {"version": version, "actor": owner, "kind__in": sorted(map(str, kinds))}


def rerun_event(settled_version: int, state: str) -> Where:
    """The event of the rerun of a job that its owner had settled from this version."""
    return {"kind": "rerun", "detail__settled_version": settled_version, "from_state": state}
