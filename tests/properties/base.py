"""What every rule of the machine has in common: do it twice, compare, and end well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar

from hypothesis.stateful import Bundle, RuleBasedStateMachine, multiple

from jobqueue import fence
from jobqueue.models import Job
from tests.explorer.model import Answer
from tests.properties.answers import as_told, told
from tests.properties.clock import Clock
from tests.properties.history import History
from tests.properties.mirror import Act, Mirror, row_of
from tests.properties.tables import clear, compare, work_off

copies = Bundle("copies")


class Base(RuleBasedStateMachine):
    """What every rule needs."""

    clock: ClassVar[Clock]
    alias: ClassVar[str]
    # How often each rule had each answer, over all examples.
    answers: ClassVar[Counter[tuple[str, str]]]

    # Who finds what is left in the air when an example ends.
    ending = "by sweep"
    is_sound = True

    def __init__(self) -> None:
        super().__init__()
        clear(self.alias)
        self.clock.reset()
        self.mirror, self.history = Mirror(), History()
        self.workers: list[str] = []

    def both(
        self,
        name: str,
        skew: int,
        real: Callable[[], Any],
        mirrored: Callable[[int, Any], Any],
        shown: Callable[[Any], Any] | None = None,
        decided_on: Iterable[Job] | None = (),
        actor: str | None = None,
    ) -> Any:
        """Do it in the database and in the mirror, and compare; return the first one's value.

        ``mirrored`` is given the time and that value, and returns an answer, or what comes with
        success: to be compared with what ``shown`` makes of the value. ``decided_on`` are the
        copies on which writes are decided, by their owners or ``actor``; ``None`` if they are
        decided on whatever is found.
        """
        self.is_sound = False
        with self.clock.skewed(skew) as now:
            answer = told(real)
            expected = as_told(mirrored(now, answer.value))
        self.answers[name, str(answer.answer)] += 1
        assert answer.answer == expected.answer, f"{name}: {answer}, not {expected}"
        succeeded = answer.answer == Answer.APPLIED
        if succeeded and shown:
            given = shown(answer.value)
            assert given == expected.value, f"{name} returned {given}, not {expected.value}"
        self.history.observe(compare(self.mirror), decided_on, actor)
        self.is_sound, self.has_succeeded = True, succeeded
        return answer.value if succeeded else None

    def one(
        self,
        name: str,
        skew: int,
        job: Job,
        real: Callable[[], Any],
        act: Act,
        edited: Mapping[str, Any] = {},
        *,
        actor: str | None = None,
        by_id: bool = False,
        opens_version: bool = True,
    ) -> Any:
        """Do one write to one job, by a copy or ``by_id``; return the copy that it gives."""

        def mirrored(now: int, _: Any) -> Any:
            answer = self.mirror.write(now, job.pk, act, edited=edited)
            if answer == Answer.ALREADY_APPLIED:
                self.answers[name, f"({answer})"] += 1
            if answer not in (Answer.APPLIED, Answer.ALREADY_APPLIED):
                return answer
            return self.mirror.fingerprint(job.pk)

        fingerprint = lambda job: job and row_of(job).fingerprint  # noqa: E731
        decided_on = None if by_id else [job]
        after = self.both(name, skew, real, mirrored, fingerprint, decided_on, actor)
        if self.has_succeeded and opens_version and not by_id:
            self.history.took_effect(job, actor)
        return after or multiple()

    def chosen(self, copy: Job, is_fresh: bool, states: Collection[str]) -> Job:
        """Return a copy on which a verb makes sense: in one of these states, if there ever was one.

        That is the one given, unless a fresh one is wanted: then the job itself as it is now, or
        the next one's in the order of ids, or the last that there was.
        """
        if copy.state in states and not is_fresh:
            return copy
        fitting = [pk for pk in self.mirror.jobs if self.mirror.jobs[pk].row.state in states]
        if fitting:
            pk = min((pk for pk in fitting if pk >= copy.pk), default=min(fitting))
            return fence.read(pk, self.alias) or copy
        return next((old for old in self.history.last.values() if old.state in states), copy)

    def worker(self, which: int) -> str:
        """Return the id of a worker, the newest being 0."""
        return self.workers[-1 - which % len(self.workers)]

    def teardown(self) -> None:
        """Whatever has happened, every job comes to an end by itself."""
        if self.is_sound:
            work_off(self.clock, self.ending)
