"""The database refuses rows that no verb could have left, and answers from the right index."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from typing import Any

import pytest
from django.apps import apps
from django.db import DatabaseError, IntegrityError, connections

from jobqueue.exceptions import UnfencedWrite
from jobqueue.lifecycle import State
from jobqueue.models import Job, JobEvent, Queue, Worker
from jobqueue.testing.factories import (
    TASK,
    JobEventFactory,
    JobFactory,
    QueueFactory,
    WorkerFactory,
)
from tests.asserting import exactly, stored

CANT_SAVE = (
    "Job {} can't be saved: use a verb of jobqueue.transitions (for the job's executor) or "
    "jobqueue.coordinator (for anybody else)."
)


def sql(alias: str, statement: str) -> int:
    with connections[alias].cursor() as cursor:
        cursor.execute(statement)
        return int(cursor.rowcount)


# -- constraints


@pytest.mark.parametrize("state", State)
def test_what_the_verbs_leave_is_accepted(alias: str, state: State) -> None:
    job = JobFactory(**({} if state == State.WAITING else {state.value: True}))
    assert Job.objects.get(pk=job.pk).state == state


@pytest.mark.parametrize(
    ("state", "assignment", "constraint"),
    [
        ("waiting", "state = 'asleep'", "jobqueue_job_"),
        ("waiting", "state = ''", "jobqueue_job_"),
        ("waiting", "finished_at = run_after", "jobqueue_job_finished_at"),
        ("running", "finished_at = run_after", "jobqueue_job_finished_at"),
        ("completed", "finished_at = NULL", "jobqueue_job_finished_at"),
        ("failed", "finished_at = NULL", "jobqueue_job_finished_at"),
        ("cancelled", "finished_at = NULL", "jobqueue_job_finished_at"),
        ("waiting", "claimed_by = 'w'", "jobqueue_job_claim"),
        ("waiting", "claimed_at = run_after", "jobqueue_job_claim"),
        ("scheduled", "claimed_by = 'w', claimed_at = run_after", "jobqueue_job_claim"),
        ("claimed", "claimed_by = NULL", "jobqueue_job_claim"),
        ("claimed", "claimed_at = NULL", "jobqueue_job_claim"),
        ("running", "claimed_by = NULL", "jobqueue_job_claim"),
        ("running", "claimed_at = NULL", "jobqueue_job_claim"),
        ("running", "attempted_at = NULL", "jobqueue_job_claim"),
        ("waiting", "priority = 101", "jobqueue_job_priority"),
        ("waiting", "priority = -101", "jobqueue_job_priority"),
        ("running", "progress = 101", "jobqueue_job_progress"),
        ("running", "progress = -1", "progress"),
        ("running", "excused = attempt + 1", "jobqueue_job_excused"),
    ],
)
def test_a_row_that_no_verb_leaves_is_refused(
    alias: str, state: str, assignment: str, constraint: str
) -> None:
    """Raw SQL, so that neither Django nor the verbs stand in between."""
    job = JobFactory(**({} if state == "waiting" else {state: True}))
    before = stored(job)

    with pytest.raises(DatabaseError, match=constraint):
        sql(alias, f"UPDATE jobqueue_job SET {assignment} WHERE id = {job.pk}")

    assert stored(job) == before


def test_a_unique_key_is_unique_and_null_is_not(alias: str) -> None:
    first, second = JobFactory(unique_key="k"), JobFactory()
    JobFactory()

    with pytest.raises(IntegrityError):
        sql(alias, f"UPDATE jobqueue_job SET unique_key = 'k' WHERE id = {second.pk}")

    assert sql(alias, f"UPDATE jobqueue_job SET unique_key = NULL WHERE id = {first.pk}") == 1
    assert sql(alias, f"UPDATE jobqueue_job SET unique_key = 'k' WHERE id = {second.pk}") == 1


@pytest.mark.parametrize("other", ["K", "ḱ", "k "], ids=["case", "accent", "trailing space"])
def test_text_is_compared_as_it_is(alias: str, other: str) -> None:
    """By code points, on every engine: MariaDB's usual collation takes all of these for one."""
    JobFactory(unique_key="k", queue="k")
    JobFactory(unique_key=other, queue=other)

    assert Job.objects.filter(unique_key="k").count() == 1
    assert Job.objects.filter(queue=other).count() == 1


# -- one door


def test_an_existing_job_can_t_be_saved(alias: str) -> None:
    job = Job.objects.get(pk=JobFactory(running=True).pk)
    before = stored(job)
    job.state = State.COMPLETED

    for save in (
        job.save,
        lambda: job.save(update_fields=["state"]),
        lambda: job.save(force_update=True),
        lambda: asyncio.run(job.asave()),
        lambda: Job.objects.update_or_create(pk=job.pk, defaults={"priority": 3}),
    ):
        with pytest.raises(UnfencedWrite, match=exactly(CANT_SAVE.format(job.pk))):
            save()

    assert stored(job) == before


def test_nor_can_one_that_was_just_born(alias: str) -> None:
    job = JobFactory()
    with pytest.raises(UnfencedWrite, match=exactly(CANT_SAVE.format(job.pk))):
        job.save()


def test_a_copy_with_an_id_never_overwrites_the_row(alias: str) -> None:
    job = JobFactory(running=True)
    before = stored(job)
    with pytest.raises(IntegrityError):
        Job(pk=job.pk, task=TASK).save()
    assert stored(job) == before


def test_a_job_can_t_be_deleted_by_its_model(alias: str) -> None:
    job = JobFactory(completed=True)
    for delete in (job.delete, lambda: asyncio.run(job.adelete())):
        message = (
            f"Job {job.pk} can't be deleted like that: use jobqueue.coordinator.delete "
            "or jobqueue.sweep.prune_jobs."
        )
        with pytest.raises(UnfencedWrite, match=exactly(message)):
            delete()
    assert Job.objects.filter(pk=job.pk).exists()


