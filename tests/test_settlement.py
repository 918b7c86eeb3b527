"""What each outcome writes, from a job as it was decided on. No database is asked."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import pytest
from django.db.models import Q
from django.test import override_settings

from jobqueue.backoff import Drawn
from jobqueue.exceptions import InvalidJob, TransitionNotAllowed
from jobqueue.lifecycle import (
    FINAL,
    HELD,
    QUEUED,
    Cancelled,
    Completed,
    Error,
    Failed,
    Released,
    Retry,
    Snoozed,
    State,
)
from jobqueue.models import EventKind, Job
from jobqueue.settlement import as_delay, plan
from tests.asserting import exactly

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
ERROR = Error("ValueError: no", "Traceback ...")
FREE = {"claimed_by": None, "claimed_at": None}
ENDED = {"finished_at": NOW, "unique_key": None}
WHEN_ASKED = Q(cancel_requested_at__isnull=False)
UNLESS_ASKED = Q(cancel_requested_at__isnull=True)

# Of a job that runs for the second time of three, with a backoff of 10 s, doubled each time.
OUTCOMES = [
    (Completed({"n": 1}), {"state": "completed", "result": {"n": 1}, **ENDED}),
    (Failed(ERROR), {"state": "failed", **ENDED}),
    (Retry(ERROR), {"state": "scheduled", "run_after": NOW + timedelta(seconds=20), **FREE}),
    (Retry(ERROR, MINUTE), {"state": "scheduled", "run_after": NOW + MINUTE, **FREE}),
    (Retry(ERROR, timedelta(0)), {"state": "waiting", "run_after": NOW, **FREE}),
    (Snoozed(MINUTE), {"state": "scheduled", "run_after": NOW + MINUTE, "excused": 1, **FREE}),
    (Snoozed(timedelta(0)), {"state": "scheduled", "run_after": NOW, "excused": 1, **FREE}),
    (Released("stopped"), {"state": "waiting", "excused": 1, **FREE}),
    (Cancelled("not wanted"), {"state": "cancelled", **ENDED}),
]
EVENTS = {
    Completed: (None, "", {}),
    Failed: (EventKind.FAILED, ERROR.message, {"traceback": ERROR.traceback}),
    Retry: (EventKind.RETRIED, ERROR.message, {"traceback": ERROR.traceback}),
    Snoozed: (EventKind.SNOOZED, None, {}),
    Released: (EventKind.RELEASED, "stopped", {}),
    Cancelled: (EventKind.CANCELLED, "not wanted", {}),
}
by_outcome = pytest.mark.parametrize(
    ("outcome", "changes"), OUTCOMES, ids=[repr(outcome)[:50] for outcome, _ in OUTCOMES]
)


def job_in(state: str = "running", **columns: object) -> Job:
    columns = {
        "attempt": 2,
        "max_attempts": 3,
        "backoff": {"base": 10, "factor": 2, "cap": 1000, "jitter": 0},
        "claimed_by": "host:1:1",
        **columns,
    }
    return Job(pk=7, task="a.b", state=state, version=5, **columns)


@by_outcome
def test_columns_that_an_outcome_writes(outcome, changes):
    """Only those of the table of verbs; state and version are all that every verb writes."""
    job = job_in()
    write = plan(job, outcome, NOW)[0]
    assert write.changes == changes
    assert write.changes["state"] != job.state
    assert (job.attempt, job.excused, job.state) == (2, 0, "running")  # the copy in hand stays


@by_outcome
def test_event_that_an_outcome_leaves(outcome, changes):
    """The exceptional history: a completion leaves none."""
    write = plan(job_in(), outcome, NOW)[0]
    kind, message, detail = EVENTS[type(outcome)]
    assert (write.kind, write.detail) == (kind, detail)
    assert write.message == (f"for {outcome.delay}" if kind == EventKind.SNOOZED else message)


@by_outcome
def test_cancel_request_decides_between_two_writes(outcome, changes):
    """Its condition is the statement's, so a request made after the read counts too."""
    first, *rest = plan(job_in(cancel_requested_at=NOW), outcome, NOW)
    if isinstance(outcome, Completed | Cancelled):
        assert (first.where, rest) == (Q(), [])
        return
    (second,) = rest
    assert (first.where, second.where) == (UNLESS_ASKED, WHEN_ASKED)
    assert second.changes == {"state": "cancelled", **ENDED}
    assert second.kind == EventKind.CANCELLED
    assert second.message == f"cancelled as requested: {first.message}"


