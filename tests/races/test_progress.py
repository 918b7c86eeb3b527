"""Progress and checkpoints: many reporters of one execution, and reporters of one that is over."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import pytest
from django.db import transaction

from jobqueue import coordinator, signals, transitions
from jobqueue.claim import claim_jobs
from jobqueue.exceptions import InvalidJob, TransitionConflict, TransitionNotAllowed
from jobqueue.models import Job
from jobqueue.testing.factories import WorkerFactory
from tests.asserting import exactly
from tests.helpers import child_environment, run_in_thread, wait_until_blocked
from tests.races.reporter import report_all
from tests.races.scenes import changed, events, hearing, job_in, kinds, row, take_over

REPORTS = {
    "progress": lambda job: transitions.record_progress(job, 70, "page 7"),
    "checkpoint": lambda job: transitions.checkpoint(job, {"page": 7}),
}


def shown(job):
    """Return the figure and the note, read at once."""
    return Job.objects.values_list("progress", "progress_note").get(pk=job.pk)


# -- Many reporters


@pytest.mark.timeout(120)
def test_threads_and_processes_report_in_any_order(alias):
    """antenna#1337, harmony#191: 16 threads, 4 processes; no reader sees a fall or a wrong note."""
    job = job_in("running")
    before = row(job)
    with ExitStack() as stack:
        processes = [stack.enter_context(reporter(job, seed)) for seed in range(4)]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        threads = [run_in_thread(report_all, job.pk, seed) for seed in range(16)]
        seen = [shown(job)]
        while not all([*(thread.done for thread in threads), *(p.poll() == 0 for p in processes)]):
            assert not any(process.poll() for process in processes)
            seen.append(shown(job))
        for thread in threads:
            thread.result()
    figures = [figure for figure, _ in seen]
    assert figures == sorted(figures)
    assert {note for figure, note in seen if note != str(figure)} <= {""}
    assert changed(before, job) == {"progress": 100, "progress_note": "100"}
    assert events(job) == []


def reporter(job, seed):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.races.reporter", str(job.pk), str(seed)],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_note_is_that_of_the_highest_figure(alias):
    """The last one of it, if there are several."""
    job = job_in("running")
    for said, shows in [
        ((0, "begun"), (0, "begun")),
        ((40, "b"), (40, "b")),
        ((30, "a"), (40, "b")),
        ((40, "c"), (40, "c")),
        ((41, ""), (41, "")),
        ((100, "z"), (100, "z")),
        ((0, "a"), (100, "z")),
    ]:
        transitions.record_progress(job, *said)
        assert shown(job) == shows


def test_lower_figure_that_had_to_wait_is_dropped(alias):
    """antenna#1337: it was decided on before the higher one, and is compared after it."""
    job = job_in("running")
    with transaction.atomic(using=alias):
        transitions.record_progress(job, 60, "high")
        late = run_in_thread(transitions.record_progress, job, 50, "low")
        wait_until_blocked(alias)
    late.result()
    assert shown(job) == (60, "high")


def test_reports_write_nothing_else(alias):
    """qiskit-serverless#956: what others write meanwhile survives; no version, event or signal."""
    job = job_in("running")
    coordinator.cancel(job.pk, actor="ann")
    before = row(job)
    with hearing(signals.job_transitioned) as heard:
        for report in REPORTS.values():
            report(job)
    assert changed(before, job) == {
        "progress": 70,
        "progress_note": "page 7",
        "checkpoint": {"page": 7},
    }
    assert (kinds(job), heard) == (["cancel requested"], [])


def test_report_is_no_reason_for_a_conflict(alias):
    """A coordinator who read the job before it was reported on writes all the same."""
    job = job_in("running")
    REPORTS["progress"](job)
    coordinator.complete(job.pk, actor="ann", expected_version=job.version)
    assert (row(job)["state"], shown(job)) == ("completed", (70, "page 7"))


# -- An execution that is over


ENDS = {
    "completed": lambda job: transitions.complete(job),
    "retried": lambda job: transitions.retry(job, "no"),
    "released": lambda job: coordinator.release(job.pk, actor="ann"),
    "cancelled by force": lambda job: coordinator.cancel(job.pk, force=True, actor="ann"),
    "run by another": take_over,
    "run again by the same": lambda job: take_over(job, job.claimed_by),
}


@pytest.mark.parametrize("end", ENDS)
def test_execution_that_is_over_reports_nothing(alias, end):
    """river#1226: it is told, changes neither figure, note nor checkpoint, and leaves an event."""
    job = job_in("running", progress=5, checkpoint={"page": 1})
    ENDS[end](job)
    before, past = row(job), events(job)
    now = Job.objects.get(pk=job.pk).fingerprint
    for report in REPORTS.values():
        with pytest.raises(TransitionConflict) as refused:
            report(job)
        assert (refused.value.expected, refused.value.found) == (job.fingerprint, now)
        assert row(job) == before
    assert events(job) == [*past, *[("conflict", "running", now.state, job.claimed_by)] * 2]


