"""Jobs run elsewhere: by an ``Executor`` of processes, or of a cluster such as Dask's.

The queue stays the one source of truth. What runs there gets a copy of the job and gives back an
outcome, which this worker writes through the fence, as it does any other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future
from functools import partial

from jobqueue.lifecycle import Outcome, Report, Retry
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
    """

    def __init__(self, executor: Executor, done: Callable[[Execution, Outcome], None]) -> None:
        self._executor = executor
        self._done = done
        self._futures: dict[Future[Answer], Execution] = {}
        self._lock = threading.Lock()

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
            except Exception as error:  # an executor that has broken
                self._done(execution, Retry(describe(error)))
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
        """Return those that nobody has begun."""
        with self._lock:
            waiting = list(self._futures.items())
        return [execution for future, execution in waiting if future.cancel()]

    def shutdown(self, wait: bool = True) -> None:
        """End the executor."""
        self._executor.shutdown(wait=wait)

    def _ended(self, execution: Execution, future: Future[Answer]) -> None:
        with self._lock:
            self._futures.pop(future, None)
        try:
            outcome, report, took = future.result()
        except CancelledError:
            return  # taken back
        except BaseException as error:
            outcome = Retry(describe(error))
        else:
            execution.took = took
            if report:
                execution.context.give_back(report)
        self._done(execution, outcome)
