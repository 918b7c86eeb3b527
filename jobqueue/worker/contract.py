"""What the loop is handed and what it answers: a broker, options, and why it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from jobqueue.lifecycle import Effects, Heartbeat, Outcome, Report
from jobqueue.worker.execution import Execution


class Broker(Protocol):
    """The verbs that the loop needs; ``jobqueue.broker`` tells what each does."""

    def claim(self, worker_id: str, limit: int) -> Sequence[Any]: ...

    def next_due(self, worker_id: str) -> float | None: ...

    def heartbeat(self, worker_id: str, held: Mapping[int, Any] | None) -> Heartbeat: ...

    def settle(self, worker_id: str, items: Sequence[tuple[Any, Outcome]]) -> Sequence[Any]: ...

    def report(self, worker_id: str, items: Sequence[tuple[Any, Report]]) -> Sequence[bool]: ...

    def atomic(
        self, worker_id: str, job: Any, closing: Execution, alias: str | None
    ) -> AbstractContextManager[Effects]: ...

    def leave(self, worker_id: str) -> None: ...


class Ended(Enum):
    """Why a loop ended.

    With HUNG its threads, or its executor, are of no more use, and are to be replaced.
    """

    STOPPED = auto()
    DRAINED = auto()
    LEASE_LOST = auto()
    HUNG = auto()


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How to work: see ``run_worker``. Times in seconds.

    ``patience`` is how far past its timeout a handler may go on before it is given up; ``batch``,
    how many quick jobs may be in hand at once; ``coroutines``, how many async handlers may run at
    once on an event loop of their own: with 0 they run in the threads, one each. ``executor`` makes
    an ``Executor`` that runs the jobs in the place of threads.
    """

    slots: int
    poll: float
    lease: float
    grace: float
    patience: float = 15.0
    batch: int = 500
    coroutines: int = 0
    executor: Callable[[], Executor] | None = None
    burst: bool = False
    max_jobs: int | None = None
