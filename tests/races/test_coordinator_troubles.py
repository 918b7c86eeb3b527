"""What a coordinator does when it can't have its way: tries again, gives up, and says why.

Nobody waits here: the pauses between tries are where the other side acts.
"""

from __future__ import annotations

import logging
import re
import threading
import time

import pytest
from django.db import DatabaseError, connections, transaction
from django.db.backends.postgresql.psycopg_any import IsolationLevel

from jobqueue import coordinator, db, signals, transitions
from jobqueue.exceptions import (
    JobBusy,
    JobQueueError,
    TransitionConflict,
    TransitionNotAllowed,
)
from jobqueue.ledger import refused_writes
from jobqueue.models import Job
from jobqueue.testing.factories import TASK
from tests.asserting import exactly
from tests.coordinating import (
    CALLS,
    FROM,
    WANTED,
    assert_growing,
    at_fenced,
    history,
    impatient,
    meddling,
    pausing,
    rival,
)
from tests.helpers import TIMEOUT, engine, other_connection, run_in_thread, use_connection
from tests.races.scenes import events, hearing, job_in, kinds, row, write_raw

with_row_locks = pytest.mark.parametrize(
    "alias", [engine("postgresql"), engine("mariadb")], indirect=True
)
BUSY = {
    "sqlite": "database is locked",
    "postgresql": 'could not obtain lock on row in relation "jobqueue_job"',
    "mysql": "Lock wait timeout exceeded; try restarting transaction",
}


def busy_message(job, tries, reason, holder):
    return f"Job {job.pk} was busy in each of {tries} tries: {reason}. Look for {holder}."


# -- Conflicts: somebody outside the rules changes the row under our hands


@pytest.mark.parametrize("verb", CALLS)
def test_conflict_is_reported_after_the_fourth_failure_exactly(alias, verb, caplog):
    """After growing waits; and it leaves one event, one count, one signal and one line."""
    job = job_in(FROM[verb])
    before, count = row(job), refused_writes()
    caplog.set_level(logging.INFO, logger="jobqueue")
    with (
        pausing() as waits,
        meddling(job, attempt=9),
        hearing(signals.write_refused) as heard,
        pytest.raises(TransitionConflict) as refused,
    ):
        CALLS[verb](job, actor="ann")
    assert refused.value.tries == 4
    assert_growing(waits, 3)
    assert row(job) == before
    # What was met in the transaction that is undone, not what the row is by now.
    met = dict(job.fingerprint.as_dict(), attempt=9)
    assert refused.value.found.as_dict() == met
    (event,) = history(job)
    assert (event["kind"], event["actor"], event["version"]) == ("conflict", "ann", job.version)
    assert event["detail"] == {
        "wanted": WANTED[verb],
        "expected": job.fingerprint.as_dict(),
        "found": met,
    }
    assert refused_writes() - count == {(TASK, WANTED[verb]): 1}
    assert [(told["job"].pk, told["error"], told["actor"]) for told in heard] == [
        (job.pk, refused.value, "ann")
    ]
    assert heard[0]["job"].fingerprint == job.fingerprint
    assert caplog.record_tuples == [
        ("jobqueue", logging.WARNING, f"Refused a write of ann: {refused.value}")
    ]


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_conflict_that_passes_is_nobodys_business(alias, failures):
    """Each try reads the row anew, and a conflict that was got over leaves no trace."""
    job = job_in("running")
    count = refused_writes()
    with pausing() as waits, meddling(job, times=failures, attempt=9):
        coordinator.complete(job.pk, "r", actor="ann")
    assert_growing(waits, failures)
    stored = Job.objects.get(pk=job.pk)
    assert (stored.result, stored.attempt, stored.version) == ("r", 1, job.version + 1)
    assert (kinds(job), refused_writes() - count) == (["completed"], {})


