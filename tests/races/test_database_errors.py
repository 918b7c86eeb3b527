"""Database errors are not conflicts: genuine ones come out, passing ones are tried again."""

from __future__ import annotations

import re
import threading

import pytest
from django.db import DataError, OperationalError, connections, transaction

from jobqueue import broker, db, signals, transitions
from jobqueue.claim import claim_jobs
from jobqueue.lifecycle import Completed
from jobqueue.models import Job
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.testing.factories import JobFactory, WorkerFactory
from tests.asserting import stubborn
from tests.helpers import (
    TIMEOUT,
    engine,
    other_connection,
    pause_at,
    run_in_thread,
    statement,
    use_connection,
    wait_until,
    wait_until_blocked,
)
from tests.races.scenes import (
    ON_RUNNING,
    events,
    failing,
    hearing,
    job_in,
    lock,
    noticing_errors,
    row,
    settle_all,
    update_of_job,
)

GONE = OperationalError("server closed the connection unexpectedly")
TOO_LONG = DataError("value too long")


def any_update(sql, params):
    return update_of_job(sql)


def updates_of(*jobs):
    """Match updates of these jobs' rows, alone or among others."""
    ids = {job.pk for job in jobs}

    def names_one(params):
        batches = (p for p in params if isinstance(p, str) and p.startswith("{"))
        named = {int(word) for batch in batches for word in re.findall(r"\d+", batch)}
        return bool(ids & {*named, *(p for p in params if isinstance(p, int))})

    return lambda sql, params: update_of_job(sql) and names_one(params)


@pytest.mark.parametrize("error", [GONE, TOO_LONG], ids=["lost connection", "bad data"])
@pytest.mark.parametrize("verb", ON_RUNNING)
def test_genuine_error_in_a_settle_comes_out(alias, verb, error):
    """sidequest#208: it is no conflict, leaves no event and no signal; the next try may do."""
    job = job_in("running")
    before = row(job)
    with (
        hearing(signals.job_transitioned) as heard,
        hearing(signals.write_refused) as refused,
        failing(alias, any_update, error) as met,
        pytest.raises(type(error)) as caught,
    ):
        ON_RUNNING[verb](job)
    assert caught.value is error
    assert len(met) == 1  # tried once: it will not pass by itself
    assert (row(job), events(job), heard, refused) == (before, [], [], [])
    ON_RUNNING[verb](job)


def test_error_in_a_batch_writes_none_of_it(alias):
    """All or nothing, so that the same batch can be written again."""
    jobs = JobFactory.create_batch(3, running=True)
    before = [row(job) for job in jobs]
    with failing(alias, updates_of(jobs[2]), GONE), pytest.raises(OperationalError):
        settle_all(jobs, Completed())
    assert [row(job) for job in jobs] == before
    assert settle_all(jobs, Completed()) == ["applied"] * 3


def test_one_rows_error_in_a_sweep(alias):
    """The others are done, the error is counted and told, and the next sweep tries again."""
    jobs = JobFactory.create_batch(5, running=True)
    bad = jobs[2]
    before = row(bad)
    with (
        hearing(signals.sweep_failed) as heard,
        failing(alias, updates_of(bad), TOO_LONG),
    ):
        report = sweep_stale_jobs()
    assert (report.examined, report.retried, report.errors) == (5, 4, 1)
    assert [(told["job_id"], told["error"]) for told in heard] == [(bad.pk, TOO_LONG)]
    assert (row(bad), events(bad)) == (before, [])
    assert sweep_stale_jobs().retried == 1


@pytest.mark.parametrize("state", ["claimed", "running"])
def test_what_was_written_before_an_error_is_counted_once(alias, state):
    """The others, which another statement writes, are no conflicts when each is tried again."""
    others = JobFactory.create_batch(3, running=True)
    asked = {"cancel_requested_at": db.now(alias)} if state == "running" else {}
    bad = job_in(state, **asked)
    with stubborn(alias, bad):
        report = sweep_stale_jobs()
    assert (report.retried, report.conflicts, report.errors) == (3, 0, 1)
    assert {row(job)["version"] - job.version for job in others} == {1}
    assert row(bad)["version"] == bad.version


def test_error_at_every_row_comes_out_of_the_sweep(alias):
    """Nothing worked, so it is not the jobs' fault."""
    jobs = JobFactory.create_batch(3, running=True)
    before = [row(job) for job in jobs]
    with failing(alias, any_update, TOO_LONG), pytest.raises(DataError) as caught:
        sweep_stale_jobs()
    assert caught.value is TOO_LONG
    assert [row(job) for job in jobs] == before


@pytest.mark.parametrize("table", ["jobqueue_worker", "jobqueue_job"])
def test_error_in_the_sweeps_look_comes_out(alias, table):
    job_in("running")
    look = statement("SELECT", table)
    with failing(alias, lambda sql, params: look(sql), GONE), pytest.raises(OperationalError):
        sweep_stale_jobs()


