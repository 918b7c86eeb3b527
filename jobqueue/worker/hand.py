"""The jobs in a worker's hands, as its threads see them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from jobqueue.lifecycle import Heartbeat, Outcome
from jobqueue.worker.execution import Execution


class Hand:
    """Every execution from its claim until its outcome is written.

    Only the loop adds and removes; the heartbeat reads, and tells.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], Execution] = {}
        # Whether the database may know outcomes of which this worker knows not if they were taken.
        self.in_doubt = False

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Execution]:
        """Go through what is held now, in the order in which it was claimed."""
        return iter(list(self._held.values()))

    def add(self, execution: Execution) -> None:
        """Take an execution into hand."""
        self._held[execution.key] = execution

    def remove(self, execution: Execution) -> None:
        """Take it off the books."""
        del self._held[execution.key]

    def ripe(self, *, last: bool = False) -> list[Execution]:
        """Return those whose outcome may be written now; the ``last`` time, all that have one."""
        now = time.monotonic()
        return [e for e in self if e.is_ripe(now) or (last and e.outcome is not None)]

    def judged(self) -> dict[int, Any] | None:
        """Return the jobs by id, to be compared with what the database gives.

        A job of which the database may know the end, and this worker not yet, is not one that
        somebody took: ``None`` stands for one that its handler may complete at any moment, and for
        all of them while it isn't known whether outcomes were written.
        """
        if self.in_doubt:
            return None
        newest: dict[int, Execution] = {}
        for execution in self:
            if not execution.lost:
                if older := newest.get(execution.job.pk):
                    older.context.tell_lost()
                newest[execution.job.pk] = execution
        return {pk: execution.judged for pk, execution in newest.items()}

    def hear(self, heard: Heartbeat) -> None:
        """Pass on what a heartbeat learned."""
        for execution in self:
            if execution.job.pk in heard.cancel_requested:
                execution.context.tell_cancelled()
            if execution.job.pk in heard.lost:
                execution.lose()

    def tell_all_lost(self) -> None:
        """Tell every handler that the lease is lost."""
        for execution in self:
            execution.context.tell_lost()

    def give_up(self, outcome: Outcome) -> int:
        """Decide what becomes of those whose handlers have not ended; return how many."""
        left = [execution for execution in self if execution.outcome is None]
        for execution in left:
            execution.context.tell_lost()
            execution.outcome = outcome
        return len(left)
