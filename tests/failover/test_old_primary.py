"""The old primary comes back, and the door of the new one is held until all is in order."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections

from jobqueue import broker, transitions
from jobqueue.enqueue import enqueue, enqueue_many
from jobqueue.exceptions import TransitionConflict
from jobqueue.models import EventKind, Job
from tests.failover.standby import ALIAS, PATIENCE, Node, Pair
from tests.failover.test_asynchronous import GIVE, cut_off
from tests.failover.test_synchronous import wait_for_hung_commits
from tests.helpers import run_in_thread, wait_until
from tests.races.scenes import kinds, row


def enqueue_anew(queue: str) -> Job:
    """Enqueue on a new connection: to whichever server takes writes, the first one first."""
    connections[ALIAS].close()
    return enqueue(GIVE, queue=queue)


def queues(node: Node) -> list[str]:
    """Return the queues of the jobs that this server has."""
    return [queue for (queue,) in node.sql("SELECT queue FROM jobqueue_job ORDER BY id")]


def test_an_old_primary_that_comes_back_as_one_takes_writes_that_are_lost(pair: Pair) -> None:
    """What the guide forbids. Made a standby again by pg_rewind, it takes none and follows."""
    pair.fail_over()
    enqueue_anew("new")
    pair.db1.start()
    enqueue_anew("astray")
    assert (queues(pair.db1), queues(pair.db2)) == (["astray"], ["new"])

    pair.db1.stop()
    pair.db1.rejoin(pair.db2)
    wait_until(lambda: queues(pair.db1) == ["new"], "it doesn't follow", timeout=PATIENCE)
    enqueue_anew("later")
    assert queues(pair.db2) == ["new", "later"]
    wait_until(lambda: queues(pair.db1) == queues(pair.db2), "it lags behind", timeout=PATIENCE)


def test_an_old_primary_with_a_signal_file_comes_back_without_taking_writes(pair: Pair) -> None:
    """The fence that can be put up on the old machine itself, before anybody starts it."""
    pair.fail_over()
    pair.db1.make_standby()
    pair.db1.start()
    enqueue_anew("new")
    assert (queues(pair.db1), queues(pair.db2)) == ([], ["new"])


def test_an_old_primary_that_was_synchronous_acknowledges_nothing(pair: Pair) -> None:
    """Nothing acknowledged is lost there, but whoever has come to it hangs."""
    pair.make_synchronous()
    pair.fail_over()
    pair.db1.start()
    hung = run_in_thread(enqueue_anew, "astray")
    wait_for_hung_commits(pair.db1, 1)
    assert not hung.done
    pair.db1.crash()
    with pytest.raises(OperationalError):
        hung.result()
    enqueue_anew("new")
    assert queues(pair.db2) == ["new"]


# -- The door


def hold_the_door(node: Node) -> None:
    """Look read-only to all but who says otherwise, as an operator's session does."""
    node.set(default_transaction_read_only="on")


def open_the_door(node: Node) -> None:
    """Let them in again."""
    node.set(default_transaction_read_only="off")


SKIP_LOST_IDS = (
    "SELECT setval(pg_get_serial_sequence('jobqueue_job', 'id'), "
    "nextval(pg_get_serial_sequence('jobqueue_job', 'id')) + 1000000)"
)
SKIP_LOST_VERSIONS = (
    "UPDATE jobqueue_job SET version = version + 1000000 "
    "WHERE state NOT IN ('completed', 'failed', 'cancelled')"
)


def test_ids_of_lost_jobs_come_again_and_their_executors_are_refused(pair: Pair) -> None:
    """Another job has the id, the version and the attempt: another holder is all that differs."""
    worker, other = broker.register(["default"]), broker.register(["default"])
    cut_off(pair)
    enqueue_many([{"task": GIVE}] * 100)
    lost = {job.pk: job for job in broker.claim(worker.pk, 100)}
    pair.fail_over()
    new = enqueue(GIVE, queue="default", metadata={"is": "another"})
    (running,) = broker.claim(other.pk, 1)
    before = lost[new.pk]
    assert (before.version, before.attempt) == (running.version, running.attempt)
    found = row(new)
    with pytest.raises(TransitionConflict):
        transitions.complete(before)
    assert row(new) == found
    assert kinds(new) == [EventKind.CONFLICT]


def test_nothing_comes_again_where_the_door_was_held_for_that(pair: Pair) -> None:
    """Behind it ids and versions are moved past all that the lost commits can have used."""
    worker = broker.register(["default"])
    kept, waiting = enqueue(GIVE, priority=1), enqueue(GIVE)
    (survivor,) = broker.claim(worker.pk, 1)
    cut_off(pair)
    (lost,) = broker.claim(worker.pk, 1)
    lost_ids = {enqueue(GIVE).pk for _ in range(100)}

    hold_the_door(pair.db2)
    pair.fail_over()
    with pytest.raises(OperationalError, match="session is read-only"):
        enqueue_anew("default")
    with pytest.raises(CommandError, match=r"^The queue's tables can't be read on database"):
        call_command("run_worker")
    pair.db2.sql(SKIP_LOST_IDS)
    pair.db2.sql(SKIP_LOST_VERSIONS)
    open_the_door(pair.db2)

    assert enqueue_anew("other").pk > max(lost_ids) + 900_000
    heard = broker.heartbeat(worker.pk, {kept.pk: survivor, waiting.pk: lost})
    assert heard.lost == {kept.pk, waiting.pk}
    for old in (survivor, lost):
        with pytest.raises(TransitionConflict):
            transitions.complete(old)
    again = broker.claim(worker.pk, 2)
    assert [job.pk for job in again] == [kept.pk, waiting.pk]
    assert all(job.version > 1_000_000 for job in again)