def test_sweep_in_a_callers_transaction_stops_at_the_first_error(alias):
    """After it the transaction can't be used, so nothing is tried row by row."""
    jobs = JobFactory.create_batch(3, running=True)
    with (
        failing(alias, updates_of(jobs[1]), TOO_LONG) as met,
        pytest.raises(DataError),
        transaction.atomic(using=alias),
    ):
        sweep_stale_jobs()
    assert len(met) == 1
    assert {row(job)["state"] for job in jobs} == {"running"}


@pytest.mark.parametrize("alias", [engine("postgresql"), engine("mariadb")], indirect=True)
def test_deadlock_is_tried_again(alias):
    """A real one, of which the batch is the victim: it is written once the other is through."""
    first, second = JobFactory.create_batch(2, running=True)

    def settle():
        with noticing_errors(alias) as met:
            return settle_all([first, second], Completed(1)), met

    locked = threading.Event()

    def lock_crosswise():
        with transaction.atomic(using=alias):
            if alias == "postgresql":  # the victim is whoever looks first why it waits
                with connections[alias].cursor() as cursor:
                    cursor.execute("SET LOCAL deadlock_timeout = '60s'")
            else:  # whoever has written less
                JobFactory.create_batch(30, queue="elsewhere")
            lock(second)
            locked.set()
            assert waiting.wait(TIMEOUT)
            lock(first)

    waiting = threading.Event()
    with hearing(signals.write_refused) as refused:
        other = run_in_thread(lock_crosswise)
        assert locked.wait(TIMEOUT)
        batch = run_in_thread(settle)
        wait_until_blocked(alias)
        waiting.set()
        became, (error,) = batch.result()
        other.result()
    assert "deadlock" in str(error).lower()
    assert became == ["applied", "applied"]
    assert refused == []
    assert [row(job)["version"] for job in (first, second)] == [3, 3]


@pytest.mark.parametrize("alias", [engine("postgresql"), engine("mariadb")], indirect=True)
def test_two_batches_never_wait_for_each_other_crosswise(alias):
    """Rows are written in the order of their ids, whatever the order of the outcomes."""
    first, second = JobFactory.create_batch(2, running=True)

    def settle(*jobs):
        with noticing_errors(alias) as met:
            return settle_all(jobs, Completed(1)), met

    with pause_at(alias, update_of_job, after=True) as pause:
        one = run_in_thread(settle, second, first)
        pause.wait_until_reached()
        other = run_in_thread(settle, first, second)
        wait_until_blocked(alias)
        pause.release()
        assert one.result() == (["applied", "applied"], [])
    assert other.result() == (["already applied", "already applied"], [])


CALLS = {
    "settle": lambda worker, job: transitions.complete(job),
    "start": lambda worker, job: transitions.start(job),
    "progress": lambda worker, job: transitions.record_progress(job, 5),
    "claim": lambda worker, job: claim_jobs(worker.pk, ["default"], 1),
    "heartbeat": lambda worker, job: broker.heartbeat(worker.pk),
    "sweep": lambda worker, job: sweep_stale_jobs(),
}


@pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)
@pytest.mark.parametrize("name", CALLS)
def test_locked_database_is_tried_again(alias, name):
    """django-q2#144: a real 'database is locked', from a connection that does not wait at all."""
    worker = WorkerFactory()
    state = {"start": "claimed", "claim": "waiting"}.get(name, "running")
    job = job_in(state)
    met = []

    def call():
        with (
            other_connection(alias, timeout=0) as impatient,
            use_connection(impatient),
            noticing_errors(alias) as errors,
        ):
            met.append(errors)
            CALLS[name](worker, job)

    with transaction.atomic(using=alias):
        running = run_in_thread(call)
        wait_until(lambda: met and met[0], "nothing found the database locked")
        assert not running.done
    running.result()
    assert {str(error) for error in met[0]} == {"database is locked"}


@pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)
def test_database_that_stays_locked_comes_out(alias):
    """After the last try the caller is told; nothing was written."""
    job = job_in("running")
    with (
        other_connection(alias, timeout=0) as impatient,
        transaction.atomic(using=alias),
        use_connection(impatient),
        pytest.raises(OperationalError, match="database is locked"),
    ):
        transitions.complete(job)
    assert row(job)["state"] == "running"


def test_passing_error_in_a_callers_transaction_comes_out_at_once(alias):
    """solid_queue#99: only the whole of the caller's transaction can be run again."""
    job = job_in("running")
    passing = OperationalError(1213, "Deadlock found when trying to get lock")
    with (
        failing(alias, any_update, passing) as met,
        pytest.raises(OperationalError),
        transaction.atomic(using=alias),
    ):
        transitions.complete(job)
    assert len(met) == 1
    assert Job.objects.get().state == "running"


def test_passing_error_is_tried_a_few_times(alias):
    """Two deadlocks in a row are nothing that an executor should hear of."""
    job = job_in("running")
    passing = OperationalError(1213, "Deadlock found when trying to get lock")
    with failing(alias, any_update, passing, times=2) as met:
        assert transitions.complete(job).state == "completed"
    assert len(met) == 2
    assert row(job)["version"] == job.version + 1
