"""What must hold whatever the mirror says: laws on how rows may change, told from rows alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jobqueue.lifecycle import FINAL, HELD, State
from jobqueue.models import Job

NEVER_FALLS = ("version", "attempt", "excused")


@dataclass(slots=True)
class History:
    """The rows as they were last seen, the last one in each state, and how executions ended."""

    rows: dict[int, Job] = field(default_factory=dict)
    last: dict[str, Job] = field(default_factory=dict)
    # From which versions writes took effect, and whose: None for the execution's own worker.
    written: set[tuple[int, int, str | None]] = field(default_factory=set)
    ended: Counter[tuple[int, int]] = field(default_factory=Counter)
    accepted: Counter[tuple[int, int]] = field(default_factory=Counter)

    def took_effect(self, copy: Job, actor: str | None) -> None:
        """Note that the writer was told that what it decided on this copy is written."""
        it = (copy.pk, copy.version, actor)
        assert it in self.written, f"told that it was written, on {copy.fingerprint}"

    def applied_now(self, copy: Job) -> None:
        """Note that the writer was told that it was written just now."""
        self.accepted[copy.pk, copy.version] += 1
        assert self.accepted[copy.pk, copy.version] == 1, f"two outcomes for {copy.fingerprint}"

    def observe(
        self, rows: Iterable[Job], decided_on: Iterable[Job] | None, actor: str | None
    ) -> None:
        """Compare all rows with what they were, and remember them.

        Nothing may have changed but what was decided on its newest version: that of one of the
        copies ``decided_on``. ``None`` allows any change, by somebody who acts on what there is.
        """
        now = {job.pk: job for job in rows}
        newest = None if decided_on is None else {(job.pk, job.version) for job in decided_on}
        for pk, old in self.rows.items():
            if values(old) == values(now.get(pk)):
                continue
            assert newest is None or (pk, old.version) in newest, (
                f"stale write on {old.fingerprint}"
            )
            if pk not in now or now[pk].version > old.version:
                self.written.add((pk, old.version, actor))
            self._compare(old, now.get(pk))
        for job in now.values():
            assert_consistent(job)
        keys = Counter(job.unique_key for job in now.values() if job.unique_key)
        assert not [key for key, count in keys.items() if count > 1]
        self.rows = now
        self.last |= {job.state: job for job in now.values()}

    def _compare(self, old: Job, new: Job | None) -> None:
        if new is None:
            assert old.state in FINAL, f"deleted while {old.fingerprint}"
            return
        step = f"{old.fingerprint} -> {new.fingerprint}"
        for name in NEVER_FALLS:
            assert getattr(new, name) >= getattr(old, name), f"{name} fell: {step}"
        assert new.version > old.version or new.fingerprint == old.fingerprint, step
        assert new.progress >= old.progress or old.state in FINAL, f"progress fell: {step}"
        if new.version == old.version:
            return
        assert old.state not in FINAL or new.state not in FINAL, f"final twice: {step}"
        if old.state == State.RUNNING:
            self.ended[old.pk, old.attempt] += 1
            assert self.ended[old.pk, old.attempt] == 1, f"ended twice: {step}"
            asked_to_stop = old.cancel_requested_at is not None
            assert not asked_to_stop or new.state in FINAL, f"cancelled, yet goes on: {step}"


def values(job: Job | None) -> dict[str, Any]:
    """Return the columns of a row, none if it is gone."""
    return {name: value for name, value in vars(job).items() if name != "_state"} if job else {}


def assert_consistent(job: Job) -> None:
    """Say in Python what the constraints of the database say of one row."""
    seen = f"{job.fingerprint}"
    assert (job.finished_at is not None) == (job.state in FINAL), seen
    assert job.state in FINAL or (job.claimed_by is not None) == (job.state in HELD), seen
    assert (job.claimed_by is None) == (job.claimed_at is None), seen
    assert job.state != State.RUNNING or job.attempted_at is not None, seen
    assert 0 <= job.excused <= job.attempt, seen
    assert 0 <= job.progress <= 100, seen
    assert job.state not in FINAL or job.unique_key is None, seen