@pytest.mark.parametrize("lock", [True, False], ids=["with a lock", "without"])
def test_conflict_at_the_expected_version_is_the_callers_to_decide(alias, lock):
    """SamSaffron/term-llm#918: the decision was made on what is no more."""
    job = job_in("running")
    seen = {"expected_version": job.version, "lock": lock}
    with (
        pausing() as waits,
        meddling(job, attempt=9) as met,
        pytest.raises(TransitionConflict) as refused,
    ):
        coordinator.complete(job.pk, "r", actor="ann", **seen)
    assert (refused.value.tries, len(met), waits) == (1, 1, [])
    assert kinds(job) == ["conflict"]


def test_conflict_in_a_callers_transaction_leaves_the_rest_of_it(alias):
    job, other = job_in("running"), job_in("waiting")
    with transaction.atomic(using=alias), pausing():
        coordinator.edit(other.pk, priority=1, actor="ann")
        with meddling(job, attempt=9), pytest.raises(TransitionConflict) as refused:
            coordinator.complete(job.pk, actor="ann")
        coordinator.edit(other.pk, priority=2, actor="ann")
    assert (refused.value.tries, row(job)["state"]) == (4, "running")
    assert (row(other)["priority"], kinds(other)) == (2, ["edited", "edited"])
    assert kinds(job) == ["conflict"]


def test_error_that_will_not_pass_is_not_tried_again(alias):
    """The database's own error reaches the caller after one try; the row stays."""
    job = job_in("running")
    before = row(job)

    def break_down():
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT 1 FROM nowhere")

    with (
        pausing() as waits,
        at_fenced(break_down) as met,
        pytest.raises(DatabaseError, match="nowhere"),
    ):
        coordinator.complete(job.pk, actor="ann")
    assert (len(met), waits) == (1, [])
    assert (row(job), events(job)) == (before, [])


# -- Somebody else holds the row


@pytest.mark.parametrize("passes_at", [1, 2, 3])
def test_lock_that_is_given_up_in_time_is_got(alias, passes_at):
    job = job_in("running")
    with rival(alias) as other, pausing(other.commit, at=passes_at) as waits, impatient(alias):
        other.lock(job)
        coordinator.complete(job.pk, "r", actor="ann")
    assert_growing(waits, passes_at)
    assert (row(job)["result"], kinds(job)) == ("r", ["completed"])


@pytest.mark.parametrize("verb", CALLS)
def test_lock_that_is_not_given_up_is_reported_after_the_fourth_try(alias, verb):
    """Nobody hangs behind a long transaction; nothing is written, and it isn't a conflict."""
    job = job_in(FROM[verb])
    before = row(job)
    with rival(alias) as other, pausing() as waits, impatient(alias):
        other.lock(job)
        with pytest.raises(JobBusy) as refused:
            CALLS[verb](job, actor="ann")
    assert refused.value.tries == 4
    assert isinstance(refused.value.__cause__, DatabaseError)
    assert_growing(waits, 3)
    assert str(refused.value).startswith(
        f"Job {job.pk} was busy in each of 4 tries: {BUSY[other.connection.vendor]}."
    )
    assert (row(job), events(job)) == (before, [])


@pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)
def test_who_to_look_for_on_sqlite(alias):
    job = job_in("running")
    holder = "another process that is writing to the database file"
    with rival(alias), pausing(), impatient(alias):
        message = busy_message(job, 4, BUSY["sqlite"], holder)
        with pytest.raises(JobBusy, match=exactly(message)) as refused:
            coordinator.cancel(job.pk, actor="ann")
    assert refused.value.holder == holder


HOLDS = {
    "a lock": lambda other, job: other.lock(job),
    "a raw write": lambda other, job: other.do(write_raw, job, progress=1),
    "a write of a verb": lambda other, job: other.do(transitions.complete, job),
    "a coordinator's write": lambda other, job: other.do(coordinator.release, job.pk, actor="bob"),
}


