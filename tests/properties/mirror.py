"""What the tables ought to hold: the model's one job, many times, with what jobs have in common.

The model knows every write to a job and to a lease. Here stands what it has no need of: which jobs
are chosen and in what order, batches, unique keys, paused queues, and the counts of reports.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from jobqueue.lifecycle import FINAL, HELD, ExecutionFingerprint, Heartbeat, Outcome, Report, State
from jobqueue.models import Job
from jobqueue.sweep import PruneReport, SweepReport
from tests.explorer import model
from tests.explorer.values import NOT_JUDGED, UNKNOWN, Answer, Event, Lease, Row, World, tick

Act = Callable[[World], tuple[World, Answer]]
SWEEP = "sweep"
# The columns that the model hasn't.
OTHERS = ("queue", "priority", "unique_key", "progress_note", "checkpoint")


def row_of(job: Job) -> Row:
    """Return a copy of a job as the model has it."""
    times = ("claimed_at", "attempted_at", "cancel_requested_at", "run_after", "finished_at")
    seconds = {name: _tick(getattr(job, name)) for name in times}
    alike = ("attempt", "excused", "max_attempts", "claimed_by", "version", "settled_version")
    return Row(
        **seconds,  # type: ignore[arg-type]
        **{name: getattr(job, name) for name in (*alike, "progress", "result")},
        state=str(job.state),
        timeout=whole(job.timeout),
        backoff=int(job.backoff["base"]),
    )


def whole(length: timedelta | None) -> int | None:
    """Return a length of time as the model has it."""
    return None if length is None else int(length.total_seconds())


def _tick(moment: Any) -> int | None:
    return None if moment is None else tick(moment)


@dataclass(slots=True)
class Entry:
    """One job: its row, its history, and the columns that the model hasn't."""

    row: Row
    queue: str
    priority: int
    unique_key: str | None
    progress_note: str = ""
    checkpoint: Any = None
    events: tuple[Event, ...] = ()
    refused: int = 0

    @property
    def others(self) -> tuple[Any, ...]:
        """The columns that the model hasn't."""
        return tuple(getattr(self, name) for name in OTHERS)


