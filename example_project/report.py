"""What a run showed: the database's records, held against the file system."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.db import connections
from django.db.models import Max, Min

from example_project.files import recompute
from example_project.scenario import Run
from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job, JobEvent

EXAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class Record:
    """What the database holds about one job; ``note`` tells of its last event."""

    path: str
    state: str
    result: Any
    completions: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The figures that are claimed, and what is wrong with them, a line each."""

    enqueued: int
    completed: int
    rescued: int
    refused: int
    lost: int
    doubled: int
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Report:
    """A verdict and how it came about."""

    verdict: Verdict
    jobs_per_second: float
    pace: float
    engine: str

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name."""
        names = ("enqueued", "completed", "rescued", "refused", "lost", "doubled")
        return {
            **{name: getattr(self.verdict, name) for name in names},
            "jobs_per_second": self.jobs_per_second,
            "engine": self.engine.lower(),
        }

    def as_table(self) -> str:
        """Return the figures for a person."""
        rows = {
            "engine": self.engine,
            "jobs enqueued": f"{self.verdict.enqueued:,}",
            "completed": f"{self.verdict.completed:,}",
            "rescued": f"{self.verdict.rescued:,}",
            "stale writes refused": f"{self.verdict.refused:,}",
            "lost": f"{self.verdict.lost:,}",
            "doubled": f"{self.verdict.doubled:,}",
            "jobs/s": f"{self.jobs_per_second:,}",
        }
        table = "\n".join(f"{name:<20}  {value:>12}" for name, value in rows.items())
        return f"{table}   (paced: each job also sleeps for {self.pace:.3g} s)"


def report_on(run: Run) -> Report:
    """Read what a finished run left in the database, and each of its files once more."""
    records = read_records(run)
    span = run.jobs().aggregate(began=Min("enqueued_at"), ended=Max("finished_at"))
    verdict = judge(
        {path: recompute(path) for path in map(str, run.files)},
        records,
        rescued=run.events().filter(kind=EventKind.RESCUED).values("job_id").distinct().count(),
        refused=len(run.refusals()),
    )
    seconds = (span["ended"] - span["began"]).total_seconds() if span["ended"] else 0
    return Report(
        verdict=verdict,
        jobs_per_second=round(verdict.completed / seconds, 1) if seconds else 0.0,
        pace=run.pace,
        engine=connections[run.using].display_name,
    )


def read_records(run: Run) -> list[Record]:
    """Return what the database holds about each job of a run."""
    events = defaultdict(list)
    for event in run.events():
        events[event.job_id].append(event)
    return [
        Record(
            path=job.args[0],
            state=job.state,
            result=job.result,
            completions=accepted_completions(job, events[job.pk]),
            note=events[job.pk][-1].message if events[job.pk] else "",
        )
        for job in run.jobs().order_by("pk")
    ]


def accepted_completions(job: Job, events: Iterable[JobEvent]) -> int:
    """Return how many completions of a completed job took effect, from the versions of its row.

    Every accepted write raises ``version`` by one. The row counts the executions that began; an
    event tells of each that ended without completion, and one that ended as ``scheduled`` was
    promoted later. What these leave unexplained are completions: one, unless an outcome was
    written over another.
    """
    explained = job.attempt
    for event in events:
        if event.kind != EventKind.CONFLICT:
            was_promoted = event.to_state == State.SCHEDULED
            never_began = event.from_state == State.CLAIMED
            explained += 1 + was_promoted + never_began
    return job.version - explained


def judge(
    truths: Mapping[str, Any], records: Sequence[Record], *, rescued: int, refused: int
) -> Verdict:
    """Hold what is recorded against what the files are.

    Args:
        truths: what each file's result must be, by its path.
        records: what the database holds.
        rescued: jobs that a sweep took from a worker.
        refused: writes that came too late and were refused.
    """
    completed = [record for record in records if record.state == State.COMPLETED]
    accepted: Counter[str] = Counter()
    for record in completed:
        accepted[record.path] += record.completions
    ends = {record.path: f"{record.state}: {record.note}".rstrip(": ") for record in records}
    lost = [f"{path} ({ends.get(path, 'no job')})" for path in truths if path not in accepted]
    doubled = [f"{path} ({count} times)" for path, count in accepted.items() if count > 1]
    unaccounted = [path for path, count in accepted.items() if count < 1]
    wrong = [record.path for record in completed if record.result != truths.get(record.path)]
    problems = [
        *_problem("lost, without a completed job", lost),
        *_problem("doubled, with more than one accepted outcome", doubled),
        *_problem(
            "unaccounted for, since its version fell behind what it went through", unaccounted
        ),
        *_problem("wrong, unless the file has changed meanwhile", wrong),
    ]
    if not rescued:
        problems.append("no job was rescued: nothing was shown")
    if not refused:
        problems.append("no late write was refused: nothing was shown")
    return Verdict(
        enqueued=len(records),
        completed=len(completed),
        rescued=rescued,
        refused=refused,
        lost=len(lost),
        doubled=len(doubled),
        problems=problems,
    )


def _problem(what: str, examples: Sequence[str]) -> list[str]:
    if not examples:
        return []
    more = f" and {len(examples) - EXAMPLES:,} more" if len(examples) > EXAMPLES else ""
    return [f"{len(examples):,} {what}: {', '.join(examples[:EXAMPLES])}{more}"]
