"""Rows of every kind, by factory-boy: ``JobFactory(running=True)``.

A trait writes what the verbs would have left, so that a test can begin in the middle of a life.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import factory
from django.db import router
from factory.django import DjangoModelFactory

from jobqueue import db
from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job, JobEvent, Queue, Worker

TASK = "jobqueue.testing.tasks.succeed"


@dataclass(frozen=True)
class _Ago:
    """A time by the clock of the database that the row goes to."""

    seconds: float


_CLAIM = {
    "claimed_by": "host:1:00000000",
    "claimed_at": _Ago(1),
}
_EXECUTION = {**_CLAIM, "attempt": 1, "attempted_at": _Ago(1)}
_FINISHED = {
    **_EXECUTION,
    "version": 3,
    "finished_at": _Ago(0),
}


class _Factory(DjangoModelFactory[Any]):
    """Creates rows where the router sends them, or on the alias given as ``using``."""

    class Meta:
        abstract = True

    @classmethod
    def _build(cls, model_class: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._build(model_class, *args, **_with_times(kwargs, kwargs.pop("using", None)))

    @classmethod
    def _create(cls, model_class: Any, *args: Any, **kwargs: Any) -> Any:
        using = kwargs.pop("using", None)
        manager = model_class._default_manager.db_manager(using)
        return manager.create(*args, **_with_times(kwargs, using))


def _with_times(values: dict[str, Any], using: str | None) -> dict[str, Any]:
    if not any(isinstance(value, _Ago) for value in values.values()):
        return values
    now = db.now(using or router.db_for_write(Job))
    return {
        name: now - timedelta(seconds=value.seconds) if isinstance(value, _Ago) else value
        for name, value in values.items()
    }


class WorkerFactory(_Factory):
    """A worker that lives; ``silent=True`` for one whose lease ran out unnoticed."""

    class Meta:
        model = Worker

    class Params:
        silent = factory.Trait(last_seen_at=_Ago(3600))
        dead = factory.Trait(state=Worker.State.DEAD)

    id = factory.Sequence(lambda n: f"host:{1000 + n}:{n:08x}")
    host = "host"
    pid = factory.Sequence(lambda n: 1000 + n)
    queues = factory.LazyFunction(lambda: ["default"])
    lease = timedelta(seconds=30)
    started_at = _Ago(0)
    last_seen_at = _Ago(0)


class JobFactory(_Factory):
    """A waiting job; traits ``scheduled``, ``claimed``, ``running``, ``completed``, ``failed``
    and ``cancelled`` for the other states.

    Held and finished ones bear the name of a worker that has no row: make a ``WorkerFactory`` and
    pass ``claimed_by=worker.pk`` where it is to live.
    """

    class Meta:
        model = Job

    class Params:
        scheduled = factory.Trait(state=State.SCHEDULED.value, run_after=_Ago(-3600))
        claimed = factory.Trait(state=State.CLAIMED.value, version=1, **_CLAIM)
        running = factory.Trait(state=State.RUNNING.value, version=2, **_EXECUTION)
        completed = factory.Trait(state=State.COMPLETED.value, **_FINISHED)
        failed = factory.Trait(state=State.FAILED.value, **_FINISHED)
        cancelled = factory.Trait(state=State.CANCELLED.value, **_FINISHED)

    task = TASK
    max_attempts = 3
    run_after = _Ago(1)


class JobEventFactory(_Factory):
    """A failed attempt."""

    class Meta:
        model = JobEvent

    job = factory.SubFactory(JobFactory, running=True)
    kind = EventKind.RETRIED
    attempt = factory.SelfAttribute("job.attempt")
    from_state = State.RUNNING.value
    to_state = State.SCHEDULED.value
    version = factory.SelfAttribute("job.version")
    actor = factory.SelfAttribute("job.claimed_by")
    message = "ValueError: no"


class QueueFactory(_Factory):
    """A queue that isn't paused."""

    class Meta:
        model = Queue

    class Params:
        paused = factory.Trait(paused_at=_Ago(0))

    name = factory.Sequence(lambda n: f"queue{n}")
