"""What the logs of a run say, gathered by job. No database: lines in, one life per job out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.chaos.log import Line


class Status(StrEnum):
    """What became of something that was asked."""

    OK = "ok"
    REFUSED = "refused"
    UNDONE = "undone"
    UNKNOWN = "unknown"


# Whoever waits for these answers knows that it has not happened.
NOT_DONE = frozenset({Status.REFUSED, Status.UNDONE})


@dataclass(frozen=True, slots=True)
class Known:
    """What a job is, as far as its versions tell."""

    state: str
    attempt: int = 0
    holder: str | None = None

    def __str__(self) -> str:
        held = f" by {self.holder}" if self.holder else ""
        return f"{self.state}{held}, attempt {self.attempt}"


@dataclass(slots=True)
class Asked:
    """One request to change one job, and its answer; without one it may have happened or not."""

    line: Line
    status: Status = Status.UNKNOWN
    answered_at: float | None = None

    @property
    def asked_at(self) -> float:
        """When it was asked, by the clock that all processes share."""
        at: float = self.line.said["t"]
        return at

    @property
    def may_have_happened(self) -> bool:
        """Whether nobody was told that it has not."""
        return self.status not in NOT_DONE


@dataclass(slots=True)
class Birth(Asked):
    """A job was inserted."""

    token: str = ""
    task: str = ""
    state: str = ""


@dataclass(slots=True)
class Write(Asked):
    """A row was to become ``after``, if it was still at ``version``, which made it ``before``."""

    version: int = 0
    before: Known = Known("")
    after: Known = Known("")
    by_owner: bool = False


@dataclass(slots=True)
class Within(Asked):
    """A write within an execution: progress, or a request to cancel. It makes no version."""

    kind: str = ""
    version: int = 0


@dataclass(frozen=True, slots=True)
class Told:
    """What a caller was told of the write that it had decided on at ``version``."""

    line: Line
    version: int
    by_owner: bool
    wanted: tuple[str, ...]
    found: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A handler began."""

    line: Line
    version: int
    attempt: int
    token: str


@dataclass(slots=True)
class Life:
    """All that the logs say of one job."""

    job_id: int
    births: list[Birth] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    withins: list[Within] = field(default_factory=list)
    already: list[Told] = field(default_factory=list)
    conflicts: list[Told] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def birth(self) -> Birth | None:
        """The birth that stands, if any does. An id that was rolled back may be given again."""
        standing = [birth for birth in self.births if birth.may_have_happened]
        return standing[-1] if standing else None


@dataclass(slots=True)
class History:
    """The lives of all jobs by id; and what can't be of any."""

    lives: dict[int, Life] = field(default_factory=dict)
    partly: list[Line] = field(default_factory=list)
    quiet_conflicts: int = 0

    def life(self, job_id: int) -> Life:
        """Return the life of a job, begun here if this is the first that is heard of it."""
        return self.lives.setdefault(job_id, Life(job_id))


def gather(lines: Iterable[Line]) -> History:
    """Return the history that the logs tell; each line is looked at once."""
    history = History()
    asked: dict[tuple[str, int], dict[int, Asked]] = defaultdict(dict)
    for line in lines:
        said, kind = line.said, line.said["e"]
        if kind in tuple(Status):
            for number in said["of"]:
                requests = asked[line.log, number]
                for job_id in said.get("jobs", list(requests)):  # of a batch, perhaps only some
                    request = requests.pop(job_id)
                    request.status, request.answered_at = Status(kind), said["t"]
        elif kind == "partly":
            history.partly.append(line)
        elif kind in _REQUESTS:
            asked[line.log, said["n"]] = _REQUESTS[kind](history, line, said)
        elif kind not in _OF_FAMILIES:
            _NEWS[kind](history, line, said)
    return history


def _born(history: History, line: Line, said: dict[str, Any]) -> dict[int, Asked]:
    born: dict[int, Asked] = {}
    for job_id, token, task, state in said["jobs"]:
        birth = Birth(line, token=token, task=task, state=state)
        history.life(job_id).births.append(birth)
        born[job_id] = birth
    return born


def _write(history: History, line: Line, said: dict[str, Any]) -> dict[int, Asked]:
    written: dict[int, Asked] = {}
    for job_id, version, before, after in said["jobs"]:
        owner = said["owner"]
        write = Write(
            line, version=version, before=Known(*before), after=Known(*after), by_owner=owner
        )
        history.life(job_id).writes.append(write)
        written[job_id] = write
    return written


def _within(history: History, line: Line, said: dict[str, Any]) -> dict[int, Asked]:
    within = Within(line, kind=said["what"], version=said["v"])
    history.life(said["job"]).withins.append(within)
    return {said["job"]: within}


def _told(line: Line, said: dict[str, Any]) -> Told:
    return Told(line, said["v"], said["owner"], tuple(said["wanted"]), said.get("found"))


def _already(history: History, line: Line, said: dict[str, Any]) -> None:
    history.life(said["job"]).already.append(_told(line, said))


def _conflict(history: History, line: Line, said: dict[str, Any]) -> None:
    history.life(said["job"]).conflicts.append(_told(line, said))
    history.quiet_conflicts += said.get("quiet", False)


def _run(history: History, line: Line, said: dict[str, Any]) -> None:
    run = Run(line, said["v"], said["attempt"], said["token"])
    history.life(said["job"]).runs.append(run)


_REQUESTS = {"born": _born, "write": _write, "within": _within}
_NEWS = {"already": _already, "conflict": _conflict, "run": _run}
# Said by children of their leases, not of jobs: see ``families``.
_OF_FAMILIES = {"led", "bury"}
