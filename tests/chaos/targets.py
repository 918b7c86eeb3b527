"""The database of a run: started, stopped, and struck in the ways that its engine allows."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

from example_project import databases
from tests.servers import MariadbServer, PostgresServer, Server

NAME: Final = "chaos"
# Fewer than the workers and sweeps of a run need.
FEW_CONNECTIONS: Final = 6


class Target:
    """A database of the run's own, in a directory of its own."""

    # What can be done to it, and the errors of trying; without a server there is no place for a
    # proxy.
    STRIKES: ClassVar[frozenset[str]] = frozenset()
    errors: tuple[type[Exception], ...] = ()
    socket: Path | None = None

    def start(self) -> None:
        """Create the database and start to serve it."""

    def stop(self) -> None:
        """Stop to serve it."""

    def heal(self) -> None:
        """Undo every lasting strike."""

    def entry(self, port: int | None = None) -> dict[str, Any]:
        """Return Django's DATABASES entry: the server's own, or that of a proxy on ``port``."""
        raise NotImplementedError


class ServerTarget(Target):
    """A server that can be crashed, and whose sessions can be ended."""

    server: Server

    def stop(self) -> None:
        self.server.stop()

    def restart(self, dice: random.Random) -> None:
        """End the server at once, by order or by force; start it again a little later."""
        dice.choice([self.server.stop, self.server.crash])()
        time.sleep(dice.uniform(0, 0.7))
        self.server.start()

    def terminate(self, dice: random.Random) -> int:
        """End some of the sessions; return how many."""
        with self._console() as ask:
            sessions = sorted(number for (number,) in ask(self._sessions))
            chosen = dice.sample(sessions, min(len(sessions), dice.randint(1, 6)))
            for session in chosen:
                self._end(ask, session)
        return len(chosen)

    _sessions: ClassVar[str]

    @contextmanager
    def _console(self) -> Iterator[Any]:
        raise NotImplementedError
        yield

    def _end(self, ask: Any, session: int) -> None:
        raise NotImplementedError


class Postgres(ServerTarget):
    """PostgreSQL; the run's processes log in as somebody whose connections can be limited."""

    STRIKES = frozenset({"terminate", "restart", "exhaust", "read_only"})
    _sessions = f"SELECT pid FROM pg_stat_activity WHERE usename = '{NAME}'"

    def __init__(self, directory: Path) -> None:
        import psycopg

        self.errors = (psycopg.Error,)
        self.server = PostgresServer(directory)
        self.socket = directory / ".s.PGSQL.5432"

    def start(self) -> None:
        self.server.start()
        with self._console() as ask:
            ask(f"CREATE ROLE {NAME} LOGIN")
            ask(f"CREATE DATABASE {NAME} OWNER {NAME}")

    def heal(self) -> None:
        self.exhaust(False)
        self.read_only(False)

    def entry(self, port: int | None = None) -> dict[str, Any]:
        entry = {**self.server.settings(NAME), "USER": NAME}
        if port:
            entry |= {"HOST": "127.0.0.1", "PORT": str(port)}
        options = {"sslmode": "disable", "gssencmode": "disable", "connect_timeout": 5}
        return {**entry, "OPTIONS": options}

    def exhaust(self, on: bool) -> None:
        """Allow few connections, and end those that there are; or allow as many as they want."""
        with self._console() as ask:
            ask(f"ALTER ROLE {NAME} CONNECTION LIMIT {FEW_CONNECTIONS if on else -1}")
            if on:
                for (session,) in ask(self._sessions):
                    self._end(ask, session)

    def read_only(self, on: bool) -> None:
        """Refuse all writes, or take them again."""
        with self._console() as ask:
            ask(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on else 'off'}")
            ask("SELECT pg_reload_conf()")

    @contextmanager
    def _console(self) -> Iterator[Any]:
        import psycopg

        def ask(sql: str, *values: Any) -> list[Any]:
            cursor = connection.execute(sql, values or None)
            return cursor.fetchall() if cursor.description else []

        with psycopg.connect(
            host=str(self.server.directory),
            user="postgres",
            dbname="postgres",
            autocommit=True,
            connect_timeout=5,
            options="-c default_transaction_read_only=off",
        ) as connection:
            yield ask

    def _end(self, ask: Any, session: int) -> None:
        ask("SELECT pg_terminate_backend(%s)", session)


class Mariadb(ServerTarget):
    """MariaDB, which is to lose nothing that it acknowledged when its process is killed."""

    STRIKES = frozenset({"terminate", "restart"})
    _sessions = f"SELECT id FROM information_schema.processlist WHERE db = '{NAME}'"

    def __init__(self, directory: Path) -> None:
        databases.use_pymysql_without_mysqlclient()
        import MySQLdb

        self.errors = (MySQLdb.Error,)
        self.server = MariadbServer(directory, options={"innodb-flush-log-at-trx-commit": "2"})
        self.socket = self.server.socket

    def start(self) -> None:
        self.server.start()
        with self._console() as ask:
            ask(f"CREATE DATABASE {NAME}")

    def entry(self, port: int | None = None) -> dict[str, Any]:
        entry = self.server.settings(NAME)
        return {**entry, "HOST": "127.0.0.1", "PORT": str(port)} if port else entry

    @contextmanager
    def _console(self) -> Iterator[Any]:
        import MySQLdb

        connection = MySQLdb.connect(unix_socket=str(self.socket), user="root", autocommit=True)

        def ask(sql: str) -> Any:
            cursor = connection.cursor()
            cursor.execute(sql)
            return cursor.fetchall()

        try:
            yield ask
        finally:
            connection.close()

    def _end(self, ask: Any, session: int) -> None:
        ask(f"KILL SOFT CONNECTION {int(session)}")


class Sqlite(Target):
    """A file. Its only server is the lock that one writer at a time holds."""

    STRIKES = frozenset({"hold_lock"})
    errors = (sqlite3.Error,)

    def __init__(self, directory: Path) -> None:
        self._path = directory / "chaos.sqlite3"
        self._holder: sqlite3.Connection | None = None

    def start(self) -> None:
        self._path.parent.mkdir()

    def entry(self, port: int | None = None) -> dict[str, Any]:
        return databases.sqlite(self._path)

    def heal(self) -> None:
        self.hold_lock(False)

    stop = heal

    def hold_lock(self, on: bool) -> None:
        """Hold the write lock, or let it go."""
        if on and not self._holder:
            holder = sqlite3.connect(self._path, isolation_level=None, timeout=5)
            holder.execute("BEGIN IMMEDIATE")
            self._holder = holder
        elif not on and self._holder:
            self._holder.close()
            self._holder = None


TARGETS: Final[Mapping[str, type[Any]]] = {
    "postgresql": Postgres,
    "mariadb": Mariadb,
    "sqlite": Sqlite,
}
