"""Histories made by hand, to see that the checker tells a good one from a bad one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Self

from tests.chaos.checker import Row, Tables, Violation, check
from tests.chaos.history import Known, gather
from tests.chaos.log import Line

WAITING = Known("waiting")
JOB = 7
TOKEN = "token"


def running(attempt: int = 1, holder: str = "w1") -> Known:
    """Return what a running job is."""
    return Known("running", attempt, holder)


def ended(state: str = "completed", attempt: int = 1, holder: str | None = "w1") -> Known:
    """Return what a finished job is."""
    return Known(state, attempt, holder)


class Story:
    """What the logs say of one job; each line comes a second after the one before it."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def _say(self, log: str, kind: str, **what: object) -> int:
        number = len(self.lines) + 1
        said = {"e": kind, "t": float(number), **what}
        if kind in ("born", "write", "within"):
            said["n"] = number
        self.lines.append(Line(log, json.dumps(said), said))
        return number

    def _answer(self, log: str, number: int, answer: str | None) -> Self:
        if answer:
            self._say(log, answer, of=[number])
        return self

    def born(
        self,
        answer: str | None = "ok",
        *,
        token: str = TOKEN,
        task: str = "quick",
        state: str = "waiting",
    ) -> Self:
        """Somebody enqueued it; without an answer it isn't known whether that was committed."""
        return self._answer(
            "enqueue", self._say("enqueue", "born", jobs=[[JOB, token, task, state]]), answer
        )

    def write(
        self,
        version: int,
        before: Known,
        after: Known,
        answer: str | None = "ok",
        *,
        owner: bool = False,
        log: str = "worker",
    ) -> Self:
        """Somebody wrote ``after`` where it was ``before``, at ``version``."""
        known = [[k.state, k.attempt, k.holder] for k in (before, after)]
        number = self._say(log, "write", jobs=[[JOB, version, *known]], owner=owner)
        return self._answer(log, number, answer)

    def claim(self, version: int = 0, attempt: int = 1, holder: str = "w1") -> Self:
        """A worker claimed and began it."""
        before = Known("waiting", attempt - 1)
        return self.write(version, before, running(attempt, holder), log=holder)

    def run(self, version: int = 1, attempt: int = 1, token: str = TOKEN) -> Self:
        """Its handler began."""
        self._say("worker", "run", job=JOB, v=version, attempt=attempt, token=token)
        return self

    def complete(
        self, version: int = 1, answer: str | None = "ok", *, before: Known | None = None
    ) -> Self:
        """Its owner completed it."""
        before = before or running()
        after = ended("completed", before.attempt, before.holder)
        return self.write(version, before, after, answer, owner=True)

    def within(self, what: str, version: int = 1, answer: str = "ok") -> Self:
        """Somebody reported progress, or asked for it to be cancelled."""
        number = self._say("operator", "within", what=what, job=JOB, v=version, before=None)
        return self._answer("operator", number, answer)

    def told(
        self,
        kind: str,
        version: int = 1,
        *,
        owner: bool = True,
        wanted: Sequence[str] = ("completed",),
        found: int | None = None,
    ) -> Self:
        """A caller was told ``already`` or ``conflict``."""
        more: Mapping[str, object] = {} if kind == "already" else {"found": found}
        self._say("worker", kind, job=JOB, v=version, owner=owner, wanted=list(wanted), **more)
        return self

    def partly(self) -> Self:
        """A batch matched some of its rows."""
        self._say("worker", "partly", of=[1], matched=1)
        return self

    def violations(
        self,
        version: int | None = None,
        known: Known | None = None,
        *,
        token: str = TOKEN,
        task: str = "quick",
        effects: Sequence[int] = (),
        result: str | None = None,
    ) -> list[Violation]:
        """Check it against the row as it ended, ``None`` if there is none."""
        rows = {}
        if version is not None:
            rows[JOB] = Row(version, known or ended(), token, task, result)
        return check(gather(self.lines), Tables(rows, {JOB: list(effects)} if effects else {}))