@pytest.mark.parametrize("report", REPORTS)
def test_report_that_waits_while_its_execution_ends(alias, report):
    """The end wins, and what the report would have written is not there."""
    job = job_in("running")
    with transaction.atomic(using=alias):
        transitions.retry(job, "no")
        late = run_in_thread(REPORTS[report], job)
        wait_until_blocked(alias)
    with pytest.raises(TransitionConflict):
        late.result()
    assert (shown(job), row(job)["checkpoint"]) == ((0, ""), None)


@pytest.mark.parametrize("report", REPORTS)
def test_job_that_does_not_run_has_nothing_to_report(alias, report):
    for state in ("scheduled", "waiting", "claimed", "completed", "failed", "cancelled"):
        job = job_in(state)
        before = row(job)
        message = f"Job {job.pk} is {state}: {report} is not allowed."
        with pytest.raises(TransitionNotAllowed, match=exactly(message)):
            REPORTS[report](job)
        assert (row(job), events(job)) == (before, [])


# -- From one execution to the next


def test_rerun_starts_from_nothing(alias):
    """Also where the last run had come to the end."""
    job = job_in("running")
    transitions.record_progress(job, 100, "all pages")
    transitions.checkpoint(job, {"page": 100})
    transitions.complete(job)
    coordinator.rerun(job.pk, actor="ann")
    assert (shown(job), row(job)["checkpoint"]) == ((0, ""), None)
    again = run(job)
    transitions.record_progress(again, 1, "page 1")
    assert shown(job) == (1, "page 1")


def test_next_attempt_sees_the_last_checkpoint_of_the_one_before(alias):
    """river#1226: what was taken out of it is gone, and a late one of the old one is refused."""
    job = job_in("running")
    transitions.checkpoint(job, {"step": 1, "cursor": 10})
    transitions.checkpoint(job, {"step": 2})
    transitions.retry(job, "no", 0)
    again = run(job)
    with pytest.raises(TransitionConflict):
        transitions.checkpoint(job, {"step": 1, "cursor": 11})
    assert (again.attempt, again.checkpoint, row(job)["checkpoint"]) == (
        2,
        {"step": 2},
        {"step": 2},
    )
    transitions.checkpoint(again, None)
    assert row(job)["checkpoint"] is None


def run(job):
    (running,) = claim_jobs(WorkerFactory().pk, [job.queue], 1, start=True)
    assert running.pk == job.pk
    return running


# -- Bad input


NUMBERS = "progress must be an integer from 0 to 100, not "
BAD_PROGRESS = [
    ((101, ""), NUMBERS + "101"),
    ((-1, ""), NUMBERS + "-1"),
    ((float("nan"), ""), NUMBERS + "nan"),
    ((50.0, ""), NUMBERS + "50.0"),
    (("50", ""), NUMBERS + "'50'"),
    ((True, ""), NUMBERS + "True"),
    ((None, ""), NUMBERS + "None"),
    ((50, "x" * 2**20), "the progress note has 1,048,576 of 1,000 characters"),
    ((50, "a\x00b"), "the progress note contains a NUL character"),
    ((50, None), "the progress note must be text, not None"),
]
BAD_CHECKPOINTS = [
    ({"at": float("nan")}, "the checkpoint['at'] is nan, which JSON can't hold"),
    ({1: "one"}, "the checkpoint has a key that is not a string: 1"),
    (["a\x00b"], "the checkpoint[0] contains a NUL character"),
]


def test_progress_that_can_not_be(alias):
    job = job_in("running", progress=5, progress_note="page 1")
    before = row(job)
    for said, message in BAD_PROGRESS:
        with pytest.raises(InvalidJob, match=exactly(f"Job {job.pk}: {message}")):
            transitions.record_progress(job, *said)
    assert (row(job), events(job)) == (before, [])


def test_checkpoint_that_is_not_json(alias):
    job = job_in("running", checkpoint={"page": 1})
    before = row(job)
    for value, message in BAD_CHECKPOINTS:
        with pytest.raises(InvalidJob, match=exactly(f"Job {job.pk}: {message}")):
            transitions.checkpoint(job, value)
    assert (row(job), events(job)) == (before, [])


def test_checkpoint_of_an_object_and_one_that_is_too_large(alias):
    job = job_in("running", checkpoint={"page": 1})
    before = row(job)
    for value, wanted in [(object(), "object"), ("x" * 2**21, "MAX_PAYLOAD_BYTES")]:
        with pytest.raises(InvalidJob, match=rf"^Job {job.pk}: the checkpoint .*{wanted}"):
            transitions.checkpoint(job, value)
    assert row(job) == before


def test_checkpoint_is_read_back_as_it_was_stored(alias):
    job = job_in("running", checkpoint={"page": 9})
    for value in ({"page": 1}, [], 0, "", False, None, {"deep": [[{}]]}):
        transitions.checkpoint(job, value)
        assert row(job)["checkpoint"] == value
