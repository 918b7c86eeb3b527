"""A worker's row is its lease, and a heartbeat tells it the truth about what it holds."""

from __future__ import annotations

from jobqueue import transitions
from jobqueue.exceptions import LeaseLost
from jobqueue.lifecycle import Heartbeat
from jobqueue.models import Worker
from jobqueue.sweep import sweep_stale_jobs
from jobqueue.testing.conformance.base import Bench


class Workers(Bench):
    """Registering, reconciling and leaving."""

    def test_heartbeat_renews_the_lease(self) -> None:
        """As often as it is sent, also within one tick of the clock."""
        before = Worker.objects.get(pk=self.worker).last_seen_at
        for _ in range(3):
            self.assertEqual(self.broker.heartbeat(self.worker, {}), Heartbeat())
        after = Worker.objects.get(pk=self.worker)
        self.assertGreaterEqual(after.last_seen_at, before)
        self.assertEqual(after.state, Worker.State.ALIVE)

    def test_lost_lease_is_told(self) -> None:
        """To a worker that was declared dead or left; it comes back under another id."""
        silent, left = self.another_worker(silent=True), self.broker.register(["default"]).pk
        self.broker.leave(left)
        self.assertEqual(sweep_stale_jobs().dead_workers, 1)
        for worker_id in (silent, left, "nobody:0:0"):
            with self.subTest(worker_id), self.assertRaises(LeaseLost):
                self.broker.heartbeat(worker_id, {})
        self.assertNotIn(self.broker.register(["default"]).pk, {silent, left, self.worker})

    def test_claim_that_the_worker_never_learned_of_is_released(self) -> None:
        """An attempt that had begun is excused; what the worker does hold stays its own."""
        held = self.held()
        claimed, running = self.held("claimed"), self.held()
        other = self.job("running")
        self.assertEqual(self.broker.heartbeat(self.worker, {held.pk: held}), Heartbeat())
        rows = [self.row(job) for job in (claimed, running)]
        self.assertEqual([row["state"] for row in rows], ["waiting", "waiting"])
        self.assertEqual([(row["attempt"], row["excused"]) for row in rows], [(0, 0), (1, 1)])
        self.assertEqual([self.state(job) for job in (held, other)], ["running", "running"])

    def test_nothing_is_released_while_the_worker_is_unsure(self) -> None:
        """Since a claim or an outcome is on its way."""
        job = self.held()
        self.assertEqual(self.broker.heartbeat(self.worker, None), Heartbeat())
        self.assertEqual(self.state(job), "running")

    def test_job_that_was_taken_is_reported_lost(self) -> None:
        """With one event; whatever the executor then reports is refused."""
        job, kept = self.held(), self.held()
        newer = self.run_again(job)
        heard = self.broker.heartbeat(self.worker, {job.pk: job, kept.pk: kept})
        self.assertEqual(heard, Heartbeat(lost=frozenset({job.pk})))
        self.assertEqual(self.kinds(job), ["released", "conflict"])
        self.assert_refused(transitions.complete, job)
        self.assertEqual(transitions.complete(newer).state, "completed")

    def test_cancel_request_is_delivered(self) -> None:
        """With each heartbeat, until the job is settled."""
        job = self.held()
        transitions.request_cancel(job, actor="operator")
        told = Heartbeat(cancel_requested=frozenset({job.pk}))
        for held in ({job.pk: job}, None):
            self.assertEqual(self.broker.heartbeat(self.worker, held), told)
        transitions.cancel(job)
        self.assertEqual(self.broker.heartbeat(self.worker, {}), Heartbeat())
