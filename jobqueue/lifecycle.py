"""A job's life on one screen: states, the table of verbs, the fingerprint and outcomes.

Everything here is a value. Nothing imports Django, so that the table can be explored by a model
checker and read by a person without a database.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final


class State(StrEnum):
    """Where a job is in its life."""

    SCHEDULED = "scheduled"
    WAITING = "waiting"
    CLAIMED = "claimed"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


QUEUED: Final = frozenset({State.SCHEDULED, State.WAITING})
HELD: Final = frozenset({State.CLAIMED, State.RUNNING})
FINAL: Final = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})


class Verb(StrEnum):
    """What can happen to a job."""

    PROMOTE = "promote"
    CLAIM = "claim"
    START = "start"
    COMPLETE = "complete"
    FAIL = "fail"
    RETRY = "retry"
    SNOOZE = "snooze"
    RELEASE = "release"
    CANCEL = "cancel"
    RERUN = "rerun"
    EDIT = "edit"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the table of verbs.

    ``target`` is ``None`` where the state stays as it is (edit) or the row goes (delete). A verb
    ``yields_to_cancel`` when a cancel request, made while the job ran, turns it into *cancelled*.
    """

    sources: frozenset[State]
    target: State | None
    yields_to_cancel: bool = False


RULES: Final[Mapping[Verb, Rule]] = {
    Verb.PROMOTE: Rule(frozenset({State.SCHEDULED}), State.WAITING),
    Verb.CLAIM: Rule(frozenset({State.WAITING}), State.CLAIMED),
    Verb.START: Rule(frozenset({State.CLAIMED}), State.RUNNING),
    Verb.COMPLETE: Rule(frozenset({State.RUNNING}), State.COMPLETED),
    Verb.FAIL: Rule(frozenset({State.RUNNING}), State.FAILED, yields_to_cancel=True),
    Verb.RETRY: Rule(frozenset({State.RUNNING}), State.SCHEDULED, yields_to_cancel=True),
    Verb.SNOOZE: Rule(frozenset({State.RUNNING}), State.SCHEDULED, yields_to_cancel=True),
    Verb.RELEASE: Rule(HELD, State.WAITING, yields_to_cancel=True),
    Verb.CANCEL: Rule(QUEUED | HELD, State.CANCELLED),
    Verb.RERUN: Rule(FINAL, State.WAITING),
    Verb.EDIT: Rule(QUEUED, None),
    Verb.DELETE: Rule(FINAL, None),
}


def is_allowed(verb: Verb, state: str) -> bool:
    """Say whether the table of verbs lets ``verb`` happen to a job in ``state``."""
    return state in RULES[verb].sources


@dataclass(frozen=True, slots=True)
class ExecutionFingerprint:
    """What a decision about a job rests on; every write compares the whole of it.

    The first five fields identify the execution, for humans and against writers outside the
    rules; ``version`` rises by one with every verb and closes ABA.
    """

    state: str
    attempt: int
    claimed_by: str | None
    claimed_at: datetime | None
    attempted_at: datetime | None
    version: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields with times in ISO 8601, fit for JSON."""
        return {
            name: value.isoformat() if isinstance(value, datetime) else value
            for name, value in asdict(self).items()
        }

    def __str__(self) -> str:
        held = f" by {self.claimed_by}" if self.claimed_by else ""
        return f"{self.state}{held}, attempt {self.attempt}, version {self.version}"


@dataclass(frozen=True, slots=True)
class Error:
    """Why an attempt failed: one line for lists, and the traceback for whoever digs."""

    message: str
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Completed:
    """The handler returned ``result`` (JSON), or a coordinator gives it for ``reason``.

    ``is_plain``: the result is known to be what will be read back, and is not checked again.
    """

    result: Any = None
    reason: str = ""
    is_plain: bool = field(default=False, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The job is over without success: no further attempt."""

    error: Error


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed and another follows after ``delay``, or nothing if the budget is spent.

    Without a ``delay`` the job's own backoff decides.
    """

    error: Error
    delay: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The handler asked to be run again after ``delay``; the attempt is excused."""

    delay: timedelta


@dataclass(frozen=True, slots=True)
class Released:
    """The job was handed back unfinished; an attempt that had begun is excused."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The executor gave the job up for good."""

    reason: str = ""


Outcome = Completed | Failed | Retry | Snoozed | Released | Cancelled


class Settled(StrEnum):
    """What became of one item of a batch of outcomes."""

    APPLIED = "applied"
    ALREADY_APPLIED = "already applied"
    CONFLICT = "conflict"
    # Refused by the database or locked by somebody, unlike others: it is still to be written.
    NOT_WRITTEN = "not written"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a worker learns when it renews its lease: ids of jobs.

    ``cancel_requested``: somebody asked for these to stop, of all that name the worker. ``lost``:
    the database no longer gives these to the worker; it must write nothing more about them.
    """

    cancel_requested: frozenset[int] = field(default_factory=frozenset)
    lost: frozenset[int] = field(default_factory=frozenset)


def work_in(queue: str) -> str:
    """Return the word that wakes the workers of a queue."""
    return f"work in {queue}"


def stop_asked(job_id: int) -> str:
    """Return the word that has the worker of a job ask what it should know of it."""
    return f"stop {job_id}"


@dataclass(slots=True)
class Effects:
    """What the block of ``context.atomic()`` hands over: the job's ``result`` (JSON)."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a running execution says about itself; each part may be missing."""

    percent: int | None = None
    note: str = ""
    checkpoint: Any = None
    has_checkpoint: bool = False

    def with_progress(self, percent: int, note: str) -> Report:
        """Return this with a figure and its note, unless it has a higher one."""
        if self.percent is not None and percent < self.percent:
            return self
        return replace(self, percent=percent, note=note)

    def with_checkpoint(self, value: Any) -> Report:
        """Return this with a checkpoint in the place of any that it has."""
        return replace(self, checkpoint=value, has_checkpoint=True)

    def over(self, older: Report) -> Report:
        """Return what is known if ``older`` was said before this."""
        merged = older
        if self.has_checkpoint:
            merged = merged.with_checkpoint(self.checkpoint)
        if self.percent is not None:
            merged = merged.with_progress(self.percent, self.note)
        return merged
