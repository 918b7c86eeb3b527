"""Claim, run, settle: the life of a worker under one lease. It is handed a broker."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

from jobqueue import db, signals
from jobqueue.exceptions import JobQueueError, LeaseLost
from jobqueue.lifecycle import (
    FINAL,
    Completed,
    Effects,
    Error,
    Heartbeat,
    Outcome,
    Released,
    Report,
    Retry,
    Settled,
    Snoozed,
)
from jobqueue.worker.context import JobContext
from jobqueue.worker.execute import describe, execute
from jobqueue.worker.execution import REFUSED_WAIT, REPORT_EVERY, Execution, reports_due
from jobqueue.worker.heartbeat import BEATS_PER_LEASE, Turns

Answer = TypeVar("Answer")


class Broker(Protocol):
    """The verbs that the loop needs; ``jobqueue.broker`` tells what each does."""

    def claim(self, worker_id: str, limit: int) -> Sequence[Any]: ...

    def heartbeat(self, worker_id: str, held: Mapping[int, Any] | None) -> Heartbeat: ...

    def settle(self, worker_id: str, items: Sequence[tuple[Any, Outcome]]) -> Sequence[Any]: ...

    def report(self, worker_id: str, items: Sequence[tuple[Any, Report]]) -> Sequence[bool]: ...

    def atomic(
        self, worker_id: str, job: Any, closing: Execution, alias: str | None
    ) -> AbstractContextManager[Effects]: ...

    def leave(self, worker_id: str) -> None: ...


class Ended(Enum):
    """Why a loop ended."""

    STOPPED = auto()
    DRAINED = auto()
    LEASE_LOST = auto()


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How to work: see ``run_worker``. Times in seconds."""

    slots: int
    poll: float
    lease: float
    grace: float
    burst: bool = False
    max_jobs: int | None = None


# How a job that may run again is counted; one that is over, by its state.
_PUT_OFF = {Retry: "retried", Snoozed: "snoozed", Released: "released"}


def _became(outcome: Outcome, result: Any) -> str:
    if result.status == Settled.CONFLICT:
        return Settled.CONFLICT
    state = str(result.state)
    return state if state in FINAL else _PUT_OFF.get(type(outcome), state)