@by_outcome
def test_rescue_is_told_from_what_an_executor_wrote(outcome, changes):
    """A sweep's retries and releases are of a kind of their own, and write the same columns."""
    own, rescue = plan(job_in(), outcome, NOW)[0], plan(job_in(), outcome, NOW, rescue=True)[0]
    assert own.changes == rescue.changes
    expected = EventKind.RESCUED if isinstance(outcome, Retry | Released) else own.kind
    assert rescue.kind == expected


@pytest.mark.parametrize(
    ("attempt", "excused", "max_attempts", "state"),
    [
        (1, 0, 1, "failed"),
        (1, 0, 2, "scheduled"),
        (2, 0, 2, "failed"),
        (2, 1, 2, "scheduled"),
        (9, 7, 3, "scheduled"),
        (10, 7, 3, "failed"),
        (11, 7, 3, "failed"),  # past the budget, which was lowered meanwhile
    ],
)
def test_retry_within_the_budget(attempt, excused, max_attempts, state):
    """sidequest#155, faktory#409: excused executions don't count; the last one fails."""
    job = job_in(attempt=attempt, excused=excused, max_attempts=max_attempts)
    write = plan(job, Retry(ERROR), NOW)[0]
    assert write.changes["state"] == state
    assert (write.message, write.detail) == (ERROR.message, {"traceback": ERROR.traceback})


@pytest.mark.parametrize(
    ("attempt", "excused", "seconds"),
    [(1, 0, 10), (2, 0, 20), (3, 0, 40), (3, 2, 10), (50, 0, 1000)],
)
def test_backoff_counts_failures(attempt, excused, seconds):
    """river#697: a snoozed execution does not lengthen the wait, and the cap is never passed."""
    job = job_in(attempt=attempt, excused=excused, max_attempts=100)
    changes = plan(job, Retry(ERROR), NOW)[0].changes
    assert changes["run_after"] == NOW + timedelta(seconds=seconds)


@pytest.mark.parametrize("attempt", [1, 3])
def test_wait_of_many_jobs_is_left_to_be_drawn(attempt):
    """One plan for all of them, and one wait for each; a single job's is drawn with its plan."""
    job = job_in(attempt=attempt, max_attempts=9, backoff={"base": 10, "jitter": 0.5})
    wait = 10 * timedelta(seconds=2 ** (attempt - 1))
    many = plan(job, Retry(ERROR), NOW, draws=False)[0].changes
    assert many == {"state": "scheduled", "run_after": Drawn(NOW + wait / 2, NOW + wait), **FREE}
    drawn = {plan(job, Retry(ERROR), NOW)[0].changes["run_after"] for _ in range(9)}
    assert len(drawn) > 1
    assert NOW + wait / 2 <= min(drawn) <= max(drawn) <= NOW + wait


@pytest.mark.parametrize(
    ("backoff", "why"),
    [
        ({"base": "soon"}, "backoff base must be a number, not 'soon'"),
        ({"base": -1}, "backoff base must be 0 to 31,536,000, not -1"),
        ({"wait": 5}, "backoff has no figure 'wait'"),
        ("soon", "backoff must be a Backoff, seconds or a mapping, not 'soon'"),
        ([5], "backoff must be a Backoff, seconds or a mapping, not [5]"),
        (None, "backoff must be a Backoff, seconds or a mapping, not None"),
    ],
)
@override_settings(JOBQUEUE={"BACKOFF": 77})
def test_unreadable_backoff_falls_back_and_says_so(backoff, why):
    """threadmill#47: a broken policy never means that there is no retry."""
    write = plan(job_in(backoff=backoff), Retry(ERROR), NOW)[0]
    assert write.changes["run_after"] == NOW + timedelta(seconds=77)
    assert write.detail == {"traceback": ERROR.traceback, "backoff": f"{why}; used the default"}


def test_backoff_of_the_row_is_not_asked_when_a_delay_is_given():
    write = plan(job_in(backoff="soon"), Retry(Error("no"), MINUTE), NOW)[0]
    assert (write.changes["run_after"], write.detail) == (NOW + MINUTE, {})