@dataclass(slots=True)
class Mirror:
    """All tables."""

    jobs: dict[int, Entry] = field(default_factory=dict)
    workers: dict[str, Lease] = field(default_factory=dict)
    served: dict[str, list[str]] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)

    # -- What there is

    def has(self, *states: str) -> bool:
        """Say whether a job is in one of these states."""
        return any(entry.row.state in states for entry in self.jobs.values())

    def alive(self) -> int:
        """Count the workers with a live row."""
        return len(model.alive_ids(self.world(0)))

    # -- One atomic write to one job

    def world(self, now: int, pk: int | None = None) -> World:
        """Return what there is, with one job or none, as the model's world."""
        entry = self.jobs.get(pk or 0)
        row, events = (entry.row, entry.events) if entry else (None, ())
        return World(row, events, tuple(sorted(self.workers.items())), now)

    def write(
        self,
        now: int,
        pk: int,
        act: Act,
        *,
        quiet: bool = False,
        edited: Mapping[str, Any] = {},
    ) -> Answer:
        """Do one write; unless it is ``quiet``, one that is refused leaves its event.

        ``edited`` are changes of an edit, of which those are made here that the model can't.
        """
        after, answer = act(self.world(now, pk))
        self._keep(pk, after)
        if not quiet:
            self._count_refused(pk, answer)
        if answer == Answer.APPLIED and edited:
            entry = self.jobs[pk]
            entry.queue = edited.get("queue", entry.queue)
            entry.priority = edited.get("priority", entry.priority)
        return answer

    def fingerprint(self, pk: int) -> ExecutionFingerprint | None:
        """Return the job's fingerprint in the model's times, ``None`` if it is gone."""
        return self.jobs[pk].row.fingerprint if pk in self.jobs else None

    def _keep(self, pk: int, after: World) -> None:
        self.workers = dict(after.workers)
        entry = self.jobs.get(pk)
        if entry is None:
            return
        if after.row is None:
            del self.jobs[pk]
            return
        before, entry.row, entry.events = entry.row, after.row, after.events
        if entry.row.state in FINAL:
            entry.unique_key = None
        elif before.state in FINAL:
            entry.progress_note = ""
            entry.checkpoint = None if before.state == State.COMPLETED else entry.checkpoint

    def _count_refused(self, pk: int, answer: Answer) -> None:
        if answer == Answer.CONFLICT and pk in self.jobs:
            self.jobs[pk].refused += 1

    # -- Birth

    def holder(self, unique_key: str | None) -> int | None:
        """Return the unfinished job that has the key."""
        keys = {entry.unique_key: pk for pk, entry in self.jobs.items()}
        return keys.get(unique_key) if unique_key else None

    def bear(self, job: Job, spec: Mapping[str, Any], now: int) -> None:
        """Note a job that was born of ``spec``, or was there."""
        if (holder := self.holder(spec["unique_key"])) is not None:
            assert job.pk == holder, f"job {job.pk} was born, though {holder} has its key"
            return
        assert job.pk not in self.jobs
        # Without a time the column's default tells it: by a clock that isn't ours.
        run_after = now + spec["run_after"] if "run_after" in spec else tick(job.run_after)
        row = Row(
            state="scheduled" if run_after > now else "waiting",
            run_after=run_after,
            max_attempts=spec["max_attempts"],
            timeout=spec["timeout"],
        )
        self.jobs[job.pk] = Entry(row, spec["queue"], spec["priority"], spec["unique_key"])

    # -- Outcomes

    def settle_many(
        self,
        now: int,
        items: Sequence[tuple[Job, Outcome]],
        actor: str | None,
        *,
        quiet: bool = False,
    ) -> Answer | list[Answer]:
        """Write a batch; ``NOT_ALLOWED``, if any of it is, and then none is written."""
        acts = [(job.pk, _settling(row_of(job), outcome, actor)) for job, outcome in items]
        if any(act(self.world(now, pk))[1] == Answer.NOT_ALLOWED for pk, act in acts):
            return Answer.NOT_ALLOWED
        answers = [Answer.NOTHING] * len(acts)
        for index in sorted(range(len(acts)), key=lambda index: acts[index][0]):
            answers[index] = self.write(now, *acts[index], quiet=True)
        # Why the others weren't written is asked when all are done.
        for index, (pk, act) in enumerate(acts):
            if answers[index] != Answer.APPLIED:
                answers[index] = self.write(now, pk, act, quiet=quiet)
        return answers

    def report(self, now: int, job: Job, said: Report) -> Answer:
        """Write what an execution says of itself."""
        percent, seen = said.percent, row_of(job)
        entry = self.jobs.get(job.pk)
        before = entry.row.progress if entry else 0
        answer = self.write(now, job.pk, lambda w: model.record_progress(w, seen, percent or 0))
        if answer == Answer.APPLIED and entry:
            if percent is not None and percent >= before:
                entry.progress_note = said.note
            if said.has_checkpoint:
                entry.checkpoint = said.checkpoint
        return answer

    def reports(self, now: int, items: Sequence[tuple[Job, Report]]) -> Answer | list[bool]:
        """Write reports one by one, as far as one isn't allowed; say which executions go on."""
        kept = []
        for job, said in items:
            answer = self.report(now, job, said)
            if answer == Answer.NOT_ALLOWED:
                return answer
            kept.append(answer == Answer.APPLIED)
        return kept

    # -- Claims

    def promote(self, now: int, queues: Collection[str] | None, limit: int) -> None:
        """Promote the oldest of the due jobs."""
        due = [
            (entry.row.run_after, pk)
            for pk, entry in self.jobs.items()
            if entry.row.state == State.SCHEDULED
            and entry.row.run_after <= now
            and (queues is None or entry.queue in queues)
        ]
        for _, pk in sorted(due)[:limit]:
            assert self.write(now, pk, model.promote) == Answer.APPLIED

    def claim(
        self, now: int, worker_id: str, queues: Sequence[str], limit: int, *, start: bool
    ) -> Answer | list[int]:
        """Claim; return which jobs, in their order."""
        self.promote(now, queues, 100)
        if worker_id not in model.alive_ids(self.world(now)):
            return Answer.LEASE_LOST
        claimed: list[int] = []
        for queue in queues:
            for pk in self._claimable(now, queue)[: limit - len(claimed)]:
                answer = self.write(now, pk, lambda w: _claiming(w, worker_id, start))
                assert answer == Answer.APPLIED
                claimed.append(pk)
        return claimed

    def claim_registered(
        self, now: int, worker_id: str, limit: int, *, start: bool
    ) -> Answer | list[int]:
        """Claim from the queues that the worker registered for; a dead one promotes nothing."""
        if worker_id not in model.alive_ids(self.world(now)):
            return Answer.LEASE_LOST
        return self.claim(now, worker_id, self.served[worker_id], limit, start=start)

    def _claimable(self, now: int, queue: str) -> list[int]:
        found = [
            (-entry.priority, entry.row.run_after, pk)
            for pk, entry in self.jobs.items()
            if entry.row.state == State.WAITING and entry.row.run_after <= now
            if entry.queue == queue and queue not in self.paused
        ]
        return [pk for *_, pk in sorted(found)]

    # -- Workers

    def register(self, now: int, worker_id: str, queues: list[str], lease: int) -> None:
        """Announce a worker."""
        assert worker_id not in self.workers
        self.workers = dict(model.register(self.world(now), worker_id, lease).workers)
        self.served[worker_id] = queues

    def leave(self, now: int, worker_id: str) -> None:
        """End a lease, if it holds."""
        self.write(now, 0, lambda world: model.leave(world, worker_id))

    def heartbeat(
        self, now: int, worker_id: str, held: Mapping[int, Job | None] | None
    ) -> Answer | Heartbeat:
        """Renew, and reconcile job by job."""
        world, answer = model.renew(self.world(now), worker_id)
        if answer == Answer.LEASE_LOST:
            return answer
        self.workers = dict(world.workers)
        told = {pk: self._reconcile(now, worker_id, pk, held) for pk in {*self.jobs, *(held or ())}}
        return Heartbeat(
            *(frozenset(pk for pk, words in told.items() if word in words) for word in TOLD)
        )

    def _reconcile(
        self, now: int, worker_id: str, pk: int, held: Mapping[int, Job | None] | None
    ) -> frozenset[str]:
        if held is None:
            hand: Any = UNKNOWN
        elif pk in held:
            job = held[pk]
            hand = row_of(job) if job else NOT_JUDGED
        else:
            hand = None
        world, told = model.reconcile(self.world(now, pk), worker_id, hand)
        self._keep(pk, world)
        if "lost" in told:
            self._count_refused(pk, Answer.CONFLICT)
        return told

    # -- Sweeps

    def sweep(
        self,
        now: int,
        queues: Collection[str] | None,
        claimed_after: int | None,
        running_after: int | None,
        batch_size: int,
        limit: int | None,
        dry_run: bool,
    ) -> SweepReport:
        """Sweep, or say what a sweep would count."""
        claimed_after = 60 if claimed_after is None else claimed_after
        rules = model.stale_rules(now, claimed_after, running_after)
        report, before = SweepReport(), (replace_all(self.jobs), dict(self.workers))
        for worker_id in model.silent_ids(self.world(now), rules):
            cutoff = now - self.workers[worker_id].lease
            self.write(now, 0, lambda w, pk=worker_id, at=cutoff: model.fence_worker(w, pk, at))
            report.dead_workers += 1
        if not dry_run:
            self.promote(now, queues, batch_size)
        held = [
            pk
            for pk, entry in sorted(self.jobs.items())
            if entry.row.state in HELD and (queues is None or entry.queue in queues)
        ]
        for first in range(0, len(held), batch_size):
            page = held[first : first + batch_size]
            report.examined += len(page)
            self._take(now, page, rules, limit, report)
            if limit is not None and report.taken >= limit:
                break
        if dry_run:
            self.jobs, self.workers = before
        return report

    def _take(
        self, now: int, page: Sequence[int], rules: Any, limit: int | None, report: SweepReport
    ) -> None:
        for pk in page:
            seen, alive = self.jobs[pk].row, model.alive_ids(self.world(now))
            is_full = limit is not None and report.taken >= limit
            if is_full or not model.stale_verdict(rules, seen, alive):
                continue
            answer = self.write(now, pk, lambda w, seen=seen: model.rescue(w, seen, SWEEP))
            assert answer == Answer.APPLIED
            state = self.jobs[pk].row.state
            given_back = "released" if seen.state == State.CLAIMED else "retried"
            name = state if state in FINAL else given_back
            setattr(report, name, getattr(report, name) + 1)

    def prune(self, now: int, older_than: int) -> PruneReport:
        """Delete what has been over for long: jobs, and workers that are gone."""
        before, report = now - older_than, PruneReport()
        for pk in list(self.jobs):
            answer = self.write(now, pk, lambda world: model.prune(world, before))
            report.jobs += answer == Answer.APPLIED
        for worker_id, lease in list(self.workers.items()):
            if lease.state != "alive" and lease.last_seen_at < before:
                del self.workers[worker_id]
                report.workers += 1
        return report


TOLD = ("cancel", "lost")


def replace_all(jobs: Mapping[int, Entry]) -> dict[int, Entry]:
    """Return copies of all entries."""
    return {pk: replace(entry) for pk, entry in jobs.items()}


def _settling(seen: Row, outcome: Outcome, actor: str | None) -> Act:
    return lambda world: model.settle(world, seen, outcome, actor)


def _claiming(world: World, worker_id: str, start: bool) -> tuple[World, Answer]:
    world, got = model.claim(world, worker_id, start)
    return world, Answer.APPLIED if isinstance(got, Row) else got
