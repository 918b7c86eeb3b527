"""Why a job is not running: each answer, its evidence, and the command that prints them."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from jobqueue import coordinator, db, explain, transitions
from jobqueue.claim import claim_jobs
from jobqueue.exceptions import JobNotFound
from jobqueue.models import Job, JobEvent
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.testing.factories import TASK, JobFactory, QueueFactory, WorkerFactory
from tests.asserting import exactly
from tests.races.scenes import job_in
from tests.routers import ALIAS_VARIABLE

MINUTE = timedelta(minutes=1)


def answers(job):
    """Return the answers by their codes, and check that no code comes twice."""
    explanation = explain.explain(job.pk)
    found = {answer.code: answer for answer in explanation.answers}
    assert len(found) == len(explanation.answers)
    return found


def at(moment):
    return moment.isoformat(sep=" ", timespec="seconds")


def test_job_that_has_only_to_wait_its_turn(alias):
    """The whole of an explanation."""
    worker = WorkerFactory()
    job = job_in("waiting", max_attempts=5)
    found = explain.explain(job.pk)
    assert found.as_dict() == {
        "job_id": job.pk,
        "task": TASK,
        "queue": "default",
        "state": "waiting",
        "answers": [
            {
                "code": "workers",
                "text": "1 live worker(s) serve its queue.",
                "evidence": {"workers": [worker.pk]},
            }
        ],
    }


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_finished(alias, state):
    """Nothing else is asked of it: not who serves its queue, nor what its budget is."""
    job = job_in(state, max_attempts=1, task="no.such.task")
    QueueFactory(name="default", paused=True)
    (answer,) = answers(job).values()
    ended = at(job.finished_at)
    assert answer.code == "finished"
    assert answer.text == f"It is {state} since {ended}."
    assert answer.evidence == {"finished_at": ended}


@pytest.mark.parametrize("state", ["waiting", "scheduled"])
def test_queue_paused(alias, state):
    queue = QueueFactory(name="mail", paused=True)
    QueueFactory(name="default", paused=True)
    QueueFactory(name="open")
    answer = answers(job_in(state, queue="mail"))["queue-paused"]
    assert answer.text == f"Its queue, mail, is paused since {at(queue.paused_at)}."
    assert answer.evidence == {"paused_at": at(queue.paused_at)}
    for queue in ("open", "without-a-row"):
        assert "queue-paused" not in answers(job_in(state, queue=queue))


def test_pause_of_its_queue_does_not_concern_a_job_that_runs(alias):
    QueueFactory(name="default", paused=True)
    assert "queue-paused" not in answers(job_in("running"))


@pytest.mark.parametrize("state", ["waiting", "scheduled"])
def test_not_due(alias, state):
    """Also a job that is waiting: it was edited."""
    due = db.now(alias) + 90 * MINUTE
    answer = answers(job_in(state, run_after=due))["not-due"]
    assert answer.text == f"It is not due before {at(due)}, in 1:30:00."
    assert answer.evidence == {"run_after": at(due)}


def test_due_and_not_promoted(alias):
    """A scheduled job becomes a waiting one when somebody looks."""
    due = db.now(alias) - MINUTE
    job = job_in("scheduled", run_after=due)
    answer = answers(job)["not-promoted"]
    assert answer.text == (
        "It is due, and will be waiting as soon as a worker of its queue or a sweep looks."
    )
    assert answer.evidence == {"run_after": at(due)}
    sweep_stale_jobs()
    assert not {"not-promoted", "not-due"} & set(answers(job))


def test_no_worker(alias):
    """Neither one of another queue, nor one that left, died, or has not been heard of."""
    other = WorkerFactory(queues=["mail", "post"])
    silent = WorkerFactory(silent=True)
    WorkerFactory(dead=True)
    WorkerFactory(state="stopped")
    job = job_in("waiting")
    answer = answers(job)["no-worker"]
    assert answer.text == "No live worker serves the queue default."
    assert answer.evidence == {
        "live_workers": {other.pk: ["mail", "post"]},
        "silent_workers": [silent.pk],
    }
    worker = WorkerFactory(queues=["mail", "default"])
    assert answers(job)["workers"].evidence == {"workers": [worker.pk]}
    assert "no-worker" not in answers(job)


@pytest.mark.parametrize("state", ["claimed", "running"])
def test_held(alias, state):
    """By whom, since when, and when its worker was last heard of."""
    worker = WorkerFactory()
    job = job_in(state, claimed_by=worker.pk)
    since = at(job.claimed_at if state == "claimed" else job.attempted_at)
    answer = answers(job)["held"]
    assert answer.text == f"It is {state} by {worker.pk} since {since}."
    assert answer.evidence == {
        "claimed_by": worker.pk,
        "since": since,
        "worker_state": "alive",
        "last_seen_at": at(worker.last_seen_at),
    }
    assert "stale" not in answers(job)


LOST = {
    "its worker has no row": lambda: None,
    "its worker is dead": lambda: WorkerFactory(id="w:1", dead=True),
    "its worker left": lambda: WorkerFactory(id="w:1", state="stopped"),
    "its worker is silent, and no sweep has looked": lambda: WorkerFactory(id="w:1", silent=True),
}


@pytest.mark.parametrize("loss", LOST)
def test_stale_since_its_worker_is_gone(alias, loss):
    """What is said of the next sweep is what the next sweep does."""
    worker = LOST[loss]()
    jobs = [job_in(state, claimed_by="w:1") for state in ("claimed", "running")]
    for job in jobs:
        found = answers(job)
        assert found["held"].evidence["worker_state"] == (worker and worker.state)
        assert found["stale"].text == "The next sweep takes it: its worker w:1 is gone."
        assert found["stale"].evidence == {"reason": "its worker w:1 is gone"}
    assert sweep_stale_jobs().taken == 2
    assert not any("stale" in answers(job) for job in jobs)


def test_stale_since_it_is_overdue(alias):
    """Its worker lives: a claim that isn't started, and a run past its timeout and the grace."""
    worker = WorkerFactory()
    long_ago = db.now(alias) - 60 * MINUTE
    claimed = job_in("claimed", claimed_by=worker.pk, claimed_at=long_ago)
    running = job_in("running", claimed_by=worker.pk, attempted_at=long_ago, timeout=MINUTE)
    free = job_in("running", claimed_by=worker.pk, attempted_at=long_ago)
    assert answers(claimed)["stale"].evidence == {
        "reason": f"claimed by {worker.pk} and not started in time"
    }
    assert answers(running)["stale"].evidence == {
        "reason": f"ran past its timeout of 0:01:00 on {worker.pk}"
    }
    assert "stale" not in answers(free)


