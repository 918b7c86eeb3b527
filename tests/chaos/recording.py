"""Has a process log what it asks of the database about jobs, and what it is told.

Writes of job rows go through ``JobQuerySet`` or, many at once, through the statements of
``jobqueue.db``; where each is called, both the version that it expects of a row and the rows that
it matched are known. Whether a matched row stands is known once COMMIT was answered; a COMMIT
without an answer is *unknown*, as is whatever a killed process had asked.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from jobqueue import broker, db, fence, groups, guards
from jobqueue.lifecycle import RULES, ExecutionFingerprint, Settled, State, Verb
from jobqueue.models import Job
from jobqueue.querysets import JobQuerySet
from jobqueue.worker import run
from jobqueue.worker.link import Link
from tests.chaos.log import SUFFIX, Log

GONE = "gone"
DECIDED = "chaos_decided"
PENDING = "_chaos_pending"

# State, attempt and holder: what a job is, as far as versions tell.
Known = tuple[str, int, str | None]
Answer = TypeVar("Answer")

_logs: list[Log] = []


def log() -> Log:
    """Return the log of this process."""
    return _logs[-1]


def start(directory: Path, role: str) -> None:
    """Log from now on, to a file named for the role and the process; each fork to its own."""

    def begin() -> None:
        _logs.append(Log(directory / f"{role}-{os.getpid()}{SUFFIX}"))

    begin()
    os.register_at_fork(after_in_child=begin)
    _around(JobQuerySet, "matching", _matching)
    _around(JobQuerySet, "chosen", _chosen)
    _around(JobQuerySet, "update", _update)
    _around(JobQuerySet, "_raw_delete", _raw_delete)
    _around(BaseDatabaseWrapper, "commit", _commit)
    _around(BaseDatabaseWrapper, "rollback", _undo)
    _around(BaseDatabaseWrapper, "close", _undo)
    _around(fence, "apply", _apply)
    _around(fence, "rescue", _rescue)
    _around(fence, "refuse", _refuse)
    _around(broker, "_took_effect", _took_effect)
    _around(db.UpdateChosen, "__call__", _claim)
    _around(fence, "update", _update_one)
    _around(groups, "update", _update_group)
    _around(Link, "send", _send)
    _around(run, "_bury_all", _bury_all)


def remove_fence() -> None:
    """Have this process write jobs by their ids alone: what the checker must find out."""
    guards.unchanged = lambda fingerprint: {}


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Have ``wrapper`` called in the place of a function, which it is given first."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, call)


# -- Births, logged by whoever enqueues


def born(jobs: Iterable[Job]) -> int:
    """Log jobs that have been inserted, in a transaction still to be committed."""
    rows = [[job.pk, job.args[0], job.task.rpartition(".")[2], job.state] for job in jobs]
    return log().ask("born", jobs=rows)


def await_commit(number: int, using: str) -> None:
    """Have the answer to the current transaction's COMMIT be the answer to this."""
    vars(connections[using]).setdefault(PENDING, []).append(number)


# -- Writes: what one was decided on travels with its queryset


@dataclass(frozen=True, slots=True)
class Decided:
    """Rows that are to be written: one by its fingerprint, or those chosen and locked by id."""

    job_ids: Sequence[int]
    fingerprint: ExecutionFingerprint | None = None

    def rows(self, using: str) -> list[tuple[int, int, Known]]:
        """Return id, version and what else is known of each row, as decided on."""
        if self.fingerprint:
            mine = self.fingerprint
            known = (str(mine.state), mine.attempt, mine.claimed_by)
            return [(self.job_ids[0], mine.version, known)]
        columns = ("pk", "version", "state", "attempt", "claimed_by")
        found = Job.objects.using(using).filter(pk__in=self.job_ids).values_list(*columns)
        return [(pk, version, (state, n, by)) for pk, version, state, n, by in found]


def _remember(rows: JobQuerySet, decided: Decided) -> JobQuerySet:
    rows._hints = {**rows._hints, DECIDED: decided}
    return rows


def _matching(original: Any, rows: JobQuerySet, job_id: int, known: Any) -> JobQuerySet:
    return _remember(original(rows, job_id, known), Decided([job_id], known))


def _chosen(original: Any, rows: JobQuerySet, job_ids: Iterable[int], *states: str) -> JobQuerySet:
    ids = sorted(job_ids)
    return _remember(original(rows, ids, *states), Decided(ids))


def _update(original: Any, rows: JobQuerySet, **changes: Any) -> int:
    # A claim has locked its rows, and asks for them by what they must be.
    decided: Decided = rows._hints.get(DECIDED) or Decided(list(rows.values_list("pk", flat=True)))
    if "version" in changes:
        return _write(rows.db, decided, changes, lambda: original(rows, **changes))
    what = "cancel" if "cancel_requested_at" in changes else "progress"
    ((job_id, version, known),) = decided.rows(rows.db)
    number = log().ask("within", what=what, job=job_id, v=version, before=known)
    return _carry_out(rows.db, number, lambda: original(rows, **changes))


def _raw_delete(original: Any, rows: JobQuerySet, using: str) -> int:
    decided: Decided = rows._hints[DECIDED]
    return _write(rows.db, decided, {"state": GONE}, lambda: original(rows, using) or 0)


def _update_one(original: Any, job: Job, changes: dict[str, Any], where: Any, using: str) -> bool:
    decided = Decided([job.pk], job.fingerprint)
    write = functools.partial(original, job, changes, where, using)
    return bool(_write(using, decided, changes, lambda: int(write())))


