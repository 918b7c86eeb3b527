"""A pair of servers for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_django import DjangoDbBlocker

from tests import helpers, servers
from tests.failover import standby
from tests.worker import handlers


@pytest.fixture(scope="package")
def template(
    django_db_modify_db_settings: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[Path]:
    """Make the data that all pairs begin with."""
    if reason := servers.missing_engines().get("postgresql"):
        pytest.skip(reason)
    with django_db_blocker.unblock(), standby.template() as data:
        yield data


@pytest.fixture
def pair(template: Path, django_db_blocker: DjangoDbBlocker) -> Iterator[standby.Pair]:
    """Run a primary and a standby, asynchronous until the test says otherwise."""
    handlers.reset()
    with django_db_blocker.unblock(), standby.running_pair(template) as running:
        yield running
    handlers.reset()
    helpers.assert_threads_done()
