"""The session's database servers, and the fixture that runs a test on each engine."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import Iterable, Iterator

import pytest

from tests import helpers, routers, servers


def pytest_configure(config: pytest.Config) -> None:
    # Ignored by whoever runs in the background or under nohup, and inherited from there by the
    # processes that tests start; what has a handler is at its default in them.
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    missing = servers.missing_engines()
    if missing and os.environ.get("JOBQUEUE_REQUIRE_ALL_ENGINES") == "1":
        reasons = "; ".join(f"{engine}: {reason}" for engine, reason in missing.items())
        raise pytest.UsageError(f"JOBQUEUE_REQUIRE_ALL_ENGINES is set, but {reasons}")


def pytest_report_header(config: pytest.Config) -> str:
    missing = servers.missing_engines()
    engines = [f"{e} ({missing[e]})" if e in missing else e for e in helpers.ENGINES]
    return f"engines: {', '.join(engines)}"


@pytest.fixture(scope="session")
def django_db_modify_db_settings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the servers that the chosen tests need, before pytest-django creates the databases.

    pytest-django would give each xdist worker databases of its own here; they have servers of
    their own.
    """
    with servers.running(_aliases_of(request.session.items)):
        yield


@pytest.fixture(params=[helpers.engine(name) for name in helpers.ENGINES])
def alias(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test on each engine: the alias of its database, to which all queries are routed."""
    with routers.use_alias(request.param):
        yield request.param
    helpers.assert_threads_done()


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    """Let no claim rely on what one has learned in another test, of a worker of the same name."""
    from jobqueue import claim

    claim._known.clear()


@pytest.fixture
def postgres_server(django_db_modify_db_settings: None) -> Iterator[servers.PostgresServer]:
    """Start a PostgreSQL of the test's own, to be crashed and restarted at will."""
    if reason := servers.missing_engines().get("postgresql"):
        pytest.skip(reason)
    server = servers.PostgresServer(servers.run_dir() / f"pg-{secrets.token_hex(3)}")
    server.start()
    yield server
    server.stop()
    shutil.rmtree(server.directory)


def _aliases_of(items: Iterable[pytest.Item]) -> set[str]:
    aliases: set[str] = set()
    for item in items:
        if marker := item.get_closest_marker("django_db"):
            databases = marker.kwargs.get("databases") or ()
        else:
            databases = getattr(getattr(item, "cls", None), "databases", ())
        aliases.update(servers.session_servers() if databases == "__all__" else databases)
    return aliases
