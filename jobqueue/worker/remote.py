"""Jobs run elsewhere: by an ``Executor`` of processes, or of a cluster such as Dask's.

The queue stays the one source of truth. What runs there gets a copy of the job and gives back an
outcome, which this worker writes through the fence, as it does any other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from functools import partial

from jobqueue.lifecycle import Outcome, Released, Report, Retry
from jobqueue.worker.context import JobContext
from jobqueue.worker.execute import describe, execute
from jobqueue.worker.execution import Execution
from jobqueue.worker.order import Order, carry_out

Answer = tuple[Outcome, Report | None, float]


def run(order: Order) -> Answer:
    """Run a job in this process, wherever that is, and say what became of it.

    There the handler's context can't tell of a cancel request or a lost job, and has no
    ``atomic()``; progress and a checkpoint travel back with the outcome.
    """
    context = JobContext(
        order.pk,
        order.task,
        order.attempt,
        order.version,
        checkpoint=order.checkpoint,
        timeout=order.timeout,
    )
    began = context.begin()
    outcome = execute(order, context)
    return outcome, context.take_report(), time.monotonic() - began


class Remote:
    """Hands executions to an ``Executor``, not more at once than it was said to take.

    Args:
        executor: any; it is shut down with the worker.
        done: called with each execution and its outcome.

    Attributes:
        is_broken: the executor has worked, and will take no more work.
    """

    def __init__(self, executor: Executor, done: Callable[[Execution, Outcome], None]) -> None:
        if not callable(getattr(executor, "submit", None)):
            raise TypeError(f"an executor must have submit(), not be {executor!r:.80}")
        self._executor = executor
        self._done = done
        self._futures: dict[Future[Answer], Execution] = {}
        self._lock = threading.Lock()
        self._has_worked = False
        self.is_broken = False

    def give(self, executions: Sequence[Execution]) -> None:
        """Have these run."""
        for execution in executions:
            job = execution.job
            order = Order(
                job.pk,
                job.task,
                job.args,
                job.kwargs,
                job.attempt,
                job.version,
                job.checkpoint,
                job.timeout,
            )
            execution.begin()
            try:
                future = self._executor.submit(carry_out, order)
            except Exception as error:
                self._done(execution, self._refused(error))
                continue
            with self._lock:
                self._futures[future] = execution
            future.add_done_callback(partial(self._ended, execution))

    def backlog(self) -> int:
        """How many wait for this worker; what waits there is the executor's affair."""
        return 0

    def first(self) -> Execution | None:
        """Return the first of them."""
        return None

    def take_back(self) -> list[Execution]:
        """Return those that wait for this worker: none. Of others only the executor knows."""
        return []

    def shutdown(self, wait: bool = True) -> None:
        """End the executor; without ``wait`` also what it can still cancel."""
        if not wait:
            with self._lock:
                left = list(self._futures)
            for future in left:
                future.cancel()
        self._executor.shutdown(wait=wait)

    def _refused(self, error: Exception) -> Outcome:
        """Say what becomes of a job that the executor doesn't take: no attempt, if it has broken.

        One that never worked would break again at each, so there it is one.
        """
        if isinstance(error, BrokenExecutor) and self._has_worked:
            self.is_broken = True
            return Released(f"its executor has broken: {error}")
        return Retry(describe(error))

    def _ended(self, execution: Execution, future: Future[Answer]) -> None:
        with self._lock:
            self._futures.pop(future, None)
        try:
            outcome, report, took = future.result()
        except CancelledError:
            outcome = Released("its executor cancelled it")
        except BaseException as error:
            self.is_broken = self.is_broken or isinstance(error, BrokenExecutor)
            outcome = Retry(describe(error))
        else:
            self._has_worked = True
            execution.took = took
            if report:
                execution.context.give_back(report)
        self._done(execution, outcome)