def test_cancel_requested(alias):
    """As long as it runs: then it is what it is."""
    job = job_in("running")
    asked = at(coordinator.cancel(job.pk, actor="ann").cancel_requested_at)
    answer = answers(job)["cancel-requested"]
    assert answer.text == f"Cancellation was asked for on {asked}; it ends when its handler does."
    assert answer.evidence == {"cancel_requested_at": asked}
    transitions.retry(job, "no")
    assert "cancel-requested" not in answers(job)


def test_behind_others(alias):
    """Those that a worker of its queue would be given first; not itself, nor what isn't due."""
    due = db.now(alias) - MINUTE
    jobs = [job_in("waiting", run_after=due) for _ in range(3)]
    job_in("waiting", queue="mail", run_after=due)
    job_in("waiting", run_after=due + 60 * MINUTE, priority=9)
    job_in("running", run_after=due, priority=9)
    answer = answers(jobs[2])["behind"]
    assert answer.text == "2 job(s) of its queue come before it."
    assert answer.evidence == {"ahead": 2}
    coordinator.edit(jobs[2].pk, priority=1, actor="ann")
    assert "behind" not in answers(jobs[2])
    assert answers(jobs[0])["behind"].evidence == {"ahead": 1}


def test_behind_more_than_are_counted(alias, monkeypatch):
    monkeypatch.setattr(explain, "MANY", 3)
    due = db.now(alias) - MINUTE
    jobs = [job_in("waiting", run_after=due) for _ in range(6)]
    assert answers(jobs[5])["behind"].text == "3 or more job(s) of its queue come before it."
    assert answers(jobs[3])["behind"].text == "3 or more job(s) of its queue come before it."
    assert answers(jobs[2])["behind"].text == "2 job(s) of its queue come before it."


def test_job_that_is_not_due_is_behind_nobody(alias):
    """Who will be before it then can't be known."""
    JobFactory.create_batch(2)
    job = job_in("waiting", run_after=db.now(alias) + MINUTE)
    assert "behind" not in answers(job)


def test_budget(alias):
    """A running job's own attempt is among those that are used up; one that was excused isn't."""
    for state, used, says in [
        ("waiting", 2, "the next is the last"),
        ("scheduled", 4, "the next is the last"),
        ("claimed", 2, "the next is the last"),
        ("running", 3, "this is the last"),
    ]:
        answer = answers(job_in(state, attempt=used + 1, excused=1, max_attempts=3))["budget"]
        assert answer.text == f"{used} of 3 attempts are used up; {says}."
        assert answer.evidence == {"attempt": used + 1, "excused": 1, "max_attempts": 3}


def test_budget_that_is_not_short_is_not_told_of(alias):
    for state, used in [("waiting", 1), ("claimed", 1), ("running", 2)]:
        assert "budget" not in answers(job_in(state, attempt=used + 1, excused=1, max_attempts=3))


def test_budget_that_says_the_next_is_the_last_is_right(alias):
    job = job_in("waiting", attempt=2, max_attempts=3)
    assert "the next is the last" in answers(job)["budget"].text
    (running,) = claim_jobs(WorkerFactory().pk, ["default"], 1, start=True)
    assert "this is the last" in answers(job)["budget"].text
    assert transitions.retry(running, "no").state == "failed"