# -- indexes

JOB_INDEXES = {
    "claimable": ("queue -priority run_after id", "waiting"),
    "due": ("run_after", "scheduled"),
    "held": ("id", "claimed running"),
    "finished": ("state finished_at", "cancelled completed failed"),
}
INDEX_SQL = {
    "sqlite": "SELECT sql FROM sqlite_master WHERE name = '{}'",
    "postgresql": "SELECT indexdef FROM pg_indexes WHERE indexname = '{}'",
}


def indexes(alias: str, model: Any) -> dict[str, Any]:
    connection = connections[alias]
    with connection.cursor() as cursor:
        found = connection.introspection.get_constraints(cursor, model._meta.db_table)
    return {name: index for name, index in found.items() if index["index"] or index["unique"]}


def columns(index: dict[str, Any]) -> list[str]:
    orders = index.get("orders") or ["ASC"] * len(index["columns"])
    return [
        f"-{column}" if order == "DESC" else column
        for column, order in zip(index["columns"], orders, strict=True)
    ]


def states_of(alias: str, name: str) -> str:
    """Return the states that an index is restricted to, as the database remembers it."""
    with connections[alias].cursor() as cursor:
        cursor.execute(INDEX_SQL[connections[alias].vendor].format(name))
        _, _, condition = cursor.fetchone()[0].partition(" WHERE ")
    return " ".join(re.findall(r"'(\w+)'", condition))


@pytest.mark.parametrize("name", JOB_INDEXES)
def test_an_index_of_some_states(alias: str, name: str) -> None:
    """Partial where the engine has partial indexes, whole with ``state`` in front elsewhere."""
    wanted, states = JOB_INDEXES[name]
    index = indexes(alias, Job)[f"jobqueue_job_{name}"]
    if connections[alias].features.supports_partial_indexes:
        assert columns(index) == wanted.split()
        assert states_of(alias, f"jobqueue_job_{name}") == states
    else:
        assert columns(index) == ["state", *wanted.replace("state ", "").split()]


def test_the_unique_index_is_without_nulls_where_it_can_be(alias: str) -> None:
    index = indexes(alias, Job)["jobqueue_job_unique_key"]
    assert index["unique"]
    assert index["columns"] == ["unique_key"]
    if connections[alias].features.supports_partial_indexes:
        with connections[alias].cursor() as cursor:
            vendor = connections[alias].vendor
            cursor.execute(INDEX_SQL[vendor].format("jobqueue_job_unique_key"))
            assert "IS NOT NULL" in cursor.fetchone()[0]


def test_there_are_no_other_indexes_on_jobs(alias: str) -> None:
    """Each costs every write; and none may lead with a column that rescuers compare."""
    names = {name for name, index in indexes(alias, Job).items() if not index["primary_key"]}
    assert names == {"jobqueue_job_unique_key", *(f"jobqueue_job_{name}" for name in JOB_INDEXES)}
    first = {index["columns"][0] for index in indexes(alias, Job).values()}
    assert first.isdisjoint({"claimed_by", "claimed_at", "attempted_at", "attempt", "version"})


def test_no_model_makes_django_warn_on_any_engine(alias: str) -> None:
    """W037 and W036: a condition that MariaDB would ignore, and an index that isn't there."""
    for model in apps.get_app_config("jobqueue").get_models():
        assert model.check(databases=[alias]) == []


# -- the rest of a model


def test_rows_are_named_for_people(alias: str) -> None:
    job = JobFactory()
    assert str(job) == f"{TASK} #{job.pk}"
    assert str(JobEventFactory()) == "retried: ValueError: no"
    assert str(JobEventFactory(message="")) == "retried"
    assert str(WorkerFactory(id="host:1:ab")) == "host:1:ab"
    assert str(QueueFactory(name="mail")) == "mail"


def test_the_budget_counts_what_is_not_excused() -> None:
    job = Job(attempt=5, excused=2, max_attempts=4)
    assert (job.failures, job.is_budget_spent) == (3, False)
    job.excused = 1
    assert (job.failures, job.is_budget_spent) == (4, True)


def test_the_fingerprint_is_the_row_s(alias: str) -> None:
    job = Job.objects.get(pk=JobFactory(running=True).pk)
    assert job.fingerprint.as_dict() == {
        "state": "running",
        "attempt": 1,
        "claimed_by": job.claimed_by,
        "claimed_at": job.claimed_at.isoformat(),
        "attempted_at": job.attempted_at.isoformat(),
        "version": 2,
    }


def test_times_keep_their_microseconds(alias: str) -> None:
    """collectiveidea/delayed_job_active_record#95: what is written can be compared with."""
    job = JobFactory(running=True)
    assert Job.objects.filter(claimed_at=job.claimed_at, attempted_at=job.attempted_at).exists()
    assert stored(job)["claimed_at"] == job.claimed_at


def test_defaults_are_the_database_s(alias: str) -> None:
    """Times that nobody gave are the database's, and are known to whoever inserted them."""
    job = Job.objects.create(task=TASK)
    event = JobEvent.objects.create(job=job, kind="failed", attempt=0, version=0)
    worker = Worker.objects.create(id="w", host="h", pid=1, lease=timedelta(seconds=30))
    queue = Queue.objects.create(name="q")
    assert stored(job)["run_after"] == stored(job)["enqueued_at"] == job.run_after
    assert Worker.objects.get().last_seen_at == worker.last_seen_at
    assert JobEvent.objects.get().at == event.at
    assert queue.paused_at is None
