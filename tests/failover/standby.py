"""Two PostgreSQL servers, a primary and its streaming standby, and what an operator does to them.

Each command that the guide gives (``docs/how-to/survive-a-failover.md``) is run by a method here.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
from django.core.management import call_command
from django.db import connections

from tests import routers, servers
from tests.helpers import wait_until

ALIAS = "failover"
DATABASE = "shop"
HOSTS_VARIABLE = "JOBQUEUE_TEST_FAILOVER_HOSTS"
SLOT = "db2_slot"
# For what a slow machine may take over.
PATIENCE = 60.0


def multi_host(hosts: str) -> dict[str, Any]:
    """Return the DATABASES entry that finds whichever of the servers takes writes."""
    return {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": hosts,
        "PORT": ",".join("5432" for _ in hosts.split(",")),
        "NAME": DATABASE,
        "USER": "postgres",
        "OPTIONS": {
            "target_session_attrs": "read-write",
            "connect_timeout": 5,
            "tcp_user_timeout": 15000,
            "keepalives_idle": 5,
            "keepalives_interval": 5,
            "keepalives_count": 3,
        },
    }


class Node(servers.PostgresServer):
    """A server that can be a primary or a standby; its data are a copy of another's."""

    def __init__(self, name: str, origin: Path | Node | None = None) -> None:
        """Take the data from a directory, or by ``pg_basebackup`` from a running server."""
        directory = servers.run_dir() / f"{name}-{secrets.token_hex(3)}"
        options = {
            "cluster_name": name,
            "full_page_writes": "on",  # pg_rewind wants them
            "dynamic_shared_memory_type": "mmap",  # gone with the directory, also after a crash
        }
        super().__init__(directory, options=options)
        self.origin = origin

    def prepare(self) -> None:
        """Have a directory for data that somebody else brings."""
        self.directory.mkdir()
        self._own(self.directory)

    def _create_command(self) -> list[str]:
        if isinstance(self.origin, Path):
            return ["cp", "--archive", str(self.origin), str(self.data)]
        if isinstance(self.origin, Node):
            return [
                *(self._binary("pg_basebackup"), f"--pgdata={self.data}", "--write-recovery-conf"),
                *(f"--host={self.origin.directory}", "--username=postgres", "--checkpoint=fast"),
                *("--wal-method=stream", "--create-slot", f"--slot={SLOT}", "--no-sync"),
            ]
        return super()._create_command()

    def sql(self, query: str, *, dbname: str = DATABASE) -> list[tuple[Any, ...]]:
        """Run one statement on this server, whatever it is, and return the rows."""
        with psycopg.connect(
            host=str(self.directory),
            user="postgres",
            dbname=dbname,
            autocommit=True,
            options="-c default_transaction_read_only=off",
        ) as connection:
            cursor = connection.execute(query)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def value(self, query: str) -> Any:
        """Return the one value that a query gives."""
        ((found,),) = self.sql(query)
        return found

    def set(self, **settings: str) -> None:
        """Change settings as an operator does, without a restart."""
        for name, value in settings.items():
            self.sql(f"ALTER SYSTEM SET {name} = '{value}'")
        self.sql("SELECT pg_reload_conf()")

    def run(self, tool: str, *arguments: str) -> None:
        """Run one of PostgreSQL's own programs, by the account that owns the data."""
        self._run([self._binary(tool), *arguments])

    def promote(self) -> None:
        """Turn a standby into a primary."""
        self.run("pg_ctl", "promote", f"--pgdata={self.data}", "--wait", f"--timeout={PATIENCE:g}")

    def crash(self) -> None:
        """Kill every process; nothing is flushed, said or cleaned up."""
        lock = self.data / "postmaster.pid"
        segment = lock.read_text().splitlines()[6].split()[1]
        server = psutil.Process(self.pid)
        victims = [server, *server.children(recursive=True)]
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        # Not until nothing is left of them, for which init may take seconds.
        wait_until(lambda: not any(map(_runs, victims)), "it survived", timeout=PATIENCE)
        super().crash()
        # Shared memory outlives a process that was killed, and this server may never start again.
        subprocess.run(["ipcrm", "-m", segment], check=False, capture_output=True)

    def shut_down(self) -> None:
        """Stop the server as systemd does, if it runs: with a checkpoint."""
        if self._process is not None:
            self.run("pg_ctl", "stop", f"--pgdata={self.data}", "--mode=fast")
            self.stop()

    def make_standby(self) -> None:
        """See to it that this server, when it is started again, takes no writes."""
        (self.data / "standby.signal").touch()

    def rejoin(self, primary: Node) -> None:
        """Throw away what this stopped server has alone, and follow ``primary``."""
        primary.sql("SELECT pg_create_physical_replication_slot('db1_slot')")
        source = f"host={primary.directory} user=postgres dbname=postgres"
        self.run(
            *("pg_rewind", f"--target-pgdata={self.data}", f"--source-server={source}"),
            *("--write-recovery-conf", "--no-sync"),
        )
        self.start()
        # pg_rewind brought the settings of the other server, its slot's name among them.
        self.set(primary_slot_name="db1_slot")

    def stop_receiving(self) -> None:
        """Cut a standby off from its primary: from here on it falls behind."""
        self.set(primary_conninfo="")
        wait_until(
            lambda: not self.sql("SELECT 1 FROM pg_stat_wal_receiver"),
            "the standby still receives",
            timeout=PATIENCE,
        )


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Pair:
    """``db1``, the primary, and ``db2``, its standby."""

    def __init__(self, db1: Node, db2: Node) -> None:
        self.db1, self.db2 = db1, db2

    def make_synchronous(self, level: str = "on") -> None:
        """Have every commit wait for the standby."""
        self.db1.set(synchronous_standby_names="db2", synchronous_commit=level)
        wait_until(
            lambda: self.db1.sql("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"),
            "the standby did not become synchronous",
            timeout=PATIENCE,
        )
        connections[ALIAS].close()  # sessions of before have the old settings for a while

    def wait_until_received(self) -> None:
        """Wait until the standby has all that the primary has written."""
        written = self.db1.value("SELECT pg_current_wal_flush_lsn()")
        wait_until(
            lambda: self.db2.value(f"SELECT pg_last_wal_receive_lsn() >= '{written}'"),
            "the standby did not receive",
            timeout=PATIENCE,
        )

    def fail_over(self) -> None:
        """Kill the primary and promote the standby."""
        self.db1.crash()
        connections[ALIAS].close()
        self.db2.promote()


