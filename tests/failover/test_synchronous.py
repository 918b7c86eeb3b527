"""With a synchronous standby, whatever was acknowledged is there after the failover."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import OperationalError, connections

from jobqueue import broker, transitions
from jobqueue.enqueue import enqueue
from jobqueue.lifecycle import Completed, Error, Retry, Settled, State
from jobqueue.models import EventKind, Job, Worker
from jobqueue.sweep import sweep_stale_jobs
from tests.failover import load
from tests.failover.handlers import PREFIX
from tests.failover.standby import ALIAS, PATIENCE, Node, Pair
from tests.helpers import run_in_thread, wait_until
from tests.worker import handlers
from tests.worker.tools import AT_ONCE, kinds, make_job, running_worker

GIVE = "tests.worker.handlers.give"
WHEN_TOLD = f"{PREFIX}work_when_told"


def test_nothing_is_lost_or_doubled_and_the_workers_carry_on(pair: Pair, tmp_path: Path) -> None:
    """bensheldon/good_job#90, graphile/worker#449, RealOrangeOne/django-tasks-db#49."""
    pair.make_synchronous()
    beside_primary = enqueue(WHEN_TOLD, args=[str(tmp_path)], queue="db1", backoff=AT_ONCE)
    held = [enqueue(WHEN_TOLD, args=[str(tmp_path)]) for _ in range(2)]
    serve = ("--queue", "db1", "--queue", "default", "--lease", "12")
    with (
        load.worker(tmp_path, "--queue", "db1", "--lease", "3") as doomed,
        load.child(tmp_path, "sweep_stale_jobs", "--interval", "0.5") as sweep,
    ):
        load.wait_for_lines(tmp_path, "begins", 1)
        with (
            load.worker(tmp_path, *serve) as one,
            load.worker(tmp_path, *serve) as two,
            load.producing() as producer,
        ):
            load.wait_for_lines(tmp_path, "begins", 3)
            wait_until(lambda: len(load.effects(pair.db1)) > 20, "no work", timeout=PATIENCE)
            workers = set(Worker.objects.values_list("pk", flat=True))

            doomed.process.kill()  # as if it ran on the primary's machine
            pair.db1.crash()
            wait_until(lambda: len(producer.unknown) > 1, "nobody saw it", timeout=PATIENCE)
            pair.db2.promote()

            connections[ALIAS].close()
            producer.wait_for(40)
            begun = load.wait_for_lines(tmp_path, "begins", 4)
            (tmp_path / "go").touch()
            producer.stop()
            load.wait_until_all_final()
            assert [one.lives(), two.lives(), sweep.lives()] == [True, True, True]
            assert set(Worker.objects.values_list("pk", flat=True)) == workers
            assert [one.stop(), two.stop(), sweep.stop()] == [0, 0, 0]
            assert "failed: session is read-only" in one.output()

    assert_books_balance(pair.db2, producer)
    pids = {line.job_id: line.pid for line in begun if line.attempt == 1}
    attempts = {pk: (n, pid) for pk, n, pid in pair.db2.sql("SELECT * FROM effect")}
    for job in held:
        assert attempts[job.pk] == (1, pids[job.pk]), "an outcome was lost"
    assert attempts[beside_primary.pk][0] == 2
    assert pids[beside_primary.pk] == doomed.pid


def assert_books_balance(node: Node, producer: load.Producer) -> None:
    """What was acknowledged is there and done, nothing is twice, the unknown is one or the other.

    The producer tries each number once, so that one stands for one job or none.
    """
    numbers = Job.objects.filter(metadata__has_key="number")
    jobs = dict(numbers.values_list("metadata__number", "pk"))
    assert len(jobs) == numbers.count()
    assert producer.acknowledged.items() <= jobs.items()
    assert set(jobs) - set(producer.acknowledged) <= set(producer.unknown)
    assert set(Job.objects.values_list("state", flat=True)) == {State.COMPLETED}
    assert load.effects(node) == dict.fromkeys(Job.objects.values_list("pk", flat=True), 1)
    assert set(load.accepted_outcomes().values()) == {1}


def wait_for_hung_commits(node: Node, number: int) -> None:
    """Wait until so many sessions have committed here and wait for the standby."""
    count = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    wait_until(lambda: node.value(count) == number, "no COMMIT hangs", timeout=PATIENCE)


