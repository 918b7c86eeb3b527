"""What a handler's context says and keeps, without a database."""

from __future__ import annotations

import pytest

from jobqueue.exceptions import Cancel, InvalidJob, JobQueueError
from jobqueue.lifecycle import Report
from jobqueue.worker.context import JobContext
from tests.asserting import exactly


@pytest.fixture
def context() -> JobContext:
    """The second execution of job 7, which found a checkpoint."""
    return JobContext(7, "a.task", 2, 9, checkpoint={"page": 3})


def test_context_tells_of_its_execution(context):
    assert (context.job_id, context.task, context.attempt) == (7, "a.task", 2)
    assert (context.fencing_token, context.checkpoint) == (9, {"page": 3})
    assert (context.lost, context.cancelled) == (False, False)


def test_context_is_told_of_loss_and_of_cancellation(context):
    context.raise_if_cancelled()
    context.tell_lost()
    assert (context.lost, context.cancelled) == (True, False)
    context.tell_cancelled()
    with pytest.raises(Cancel, match=exactly("cancelled as requested")):
        context.raise_if_cancelled()


def test_what_is_said_is_taken_once(context):
    """The highest figure with its note, and the last checkpoint, in one report."""
    assert not context.has_report
    context.progress(40, "b")
    context.save_checkpoint({"page": 4})
    context.progress(30, "a")
    context.save_checkpoint({"page": 5})
    assert context.has_report
    assert context.take_report() == Report(40, "b", {"page": 5}, has_checkpoint=True)
    assert (context.has_report, context.take_report()) == (False, None)


def test_note_of_a_figure_said_again_is_the_last(context):
    context.progress(40, "b")
    context.progress(40, "c")
    assert context.take_report() == Report(40, "c")


@pytest.mark.parametrize(
    ("since", "together"),
    [
        (Report(50, "since"), Report(50, "since", [1], has_checkpoint=True)),
        (Report(30, "since"), Report(40, "before", [1], has_checkpoint=True)),
        (Report(40, "since"), Report(40, "since", [1], has_checkpoint=True)),
        (
            Report(checkpoint=None, has_checkpoint=True),
            Report(40, "before", None, has_checkpoint=True),
        ),
        (None, Report(40, "before", [1], has_checkpoint=True)),
    ],
    ids=["higher", "lower", "same", "checkpoint", "nothing"],
)
def test_report_given_back_is_older_than_what_was_said_since(context, since, together):
    context.progress(40, "before")
    context.save_checkpoint([1])
    report = context.take_report()
    if since and since.percent is not None:
        context.progress(since.percent, since.note)
    elif since:
        context.save_checkpoint(since.checkpoint)
    context.give_back(report)
    assert context.take_report() == together


def test_checkpoint_is_what_will_be_read_back(context):
    """At once, for the same execution too; later changes of the object don't reach it."""
    value = {"pages": [1]}
    context.save_checkpoint(value)
    value["pages"].append(2)
    assert context.checkpoint == {"pages": [1]}
    assert context.take_report() == Report(checkpoint={"pages": [1]}, has_checkpoint=True)
    context.save_checkpoint(None)
    assert context.checkpoint is None


NUMBERS = "Job 7: progress must be an integer from 0 to 100, not "


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ((101, ""), NUMBERS + "101"),
        ((-1, ""), NUMBERS + "-1"),
        ((float("nan"), ""), NUMBERS + "nan"),
        ((50.0, ""), NUMBERS + "50.0"),
        ((True, ""), NUMBERS + "True"),
        ((50, "x" * 2**20), "Job 7: the progress note has 1,048,576 of 1,000 characters"),
        ((50, "a\x00b"), "Job 7: the progress note contains a NUL character"),
        ((50, 5), "Job 7: the progress note must be text, not 5"),
    ],
)
def test_bad_progress_is_refused_where_it_is_said(context, said, message):
    with pytest.raises(InvalidJob, match=exactly(message)):
        context.progress(*said)
    assert not context.has_report


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"at": float("nan")}, "the checkpoint['at'] is nan, which JSON can't hold"),
        ({1: "one"}, "the checkpoint has a key that is not a string: 1"),
    ],
)
def test_bad_checkpoint_is_refused_and_the_one_before_stands(context, value, message):
    with pytest.raises(InvalidJob, match=exactly(f"Job 7: {message}")):
        context.save_checkpoint(value)
    assert (context.checkpoint, context.has_report) == ({"page": 3}, False)


def test_atomic_needs_a_worker(context):
    message = "context.atomic() needs a worker on the job's own database"
    with pytest.raises(JobQueueError, match=exactly(message)):
        context.atomic()