@pytest.mark.parametrize(
    ("task", "error"),
    [
        ("no.such.task", "ModuleNotFoundError: No module named 'no'"),
        (
            "jobqueue.testing.tasks.gone",
            'ImportError: Module "jobqueue.testing.tasks" does not define a "gone" attribute/class',
        ),
        ("broken_handlers.work", "RuntimeError: not today"),
    ],
)
def test_not_importable(alias, task, error, monkeypatch, tmp_path):
    """Here, that is: another release may have it. Whatever the import raises is an answer."""
    (tmp_path / "broken_handlers.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    answer = answers(job_in("waiting", task=task))["not-importable"]
    assert answer.text == f"Its handler can't be imported here: {error}"
    assert answer.evidence == {"task": task}


def test_last_error(alias):
    """The last one, while it isn't done; when it is, that is history."""
    job = job_in("running")
    transitions.retry(job, "first", 0)
    (again,) = claim_jobs(WorkerFactory().pk, ["default"], 1, start=True)
    transitions.retry(again, "second", 0)
    coordinator.edit(job.pk, priority=1, actor="ann", reason="not an error")
    event = JobEvent.objects.get(job=job, message="second")
    answer = answers(job)["last-error"]
    assert answer.text == f"Attempt 2 ended on {at(event.at)}: second"
    assert answer.evidence == {
        "event": event.pk,
        "kind": "retried",
        "at": at(event.at),
        "message": "second",
    }
    claim_jobs(again.claimed_by, ["default"], 1, start=True)
    assert "last-error" in answers(job)
    transitions.complete(Job.objects.get(pk=job.pk))
    assert "last-error" not in answers(job)


def test_last_error_of_a_failed_job(alias):
    job = job_in("running")
    transitions.fail(job, "for good")
    assert list(answers(job)) == ["finished", "last-error"]
    assert answers(job)["last-error"].text.endswith(": for good")


def test_last_error_of_a_job_that_was_claimed_and_never_started(alias):
    """It has used up no attempt."""
    job = job_in("claimed")
    sweep_stale_jobs()
    text = answers(job)["last-error"].text
    assert text.startswith("A claim ended on ")
    assert text.endswith(f": its worker {job.claimed_by} is gone")


def test_codes_are_fixed_words():
    """Programs know them: none goes, and a new one needs a test of its own here."""
    source = Path(explain.__file__).read_text()
    codes = set(re.findall(r'Answer\(\s*"([a-z-]+)"', source))
    assert codes == {
        *("finished", "held", "stale", "cancel-requested", "queue-paused", "not-due"),
        *("not-promoted", "workers", "no-worker", "behind", "not-importable", "budget"),
        "last-error",
    }


def test_unknown_job(alias):
    with pytest.raises(JobNotFound, match=exactly("There is no job 4711.")):
        explain.explain(4711)


def test_using_names_the_database(alias, monkeypatch):
    """It wins over the router, in every question."""
    jobs = [job_in(state) for state in ("waiting", "running", "scheduled", "failed")]
    monkeypatch.delenv(ALIAS_VARIABLE)
    for job in jobs:
        assert explain.explain(job.pk, using=alias).job_id == job.pk
    monkeypatch.setenv(ALIAS_VARIABLE, alias)


# -- The command


def run(*args, **options):
    out = StringIO()
    call_command("explain_job", *args, stdout=out, **options)
    return out.getvalue()


def test_command_prints_each_answer_with_its_evidence(alias):
    job = job_in("waiting", queue="mail")
    assert run(job.pk) == (
        f"Job {job.pk}, {TASK}, is waiting in the queue mail.\n"
        "- No live worker serves the queue mail.\n"
        "    live_workers: {}\n"
        "    silent_workers: []\n"
    )


@pytest.mark.parametrize("state", ["waiting", "scheduled", "claimed", "running", "failed"])
def test_command_prints_one_json_object_and_nothing_else(alias, state):
    WorkerFactory()
    job = job_in(state, task="no.such.task", max_attempts=1)
    assert json.loads(run(job.pk, as_json=True)) == explain.explain(job.pk).as_dict()


@pytest.mark.parametrize("job_id", [4711, 2**70])
def test_command_names_a_job_that_is_not_there(alias, job_id):
    with pytest.raises(CommandError, match=exactly(f"There is no job {job_id}.")):
        run(job_id)


def test_command_names_an_id_that_is_none(alias):
    message = "Error: argument ID: invalid int value: 'seven'"
    with pytest.raises(CommandError, match=exactly(message)):
        run("seven")


def test_command_takes_a_database(alias, monkeypatch):
    job = job_in("waiting")
    monkeypatch.delenv(ALIAS_VARIABLE)
    assert run(job.pk, database=alias).startswith(f"Job {job.pk}, ")
    monkeypatch.setenv(ALIAS_VARIABLE, alias)
    with pytest.raises(CommandError, match=r"^There is no database 'nowhere'; known: default"):
        run(job.pk, database="nowhere")
