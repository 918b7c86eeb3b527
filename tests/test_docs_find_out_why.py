"""What the operator's page shows is what the commands print, on each engine."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import call_command

from jobqueue import broker, coordinator, db, transitions
from jobqueue.exceptions import TransitionConflict
from jobqueue.models import Job
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.testing.factories import JobEventFactory, JobFactory, QueueFactory, WorkerFactory
from tests.documentation import DOCS, codes, importable, rows, sections

PAGE = DOCS / "how-to/find-out-why.md"
TASK = "shop.jobs.send_receipt"
HANDLER = "# shop/jobs.py\ndef send_receipt(order_id): ...\n"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)

# What is another one each time, and so isn't compared.
VARIABLE = {
    r"\d{4}-\d\d-\d\d.\d\d:\d\d:\d\d(\.\d+)?\+00:00": "<time>",
    r"[\w-]+:\d+:[0-9a-f]{8}": "<worker>",
    r"sweep \S+": "<sweep>",
    r"\b[Jj]ob \d+": "<job>",
    r"explain_job \d+": "explain_job <job>",
    r"(?<=event: )\d+": "<event>",
    r"in \d+:\d\d:\d\d": "<wait>",
    r"the oldest for \d+ s": "<oldest>",
}


def plain(text: str) -> str:
    """Return ``text`` without what differs from one time to the next."""
    for pattern, word in VARIABLE.items():
        text = re.sub(pattern, word, text)
    return text


def busy_hour(alias: str) -> None:
    """A queue that works, one that is paused, and some trouble."""
    now = db.now(alias)
    shop, _ = WorkerFactory(queues=["default", "mail"]), WorkerFactory(silent=True)
    QueueFactory(name="mail", paused=True)
    due = {"run_after": now - timedelta(minutes=30), "task": TASK}
    JobFactory.create_batch(9, **due)
    JobFactory.create_batch(12, queue="mail", **due)
    JobFactory.create_batch(4, running=True, claimed_by=shop.pk, task=TASK)
    JobFactory.create_batch(3, scheduled=True, task=TASK)
    JobFactory.create_batch(31, completed=True, task=TASK)
    failed = JobFactory(failed=True, task=TASK)
    for kind in ("retried", "retried", "failed"):
        JobEventFactory(job=failed, kind=kind)
    for job in JobFactory.create_batch(2, completed=True, task=TASK):
        late = Job(pk=job.pk, task=TASK, state="running", claimed_by=shop.pk, attempt=1)
        with pytest.raises(TransitionConflict):
            transitions.complete(late, using=alias)


def nobody_serves_it(alias: str) -> Job:
    """A job of a queue whose only worker is silent."""
    WorkerFactory(queues=["default"])
    WorkerFactory(queues=["default", "mail"], silent=True)
    return JobFactory(queue="mail", task=TASK)


def its_worker_is_gone(alias: str) -> Job:
    """A job that runs on a worker that was killed, and that no sweep has taken yet."""
    worker = WorkerFactory(queues=["mail"], silent=True)
    return JobFactory(running=True, claimed_by=worker.pk, queue="mail", task=TASK)


def it_failed_before(alias: str) -> Job:
    """A job that waits for its last attempt."""
    worker = WorkerFactory(queues=["mail"])
    job = JobFactory(running=True, claimed_by=worker.pk, queue="mail", task=TASK, max_attempts=2)
    transitions.retry(job, "ConnectionError: the bank does not answer", 3600)
    return job


SCENES: dict[str, Callable[[str], Job | None]] = {
    "Is anything running at all?": busy_hour,
    "Nobody serves its queue": nobody_serves_it,
    "Its worker is gone": its_worker_is_gone,
    "It has failed before": it_failed_before,
}


@pytest.mark.parametrize("heading", SCENES)
def test_output_is_what_the_page_shows(alias: str, heading: str, tmp_path: Path) -> None:
    """Word for word, but for times, ids and names of workers."""
    job = SCENES[heading](alias)
    block = dict(FENCE.findall(sections(PAGE)[heading]))
    command = plain(block["console"]).removeprefix("python manage.py ").strip()
    words = [str(job.pk) if job and word == "<job>" else word for word in shlex.split(command)]
    out = StringIO()
    with importable([HANDLER], tmp_path):
        call_command(*words, stdout=out)
    assert plain(out.getvalue()) == plain(block["text"])


def test_the_line_in_the_log_is_what_the_page_shows(
    alias: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A frozen worker reports after a sweep has given its job to another one."""
    frozen = WorkerFactory(silent=True)
    job = JobFactory(running=True, version=1, claimed_by=frozen.pk, backoff=0)
    caplog.set_level(logging.WARNING, logger="jobqueue")
    sweep_stale_jobs()
    (again,) = broker.claim(WorkerFactory().pk, limit=1)
    transitions.complete(again)
    with pytest.raises(TransitionConflict):
        transitions.complete(job)
    assert [event.kind for event in job.events.all()] == ["rescued", "conflict"]
    shown = dict(FENCE.findall(sections(PAGE)["Refused writes"]))["text"]
    assert plain(caplog.messages[-1]) == plain(shown).strip()
    assert caplog.records[-1].levelname == "WARNING"


LATE: dict[str, Callable[[Job], object]] = {
    "start": transitions.start,
    "progress": lambda job: transitions.record_progress(job, 50),
    "checkpoint": lambda job: transitions.checkpoint(job, 1),
    "request cancel": lambda job: transitions.request_cancel(job, actor="ann"),
    "transition to ...": lambda job: coordinator.transition(
        job.pk, "waiting", actor="ann", expected_version=0
    ),
    **{
        name: getattr(transitions, name)
        for name in ("complete", "fail", "retry", "release", "cancel")
    },
    "snooze": lambda job: transitions.snooze(job, 60),
}


def test_verbs_of_refused_writes_are_those_of_the_table(alias: str) -> None:
    """What somebody reads as *wanted* can be looked up."""
    shown = set().union(*(codes(row["wanted"]) for row in rows("how-to/find-out-why.md", "wanted")))
    assert shown == {"hold", *LATE}
    for verb, late in LATE.items():
        trait = "claimed" if verb == "start" else "running"
        job = JobFactory(**{trait: True})
        coordinator.cancel(job.pk, force=True, actor="bob")
        with pytest.raises(TransitionConflict) as refused:
            late(job)
        assert str(refused.value.verb) == verb.replace("...", "waiting")


def test_every_text_block_is_compared() -> None:
    """What the page shows and no test knows would go stale."""
    shown = {name for name, text in sections(PAGE).items() if "```text" in text}
    assert shown == {*SCENES, "Refused writes"}
