"""What Django's ``DATABASES`` needs for each engine that the queue runs on."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured

BACKENDS = {
    "sqlite": "django.db.backends.sqlite3",
    "postgres": "django.db.backends.postgresql",
    "postgresql": "django.db.backends.postgresql",
    "mysql": "django.db.backends.mysql",
    "mariadb": "django.db.backends.mysql",
}

# Readers never wait in WAL mode, and IMMEDIATE takes the write lock where a transaction begins:
# SQLite refuses at once, without waiting, to turn a reader into a writer.
SQLITE_OPTIONS: dict[str, Any] = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
}
MYSQL_OPTIONS: dict[str, Any] = {"charset": "utf8mb4", "isolation_level": "read committed"}


def sqlite(path: Path) -> dict[str, Any]:
    """Return the entry for an SQLite file."""
    return {"ENGINE": BACKENDS["sqlite"], "NAME": str(path), "OPTIONS": dict(SQLITE_OPTIONS)}


def from_url(url: str) -> dict[str, Any]:
    """Return the entry for ``url``, or raise ImproperlyConfigured naming what is wrong with it."""
    try:
        import dj_database_url  # noqa: PLC0415  (an extra, needed only when a URL is given)
    except ImportError as error:
        raise ImproperlyConfigured(
            "DATABASE_URL is set, but dj-database-url is not installed: "
            "pip install 'django-jobqueue[demo]'"
        ) from error

    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in BACKENDS:
        raise _malformed(url, f"it must begin with one of {', '.join(f'{s}://' for s in BACKENDS)}")
    if scheme == "sqlite" and (rest in ("", "/") or ":memory:" in rest):
        raise _malformed(url, "worker processes can't share a database in memory; name a file")
    scheme = "mysql" if scheme == "mariadb" else scheme
    try:
        entry: dict[str, Any] = dict(dj_database_url.parse(f"{scheme}://{rest}"))
    except ValueError:  # its message may quote the password
        raise _malformed(
            url, "check the port, and percent-encode special characters in user and password"
        ) from None
    if not entry["NAME"] or entry["NAME"] == ":memory:":
        raise _malformed(url, "the database's name is missing")

    defaults = {"sqlite": SQLITE_OPTIONS, "mysql": MYSQL_OPTIONS}.get(scheme, {})
    entry["OPTIONS"] = {**defaults, **entry.get("OPTIONS", {})}
    if scheme == "mysql":
        use_pymysql_without_mysqlclient()
    return entry


def use_pymysql_without_mysqlclient() -> None:
    """Let PyMySQL stand in for mysqlclient, which needs a compiler, where that is missing."""
    if "MySQLdb" in sys.modules:
        return
    try:
        import MySQLdb  # noqa: F401, PLC0415
    except ImportError:
        try:
            import pymysql  # noqa: PLC0415
        except ImportError:
            return  # Django's own error names the package to install
        pymysql.install_as_MySQLdb()


def _malformed(url: str, reason: str) -> ImproperlyConfigured:
    return ImproperlyConfigured(f"DATABASE_URL is malformed: {_masked(url)!r}: {reason}.")


def _masked(url: str) -> str:
    """Hide passwords, also those that the URL's own rules would not recognise as such."""
    url = re.sub(r"^((?:[^:/]*://)?[^:@]*):.*@", r"\1:***@", url)
    return re.sub(r"((?:password|passwd|pwd)=)[^&]*", r"\1***", url)
