"""Who runs the jobs of a worker: threads or an executor, and an event loop where one is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from jobqueue.lifecycle import Error, Outcome, Retry
from jobqueue.worker.contract import LoopOptions
from jobqueue.worker.coroutines import Coroutines
from jobqueue.worker.execute import execute, is_async
from jobqueue.worker.execution import Execution
from jobqueue.worker.pace import HORIZON, Pace
from jobqueue.worker.remote import Remote
from jobqueue.worker.threads import Crew


class Runners:
    """Takes executions, and tells how each has ended.

    Args:
        options: how many jobs at once.
        done: called with each execution and its outcome, in the thread in which it has ended.
    """

    def __init__(self, options: LoopOptions, done: Callable[[Execution, Outcome], None]) -> None:
        self._options = options
        self._done = done
        self._crew: Crew[Execution] | Remote = (
            Remote(options.executor(), done)
            if options.executor
            else Crew(options.slots, self._perform)
        )
        self._coroutines = Coroutines(done) if options.coroutines else None
        # How quick jobs are elsewhere says nothing of how many an executor takes at once.
        self._pace = Pace(options.slots, 1 if options.executor else options.batch)
        self._share = 0.0

    def give(self, executions: Sequence[Execution]) -> None:
        """Have these run: async handlers on the event loop, if there is one, others in threads."""
        if self._coroutines:
            for execution in executions:
                execution.is_coroutine = is_async(execution.job.task)
            self._coroutines.give([each for each in executions if each.is_coroutine])
        self._crew.give([each for each in executions if not each.is_coroutine])

    def room(self, in_hand: Sequence[Execution]) -> int:
        """Return for how many more there is something to gain from claiming them now."""
        since = time.monotonic() - HORIZON
        in_threads = [each for each in in_hand if not each.is_coroutine]
        stuck = sum(0 < each.began_at < since and each.outcome is None for each in in_threads)
        limit = self._pace.limit(stuck)
        room = limit - len(in_threads)
        if self._coroutines:
            return self._room_for_both(room, len(in_hand) - len(in_threads), len(in_hand))
        # A statement for a few more doesn't pay while there is enough to do.
        return 0 if room < limit // 2 and self.backlog() else max(room, 0)

    def _room_for_both(self, room: int, coroutines: int, in_hand: int) -> int:
        """Return for how many more there is room, of whom nobody knows yet where they will run.

        Among them is expected the share of coroutines that there is among those in hand.
        """
        if in_hand:
            self._share = coroutines / in_hand
        rooms = {1 - self._share: room, self._share: self._options.coroutines - coroutines}
        fitting = min(left / share for share, left in rooms.items() if share)
        return max(0, min(int(fitting), self._options.batch))

    @property
    def is_broken(self) -> bool:
        """Whether an executor is to be replaced by another."""
        return isinstance(self._crew, Remote) and self._crew.is_broken

    def note(self, ended: Sequence[Execution]) -> None:
        """Learn from how long these took."""
        times = [each.took for each in ended if each.began_at and not each.is_coroutine]
        self._pace.note(len(times), sum(times))

    def backlog(self) -> int:
        """How many wait for a thread."""
        return self._crew.backlog()

    def waits_since(self) -> float | None:
        """Since when, by ``time.monotonic()``, the first has been in hand that hasn't begun."""
        firsts = [self._crew.first(), self._coroutines.first() if self._coroutines else None]
        return min((first.taken_at for first in firsts if first), default=None)

    def take_back(self) -> list[Execution]:
        """Return those that nobody has begun; nobody will. Fewer are claimed for a while."""
        self._pace.slow_down()
        coroutines = self._coroutines.take_back() if self._coroutines else []
        return self._crew.take_back() + coroutines

    def shutdown(self, wait: bool) -> None:
        """End all threads: once they are idle, or without waiting for those that are not."""
        self._crew.shutdown(wait)
        if self._coroutines:
            self._coroutines.shutdown(wait)

    def _perform(self, execution: Execution) -> None:
        began = execution.begin()
        try:
            outcome = execute(execution.job, execution.context)
        except BaseException as error:  # which it should not raise; the thread must go on
            outcome = Retry(Error(type(error).__name__))
        execution.took = time.monotonic() - began
        self._done(execution, outcome)
