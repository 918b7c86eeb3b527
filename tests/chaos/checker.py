"""Proves from a history, and from the tables as they ended, that the queue kept its promise.

Versions order everything: a job is a register of its own, and its writes are a chain in which each
version is left once. So the checker walks each chain once, with the set of what the job may be:
where a write was acknowledged there is one possibility, where one is unknown there may be more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from jobqueue.lifecycle import FINAL, RULES, State, Verb
from tests.chaos.history import History, Known, Life, Status, Within, Write
from tests.chaos.log import Line

GONE: Final = "gone"

# What each kind of violation means to whoever reads the table; ``None``: the history is broken.
KINDS: Final[Mapping[str, str | None]] = {
    "enqueue lost": "lost",
    "write lost": "lost",
    "effect lost": "lost",
    "not final": "stuck",
    "ran though rolled back": "doubled",
    "ran twice": "doubled",
    "ran unclaimed": "doubled",
    "two writes of one version": "doubled",
    "two outcomes of one execution": "doubled",
    "effect doubled": "doubled",
    "effect without completion": "doubled",
    "stale write accepted": "doubled",
    "out of order": "doubled",
    "cancelled and went on": "doubled",
    "exists though rolled back": None,
    "unheard of": None,
    "gap": None,
    "no such verb": None,
    "row differs": None,
    "unknown resolved twice": None,
    "refused without cause": None,
    "written in part": None,
    "process ended": None,
    "not replaced": None,
    "not buried": None,
    "outlived its parent": None,
}


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must not be, with the log lines that show it."""

    kind: str
    what: str
    job_id: int | None = None
    lines: Sequence[Line] = ()

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind


@dataclass(frozen=True, slots=True)
class Row:
    """A job's row at the end of the run."""

    version: int
    known: Known
    token: str
    task: str
    result: str | None = None


@dataclass(frozen=True, slots=True)
class Tables:
    """What the database holds at the end: jobs by id, and the versions of each job's effects."""

    jobs: Mapping[int, Row] = field(default_factory=dict)
    effects: Mapping[int, Sequence[int]] = field(default_factory=dict)


def check(history: History, tables: Tables) -> list[Violation]:
    """Return all violations, job by job."""
    found = [
        Violation("written in part", "a batch matched some of its rows", lines=[line])
        for line in history.partly
    ]
    for job_id in sorted(history.lives.keys() | tables.jobs.keys() | tables.effects.keys()):
        life = history.lives.get(job_id) or Life(job_id)
        effects = tables.effects.get(job_id, ())
        judge = _Judge(life, tables.jobs.get(job_id), effects)
        found += judge.violations()
    return found


_LEGAL: Final = (
    {
        (str(source), str(rule.target or (GONE if verb == Verb.DELETE else source)))
        for verb, rule in RULES.items()
        for source in rule.sources
    }
    | {
        # A worker claims and starts with one write; a retry without a delay waits at once.
        (str(State.WAITING), str(State.RUNNING)),
        (str(State.RUNNING), str(State.WAITING)),
    }
    | {
        (str(source), str(State.CANCELLED))
        for rule in RULES.values()
        if rule.yields_to_cancel
        for source in rule.sources
    }
)