def receive_and_not_replay(pair: Pair) -> None:
    """Have the standby receive what it doesn't replay: its promotion will."""
    pair.db2.sql("SELECT pg_wal_replay_pause()")
    state = "SELECT pg_get_wal_replay_pause_state()"
    wait_until(lambda: pair.db2.value(state) == "paused", "it goes on", timeout=PATIENCE)


@pytest.mark.parametrize(
    ("hold", "is_there"),
    [(receive_and_not_replay, True), (lambda pair: pair.db2.stop_receiving(), False)],
    ids=["received", "not received"],
)
def test_what_hung_in_commit_is_resolved_one_way(
    pair: Pair, hold: Callable[[Pair], None], is_there: bool
) -> None:
    """quartznet/quartznet#1726: who asks again learns which, and nothing is done twice."""
    pair.make_synchronous("remote_apply")
    worker = broker.register(["default"])
    for _ in range(2):
        enqueue(GIVE)
    one, two = broker.claim(worker.pk, 2)
    hold(pair)
    hung = [
        run_in_thread(transitions.complete, one, "done"),
        run_in_thread(transitions.retry, two, "no", 60),
        run_in_thread(enqueue, GIVE, queue="hung"),
    ]
    wait_for_hung_commits(pair.db1, 3)
    if is_there:
        pair.wait_until_received()
    pair.fail_over()
    for call in hung:
        with pytest.raises(OperationalError):
            call.result()

    assert Job.objects.filter(queue="hung").count() == is_there
    outcomes = [(one, Completed("done")), (two, Retry(Error("no")))]
    again = broker.settle(worker.pk, outcomes)
    expected = Settled.ALREADY_APPLIED if is_there else Settled.APPLIED
    assert [result.status for result in again] == [expected, expected]
    for job, state in ((one, State.COMPLETED), (two, State.SCHEDULED)):
        found = Job.objects.get(pk=job.pk)
        assert (found.state, found.version) == (state, job.version + 1)
    assert set(load.accepted_outcomes().values()) == {1}


@pytest.mark.parametrize("swept", [False, True], ids=["in time", "after a sweep"])
def test_an_outage_longer_than_the_lease_costs_an_attempt_at_most(pair: Pair, swept: bool) -> None:
    """The handler is told; what it reports is taken, unless a sweep was there first."""
    job = make_job(handlers.hold, result="held")
    with running_worker(ALIAS, lease=0.6):
        context = handlers.gate().wait_until_entered()
        pair.wait_until_received()
        pair.db1.crash()
        connections[ALIAS].close()
        wait_until(lambda: context.lost, "it was not told", timeout=PATIENCE)
        pair.db2.promote()
        if swept:
            assert sweep_stale_jobs().as_dict().items() >= {"dead_workers": 1, "retried": 1}.items()
        handlers.gate().open()
        load.wait_until_all_final()
        wait_until(Worker.objects.alive().exists, "it does not register again", timeout=PATIENCE)
    job.refresh_from_db()
    assert (job.state, job.attempt) == (State.COMPLETED, 1 + swept)
    assert kinds(job) == ([EventKind.RESCUED, EventKind.CONFLICT] if swept else [])


def test_a_wait_for_the_standby_that_is_cancelled_promises_nothing(pair: Pair) -> None:
    """The guide's warning: PostgreSQL answers such a COMMIT with success."""
    pair.make_synchronous()
    pair.db2.stop_receiving()
    hung = run_in_thread(enqueue, GIVE)
    wait_for_hung_commits(pair.db1, 1)
    pair.db1.sql("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
    acknowledged = hung.result()
    assert Job.objects.filter(pk=acknowledged.pk).exists()
    pair.fail_over()
    assert not Job.objects.filter(pk=acknowledged.pk).exists()


def test_a_promoted_server_that_waits_for_a_standby_is_set_free(pair: Pair) -> None:
    """With the old primary's settings it acknowledges nothing, until it is told not to wait."""
    pair.db2.set(synchronous_standby_names="db1")
    pair.fail_over()
    hung = run_in_thread(enqueue, GIVE)
    wait_for_hung_commits(pair.db2, 1)
    assert not hung.done
    pair.db2.set(synchronous_standby_names="")
    acknowledged = hung.result()
    assert Job.objects.get().pk == acknowledged.pk