@pytest.mark.parametrize(("state", "excused"), [("claimed", None), ("running", 5)])
def test_release_excuses_an_attempt_that_had_begun(state, excused):
    write = plan(job_in(state, attempt=6, excused=4), Released(), NOW)[0]
    assert write.changes.get("excused") == excused


ALLOWED = {Released: HELD, Cancelled: QUEUED | HELD}


@pytest.mark.parametrize("state", State)
@by_outcome
def test_outcome_that_does_not_fit_the_state(outcome, changes, state):
    """pg-boss#346, Hangfire.Mongo#380: refused by name, whatever the budget."""
    job = job_in(state)
    if state in ALLOWED.get(type(outcome), {State.RUNNING}):
        assert plan(job, outcome, NOW)
        return
    names = {"Completed": "complete", "Failed": "fail", "Snoozed": "snooze"}
    name = type(outcome).__name__
    verb = names.get(name) or {"Released": "release", "Cancelled": "cancel"}.get(name, "retry")
    with pytest.raises(
        TransitionNotAllowed, match=exactly(f"Job 7 is {state}: {verb} is not allowed.")
    ):
        plan(job, outcome, NOW)


@pytest.mark.parametrize("state", sorted(FINAL | QUEUED))
def test_spent_budget_hides_no_wrong_state(state):
    """A retry that would have failed the job is refused in the name of what it would do."""
    with pytest.raises(TransitionNotAllowed):
        plan(job_in(state, attempt=3), Retry(ERROR), NOW)


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (math.nan, "result is nan, which JSON can't hold"),
        ({"a": [1, math.inf]}, "result['a'][1] is inf, which JSON can't hold"),
        ({"a": "x\x00"}, "result['a'] contains a NUL character"),
        ({1: 2}, "result has a key that is not a string: 1"),
        ({"a": {1, 2}}, "result['a'] is a set, which JSON can't hold: {1, 2}"),
        ("x" * 2000, "result takes 2,002 bytes as JSON; at most 1,024 are allowed "),
    ],
    ids=["nan", "inf", "nul", "key", "set", "size"],
)
@override_settings(JOBQUEUE={"MAX_PAYLOAD_BYTES": 1024})
def test_result_that_cant_be_stored(result, why):
    """The message names the job and the path to the value."""
    with pytest.raises(InvalidJob) as caught:
        plan(job_in(), Completed(result), NOW)
    assert str(caught.value).startswith(f"Job 7: {why}")


def test_result_is_written_as_it_will_be_read():
    assert plan(job_in(), Completed((1, (2,))), NOW)[0].changes["result"] == [1, [2]]


@pytest.mark.parametrize(
    ("given", "delay"), [(0, timedelta(0)), (1.5, timedelta(seconds=1.5)), (MINUTE, MINUTE)]
)
def test_delay_in_seconds_or_as_timedelta(given, delay):
    assert as_delay(given) == delay


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (-1, "delay must be zero or more, not -1 seconds"),
        (-MINUTE, "delay must be zero or more, not -60 seconds"),
        (math.nan, "delay must be a finite number of seconds, not nan"),
        (1e300, "delay must be a finite number of seconds, not 1e+300"),
        (1e12, "delay must be at most 36,500 days, not 11574074 days, 1:46:40"),
        (True, "delay must be seconds or a timedelta, not True"),
        ("5", "delay must be seconds or a timedelta, not '5'"),
        (None, "delay must be seconds or a timedelta, not None"),
    ],
)
def test_delay_that_is_none(given, why):
    """threadmill#47: an error that names the value, not a job that never comes back."""
    with pytest.raises(InvalidJob, match=exactly(why)):
        as_delay(given)


@pytest.mark.parametrize(
    "outcome", [Snoozed, lambda delay: Retry(ERROR, delay)], ids=["snooze", "retry"]
)
@pytest.mark.parametrize("delay", [timedelta(days=10**7), timedelta.max, -MINUTE])
def test_outcome_whose_delay_cant_be_stored(outcome, delay):
    """Outcomes are values that anybody can build; what they hold is looked at before any write."""
    with pytest.raises(InvalidJob, match="Job 7: delay must be"):
        plan(job_in(), outcome(delay), NOW)
