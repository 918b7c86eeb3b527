"""What must hold of every step, by name. Nothing here asks production: it is held to this."""

from __future__ import annotations

from typing import Final

from tests.explorer.values import Answer, Row

STALE_WRITE: Final = "no write lands on an execution it was not meant for"
VERSION: Final = "the version rises by exactly one with every verb"
LEGAL: Final = "each verb leads only from and to the states that it is for"
FINAL_STAYS: Final = "a final state changes only by a rerun"
ONE_OUTCOME: Final = "an execution has at most one accepted outcome"
NO_ATTEMPT: Final = "an acknowledged cancel is never followed by another attempt"
ENDS_CANCELLED: Final = "a job asked to stop ends as cancelled unless it succeeded"
ONLY_ASKED: Final = "a setback cancels a job only if it was asked to stop"
EXCUSED: Final = "only the snooze or the release of a running job excuses its attempt"
PROGRESS: Final = "progress never falls within an attempt"
DUE: Final = "nothing begins before its time"
LIVE_CLAIM: Final = "only a worker whose lease holds claims"
DEAD_TOLD: Final = "a worker that was declared dead is told so"
ONLY_SILENT: Final = "a worker that has renewed its lease is not declared dead"
KEEPS: Final = "a worker whose lease holds keeps its jobs unless they are overdue"
LOST_TOLD: Final = "a worker that compares learns what it has lost, and keeps the rest"
NOT_APPLIED: Final = "nobody is told that a write took effect when it did not"
APPLIED: Final = "an owner whose outcome took effect is not told that it was in conflict"
OLD: Final = "only what has been final for long is pruned"
EXPECTED: Final = "who names a version changes no other"
VISIBLE: Final = "without an operator a final state can be reached from everywhere"

FINALS: Final = frozenset({"completed", "failed", "cancelled"})
QUEUED: Final = frozenset({"scheduled", "waiting"})
HELD: Final = frozenset({"claimed", "running"})

# The design's table of verbs, in the words of its page: from, to.
TABLE: Final[dict[str, tuple[frozenset[str], frozenset[str]]]] = {
    verb: (frozenset(sources), frozenset(targets))
    for verb, sources, targets in (
        ("promote", {"scheduled"}, {"waiting"}),
        ("claim", {"waiting"}, {"claimed", "running"}),
        ("start", {"claimed"}, {"running"}),
        ("complete", {"running"}, {"completed"}),
        ("fail", {"running"}, {"failed", "cancelled"}),
        ("retry", {"running"}, {"scheduled", "waiting", "failed", "cancelled"}),
        ("snooze", {"running"}, {"scheduled", "cancelled"}),
        ("release", HELD, {"waiting", "cancelled"}),
        ("cancel", QUEUED | HELD, {"cancelled"}),
        ("rerun", FINALS, {"waiting"}),
        ("delete", FINALS, set()),
        ("edit", QUEUED, QUEUED),
        ("progress", {"running"}, {"running"}),
        ("request cancel", {"running"}, {"running"}),
    )
}
WITHIN: Final = {"progress": "progress", "request cancel": "cancel_requested_at"}

# What an outcome may have become, by its verb: the truth about lost replies.
BECOMES: Final = {
    "complete": {"completed"},
    "fail": {"failed", "cancelled"},
    "retry": {"retried", "cancelled"},
    "snooze": {"snoozed", "cancelled"},
    "release": {"released", "cancelled"},
    "cancel": {"cancelled"},
}


def broken_by_write(verb: str, before: Row, after: Row | None, now: int) -> str | None:
    """Return the invariant that a write of this verb breaks, judged by the two rows alone."""
    sources, targets = TABLE[verb]
    if before.state in FINALS and verb not in ("rerun", "delete") and after != before:
        return FINAL_STAYS
    if before.state not in sources or (after and after.state not in targets):
        return LEGAL
    if after is None:
        return None
    if verb in ("promote", "claim") and before.run_after > now:
        return DUE
    if after.version != before.version + (verb not in WITHIN):
        return VERSION
    if verb in WITHIN and _changed(before, after) - {WITHIN[verb]}:
        return VERSION
    if after.progress < before.progress and verb != "rerun":
        return PROGRESS
    began = after.state == "running" and before.state != "running"
    if after.attempt != before.attempt + began:
        return ONE_OUTCOME
    stopped = before.state == "running" and after.state in QUEUED
    if after.excused != before.excused + (stopped and verb in ("snooze", "release")):
        return EXCUSED
    return None


def broken_by_past(verb: str, asked: bool, before: Row, after: Row) -> str | None:
    """Return what it breaks that a job, asked to stop or not, comes to ``after`` by this verb."""
    if asked and after.state == "running" and before.state != "running":
        return NO_ATTEMPT
    if asked and after.state == "failed":
        return ENDS_CANCELLED
    is_setback = verb in ("fail", "retry", "snooze", "release") and before.state == "running"
    if is_setback and after.state == "cancelled" and not asked:
        return ONLY_ASKED
    return None


def broken_by_answer(
    verb: str, seen: Row, took_effect_as: str | None, answer: Answer
) -> str | None:
    """Return what an answer to an owner, who decided on the row as seen, breaks.

    ``took_effect_as`` is what became of the job when this owner's reply was lost, if it was.
    """
    is_last = seen.attempt - seen.excused >= seen.max_attempts
    is_mine = took_effect_as in BECOMES["fail" if verb == "retry" and is_last else verb]
    if answer == Answer.ALREADY_APPLIED and not is_mine:
        return NOT_APPLIED
    if answer == Answer.CONFLICT and is_mine:
        return APPLIED
    if answer == Answer.APPLIED and took_effect_as:
        return ONE_OUTCOME
    return None


def _changed(before: Row, after: Row) -> set[str]:
    return {name for name in Row.__slots__ if getattr(before, name) != getattr(after, name)}