class _Judge:
    """Judges one job's life."""

    def __init__(self, life: Life, row: Row | None, effects: Sequence[int]) -> None:
        self.life = life
        self.row = row
        self.effects = effects
        self.birth = life.birth
        self.steps: dict[int, list[Write]] = defaultdict(list)
        for write in life.writes:
            if write.may_have_happened:
                self.steps[write.version].append(write)
        # By version: what the job may have been at it, and the writes that may have left it.
        self.possible: dict[int, set[Known]] = {}
        self.left_by: dict[int, list[Write]] = {}

    def violations(self) -> Iterator[Violation]:
        """Yield all that is wrong."""
        yield from self._birth()
        if self.birth is None:
            return
        yield from self._doubles()
        yield from self._order()
        yield from self._walk()
        yield from self._within()
        yield from self._answers()
        yield from self._runs()
        yield from self._effects()

    def _bad(self, kind: str, what: str, version: int | None = None) -> Violation:
        return Violation(kind, what, self.life.job_id, self._lines(version))

    def _lines(self, version: int | None) -> list[Line]:
        """Return the lines that speak of the job at a version, or of the job."""
        life = self.life
        parts = (life.writes, life.withins, life.already, life.conflicts, life.runs)
        said = [one for part in parts for one in part]
        near = [
            one.line for one in said if version is None or one.version in (version, version - 1)
        ]
        if version is None:
            near += [birth.line for birth in life.births]
        return sorted(near, key=lambda line: line.said["t"])

    # -- The birth

    def _birth(self) -> Iterator[Violation]:
        births = {birth.token: birth for birth in self.life.births}
        undone = {t for t, birth in births.items() if birth.status is Status.UNDONE}
        for run in self.life.runs:
            if run.token in undone:
                yield self._bad("ran though rolled back", f"{run.token} was never committed")
            elif run.token not in births:
                yield self._bad("unheard of", f"{run.token} ran, and nobody enqueued it")
        if self.row and self.row.token in undone:
            yield self._bad("exists though rolled back", f"{self.row.token} was never committed")
        elif self.row and self.row.token not in births:
            yield self._bad("unheard of", f"{self.row.token} exists, and nobody enqueued it")
        elif self.birth is None and self.effects:
            yield self._bad("effect without completion", "nobody enqueued this job")

    # -- The chain

    def _doubles(self) -> Iterator[Violation]:
        for version, writes in sorted(self.steps.items()):
            accepted = [write for write in writes if write.status is Status.OK]
            if len(accepted) > 1:
                ways = " and ".join(f"{write.before} -> {write.after.state}" for write in accepted)
                what = f"version {version} was left twice: {ways}"
                yield self._bad("two writes of one version", what, version)
        outcomes = Counter(
            write.before.attempt
            for write in self.life.writes
            if write.status is Status.OK
            and write.before.state == State.RUNNING != write.after.state
        )
        for attempt, count in outcomes.items():
            if count > 1:
                what = f"attempt {attempt} has {count} accepted outcomes"
                yield self._bad("two outcomes of one execution", what)

    def _order(self) -> Iterator[Violation]:
        """No version is left after the answer to a write of a later one was heard."""
        latest = 0.0
        for write in sorted(self.life.writes, key=lambda write: write.version):
            if write.status is Status.OK and write.answered_at:
                if write.answered_at < latest:
                    what = f"version {write.version} was left before an earlier one was"
                    yield self._bad("out of order", what, write.version)
                latest = max(latest, write.asked_at)

    def _walk(self) -> Iterator[Violation]:
        """Follow the versions from birth to the end, with the set of what the job may be."""
        assert self.birth is not None
        now = {Known(self.birth.state)}
        last = self._last_version()
        for version in range(last + 1):
            self.possible[version] = now
            accepted = [w for w in self.steps.get(version, ()) if w.status is Status.OK]
            if version == last and not accepted and not self._was_deleted():
                break
            candidates = accepted or self.steps.get(version, [])
            fitting = [write for write in candidates if self._fits(write, now)]
            yield from self._step(version, now, candidates, fitting)
            self.left_by[version] = fitting or candidates
            now = {write.after for write in self.left_by[version]}
            if not now:
                return
        yield from self._end(last, now)
        self._look_back({self.row.known} if self.row else now)

    def _look_back(self, now: set[Known]) -> None:
        """Leave out what can't have happened, given what followed: an unknown has one answer."""
        for version in sorted(self.left_by, reverse=True):
            fitting = [write for write in self.left_by[version] if write.after in now]
            if not fitting:
                return
            self.left_by[version] = fitting
            now = self.possible[version] = {write.before for write in fitting}

    def _last_version(self) -> int:
        """Return the version at which the chain ends, or at which the job was deleted."""
        accepted = [
            w.version + (w.after.state != GONE) for w in self.life.writes if w.status is Status.OK
        ]
        if self.row:
            return max([self.row.version, *accepted])
        deletions = [v for v, ws in self.steps.items() for w in ws if w.after.state == GONE]
        return max([0, *accepted, *deletions])

    def _was_deleted(self) -> bool:
        return self.row is None and self._may_be_gone()

    def _may_be_gone(self) -> bool:
        return any(w.after.state == GONE for w in self.life.writes if w.may_have_happened)

    def _fits(self, write: Write, now: set[Known]) -> bool:
        return write.before in now and (write.before.state, write.after.state) in _LEGAL

    def _step(
        self, version: int, now: set[Known], candidates: list[Write], fitting: list[Write]
    ) -> Iterator[Violation]:
        if fitting:
            return
        was = " or ".join(sorted(map(str, now)))
        if not candidates:
            yield self._bad("gap", f"version {version} ({was}) was left, and nobody wrote", version)
            return
        for write in candidates:
            told = f"{write.before} -> {write.after.state}"
            if write.before in now:
                yield self._bad("no such verb", f"version {version}: {told}", version)
            else:
                what = f"version {version} was {was}, and this was accepted: {told}"
                yield self._bad("stale write accepted", what, version)

    def _end(self, last: int, now: set[Known]) -> Iterator[Violation]:
        assert self.birth is not None
        row, was = self.row, " or ".join(sorted(map(str, now)))
        if row is None:
            if any(known.state == GONE for known in now):
                return
            if self.birth.status is Status.OK or self.life.runs or self.steps:
                yield self._bad("enqueue lost", f"{self.birth.token} is gone; it was {was}")
        elif row.version < last or any(known.state == GONE for known in now):
            what = f"the row is at version {row.version}, and {last} was acknowledged"
            yield self._bad("write lost", what)
        elif row.known not in now:
            yield self._bad("row differs", f"the row is {row.known}, and should be {was}")
        elif row.known.state == State.COMPLETED and row.result not in (None, row.token):
            yield self._bad("row differs", f"its result is another job's: {row.result}")
        elif row.known.state not in FINAL:
            yield self._bad("not final", f"it ended as {row.known}, version {row.version}")

    # -- What was said within executions, and what callers were told

    def _left(self, version: int) -> list[Write]:
        return self.left_by.get(version, [])

    def _within(self) -> Iterator[Violation]:
        for within in self.life.withins:
            if within.status is not Status.OK:
                continue
            told = f"{within.kind} at version {within.version}"
            states = {known.state for known in self.possible.get(within.version, ())}
            if State.RUNNING not in states:
                yield self._bad("stale write accepted", f"{told}, which never ran", within.version)
            elif self._is_late(within):
                what = f"{told}, which had been left before it was asked"
                yield self._bad("stale write accepted", what, within.version)
            if within.kind == "cancel":
                yield from self._cancelled(within)

    def _is_late(self, within: Within) -> bool:
        left = self._left(within.version)
        ends = [w.answered_at for w in left if w.status is Status.OK and w.answered_at]
        return any(end < within.asked_at for end in ends)

    def _cancelled(self, within: Within) -> Iterator[Violation]:
        """Asked to stop, an execution ends completed or cancelled, and no other follows it."""
        left = self._left(within.version)
        after = {write.after.state for write in left}
        if after and not after & {State.COMPLETED, State.CANCELLED}:
            what = (
                f"asked to stop at version {within.version}, it became {' or '.join(sorted(after))}"
            )
            yield self._bad("cancelled and went on", what, within.version)

    def _answers(self) -> Iterator[Violation]:
        for told in self.life.already:
            ways = {write.after.state for write in self._left(told.version) if write.by_owner}
            if not ways & set(told.wanted):
                what = f"version {told.version}: called already applied, and it was not"
                yield self._bad("unknown resolved twice", what, told.version)
        for told in self.life.conflicts:
            left = self._left(told.version)
            if told.found == told.version or not left:
                what = f"version {told.version}: called a conflict, and nobody else had written"
                yield self._bad("refused without cause", what, told.version)
            elif told.found is None and self._may_be_gone():
                pass  # and all that told whose write it was
            elif told.by_owner and told.wanted and self._is_own(left, told.wanted):
                what = f"version {told.version}: its own write was called a conflict"
                yield self._bad("unknown resolved twice", what, told.version)

    @staticmethod
    def _is_own(left: list[Write], wanted: Sequence[str]) -> bool:
        """Whether the version can only have been left by the owner's write of the first choice."""
        return bool(left) and all(w.by_owner and w.after.state == wanted[0] for w in left)

    # -- Executions and their effects

    def _runs(self) -> Iterator[Violation]:
        for version, count in Counter(run.version for run in self.life.runs).items():
            if count > 1:
                yield self._bad("ran twice", f"version {version} began {count} times", version)
        for run in self.life.runs:
            known = self.possible.get(run.version, set())
            if not any(k.state == State.RUNNING and k.attempt == run.attempt for k in known):
                what = f"attempt {run.attempt} began at version {run.version}, which was no claim"
                yield self._bad("ran unclaimed", what, run.version)

    def _effects(self) -> Iterator[Violation]:
        assert self.birth is not None
        for version, count in Counter(self.effects).items():
            if count > 1:
                what = f"version {version} had its effect {count} times"
                yield self._bad("effect doubled", what, version)
            completions = [
                w for w in self._left(version) if w.by_owner and w.after.state == State.COMPLETED
            ]
            if not completions:
                what = f"version {version} had its effect, and was not completed"
                yield self._bad("effect without completion", what, version)
        if self.birth.task != "effect":
            return
        for version, writes in self.left_by.items():
            is_done = all(w.by_owner and w.after.state == State.COMPLETED for w in writes)
            if writes and is_done and version not in self.effects:
                what = f"version {version} was completed without its effect"
                yield self._bad("effect lost", what, version)
