"""Where the systems keep their jobs: one durable PostgreSQL, one durable Redis, SQLite files."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import psutil
import psycopg
from psycopg import sql

from example_project.databases import SQLITE_OPTIONS
from tests import servers
from tests.benchmarks.report import NotRun
from tests.guard import guarded

Place = dict[str, Any]


class DurablePostgres(servers.PostgresServer):
    """The wheel's PostgreSQL as it would serve in production: what is committed is on the disk."""

    OPTIONS: ClassVar[dict[str, str]] = {
        **servers.PostgresServer.OPTIONS,
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "shared_buffers": "1GB",
        # No run pays for the checkpoint that the one before it has brought about.
        "max_wal_size": "8GB",
        "deadlock_timeout": "1s",
    }


# Answers a write once it is on the disk.
DURABLE_REDIS = {"save": "", "appendonly": "yes", "appendfsync": "always"}


class Stores:
    """Started when first asked for, gone with the context that made them."""

    def __init__(self, directory: Path, stack: ExitStack, socket: Path | None = None) -> None:
        self.directory = directory
        self._stack = stack
        self._socket = socket

    @cached_property
    def postgres(self) -> str:
        """The directory of the socket of the running server."""
        if self._socket:
            return str(self._socket)
        if reason := servers.missing_engines().get("postgresql"):
            raise NotRun(reason)
        server = DurablePostgres(self.directory / "pg")
        self._stack.callback(server.stop)
        server.start()
        return str(server.directory)

    @cached_property
    def redis(self) -> Path:
        """The socket of the running Redis."""
        return self._stack.enter_context(_running_redis(self.directory / "redis"))

    def connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        """Connect to a database of the server, in autocommit mode."""
        return psycopg.connect(
            host=self.postgres, user="postgres", dbname=database, autocommit=True
        )

    def create(self, store: str, template: Place | None = None) -> Place:
        """Return a new, empty place for one system, or a copy of the place ``template``."""
        name = f"bench_{secrets.token_hex(4)}"
        place = self._create(store, name, template)
        self._stack.callback(self.drop, place)
        return place

    def _create(self, store: str, name: str, template: Place | None) -> Place:
        if store == "postgresql":
            with self.connect() as connection:
                connection.execute(
                    sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                        sql.Identifier(name),
                        sql.Identifier(template["dbname"] if template else "template1"),
                    )
                )
            return {"store": store, "host": self.postgres, "user": "postgres", "dbname": name}
        if store == "redis":
            redis_command(self.redis, "FLUSHALL")
            return {"store": store, "socket": str(self.redis)}
        path = self.directory / f"{name}.sqlite3"
        if template:
            shutil.copy(template["path"], path)
        return {"store": store, "path": str(path), "options": SQLITE_OPTIONS}

    def is_durable(self) -> bool:
        """Say whether what the PostgreSQL answers to a COMMIT is true after a power cut."""
        with self.connect() as connection:
            found = connection.execute(
                "SELECT setting FROM pg_settings "
                "WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit')"
            ).fetchall()
        return {setting for (setting,) in found} == {"on"}

    def drop(self, place: Place) -> None:
        """Remove a place with all that is in it, if that has not been done."""
        if place["store"] == "postgresql":
            with self.connect() as connection:
                name = sql.Identifier(place["dbname"])
                connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))
        elif place["store"] == "sqlite":
            for path in Path(place["path"]).parent.glob(f"{Path(place['path']).name}*"):
                path.unlink()

    def settle_down(self, place: Place) -> None:
        """Leave no work of what came before to what comes now."""
        if place["store"] == "postgresql":
            with self.connect(place["dbname"]) as connection:
                connection.execute("VACUUM ANALYZE")
            self.write_down()
        elif place["store"] == "sqlite":
            with closing(sqlite3.connect(place["path"])) as file:  # One file, to be copied.
                file.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def hasty_redis(self) -> Iterator[None]:
        """Let Redis write to the disk when it likes, while what it stores isn't measured."""
        redis_command(self.redis, "CONFIG", "SET", "appendfsync", "no")
        try:
            yield
        finally:
            redis_command(self.redis, "CONFIG", "SET", "appendfsync", DURABLE_REDIS["appendfsync"])

    def write_down(self) -> None:
        """Have PostgreSQL write out what it holds in memory, so that nobody else pays for it."""
        if "postgres" in vars(self):
            with self.connect() as connection:
                connection.execute("CHECKPOINT")


@contextmanager
def opened(socket: Path | None = None) -> Iterator[Stores]:
    """Give stores on a real disk; stop and remove them at the end.

    Args:
        socket: the directory of the socket of a PostgreSQL that runs, to be used instead.
    """
    with ExitStack() as stack:
        directory = Path(tempfile.mkdtemp(prefix="jobqueue-bench-", dir=_disk()))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o711)  # whoever PostgreSQL runs as must pass through
        stack.enter_context(guarded(directory))
        yield Stores(directory, stack, socket)


def _disk() -> Path:
    """Return a directory for temporary files that isn't memory: there, to fsync costs nothing."""
    for directory in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()):
        if directory.is_dir() and os.access(directory, os.W_OK) and not _is_memory(directory):
            return directory
    raise NotRun("there is no directory for temporary files on a disk")


def _is_memory(directory: Path) -> bool:
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    resolved = directory.resolve()
    holders = [path for path in (resolved, *resolved.parents) if path in mounts]
    return bool(holders) and mounts[holders[0]] in ("tmpfs", "ramfs")


@contextmanager
def _running_redis(directory: Path) -> Iterator[Path]:
    """Run a Redis, durable."""
    binary = shutil.which("redis-server") or _install_redis()
    directory.mkdir()
    path = directory / "redis.sock"
    options = {
        "port": "0",
        "unixsocket": str(path),
        "dir": str(directory),
        "loglevel": "warning",
        **DURABLE_REDIS,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    process = subprocess.Popen(
        [binary, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd=directory
    )
    (directory / "server.pid").write_text(str(process.pid))  # for the guard
    try:
        deadline = time.monotonic() + 10
        while True:
            with suppress(OSError):
                redis_command(path, "PING")
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise NotRun("redis-server did not start")
            time.sleep(0.02)
        yield path
    finally:
        process.terminate()
        process.wait()


def _install_redis() -> str:
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        raise NotRun("redis-server is not installed, and can't be: that takes apt-get and root")
    subprocess.run([apt, "update", "-qq"], stdout=subprocess.DEVNULL, check=False)
    done = subprocess.run(
        [apt, "install", "-y", "-qq", "--no-install-recommends", "redis-server"],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    binary = shutil.which("redis-server")
    if binary is None:
        raise NotRun(f"apt-get could not install redis-server: {done.stderr.strip()[-200:]}")
    return binary


def redis_command(path: Path | str, *words: str, database: int = 0) -> str:
    """Send one command to Redis and return its answer, a line (an integer or a status)."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        answers = connection.makefile("rb")
        answer = ""
        for command in (("SELECT", str(database)), words):
            parts = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in command)
            connection.sendall(f"*{len(command)}\r\n{parts}".encode())
            answer = answers.readline().decode().strip()
            if not answer or answer.startswith("-"):
                raise OSError(answer or "Redis closed the connection")
    return answer[1:]
