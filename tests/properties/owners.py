"""Rules of executions, which begin, speak and end, by copies fresh and old."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.db import OperationalError
from hypothesis import strategies as st
from hypothesis.stateful import multiple, rule

from jobqueue import broker, transitions
from jobqueue.fence import SettleResult
from jobqueue.lifecycle import HELD, Cancelled, Outcome, Released, Report, State
from jobqueue.models import Job
from tests.explorer import model
from tests.explorer.model import Answer
from tests.properties import strategies as some
from tests.properties.answers import INVALID, by_verb, statuses
from tests.properties.base import Base, copies
from tests.properties.mirror import row_of
from tests.races.scenes import lost_commit_reply

Items = list[tuple[Job, Outcome]]


def fitting(outcome: Outcome) -> frozenset[State]:
    """Return the states in which an execution can have this outcome."""
    return HELD if isinstance(outcome, Released | Cancelled) else frozenset({State.RUNNING})


class Owners(Base):
    """Executions begin, speak and end."""

    @rule(target=copies, copy=copies, is_fresh=st.booleans(), skew=some.skews)
    def start(self, copy: Job, is_fresh: bool, skew: int) -> Any:
        job = self.chosen(copy, is_fresh, {State.CLAIMED})
        return self.one(
            "start",
            skew,
            job,
            lambda: transitions.start(job),
            lambda world: model.start(world, row_of(job)),
        )

    @rule(
        target=copies,
        copy=copies,
        is_fresh=st.booleans(),
        outcome=some.outcomes(),
        actor=some.actors,
        skew=some.skews,
    )
    def settle(
        self, copy: Job, is_fresh: bool, outcome: Outcome, actor: str | None, skew: int
    ) -> Any:
        """An outcome by its own verb, by the owner or in its stead."""
        job = self.chosen(copy, is_fresh, fitting(outcome))
        return self._settle_one(job, outcome, actor, skew)

    @rule(
        target=copies,
        copy=copies,
        outcome=st.just(Cancelled()) | some.outcomes(),
        actor=some.actors,
        skew=some.skews,
    )
    def settle_anything(self, copy: Job, outcome: Outcome, actor: str | None, skew: int) -> Any:
        """Also what nobody holds: cancelled, or not allowed."""
        return self._settle_one(copy, outcome, actor, skew)

    def _settle_one(self, job: Job, outcome: Outcome, actor: str | None, skew: int) -> Any:
        return self.one(
            type(outcome).__name__,
            skew,
            job,
            lambda: by_verb(job, outcome, actor),
            lambda world: model.settle(world, row_of(job), outcome, actor),
            actor=actor,
        )

    @rule(
        target=copies,
        copy=copies,
        is_fresh=st.booleans(),
        outcome=some.outcomes(),
        more=st.lists(st.tuples(copies, some.outcomes()), max_size=3),
        actor=some.actors,
        is_lost=st.booleans(),
        skew=some.skews,
    )
    def settle_many(
        self,
        copy: Job,
        is_fresh: bool,
        outcome: Outcome,
        more: Items,
        actor: str | None,
        is_lost: bool,
        skew: int,
    ) -> Any:
        """A batch, which may have a job twice; if COMMIT's reply is lost, it is sent again."""
        items = self._items([(copy, outcome), *more], is_fresh)
        send = lambda: transitions.settle_many(items, actor=actor)  # noqa: E731
        if is_lost:
            self.both(
                "settle_many, reply lost",
                skew,
                lambda: self._unheard(send),
                lambda now, _: self.mirror.settle_many(now, items, actor, quiet=True),
                decided_on=[job for job, _ in items],
                actor=actor,
            )
        return self._batch("settle_many", skew, items, send, actor)

    def _items(self, drawn: Items, is_fresh: bool) -> Items:
        return [(self.chosen(job, is_fresh, fitting(outcome)), outcome) for job, outcome in drawn]

    def _unheard(self, send: Callable[[], Any]) -> None:
        with lost_commit_reply(self.alias), suppress(OperationalError):
            send()

    def _batch(
        self,
        name: str,
        skew: int,
        items: Items,
        send: Callable[[], list[SettleResult]],
        actor: str | None = None,
    ) -> Any:
        results = self.both(
            name,
            skew,
            send,
            lambda now, _: self.mirror.settle_many(now, items, actor),
            statuses,
            decided_on=[job for job, _ in items],
            actor=actor,
        )
        for (job, _), result in zip(items, results or [], strict=False):
            self.answers[f"each of {name}", result.status] += 1
            if result.status != Answer.CONFLICT:
                self.history.took_effect(job, actor)
            if result.status == Answer.APPLIED:
                self.history.applied_now(job)
        return multiple(*(result.job for result in results or [] if result.job))

    @rule(
        target=copies,
        which=some.workers,
        copy=copies,
        is_fresh=st.booleans(),
        outcome=some.outcomes(),
        more=st.lists(st.tuples(copies, some.outcomes()), max_size=2),
        skew=some.skews,
    )
    def settle_by_broker(
        self,
        which: int,
        copy: Job,
        is_fresh: bool,
        outcome: Outcome,
        more: Items,
        skew: int,
    ) -> Any:
        """As a worker does; it is kept from settling what another has."""
        items = self._items([(copy, outcome), *more], is_fresh)
        worker = self.worker(which)
        if is_fresh:  # One that knows its own.
            worker = items[0][0].claimed_by or worker
            items = [(job, each) for job, each in items if job.claimed_by == worker] or items
        send = lambda: broker.settle(worker, items)  # noqa: E731
        if any(job.claimed_by != worker for job, _ in items):
            return self.both("broker.settle", skew, send, lambda now, _: INVALID) or multiple()
        return self._batch("broker.settle", skew, items, send)

    @rule(copy=copies, is_fresh=st.booleans(), percent=some.percents, note=some.notes)
    def record_progress(self, copy: Job, is_fresh: bool, percent: int, note: str) -> None:
        job = self.chosen(copy, is_fresh, {State.RUNNING})
        self.both(
            "record_progress",
            0,
            lambda: transitions.record_progress(job, percent, note),
            lambda now, _: self.mirror.report(now, job, Report(percent, note)),
            decided_on=[job],
        )

    @rule(
        which=some.workers,
        copy=copies,
        is_fresh=st.booleans(),
        said=some.reports(),
        more=st.lists(st.tuples(copies, some.reports()), max_size=2),
    )
    def report(
        self,
        which: int,
        copy: Job,
        is_fresh: bool,
        said: Report,
        more: list[tuple[Job, Report]],
    ) -> None:
        """What executions say, one by one; only what runs in hand may say something."""
        drawn = [(copy, said), *more]
        items = [(self.chosen(job, is_fresh, {State.RUNNING}), each) for job, each in drawn]
        worker = self.worker(which)
        self.both(
            "broker.report",
            0,
            lambda: broker.report(worker, items),
            lambda now, _: self.mirror.reports(now, items),
            lambda kept: kept,
            decided_on=[job for job, _ in items],
        )

    @rule(target=copies, copy=copies, is_fresh=st.booleans(), actor=some.operators, skew=some.skews)
    def request_cancel(self, copy: Job, is_fresh: bool, actor: str, skew: int) -> Any:
        job = self.chosen(copy, is_fresh, {State.RUNNING})
        return self.one(
            "request_cancel",
            skew,
            job,
            lambda: transitions.request_cancel(job, actor=actor),
            lambda world: model.request_cancel(world, row_of(job), actor),
            actor=actor,
            opens_version=False,
        )