def _write(using: str, decided: Decided, changes: dict[str, Any], write: Callable[[], int]) -> int:
    asked = [[pk, v, b, _after(b, changes)] for pk, v, b in decided.rows(using)]
    is_owner = bool(asked) and changes.get("settled_version") == asked[0][1]
    number = log().ask("write", jobs=asked, owner=is_owner)
    return _carry_out(using, number, write, len(asked))


def _after(before: Known, changes: dict[str, Any]) -> Known:
    state, attempt, holder = before
    return (
        str(changes.get("state", state)),
        attempt + ("attempt" in changes),
        changes.get("claimed_by", holder),
    )


def _carry_out(using: str, number: int, write: Callable[[], int], count: int = 1) -> int:
    """Write, and log the answer, or leave that to the end of the transaction."""
    matched = _answered(using, number, write)
    if matched not in (0, count):
        log().write("partly", of=[number], matched=matched)
    if not matched:
        log().answer("refused", [number])
    elif connections[using].in_atomic_block:
        await_commit(number, using)
    else:
        log().answer("ok", [number])
    return matched


def _answered(using: str, number: int, write: Callable[[], Answer]) -> Answer:
    """Write; log what is known if that fails."""
    in_transaction = connections[using].in_atomic_block
    try:
        return write()
    except BaseException:
        # Within a transaction that can't be committed any more, it has not happened.
        log().answer("undone" if in_transaction else "unknown", [number])
        raise


# -- Writes of many rows in one statement


def _update_group(original: Any, parts: Any, actor: str | None, using: str) -> set[int]:
    """Each row is met or not by itself: those that were not are answered at once."""
    asked = []
    for job, ids, write, _ in parts:
        before = (str(job.state), job.attempt, job.claimed_by)
        after = _after(before, write.changes)
        asked += [[job_id, job.version, before, after] for job_id in ids]
    number = log().ask("write", jobs=asked, owner=actor is None)
    met = _answered(using, number, lambda: original(parts, actor, using))
    refused = [job_id for job_id, *_ in asked if job_id not in met]
    if refused:
        log().answer("refused", [number], jobs=refused)
    if met and connections[using].in_atomic_block:
        await_commit(number, using)
    elif met:
        log().answer("ok", [number])
    return met


def _claim(original: Any, update: Any, limit: int, **given: Any) -> list[Job]:
    """A claim: the statement itself chooses its rows and tells them, with what it made of them.

    So it is logged only then, before a COMMIT of its own. Where it isn't one statement, its parts
    are logged as they go.
    """
    using = update._using
    with transaction.atomic(using=using):
        jobs: list[Job] = original(update, limit, **given)
        (source,) = RULES[Verb.CLAIM].sources
        asked = []
        for job in jobs:
            before = (str(source), job.attempt - (job.state == State.RUNNING), None)
            after = (str(job.state), job.attempt, job.claimed_by)
            asked.append([job.pk, job.version - 1, before, after])
        if asked and db.has_batches(using):
            await_commit(log().ask("write", jobs=asked, owner=False), using)
    return jobs


# -- The end of transactions


def _commit(original: Any, connection: BaseDatabaseWrapper) -> None:
    numbers = vars(connection).pop(PENDING, [])
    try:
        original(connection)
    except BaseException:
        log().answer("unknown", numbers)
        raise
    log().answer("ok", numbers)


def _undo(original: Any, connection: BaseDatabaseWrapper) -> None:
    """Roll back, or close: either way COMMIT was never sent."""
    log().answer("undone", vars(connection).pop(PENDING, []))
    original(connection)


# -- What callers are told of their writes


def _apply(original: Any, decided: Any, actor: str | None, using: str) -> Any:
    results = original(decided, actor, using)
    for (job, plan), result in zip(decided, results, strict=True):
        wanted = [str(write.changes.get("state", job.state)) for write in plan.writes]
        told = {"job": job.pk, "v": job.version, "owner": actor is None, "wanted": wanted}
        if result.status == Settled.ALREADY_APPLIED:
            log().write("already", **told)
        elif result.conflict:
            _log_conflict(result.conflict, **told)
    return results


def _rescue(original: Any, items: Any, now: datetime, actor: str, using: str) -> Iterator[Any]:
    """A sweep counts what moved on before it: to be late is its trade."""
    done: set[int] = set()
    for written in original(items, now, actor, using):
        *_, ids = written
        done.update(ids)
        yield written
    for (job, ids), _ in items:
        for job_id in set(ids) - done:
            found = fence.read(job_id, using)
            told = {"job": job_id, "v": job.version, "owner": False, "wanted": []}
            log().write("conflict", found=found and found.version, quiet=True, **told)


def _refuse(original: Any, job: Job, verb: str, actor: str | None, using: str) -> Any:
    conflict = original(job, verb, actor, using)
    _log_conflict(conflict, job=job.pk, v=job.version, owner=actor is None, wanted=[])
    return conflict


def _log_conflict(conflict: Any, **told: Any) -> None:
    found = conflict.found.version if conflict.found else None
    log().write("conflict", found=found, **told)


def _took_effect(original: Any, job: Job, using: str | None) -> bool:
    answer: bool = original(job, using)
    if answer:
        told = {"job": job.pk, "v": job.version, "owner": True, "wanted": ["completed"]}
        log().write("already", **told)
    return answer


# -- Children of a parent


def _send(original: Any, link: Link, **facts: Any) -> None:
    """The parent has been told of a lease, which is to be buried if this process is killed."""
    original(link, **facts)
    if "worker" in facts:
        log().write("led", worker=facts["worker"], pid=os.getpid())


def _bury_all(original: Any, dead: Sequence[str], *args: Any) -> None:
    log().write("bury", workers=dead)
    original(dead, *args)
