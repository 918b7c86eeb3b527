"""Two states are one if nobody could ever tell them apart.

What is forgotten is what no guard can ask for any more, and the guards themselves say what that is:
one that is dropped or changed makes more of the past matter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from jobqueue import guards
from tests.explorer import invariants
from tests.explorer.actors import FENCE, IDLE, Bounds, State
from tests.explorer.values import Answer, Event, Row
from tests.explorer.writes import DEAD, GONE, LATER, LONG_AGO, NOW, SWAPPED, WORKERS, Writes

# The version that the job has in each state as it is stored: only the order of versions matters.
VERSION: Final = 100
# And the attempt, of which only the order and the distance to the budget matter.
ATTEMPT: Final = 50

Owners = frozenset[tuple[int, str]]
# Of a state: row, events, executions, sweeps, beats.
Job = tuple[Any, ...]


class Canonical:
    """Maps a state to the one that stands for all like it."""

    def __init__(self, writes: Writes, bounds: Bounds) -> None:
        self.writes = writes
        self.once = writes.once
        self.has_two = bounds.workers == 2
        self.forgets = bounds.forgets and "version" in guards.FINGERPRINT

    def __call__(self, s: State) -> State:
        key = (s.row, s.events, s.executions, s.sweeps, s.beats, s.acts > 0)
        job, attempts, is_over = self.once(key, self._stored, s)
        leases = s.leases
        if DEAD in leases:
            leases = _without_idle_dead(leases, job)
        if self.has_two and leases[0] >= leases[1]:
            swapped = self.once(("swap", job), self._swapped, job)
            if leases[0] > leases[1] or swapped < job:
                job, leases = swapped, leases[::-1]
        accepted = s.accepted - attempts if job[0] else 0
        asked = s.asked and not is_over
        row, events, executions, sweeps, beats = job
        return State(
            row, events, s.claims, s.acts, asked, accepted, leases, executions, sweeps, beats
        )

    def without_the_late(self, s: State) -> State:
        """Forget what was read and is history, once all that rests on it is refused for ever."""
        if not self.forgets:
            return s
        late = self._is_late
        return s._replace(
            sweeps=tuple(IDLE if w[0] > FENCE and late(s, w[1]) else w for w in s.sweeps),
            beats=tuple(b and (0 if late(s, b) else b) for b in s.beats),
            executions=tuple(e for e in s.executions if e[2] or not self._is_hopeless(s, e[1])),
        )

    def _stored(self, s: State) -> tuple[Job, int, bool]:
        """Return what of a state is about the job, by how much its attempts have been moved, and
        whether it is over."""
        s = self.without_the_late(s)
        held = tuple((e[1], WORKERS[e[0]]) for e in s.executions)
        read = (*(w[1] for w in s.sweeps if w[0] > FENCE), *(b for b in s.beats if b))
        of = (s.row, s.events, held, read, s.acts > 0)
        row, events, new, attempts = self.once(("rows", *of), self._rows, *of)
        job = (
            row,
            events,
            tuple(sorted((who, new[seen], became) for who, seen, became in s.executions)),
            tuple(sorted((do, new[x] if do > FENCE else x, why) for do, x, why in s.sweeps)),
            tuple(b and new[b] for b in s.beats),
        )
        return job, attempts, row == 0 or self.writes.rows[row].state in invariants.FINALS

    def _is_late(self, s: State, seen: int) -> bool:
        """Whether what was read is history: the write that rests on it is refused, for ever.

        Versions only rise, which is checked with every step; so once refused is always refused.
        """
        now, then = self.writes.rows[s.row], self.writes.rows[seen]
        if now and now.version == then.version:
            return False
        return self.writes.rescue(s.row, s.events, seen)[2] == Answer.CONFLICT

    def _is_hopeless(self, s: State, seen: int) -> bool:
        """Whether all that an executor, with no reply outstanding, may still do is refused."""
        now, then = self.writes.rows[s.row], self.writes.rows[seen]
        if now and now.version == then.version:
            return False
        return self.writes.is_refused(s.row, s.events, seen)

    def _rows(
        self,
        row: int,
        events: int,
        held: tuple[tuple[int, str], ...],
        read: tuple[int, ...],
        may_age: bool,
    ) -> tuple[int, int, dict[int, int], int]:
        """Return row, history and the rows that were seen as they are stored, and by how many
        attempts they have been moved."""
        rows = self.writes.rows
        job = rows[row]
        owners = frozenset((rows[seen].version, worker) for seen, worker in held)
        if job:
            job = _without_the_past(job, owners, may_age)
        kept = [e for e in self.writes.histories[events] if self.writes.asked_for(e, owners)]
        seen = {number: rows[number] for number in (*read, *(n for n, _ in held))}
        attempts, excused = (job.attempt - ATTEMPT, job.excused) if job else (0, 0)
        versions = {r.version for r in seen.values()} | {e.version for e in kept}
        versions |= {e.detail_settled_version for e in kept} | {None}
        if job:
            versions |= {job.version, job.settled_version}
        versions.discard(None)
        ranked = sorted(versions, reverse=True)
        top = VERSION if job else VERSION - 1
        rank = {version: top - place for place, version in enumerate(ranked)}
        rank[None] = None
        if job:
            job = replace(
                _moved(job, rank, attempts, excused), settled_version=rank[job.settled_version]
            )
        return (
            self.writes.row_id(job),
            self.writes.history_id(tuple(_renumbered(e, rank) for e in kept)),
            {
                n: self.writes.row_id(_as_seen(_moved(r, rank, attempts, excused)))
                for n, r in seen.items()
            },
            attempts,
        )

    # -- The two workers are alike

    def _swapped(self, job: Job) -> Job:
        row, events, executions, sweeps, beats = job
        once = self.once

        def swap(row: int) -> int:
            return once(("swap row", row), self._swap_row, row)

        return (
            swap(row),
            once(("swap events", events), self._swap_events, events),
            tuple(sorted((1 - who, swap(n), became) for who, n, became in executions)),
            tuple(
                sorted(
                    (do, swap(x) if do > FENCE else 1 - x if do else x, why)
                    for do, x, why in sweeps
                )
            ),
            tuple(map(swap, beats[::-1])),
        )

    def _swap_row(self, number: int) -> int:
        row = self.writes.rows[number]
        if row is None or row.claimed_by is None:
            return number
        return self.writes.row_id(replace(row, claimed_by=SWAPPED[row.claimed_by]))

    def _swap_events(self, number: int) -> int:
        return self.writes.history_id(
            tuple(
                replace(event, actor=SWAPPED.get(event.actor, event.actor))
                for event in self.writes.histories[number]
            )
        )


def _without_idle_dead(leases: tuple[int, ...], job: Job) -> tuple[int, ...]:
    """A dead worker with nothing in hand can do nothing any more."""
    _, _, executions, _, beats = job
    busy = {who for who, _, _ in executions}
    return tuple(
        GONE if lease == DEAD and worker not in busy and not beats[worker] else lease
        for worker, lease in enumerate(leases)
    )


def _without_the_past(job: Row, owners: Owners, may_age: bool) -> Row:
    changes: dict[str, Any] = {"run_after": LATER if job.run_after > NOW else LONG_AGO}
    if not any(guards.is_settled_from(job.settled_version, version) for version, _ in owners):
        changes["settled_version"] = None
    if job.state in invariants.FINALS:
        changes["progress"] = 0  # which a rerun begins anew
        changes |= {} if owners else {"claimed_by": None, "claimed_at": None}
        changes |= {} if may_age else {"finished_at": NOW}
    return replace(job, **changes)


def _moved(row: Row, rank: dict[Any, Any], attempts: int, excused: int) -> Row:
    """Return a row with its version and its counts moved, all that are compared alike."""
    return replace(
        row,
        version=rank[row.version],
        attempt=row.attempt - attempts,
        excused=row.excused - excused,
        max_attempts=row.max_attempts - attempts + excused,
    )


def _as_seen(row: Row) -> Row:
    """Return of a row what its reader goes by."""
    return replace(
        row, settled_version=None, cancel_requested_at=None, progress=0, run_after=LONG_AGO
    )


def _renumbered(event: Event, rank: dict[Any, Any]) -> Event:
    settled = rank[event.detail_settled_version]
    return replace(event, version=rank[event.version], detail_settled_version=settled)
