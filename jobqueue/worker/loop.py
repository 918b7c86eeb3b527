"""Claim, run, settle: the life of a worker under one lease. It is handed a broker."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar
from weakref import ref

from jobqueue import db, signals
from jobqueue.exceptions import JobQueueError, LeaseLost
from jobqueue.lifecycle import (
    FINAL,
    Completed,
    Effects,
    Error,
    Outcome,
    Released,
    Retry,
    Settled,
    Snoozed,
)
from jobqueue.worker.context import JobContext
from jobqueue.worker.contract import Broker, Ended, LoopOptions
from jobqueue.worker.execution import REFUSED_WAIT, REPORT_EVERY, Execution, reports_due
from jobqueue.worker.hand import Hand
from jobqueue.worker.heartbeat import BEATS_PER_LEASE, Turns
from jobqueue.worker.runners import Runners

Answer = TypeVar("Answer")

# While jobs wait for a thread, outcomes are gathered for so long, in seconds, before they are
# written: a statement costs far more than a row of it.
GATHER: Final = 0.005
# Those that have waited for a thread for so long are handed back, for others to take.
STALL: Final = 1.0
# Of equal words only the first is sent for a while (``db.wake``): so long after one, in seconds,
# whoever was not announced is there to be found.
LOOK_AGAIN: Final = 0.025


# How a job that may run again is counted; one that is over, by its state.
_PUT_OFF = {Retry: "retried", Snoozed: "snoozed", Released: "released"}


def _became(outcome: Outcome, result: Any) -> str:
    if result.status == Settled.CONFLICT:
        return Settled.CONFLICT
    state = str(result.state)
    return state if state in FINAL else _PUT_OFF.get(type(outcome), state)


class Loop:
    """Runs in one thread; handlers run in those of its crew.

    A slot is free only once its outcome is written, so nothing is claimed that can't soon be run.
    No outcome is dropped: while the database is in trouble it is kept and tried again, until the
    loop was told to stop and the grace is over.
    """

    def __init__(self, broker: Broker, worker_id: str, options: LoopOptions) -> None:
        self.broker = broker
        self.worker_id = worker_id
        self.turns = Turns()
        self.ticked = time.monotonic()
        self.lease_until = self.ticked + options.lease
        self.settled: Counter[str] = Counter()
        self.claimed = 0
        self.abandoned = 0  # handlers that did not end within the grace
        self.hung = 0  # handlers that did not end when their time was up
        self.runners = Runners(options, self._done)
        self.hand = Hand()
        self._options = options
        # Its put() may be called from a signal handler; an Event's set() may not.
        self._inbox: SimpleQueue[tuple[Execution, Outcome] | None] = SimpleQueue()
        self._end_by = math.inf
        self._lease_lost = False
        self._waits = db.waits()
        self._retry_at = 0.0
        self._is_retiring = False
        self._second_look_at = self._due_at = 0.0

    # -- What other threads and signal handlers may call

    def stop(self) -> None:
        """Claim no more, and end once what runs has been settled, or the grace is over."""
        self._end_by = min(self._end_by, time.monotonic() + self._options.grace)
        self._inbox.put(None)

    def retire(self) -> None:
        """Claim no more, and end once what runs has been settled, however long that takes."""
        self._is_retiring = True
        self._inbox.put(None)

    def lose_lease(self) -> None:
        """Claim no more and tell the running handlers; what they report, the fence decides."""
        self._lease_lost = True
        self.hand.tell_all_lost()
        self._inbox.put(None)

    def wake(self) -> None:
        """Look for work now, and once more when words that weren't sent may have gathered."""
        self._second_look_at = time.monotonic() + LOOK_AGAIN * (1 + random.random())
        self._inbox.put(None)

    # -- The loop

    def run(self) -> Ended:
        """Work until told to stop, the lease is lost or, with ``burst``, nothing is left to do."""
        ended = self._work()
        if ended is not Ended.DRAINED:
            self._hand_back()
        self._drain()
        return ended

    def _work(self) -> Ended:
        while True:
            self.ticked = time.monotonic()
            self._expire()
            self._report()
            self._flush()
            if self.ticked > self.lease_until + self._beat:
                # The heartbeat hangs: it should have renewed, or found that it can't, by now.
                self.lose_lease()
            if self._lease_lost:
                return Ended.LEASE_LOST
            if self.hung or self.runners.is_broken:
                return Ended.HUNG
            self._unblock()
            limit = self._room()
            if self._is_stopping() or (limit == 0 and not self.hand and self._is_spent()):
                return Ended.STOPPED
            claimed = self._claim(limit) if limit else None
            if claimed == 0 and not self.hand:
                if self._options.burst:
                    return Ended.DRAINED
                self._look_ahead()
            self._receive(self._pause())

    def _drain(self) -> None:
        """Wait for what runs, settle it, and give up what doesn't end within the grace.

        Outcomes are kept until the database takes them, unless the loop was told to stop: then it
        ends when the grace is over, after a last try.
        """
        patience = time.monotonic() + self._options.grace
        while self.hand:
            self.ticked = now = time.monotonic()
            self._expire()
            is_last = now >= self._end_by
            if is_last or now >= patience:
                self._give_up()
            for write in (self._report, partial(self._flush, last=is_last)):
                if is_last:
                    self._retry_at = 0.0
                write()
            if is_last:
                return
            if self.hand:
                ends = [end - now for end in (patience, self._end_by) if end > now]
                self._receive(min(self._pause(), *ends))

    def _give_up(self) -> None:
        """Decide what becomes of the jobs whose handlers have not ended."""
        self._receive(0)
        outcome: Outcome = Released("its worker was stopped")
        if self._lease_lost and not self._is_stopping():
            # It costs the attempt, as it does when a sweep is there first: a job that wedges its
            # worker must not come back for ever.
            outcome = Retry(Error("its worker lost its lease, and the handler did not end"))
        elif not self._is_stopping():
            outcome = Released("its worker is replaced, for another handler hangs")
        self.abandoned += self.hand.give_up(outcome)

    def _hand_back(self) -> None:
        """Release what no thread has begun."""
        for execution in self.runners.take_back():
            self._inbox.put((execution, Released("its worker did not begin it")))

    def _look_ahead(self) -> None:
        """Learn when the next scheduled job is due, to be there."""
        due_in = self._attempt("look ahead", lambda: self.broker.next_due(self.worker_id))
        self._due_at = time.monotonic() + due_in if due_in is not None else 0.0

    def _unblock(self) -> None:
        """Hand back what was claimed ahead, if it has been waiting for a thread for too long."""
        since = self.runners.waits_since()
        if since is not None and time.monotonic() - since > STALL:
            self._hand_back()
            self._receive(0)

    def _expire(self) -> None:
        """Give up handlers that go on past their time.

        Their threads can't be ended: the process has to be, which is the supervisor's business.
        """
        now = time.monotonic()
        for execution in self.hand:
            if execution.is_overdue(now - self._options.patience):
                execution.context.tell_lost()
                error = f"did not end within its timeout of {execution.job.timeout}"
                execution.outcome = Retry(Error(f"TimeoutError: {error}"))
                self.hung += 1

    @property
    def _beat(self) -> float:
        return self._options.lease / BEATS_PER_LEASE

    def _is_stopping(self) -> bool:
        return self._end_by < math.inf

    def _is_spent(self) -> bool:
        limit = self._options.max_jobs
        return self._is_retiring or (limit is not None and self.claimed >= limit)

    def _room(self) -> int:
        """How many jobs may be claimed now."""
        now = time.monotonic()
        if now < self._retry_at or now >= self.lease_until or self._is_spent():
            return 0
        room = self.runners.room(list(self.hand))
        if self._options.max_jobs is not None:
            room = min(room, self._options.max_jobs - self.claimed)
        return room

    def _pause(self) -> float:
        """How long to wait for something to happen: never for so long as to look wedged."""
        pause = min(self._options.poll * (0.75 + random.random() / 2), self._options.lease / 2)
        if self.hand:
            pause = min(pause, REPORT_EVERY)
        now = time.monotonic()
        for moment in (self._second_look_at, self._due_at):
            if now < moment:
                pause = min(pause, moment - now)
        until_retry = self._retry_at - now
        return min(pause, until_retry) if until_retry > 0 else pause

    def _claim(self, limit: int) -> int | None:
        """Claim and begin up to ``limit`` jobs; return how many, ``None`` if it wasn't possible."""
        with self.turns.take(self._beat) as entered:
            if not entered:
                return None
            jobs = self._attempt("claim", lambda: self.broker.claim(self.worker_id, limit))
            executions = [self._take(job) for job in jobs or ()]
        self.runners.give(executions)
        return None if jobs is None else len(executions)

    def _take(self, job: Any) -> Execution:
        self.claimed += 1
        context = JobContext(
            job.pk, job.task, job.attempt, job.version, job.checkpoint, job.timeout
        )
        execution = Execution(job, context, taken_at=time.monotonic())
        # No circle of references: thousands a second would keep the garbage collector busy.
        context.complete_by(partial(self._complete_within, ref(execution)))
        self.hand.add(execution)
        if self._lease_lost:  # meanwhile, when nobody knew of this one
            context.tell_lost()
        return execution

    @contextmanager
    def _complete_within(
        self, held: Callable[[], Execution | None], alias: str | None
    ) -> Iterator[Effects]:
        """Called in the handler's thread."""
        execution = held()
        if execution is None:
            raise JobQueueError("the execution is over")
        if execution.completed:
            raise JobQueueError(f"job {execution.job.pk} has been completed already")
        # No comparison or report is under way when this is noted, and none may meddle from here on.
        # The turn can't be kept: the loop may hold it while it waits for what this transaction
        # locks.
        with ExitStack() as stack:
            with self.turns.take(self._options.lease):
                stack.enter_context(execution.closed_by_handler())
            yield stack.enter_context(
                self.broker.atomic(self.worker_id, execution.job, execution, alias)
            )

    def _done(self, execution: Execution, outcome: Outcome) -> None:
        """Called in the thread in which the handler ended."""
        self._inbox.put((execution, outcome))

    def shutdown(self) -> None:
        """End the threads: once they are idle, or at once where handlers did not end."""
        self.runners.shutdown(wait=not (self.abandoned or self.hung))

    def _receive(self, timeout: float) -> None:
        """Wait until something happens, for ``timeout`` seconds at most, and take in all of it."""
        with suppress(Empty):
            messages = [self._inbox.get(timeout=timeout)]
            until = time.monotonic() + GATHER
            while self.runners.backlog() and (left := until - time.monotonic()) > 0:
                time.sleep(min(left, GATHER / 5))
            with suppress(Empty):
                while True:
                    messages.append(self._inbox.get_nowait())
            ended = [message for message in messages if message]
            for execution, outcome in ended:
                # The first one stands, if it was given up before.
                execution.outcome = execution.outcome or outcome
            self.runners.note([execution for execution, _ in ended])

    def _flush(self, *, last: bool = False) -> None:
        """Write the outcomes that have come in; on trouble keep them for the next time."""
        done = self.hand.ripe(last=last)
        if not done or time.monotonic() < self._retry_at:
            return
        with self.turns.take(self._beat) as entered:
            if not entered:
                return
            to_write = [e for e in done if e.is_open]
            items = [(e.job, e.outcome) for e in to_write if e.outcome]
            results: Sequence[Any] | None = []
            if items:
                settle = partial(self.broker.settle, self.worker_id, items)
                results = self._attempt("settle", settle)
            self.hand.in_doubt = results is None
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
        self.hand.remove(execution)
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
        has_said = any(execution.context.has_report for execution in self.hand)
        if not has_said or time.monotonic() < self._retry_at:
            return
        with self.turns.take(self._beat) as entered:
            due = list(reports_due(self.hand)) if entered else []
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
        signals.tell_trouble(self, self.worker_id, doing, error)