class Loop:
    """Runs in one thread; handlers run in the executor's.

    A slot is free only once its outcome is written, so nothing is claimed that can't be run, and
    no outcome is dropped: while the database is in trouble it is kept and tried again, until the
    loop was told to stop and the grace is over.
    """

    def __init__(
        self, broker: Broker, worker_id: str, executor: Executor, options: LoopOptions
    ) -> None:
        self.broker = broker
        self.worker_id = worker_id
        self.turns = Turns()
        self.ticked = time.monotonic()
        self.lease_until = self.ticked + options.lease
        self.settled: Counter[str] = Counter()
        self.claimed = 0
        self.abandoned = 0  # handlers that did not end within the grace
        self._executor = executor
        self._options = options
        self._held: dict[tuple[int, int], Execution] = {}
        # Its put() may be called from a signal handler; an Event's set() may not.
        self._inbox: SimpleQueue[tuple[Execution, Outcome] | None] = SimpleQueue()
        self._end_by = math.inf
        self._lease_lost = False
        self._in_doubt = False
        self._waits = db.waits()
        self._retry_at = 0.0

    # -- What other threads and signal handlers may call

    def stop(self) -> None:
        """Claim no more, and end once what runs has been settled, or the grace is over."""
        self._end_by = min(self._end_by, time.monotonic() + self._options.grace)
        self._inbox.put(None)

    def lose_lease(self) -> None:
        """Claim no more and tell the running handlers; what they report, the fence decides."""
        self._lease_lost = True
        for execution in list(self._held.values()):
            execution.context.tell_lost()
        self._inbox.put(None)

    def held_jobs(self) -> dict[int, Any] | None:
        """Return the jobs in hand by id; exact while ``turns`` keeps the loop from exchanging.

        A job of which the database may know the end, and this worker not yet, is not one that
        somebody took: ``None`` stands for one that its handler may complete at any moment, and for
        all of them while it isn't known whether outcomes were written.
        """
        if self._in_doubt:
            return None
        newest: dict[int, Execution] = {}
        for execution in list(self._held.values()):  # in the order in which they were claimed
            if not execution.lost:
                if older := newest.get(execution.job.pk):
                    older.context.tell_lost()
                newest[execution.job.pk] = execution
        return {pk: execution.judged for pk, execution in newest.items()}

    def hear(self, heard: Heartbeat) -> None:
        """Pass on what a heartbeat learned."""
        for execution in list(self._held.values()):
            if execution.job.pk in heard.cancel_requested:
                execution.context.tell_cancelled()
            if execution.job.pk in heard.lost:
                execution.lose()

    # -- The loop

    def run(self) -> Ended:
        """Work until told to stop, the lease is lost or, with ``burst``, nothing is left to do."""
        ended = self._work()
        self._drain()
        return ended

    def _work(self) -> Ended:
        while True:
            self.ticked = time.monotonic()
            self._report()
            self._flush()
            if self.ticked > self.lease_until + self._beat:
                # The heartbeat hangs: it should have renewed, or found that it can't, by now.
                self.lose_lease()
            if self._lease_lost:
                return Ended.LEASE_LOST
            limit = self._room()
            if self._is_stopping() or (limit == 0 and not self._held and self._is_spent()):
                return Ended.STOPPED
            claimed = self._claim(limit) if limit else None
            if self._options.burst and claimed == 0 and not self._held:
                return Ended.DRAINED
            self._receive(self._pause())

    def _drain(self) -> None:
        """Wait for what runs, settle it, and give up what doesn't end within the grace.

        Outcomes are kept until the database takes them, unless the loop was told to stop: then it
        ends when the grace is over, after a last try.
        """
        patience = time.monotonic() + self._options.grace
        while self._held:
            self.ticked = now = time.monotonic()
            is_last = now >= self._end_by
            if is_last or now >= patience:
                self._give_up()
            for write in (self._report, partial(self._flush, last=is_last)):
                if is_last:
                    self._retry_at = 0.0
                write()
            if is_last:
                return
            if self._held:
                ends = [end - now for end in (patience, self._end_by) if end > now]
                self._receive(min(self._pause(), *ends))

    def _give_up(self) -> None:
        """Decide what becomes of the jobs whose handlers have not ended."""
        self._receive(0)
        for execution in self._held.values():
            if execution.outcome is None:
                execution.context.tell_lost()
                # A lost lease costs the attempt, as it does when a sweep is there first: a job
                # that wedges its worker must not come back for ever.
                execution.outcome = (
                    Released("its worker was stopped")
                    if self._is_stopping()
                    else Retry(Error("its worker lost its lease, and the handler did not end"))
                )
                self.abandoned += 1

    @property
    def _beat(self) -> float:
        return self._options.lease / BEATS_PER_LEASE

    def _is_stopping(self) -> bool:
        return self._end_by < math.inf

    def _is_spent(self) -> bool:
        return self._options.max_jobs is not None and self.claimed >= self._options.max_jobs

    def _room(self) -> int:
        """How many jobs may be claimed now."""
        now = time.monotonic()
        if now < self._retry_at or now >= self.lease_until:
            return 0
        room = self._options.slots - len(self._held)
        if self._options.max_jobs is not None:
            room = min(room, self._options.max_jobs - self.claimed)
        return max(room, 0)

    def _pause(self) -> float:
        """How long to wait for something to happen: never for so long as to look wedged."""
        pause = min(self._options.poll * (0.75 + random.random() / 2), self._options.lease / 2)
        if self._held:
            pause = min(pause, REPORT_EVERY)
        until_retry = self._retry_at - time.monotonic()
        return min(pause, until_retry) if until_retry > 0 else pause

    def _claim(self, limit: int) -> int | None:
        """Claim and begin up to ``limit`` jobs; return how many, ``None`` if it wasn't possible."""
        with self.turns.exchange(self._beat) as entered:
            if not entered:
                return None
            jobs = self._attempt("claim", lambda: self.broker.claim(self.worker_id, limit))
            executions = [self._take(job) for job in jobs or ()]
        for execution in executions:
            future = self._executor.submit(execute, execution.job, execution.context)
            future.add_done_callback(partial(self._finish, execution))
        return None if jobs is None else len(executions)

    def _take(self, job: Any) -> Execution:
        self.claimed += 1
        context = JobContext(
            job.pk,
            job.task,
            job.attempt,
            job.version,
            checkpoint=job.checkpoint,
            atomic=lambda alias: self._complete_within(execution, alias),
        )
        execution = Execution(job, context)
        self._held[execution.key] = execution
        if self._lease_lost:  # meanwhile, when nobody knew of this one
            context.tell_lost()
        return execution

    @contextmanager
    def _complete_within(self, execution: Execution, alias: str | None) -> Iterator[Effects]:
        """Called in the handler's thread."""
        if execution.completed:
            raise JobQueueError(f"job {execution.job.pk} has been completed already")
        # No comparison or report is under way when this is noted, and none may meddle from here on.
        # The turn can't be kept: the loop may hold it while it waits for what this transaction
        # locks.
        with ExitStack() as stack:
            with self.turns.exchange(self._options.lease):
                stack.enter_context(execution.closed_by_handler())
            yield stack.enter_context(
                self.broker.atomic(self.worker_id, execution.job, execution, alias)
            )

    def _finish(self, execution: Execution, future: Future[Outcome]) -> None:
        """Called in the executor's thread."""
        error = future.exception()
        outcome = Retry(describe(error)) if error else future.result()
        self._inbox.put((execution, outcome))

    def _receive(self, timeout: float) -> None:
        """Wait until something happens, for ``timeout`` seconds at most, and take in all of it."""
        with suppress(Empty):
            self._take_in(self._inbox.get(timeout=timeout))
            while True:
                self._take_in(self._inbox.get_nowait())

    def _take_in(self, message: tuple[Execution, Outcome] | None) -> None:
        """Note an outcome; only here and in ``_give_up``, so that the first one stands."""
        if message:
            execution, outcome = message
            execution.outcome = execution.outcome or outcome

    def _flush(self, *, last: bool = False) -> None:
        """Write the outcomes that have come in; on trouble keep them for the next time."""
        held = list(self._held.values())
        done = [e for e in held if e.is_ripe or (last and e.outcome is not None)]
        if not done or time.monotonic() < self._retry_at:
            return
        with self.turns.exchange(self._beat) as entered:
            if not entered:
                return
            to_write = [e for e in done if e.is_open]
            items = [(e.job, e.outcome) for e in to_write if e.outcome]
            results: Sequence[Any] | None = []
            if items:
                settle = partial(self.broker.settle, self.worker_id, items)
                results = self._attempt("settle", settle)
            self._in_doubt = results is None
            if results is None:
                return
            answers = dict(zip((e.key for e in to_write), results, strict=True))
            for execution in done:
                self._let_go(execution, answers.get(execution.key))

    def _let_go(self, execution: Execution, result: Any | None) -> None:
        """Take an execution off the books, unless its outcome is still to be written."""
        if result is not None and result.status == Settled.NOT_WRITTEN:
            execution.settle_at = time.monotonic() + REFUSED_WAIT
            error = JobQueueError("its row is locked, or the database refuses the change")
            self._tell(f"settle job {execution.job.pk}", error)
            return
        del self._held[execution.key]
        if result is None:
            self._count_closed(execution)
        elif execution.outcome:
            self.settled[_became(execution.outcome, result)] += 1

    def _count_closed(self, execution: Execution) -> None:
        """Count an execution of which nothing was left to write."""
        if not execution.completed:
            self.settled[Settled.CONFLICT] += 1
            return
        self.settled["completed"] += 1
        if not isinstance(execution.outcome, Completed):
            doing = f"undo job {execution.job.pk}, completed before its handler ended with"
            error = JobQueueError(str(execution.outcome))
            self._tell(doing, error)

    def _report(self) -> None:
        """Write what running executions said about themselves; on trouble keep it."""
        has_said = any(execution.context.has_report for execution in self._held.values())
        if not has_said or time.monotonic() < self._retry_at:
            return
        with self.turns.exchange(self._beat) as entered:
            due = list(reports_due(self._held.values())) if entered else []
            if not due:
                return
            items = [(execution.job, report) for execution, report in due]
            report = partial(self.broker.report, self.worker_id, items)
            answers = self._attempt("report", report)
            if answers is None:
                for execution, said in due:
                    execution.context.give_back(said)
                return
            for (execution, _), is_ours in zip(due, answers, strict=True):
                execution.reported_at = time.monotonic()
                if not is_ours:
                    execution.lose()

    def _attempt(self, doing: str, call: Callable[[], Answer]) -> Answer | None:
        """Return what ``call`` returns, ``None`` if the database is in trouble: try again later."""
        try:
            answer = call()
        except LeaseLost:
            self.lose_lease()
            return None
        except Exception as error:
            self._tell(doing, error)
            self._retry_at = time.monotonic() + next(self._waits)
            return None
        self._waits = db.waits()
        return answer

    def _tell(self, doing: str, error: Exception) -> None:
        signals.worker_in_trouble.send_robust(
            type(self), worker_id=self.worker_id, doing=doing, error=error
        )