@contextmanager
def template() -> Iterator[Path]:
    """Make the data of a server that has the queue's tables, to be copied for each test."""
    server = Node("template")
    with gone_at_the_end(server):
        server.start()
        server.sql(f"CREATE DATABASE {DATABASE}", dbname="postgres")
        with reachable(server):
            call_command("migrate", database=ALIAS, verbosity=0)
        server.sql("CREATE TABLE effect (job_id bigint, attempt int, pid int)")
        server.sql("CHECKPOINT")
        server.stop()
        yield server.data


@contextmanager
def running_pair(data: Path) -> Iterator[Pair]:
    """Run a primary and an asynchronous standby, and send this process's queries to them."""
    db1 = Node("db1", data)
    db2 = Node("db2", db1)
    with gone_at_the_end(db1, db2):
        db1.start()
        db2.start()
        with reachable(db1, db2), routers.use_alias(ALIAS):
            yield Pair(db1, db2)


@contextmanager
def gone_at_the_end(*nodes: Node) -> Iterator[None]:
    """Stop the servers at the end, and remove their data."""
    try:
        yield
    finally:
        for node in nodes:
            node.stop()
            shutil.rmtree(node.directory, ignore_errors=True)


@contextmanager
def reachable(*nodes: Node) -> Iterator[None]:
    """Give this process, and those that it starts, the alias of these servers."""
    hosts = ",".join(str(node.directory) for node in nodes)
    os.environ[HOSTS_VARIABLE] = hosts
    entries = connections.configure_settings({"default": {}, ALIAS: multi_host(hosts)})
    connections.databases[ALIAS] = entries[ALIAS]
    try:
        yield
    finally:
        connections[ALIAS].close()
        del connections[ALIAS], connections.databases[ALIAS], os.environ[HOSTS_VARIABLE]
