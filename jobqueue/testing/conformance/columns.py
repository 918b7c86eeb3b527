"""Each column of the fingerprint counts, also when somebody outside the rules changed it.

An operator's console or an older release writes one column with SQL of its own, and raises no
version. Whoever decided before is refused, and a sweep leaves the job alone.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from django.db import connections

from jobqueue import transitions
from jobqueue.lifecycle import FINAL, HELD, State
from jobqueue.models import Job
from jobqueue.sweep import SweepReport, sweep_stale_jobs
from jobqueue.testing.conformance.base import WRITES, Bench

MICROSECOND = timedelta(microseconds=1)
HOUR = timedelta(hours=1)

ON_QUEUED: dict[str, Callable[[Job], Any]] = {
    "cancel": WRITES["cancel"],
    "edit": lambda job: transitions.edit(job, {"priority": 1}, actor="late"),
}
ON_FINAL: dict[str, Callable[[Job], Any]] = {
    "rerun": lambda job: transitions.rerun(job, actor="late"),
    "delete": lambda job: transitions.delete(job, actor="late"),
}
# Every write that rests on a copy of the row, by the state that the copy says.
DECIDED: dict[State, dict[str, Callable[[Job], Any]]] = {
    State.SCHEDULED: ON_QUEUED,
    State.WAITING: ON_QUEUED,
    State.CLAIMED: {
        "start": transitions.start,
        "release": WRITES["release"],
        "cancel": WRITES["cancel"],
    },
    State.RUNNING: {
        **WRITES,
        "checkpoint": lambda job: transitions.checkpoint(job, {"page": 9}),
        "request cancel": lambda job: transitions.request_cancel(job, actor="late"),
    },
    **dict.fromkeys(sorted(FINAL), ON_FINAL),
}
# A state that the row could as well be in, with its other columns as they are.
LIKE: dict[State, State] = {
    State.SCHEDULED: State.WAITING,
    State.WAITING: State.SCHEDULED,
    State.CLAIMED: State.RUNNING,
    State.RUNNING: State.CLAIMED,
    State.COMPLETED: State.FAILED,
    State.FAILED: State.CANCELLED,
    State.CANCELLED: State.COMPLETED,
}


class Columns(Bench):
    """One column was changed, and no other."""

    def test_state_alone_counts(self) -> None:
        """The row went to another state, and nothing else tells of it."""
        self.assert_counts("state", DECIDED)

    def test_attempt_alone_counts(self) -> None:
        """Another execution was counted."""
        self.assert_counts("attempt", DECIDED)

    def test_claimed_by_alone_counts(self) -> None:
        """Another worker has it, or none had."""
        self.assert_counts("claimed_by", HELD | FINAL)

    def test_claimed_at_alone_counts(self) -> None:
        """It was claimed at another time, by as little as a microsecond, or never."""
        self.assert_counts("claimed_at", HELD | FINAL)

    def test_attempted_at_alone_counts(self) -> None:
        """It was started at another time, by as little as a microsecond, or never."""
        self.assert_counts("attempted_at", DECIDED)

    def test_version_alone_counts(self) -> None:
        """It went on and came back to what it was."""
        self.assert_counts("version", DECIDED)

    # A job that isn't held can have no claim: the database's own constraint says so.

    def assert_counts(self, column: str, states: Any) -> None:
        """Change ``column`` alone, in each of ``states``: fail unless every writer notices."""
        for state in sorted(states):
            with self.subTest(column=column, state=state, by="verbs"):
                self._assert_verbs_refused(column, self._job(column, state, self.worker))
            if state in HELD:
                with self.subTest(column=column, state=state, by="sweep"):
                    self._assert_not_swept(column, self._job(column, state, "nobody:0:0"))

    def _assert_verbs_refused(self, column: str, job: Job) -> None:
        self.write_raw(job, column)
        for verb, late in DECIDED[State(job.state)].items():
            with self.subTest(verb=verb):
                self.assert_refused(late, job)
        # Not for ever: whoever looks again may write.
        again = Job.objects.get(pk=job.pk)
        (ON_FINAL["rerun"] if again.state in FINAL else ON_QUEUED["cancel"])(again)
        self.assertEqual(self.row(job)["version"], again.version + 1)

    def _assert_not_swept(self, column: str, job: Job) -> None:
        with connections[self.using].execute_wrapper(self._writer_before(job, column)):
            report = sweep_stale_jobs()
        self.assertEqual(report, SweepReport(examined=report.examined, conflicts=1))
        self.assertEqual(self.row(job)["version"], job.version + (column == "version"))
        report = sweep_stale_jobs()
        self.assertEqual((report.taken, report.conflicts), (1, 0))

    def _job(self, column: str, state: str, worker: str) -> Job:
        columns: dict[str, Any] = {}
        if state in HELD:
            columns |= {"claimed_by": worker}
        if (column, state) == ("state", State.CLAIMED):  # for the second time
            columns |= {"attempt": 1, "attempted_at": self.ago(HOUR)}
        if state == State.CANCELLED:  # before anybody had it
            columns |= dict.fromkeys(("claimed_by", "claimed_at", "attempted_at"))
        return self.job(state, **columns)

    def _writer_before(self, job: Job, column: str) -> Callable[..., Any]:
        """Return the wrapper that writes just before the first UPDATE of a job."""
        table, written = Job._meta.db_table, False

        def execute(run: Callable[..., Any], sql: str, *args: Any) -> Any:
            nonlocal written
            if not written and sql.startswith("UPDATE") and table in sql.partition("SET")[0]:
                written = True
                self.write_raw(job, column)
            return run(sql, *args)

        return execute

    def write_raw(self, job: Job, column: str) -> None:
        """Give the row another value in one column, with SQL that no fence knows of."""
        connection = connections[self.using]
        field: Any = Job._meta.get_field(column)
        value = field.get_db_prep_save(self._another(job, column), connection)
        table, name = map(connection.ops.quote_name, (Job._meta.db_table, field.column))
        with connection.cursor() as cursor:
            cursor.execute(f"UPDATE {table} SET {name} = %s WHERE id = %s", [value, job.pk])
            self.assertEqual(cursor.rowcount, 1)

    def _another(self, job: Job, column: str) -> Any:
        value = getattr(job, column)
        if column == "state":
            return LIKE[State(value)]
        if column in ("attempt", "version"):
            return value + 1
        if job.state == State.COMPLETED:
            return None
        if column == "claimed_by":
            return "console:1:1"
        return value + MICROSECOND if value else self.ago(HOUR)
