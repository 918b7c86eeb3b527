"""A worker that is started while its database is away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from django.db import transaction

from jobqueue.management.commands import run_worker
from tests import servers
from tests.asserting import unmigrated
from tests.commands import manage
from tests.helpers import wait_until
from tests.worker.real import Child

NOWHERE = {
    "postgresql": "postgres://me:secret@127.0.0.1:1/queue",
    "mariadb": "mysql://me:secret@127.0.0.1:1/queue",
}
TRYING = "Database 'default' can't be reached, trying again: "
GIVEN_UP = "CommandError: The queue's tables can't be read on database 'default': "


@contextmanager
def starting(directory: Path, url: str, *options: str) -> Iterator[Child]:
    """Run a worker of the example project on a database."""
    directory.mkdir()
    settings = {"DJANGO_SETTINGS_MODULE": "example_project.settings", "DATABASE_URL": url}
    child = Child(directory, *options, **settings)
    try:
        yield child
    finally:
        child.destroy()


def test_a_database_that_stays_away_is_waited_for_and_then_named(tmp_path: Path) -> None:
    """Whoever mistyped a port reads a line or two, and no traceback, on any engine.

    Django's own checks, which come first, ask MySQL as well.
    """
    engines = [name for name in NOWHERE if name not in servers.missing_engines()]
    began = time.monotonic()
    with ExitStack() as stack:
        started = [
            stack.enter_context(starting(tmp_path / name, NOWHERE[name])) for name in engines
        ]
        ends = [child.end() for child in started]
    assert run_worker.START_PATIENCE / 2 < time.monotonic() - began < 3 * run_worker.START_PATIENCE
    for status, output in ends:
        *waiting, last = output.splitlines()
        assert status == 1
        assert 5 <= len(waiting) <= 30
        assert all(line.startswith(TRYING) for line in waiting)
        assert last.startswith(GIVEN_UP)
        assert last.endswith("It could not be reached for 10 s.")
        assert "secret" not in output


def test_within_a_callers_transaction_nothing_is_waited_for(alias: str) -> None:
    """It is there, and would not answer any more."""
    with unmigrated(alias), transaction.atomic(alias):
        done = manage("run_worker", "--burst")
        transaction.set_rollback(True, using=alias)
    assert done.err.endswith("Has `manage.py migrate` been run?\n")
    assert "trying again" not in done.err


@pytest.mark.django_db(databases=[])
def test_a_database_that_comes_up_meanwhile_is_used(
    tmp_path: Path, postgres_server: servers.PostgresServer
) -> None:
    """As when both are started at once. This one has no tables, and is not waited for any more."""
    postgres_server.stop()
    with starting(tmp_path / "worker", postgres_server.url("postgres")) as child:
        wait_until(lambda: TRYING in child.output.read_text(), "it does not wait")
        postgres_server.start()
        status, output = child.end()
    assert status == 1
    last = output.splitlines()[-1]
    assert 'relation "jobqueue_worker" does not exist' in last
    assert last.endswith("Has `manage.py migrate` been run?")
