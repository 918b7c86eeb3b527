"""The demo's verdict, and the evidence that it reads from the database."""

from __future__ import annotations

import pytest
from django.db.models import F

from example_project.files import checksum
from example_project.report import Record, accepted_completions, judge, read_records
from example_project.scenario import Run
from jobqueue import broker, coordinator, transitions
from jobqueue.backoff import Backoff
from jobqueue.exceptions import TransitionConflict
from jobqueue.lifecycle import State
from jobqueue.models import EventKind, Job
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.testing.factories import JobEventFactory, JobFactory, WorkerFactory
from tests.helpers import wait_until

# -- The verdict

TRUTHS = {"/a": {"sha256": "aa"}, "/b": {"sha256": "bb"}}
RIGHT = [Record(path, "completed", truth, 1) for path, truth in TRUTHS.items()]
A, B = RIGHT


def test_right_records_are_beyond_reproach():
    verdict = judge(TRUTHS, RIGHT, rescued=2, refused=1)
    assert verdict.problems == []
    assert (verdict.enqueued, verdict.completed, verdict.lost, verdict.doubled) == (2, 2, 0, 0)
    assert (verdict.rescued, verdict.refused) == (2, 1)


@pytest.mark.parametrize(
    ("records", "lost", "doubled", "problem"),
    [
        ([A], 1, 0, "1 lost, without a completed job: /b (no job)"),
        ([], 2, 0, "2 lost, without a completed job: /a (no job), /b (no job)"),
        (
            [A, Record("/b", "failed", None, 0, "no such file")],
            *(1, 0, "1 lost, without a completed job: /b (failed: no such file)"),
        ),
        (
            [A, Record("/b", "running", None, 0)],
            *(1, 0, "1 lost, without a completed job: /b (running)"),
        ),
        (
            [A, Record("/b", "completed", TRUTHS["/b"], 2)],
            *(0, 1, "1 doubled, with more than one accepted outcome: /b (2 times)"),
        ),
        (
            [A, B, B],
            *(0, 1, "1 doubled, with more than one accepted outcome: /b (2 times)"),
        ),
        (
            [A, Record("/b", "completed", TRUTHS["/b"], 0)],
            *(0, 0, "1 unaccounted for, since its version fell behind what it went through: /b"),
        ),
        (
            [A, Record("/b", "completed", {"sha256": "aa"}, 1)],
            *(0, 0, "1 wrong, unless the file has changed meanwhile: /b"),
        ),
        (
            [A, B, Record("/c", "completed", {"sha256": "cc"}, 1)],
            *(0, 0, "1 wrong, unless the file has changed meanwhile: /c"),
        ),
    ],
    ids=[
        "no job",
        "no job at all",
        "failed",
        "unfinished",
        "two outcomes of one job",
        "two jobs of one file",
        "version written over",
        "wrong checksum",
        "no such file",
    ],
)
def test_whatever_is_off_is_named(records, lost, doubled, problem):
    verdict = judge(TRUTHS, records, rescued=1, refused=1)
    assert verdict.problems == [problem]
    assert (verdict.lost, verdict.doubled) == (lost, doubled)


@pytest.mark.parametrize(
    ("rescued", "refused", "problem"),
    [
        (0, 1, "no job was rescued: nothing was shown"),
        (1, 0, "no late write was refused: nothing was shown"),
    ],
)
def test_run_that_showed_nothing_is_off(rescued, refused, problem):
    assert judge(TRUTHS, RIGHT, rescued=rescued, refused=refused).problems == [problem]


def test_long_lists_are_cut():
    (problem,) = judge({f"/{n}": {} for n in range(1234)}, [], rescued=1, refused=1).problems
    assert problem == (
        "1,234 lost, without a completed job: /0 (no job), /1 (no job), /2 (no job) and 1,231 more"
    )


# -- Completions, counted from what the database holds


def claim(*, start: bool = True, **worker: bool) -> Job:
    """Claim the job, once it is due."""
    pk = WorkerFactory(**worker).pk
    (job,) = wait_until(lambda: broker.claim(pk, 1, start=start), "the job did not become due")
    return job


def rescue(*, start: bool) -> None:
    claim(start=start, silent=True)
    assert sweep_stale_jobs().taken == 1


SETBACKS = {
    "none": lambda: None,
    "rescued while running": lambda: rescue(start=True),
    "rescued while claimed": lambda: rescue(start=False),
    "retried at once": lambda: transitions.retry(claim(), "no", delay=0),
    "retried later": lambda: transitions.retry(claim(), "no", delay=0.001),
    "snoozed": lambda: transitions.snooze(claim(), 0.001),
    "released": lambda: transitions.release(claim()),
    "taken by an operator": lambda: coordinator.release(claim().pk, actor="me"),
}


def completions(job: Job) -> int:
    job = Job.objects.get(pk=job.pk)
    return accepted_completions(job, job.events.all())


@pytest.mark.parametrize("setback", SETBACKS)
def test_one_accepted_completion_is_counted_as_one(alias, setback):
    """Whatever came before it, and refused writes left and right."""
    JobFactory(backoff=Backoff.parse(0.001).as_dict())
    SETBACKS[setback]()
    SETBACKS[setback]()
    running = claim()
    transitions.complete(running, 1)
    with pytest.raises(TransitionConflict):
        transitions.fail(running, "late")
    assert running.attempt == (1 if setback in ("none", "rescued while claimed") else 3)
    assert completions(running) == 1


def test_outcome_written_over_another_is_counted(alias):
    """What a queue without a fence would do when an executor wakes up late."""
    JobFactory()
    running = claim()
    transitions.complete(running, 1)
    Job.objects.filter(pk=running.pk).update(result=2, version=F("version") + 1)
    assert completions(running) == 2


def test_second_outcome_of_a_job_that_was_brought_back_to_life_is_counted(alias):
    """What a sweep without a fence would do to a job that completed after its scan."""
    JobFactory()
    running = claim()
    transitions.complete(running, 1)
    Job.objects.filter(pk=running.pk).update(
        state=State.SCHEDULED,
        claimed_by=None,
        claimed_at=None,
        finished_at=None,
        version=F("version") + 1,
    )
    JobEventFactory(job=running, kind=EventKind.RESCUED)
    transitions.complete(claim(), 2)
    assert completions(running) == 2


def test_version_that_was_set_back_is_counted_as_less_than_one(alias):
    JobFactory()
    running = claim()
    transitions.complete(running, 1)
    Job.objects.filter(pk=running.pk).update(version=running.version)
    assert completions(running) == 0


def test_records_are_what_the_database_holds(alias, tmp_path):
    files = [tmp_path / "first", tmp_path / "second"]
    for file in files:
        file.write_text("content\n")
    run = Run.enqueue(files, alias)
    worker = broker.register([run.name], using=alias)
    done, failed = broker.claim(worker.pk, 2)
    transitions.complete(done, checksum(str(files[0])))
    transitions.fail(failed, "no")
    assert read_records(run) == [
        Record(str(files[0]), "completed", checksum(str(files[0])), 1),
        Record(str(files[1]), "failed", None, 0, "no"),
    ]
