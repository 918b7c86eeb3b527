"""DATABASE_URL: what each engine needs, and a clear error for what can't be used."""

from __future__ import annotations

import sys

import pytest
from django.core.exceptions import ImproperlyConfigured

from example_project.databases import from_url


def test_sqlite_file_gets_the_options_of_the_default():
    entry = from_url("sqlite:////tmp/queue.sqlite3?timeout=5")
    assert entry["ENGINE"] == "django.db.backends.sqlite3"
    assert entry["NAME"] == "/tmp/queue.sqlite3"
    assert entry["OPTIONS"]["transaction_mode"] == "IMMEDIATE"
    assert entry["OPTIONS"]["timeout"] == 5
    assert "journal_mode=WAL" in entry["OPTIONS"]["init_command"]


@pytest.mark.parametrize("scheme", ["postgres", "postgresql"])
def test_postgresql(scheme):
    entry = from_url(f"{scheme}://me:s%40cret@db.example:5433/queue?connect_timeout=3")
    assert entry["ENGINE"] == "django.db.backends.postgresql"
    assert (entry["USER"], entry["PASSWORD"]) == ("me", "s@cret")
    assert (entry["HOST"], entry["PORT"], entry["NAME"]) == ("db.example", 5433, "queue")
    assert entry["OPTIONS"] == {"connect_timeout": 3}


@pytest.mark.parametrize("scheme", ["mysql", "mariadb"])
def test_mysql(scheme):
    entry = from_url(f"{scheme}://me@db.example/queue")
    assert entry["ENGINE"] == "django.db.backends.mysql"
    assert entry["OPTIONS"] == {"charset": "utf8mb4", "isolation_level": "read committed"}
    assert "MySQLdb" in sys.modules


@pytest.mark.parametrize(
    ("url", "shown", "reason"),
    [
        ("queue.sqlite3", "queue.sqlite3", "it must begin with one of sqlite://, postgres://"),
        ("oracle://h/n", "oracle://h/n", "it must begin with one of"),
        ("postgres:/h/n", "postgres:/h/n", "it must begin with one of"),
        ("postgres://me:pw@h:port/n", "postgres://me:***@h:port/n", "check the port"),
        ("postgres://me:p@w@h:99999/n", "postgres://me:***@h:99999/n", "check the port"),
        ("postgres://me:p/w@h/n", "postgres://me:***@h/n", "check the port"),
        ("postgres://me:pw@h", "postgres://me:***@h", "the database's name is missing"),
        ("mysql://h/?password=pw", "mysql://h/?password=***", "the database's name is missing"),
        ("sqlite://", "sqlite://", "can't share a database in memory"),
        ("sqlite://:memory:", "sqlite://:memory:", "can't share a database in memory"),
        ("sqlite://queue.db", "sqlite://queue.db", "the database's name is missing"),
    ],
)
def test_malformed_url_is_named_without_its_password(url, shown, reason):
    with pytest.raises(ImproperlyConfigured) as caught:
        from_url(url)
    message = str(caught.value)
    assert repr(shown) in message
    assert reason in message


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dj_database_url", None)
    with pytest.raises(ImproperlyConfigured, match=r"pip install 'django-jobqueue\[demo\]'"):
        from_url("postgres://h/n")
