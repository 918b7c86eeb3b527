"""Rules of what goes on around jobs: births, looks, workers with their leases, clocks set."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, multiple, precondition, rule

from jobqueue import broker, coordinator, fence
from jobqueue.claim import claim_jobs
from jobqueue.enqueue import enqueue
from jobqueue.explain import explain
from jobqueue.lifecycle import HELD, Released
from jobqueue.models import Job, Queue
from jobqueue.testing.factories import TASK
from tests.explorer import model
from tests.explorer.model import Answer, at
from tests.properties import strategies as some
from tests.properties.answers import ids
from tests.properties.base import Base, copies

Spec = dict[str, Any]


class Surroundings(Base):
    """Jobs are born, queues are paused, clocks are set, people look."""

    @precondition(lambda self: len(self.mirror.jobs) < 5)
    @rule(target=copies, spec=some.births(), skew=some.skews)
    def enqueue(self, spec: Spec, skew: int) -> Job:
        return self.both(
            "enqueue",
            skew,
            lambda: enqueue(TASK, backoff=5, **spec),
            lambda now, job: self.mirror.bear(job, spec, now),
        )

    @rule(queue=some.queue_names, is_paused=st.sampled_from([False, True, False]))
    def pause(self, queue: str, is_paused: bool) -> None:
        paused_at = at(self.clock.seconds) if is_paused else None
        Queue.objects.update_or_create(name=queue, defaults={"paused_at": paused_at})
        (self.mirror.paused.add if is_paused else self.mirror.paused.discard)(queue)

    @rule(by=some.steps)
    def step_clock(self, by: int) -> None:
        """The database's clock is set, forward or back."""
        self.clock.step(by)

    @rule(target=copies, copy=copies, skew=some.skews)
    def look(self, copy: Job, skew: int) -> Any:
        """Somebody reads a row and why it is as it is, to decide on it later."""
        there = None if copy.pk in self.mirror.jobs else Answer.NOT_FOUND
        self.both("explain", skew, lambda: explain(copy.pk), lambda now, _: there)
        return fence.read(copy.pk, self.alias) or multiple()


class Workers(Surroundings):
    """Workers come, claim, renew, forget, are overtaken and go."""

    @initialize(
        target=copies,
        specs=st.lists(some.births(), min_size=2, max_size=3),
        lease=some.leases,
        start=st.booleans(),
        ending=st.sampled_from(["by sweep", "by heartbeat"]),
    )
    def begin(self, specs: list[Spec], lease: int, start: bool, ending: str) -> Any:
        """Some jobs, a worker that has one of them, and who shall find what is left at the end."""
        self.ending = ending
        self.register([*some.QUEUES], lease, 0)
        jobs = [self.enqueue(spec, 0) for spec in specs]
        return multiple(*jobs, *self._claimed(self.worker(0), 1, start, 0))

    @precondition(lambda self: self.mirror.alive() < 2)
    @rule(queues=some.queue_lists, lease=some.leases, skew=some.skews)
    def register(self, queues: list[str], lease: int, skew: int) -> None:
        worker = self.both(
            "register",
            skew,
            lambda: broker.register(queues, lease),
            lambda now, worker: self.mirror.register(now, worker.pk, queues, lease),
        )
        self.workers.append(worker.pk)

    @rule(
        target=copies,
        which=some.workers,
        limit=st.integers(1, 3),
        start=st.booleans(),
        is_lost=st.booleans(),
        skew=some.skews,
    )
    def claim(self, which: int, limit: int, start: bool, is_lost: bool, skew: int) -> Any:
        """Claim by what the worker registered for; the reply may be lost on its way."""
        jobs = self._claimed(self.worker(which), limit, start, skew)
        return multiple(*([] if is_lost else jobs))

    def _claimed(self, worker: str, limit: int, start: bool, skew: int) -> list[Job]:
        jobs = self.both(
            "broker.claim",
            skew,
            lambda: broker.claim(worker, limit, start),
            lambda now, _: self.mirror.claim_registered(now, worker, limit, start=start),
            ids,
            decided_on=None,
        )
        return jobs or []

    @rule(
        target=copies,
        which=some.workers,
        queues=some.queue_lists,
        limit=st.integers(1, 3),
        start=st.booleans(),
        skew=some.skews,
    )
    def claim_jobs(self, which: int, queues: list[str], limit: int, start: bool, skew: int) -> Any:
        return multiple(*self._claimed_from(self.worker(which), queues, limit, start, skew))

    def _claimed_from(
        self, worker: str, queues: list[str], limit: int, start: bool, skew: int
    ) -> list[Job]:
        jobs = self.both(
            "claim_jobs",
            skew,
            lambda: claim_jobs(worker, queues, limit, start),
            lambda now, _: self.mirror.claim(now, worker, queues, limit, start=start),
            ids,
            decided_on=None,
        )
        return jobs or []

    @precondition(lambda self: self.mirror.has(*HELD))
    @rule(target=copies, copy=copies, which=some.workers, start=st.booleans())
    def take_over(self, copy: Job, which: int, start: bool) -> Any:
        """A held job is given away, maybe to the same worker at the same time: copies are old.

        But for its version, the row of a claimed one may then be what it was.
        """
        job = self.chosen(copy, True, HELD)
        self.one(
            "take over",
            0,
            job,
            lambda: coordinator.release(job.pk, actor="operator"),
            lambda world: model.coordinate(
                world, lambda w, row: model.settle(w, row, Released(), "operator")
            ),
            actor="operator",
            by_id=True,
        )
        return multiple(*self._claimed_from(self.worker(which), [job.queue], 3, start, 0))

    @rule(
        which=some.workers,
        knows=st.sampled_from(["all", "some", "nothing", "can't say"]),
        copy=copies,
        more=st.lists(copies, max_size=2),
        is_unsure=st.booleans(),
        skew=some.skews,
    )
    def heartbeat(
        self, which: int, knows: str, copy: Job, more: list[Job], is_unsure: bool, skew: int
    ) -> None:
        """Renew and reconcile, with what the worker knows being right, old, nothing or unsaid."""
        worker = self.worker(which)
        hand: dict[int, Job | None] | None = None
        if knows != "can't say":
            now_held = Job.objects.filter(claimed_by=worker, state__in=HELD)
            known = {"all": [*now_held], "some": [copy, *more], "nothing": []}[knows]
            hand = {job.pk: job for job in known if job.claimed_by == worker}
            hand |= dict.fromkeys(list(hand)[:1]) if is_unsure else {}
        self.both(
            "heartbeat",
            skew,
            lambda: broker.heartbeat(worker, hand),
            lambda now, _: self.mirror.heartbeat(now, worker, hand),
            lambda heartbeat: heartbeat,
            decided_on=None,
        )

    @precondition(lambda self: self.mirror.alive() > 1)
    @rule(which=some.workers, skew=some.skews)
    def leave(self, which: int, skew: int) -> None:
        worker = self.worker(which)
        self.both(
            "leave",
            skew,
            lambda: broker.leave(worker),
            lambda now, _: self.mirror.leave(now, worker),
        )