@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("alias", [engine("postgresql")], indirect=True)
def test_who_to_look_for_on_postgresql(alias, hold):
    """The session's pid, or those of the few that it can be when it used a savepoint."""
    job = job_in("running")
    bystander = job_in("running")
    with rival(alias) as unconcerned, rival(alias) as other, pausing():
        unconcerned.lock(bystander)
        HOLDS[hold](other, job)
        with pytest.raises(JobBusy) as refused:
            coordinator.cancel(job.pk, actor="ann")
        session, holder = str(other.session()), refused.value.holder
    assert str(refused.value) == busy_message(job, 4, BUSY["postgresql"], holder)
    named = re.findall(r"session (\d+) \([^()]*idle in transaction since [-0-9:.+ ]+\)", holder)
    if hold in ("a lock", "a raw write"):
        assert named == [session]
    else:  # A savepoint that is released is known to its own session alone.
        assert named.count(session) == 1


@pytest.mark.parametrize("hold", ["a lock", "a coordinator's write"])
@pytest.mark.parametrize("alias", [engine("mariadb")], indirect=True)
def test_who_to_look_for_on_mariadb(alias, hold):
    """The oldest transaction's thread: InnoDB doesn't tell whose lock it is.

    With real pauses: its list of transactions is not made anew if it was read 100 ms ago.
    """
    job = job_in("running")
    with rival(alias) as other:
        HOLDS[hold](other, job)
        with pytest.raises(JobBusy) as refused:
            coordinator.cancel(job.pk, actor="ann")
        thread = other.session()
    wanted = rf"thread {thread}, the oldest open transaction, since [-0-9: ]+"
    assert re.fullmatch(wanted, refused.value.holder)
    assert str(refused.value) == busy_message(job, 4, BUSY["mysql"], refused.value.holder)


@with_row_locks
def test_lock_refused_in_a_callers_transaction_leaves_the_rest_of_it(alias):
    """solid_queue#99: the savepoint takes the error, also while the holder is looked for."""
    job, mine = job_in("running"), job_in("waiting")
    with rival(alias) as other, pausing() as waits:
        other.lock(job)
        with transaction.atomic(using=alias):
            coordinator.edit(mine.pk, priority=1, actor="ann")
            with pytest.raises(JobBusy) as refused:
                coordinator.release(job.pk, actor="ann")
            coordinator.edit(mine.pk, priority=2, actor="ann")
        if alias == "postgresql":  # MariaDB's list may be that of the test before.
            assert refused.value.holder.startswith(f"session {other.session()} (")
    assert (refused.value.tries, len(waits)) == (4, 3)
    assert (row(job)["state"], row(mine)["priority"]) == ("running", 2)


@with_row_locks
def test_lock_given_up_in_time_is_got_in_a_callers_transaction(alias):
    job, mine = job_in("running"), job_in("waiting")
    with rival(alias) as other, pausing(other.commit) as waits:
        other.lock(job)
        with transaction.atomic(using=alias):
            coordinator.edit(mine.pk, priority=1, actor="ann")
            coordinator.release(job.pk, actor="ann")
    assert (row(job)["state"], row(mine)["priority"], len(waits)) == ("waiting", 1, 1)


LOCK_TIMEOUTS = {
    "postgresql": "SET lock_timeout = '50ms'",
    "mysql": "SET SESSION innodb_lock_wait_timeout = 1",
}


def test_optimistic_writer_is_refused_once(alias):
    """It takes no lock to look; its write is refused as the database's own timeout has it."""
    job = job_in("running")
    with rival(alias) as other, pausing() as waits, impatient(alias) as mine:
        other.lock(job)
        if mine.vendor in LOCK_TIMEOUTS:
            with mine.cursor() as cursor:
                cursor.execute(LOCK_TIMEOUTS[mine.vendor])
        with pytest.raises(JobBusy) as refused:
            coordinator.complete(job.pk, actor="ann", expected_version=2, lock=False)
    assert (refused.value.tries, waits) == (1, [])
    assert (row(job)["state"], events(job)) == ("running", [])


# -- Two jobs, locked crosswise


