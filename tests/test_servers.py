"""A test's own PostgreSQL survives a crash, and the session's servers leave nothing behind."""

from __future__ import annotations

import subprocess
import sys

import dj_database_url
import psutil
import psycopg
import pytest

from tests import servers
from tests.helpers import child_environment, wait_until


def test_postgres_of_ones_own_can_crash_and_come_back(postgres_server):
    url = postgres_server.url("postgres").replace("postgres:", "postgresql:", 1)
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE t AS SELECT 42 AS answer")
    before = postgres_server.pid
    postgres_server.crash()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(url)
    postgres_server.start()
    assert postgres_server.pid != before
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT answer FROM t").fetchone() == (42,)


def test_url_and_settings_name_the_same_database(postgres_server):
    by_url = dj_database_url.parse(postgres_server.url("postgres"))
    by_settings = postgres_server.settings("postgres")
    assert by_url["ENGINE"] == by_settings["ENGINE"]
    assert by_url["NAME"] == by_settings["NAME"]
    assert by_url["USER"] == by_settings["USER"]
    assert by_url["OPTIONS"]["host"] == by_settings["HOST"]


def test_failed_start_says_why(postgres_server):
    postgres_server.stop()
    postgres_server.options["no_such_option"] = "1"
    with pytest.raises(RuntimeError, match=r'unrecognized .* parameter "no_such_option"'):
        postgres_server.start()


def test_killed_session_leaves_nothing_behind():
    """A session that is killed has no chance to clean up; its guard does."""
    directory = servers.run_dir().with_name(f"{servers.run_dir().name}-killed")
    script = (
        "from tests import servers\n"
        "with servers.running(['postgresql', 'mariadb']):\n"
        "    print('started', flush=True)\n"
        "    input()\n"
    )
    session = subprocess.Popen(
        [sys.executable, "-c", script],
        env=child_environment(JOBQUEUE_TEST_RUN_DIR=str(directory), PYTEST_XDIST_WORKER=""),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert session.stdout.readline() == b"started\n"
    pids = [int(file.read_text()) for file in directory.glob("*/server.pid")]
    assert len(pids) == len(servers.session_servers())
    session.kill()
    session.communicate()
    wait_until(lambda: not directory.exists(), "the run directory is still there")
    for pid in pids:
        wait_until(lambda pid=pid: not runs(pid), f"server {pid} still runs")


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