@with_row_locks
def test_two_who_want_two_jobs_crosswise_are_not_deadlocked(alias):
    """solid_queue#240: the second is refused, lets go, and has its way after the first."""
    one, two = job_in("waiting"), job_in("waiting")

    def second():
        with transaction.atomic(using=alias):
            coordinator.edit(two.pk, queue="mail", actor="bob")
            coordinator.edit(one.pk, queue="mail", actor="bob")

    with rival(alias) as first, pausing() as waits:
        first.do(coordinator.edit, one.pk, priority=1, actor="ann")
        with pytest.raises(JobBusy):
            second()
        assert row(two)["queue"] == "default"
        first.do(coordinator.edit, two.pk, priority=1, actor="ann")
        first.commit()
        second()
    assert len(waits) == 3
    for job in (one, two):
        assert (row(job)["priority"], row(job)["queue"]) == (1, "mail")
        assert [actor for *_, actor in events(job)] == ["ann", "bob"]


@with_row_locks
def test_two_at_once_who_run_their_whole_transaction_again_both_end_right(alias):
    """Whoever is refused gives up what it holds, waits a while and begins anew."""
    one, two = job_in("waiting"), job_in("waiting")
    meeting = threading.Barrier(2, timeout=TIMEOUT)
    refused = []

    def edit_both(jobs, actor, **values):
        for wait in db.waits():
            try:
                with transaction.atomic(using=alias):
                    coordinator.edit(jobs[0].pk, actor=actor, **values)
                    if actor not in refused:
                        meeting.wait()
                    coordinator.edit(jobs[1].pk, actor=actor, **values)
            except JobBusy:
                refused.append(actor)
                time.sleep(wait)
            else:
                return

    with pausing():
        ann = run_in_thread(edit_both, [one, two], "ann", priority=1)
        bob = run_in_thread(edit_both, [two, one], "bob", queue="mail")
        ann.result()
        bob.result()
    assert refused
    for job in (one, two):
        assert (row(job)["priority"], row(job)["queue"], row(job)["version"]) == (1, "mail", 2)
        assert sorted(actor for *_, actor in events(job)) == ["ann", "bob"]


# -- Snapshots that are older than the row


@pytest.mark.parametrize("alias", [engine("sqlite")], indirect=True)
def test_reader_that_can_not_become_a_writer_begins_anew(alias):
    """django-q2#144: without IMMEDIATE, SQLite refuses to write on top of what was overtaken."""
    job = job_in("running")
    with other_connection(alias) as other:

        def overtake():
            with use_connection(other):
                transitions.complete(job, "done")

        with (
            impatient(alias, transaction_mode="DEFERRED"),
            pausing() as waits,
            at_fenced(overtake, times=1),
            pytest.raises(TransitionNotAllowed),
        ):
            coordinator.fail(job.pk, actor="ann")
    assert_growing(waits, 1)
    assert (row(job)["state"], row(job)["result"], events(job)) == ("completed", "done", [])


@with_row_locks
def test_old_snapshot_of_a_caller_is_not_what_the_lock_finds(alias):
    """ratchet-run/ratchet#178: what is locked is read as it is now, or the database refuses."""
    job = job_in("running")
    level = {"postgresql": IsolationLevel.REPEATABLE_READ, "mariadb": "repeatable read"}[alias]

    def decide_on_what_was():
        with transaction.atomic(using=alias):
            assert Job.objects.get(pk=job.pk).state == "running"
            with use_connection(other):
                transitions.complete(job, "done")
            coordinator.fail(job.pk, actor="ann")

    with (
        other_connection(alias) as other,
        impatient(alias, isolation_level=level),
        pytest.raises((TransitionNotAllowed, DatabaseError)) as refused,
    ):
        decide_on_what_was()
    assert isinstance(refused.value, JobQueueError) or db.is_transient(refused.value)
    assert (row(job)["state"], row(job)["result"], events(job)) == ("completed", "done", [])
