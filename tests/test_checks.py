"""System checks: what is wrong with the set-up is told before any job is touched."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from django.core.checks import CheckMessage, Error, Warning, run_checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connections
from django.test import override_settings

from jobqueue.checks import check_databases


def of_ours(messages: list[CheckMessage]) -> list[CheckMessage]:
    return [message for message in messages if str(message.id).startswith("jobqueue.")]


@pytest.fixture
def options(alias: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The OPTIONS of the engine under test, to be changed at will."""
    changed = dict(connections[alias].settings_dict["OPTIONS"])
    monkeypatch.setitem(connections[alias].settings_dict, "OPTIONS", changed)
    return changed


def test_this_project_passes(alias: str) -> None:
    assert run_checks(databases=[alias]) == []


def test_e001_names_each_setting_that_is_wrong(settings: Any) -> None:
    settings.JOBQUEUE = {"THREADS": 0, "QUEUES": "mail"}
    assert of_ours(run_checks()) == [
        Error(
            "JOBQUEUE['THREADS']: the value must be an integer from 1 to 1000, not 0",
            id="jobqueue.E001",
        ),
        Error(
            "JOBQUEUE['QUEUES']: queues must be a list of names, not 'mail'",
            id="jobqueue.E001",
        ),
    ]
    with pytest.raises(SystemCheckError, match=r"jobqueue\.E001"):
        call_command("check", stderr=StringIO())


@pytest.mark.parametrize("mode", [None, "DEFERRED", "EXCLUSIVE"])
def test_w001_sqlite_without_immediate_transactions(
    alias: str, options: dict[str, Any], mode: str | None
) -> None:
    options["transaction_mode"] = mode
    told = [
        Warning(
            f"DATABASES[{alias!r}]: a transaction that reads and then writes fails at once when "
            "another writer came first, whatever the timeout.",
            hint="Set OPTIONS['transaction_mode'] to 'IMMEDIATE'.",
            id="jobqueue.W001",
        )
    ]
    assert check_databases(None, [alias]) == (told if alias == "default" else [])


@pytest.mark.parametrize("command", [None, "", "PRAGMA synchronous=NORMAL;"])
def test_w002_sqlite_without_write_ahead_logging(
    alias: str, options: dict[str, Any], command: str | None
) -> None:
    options["init_command"] = command
    told = [
        Warning(
            f"DATABASES[{alias!r}]: without write-ahead logging, readers and the writer wait for "
            "each other.",
            hint="Set OPTIONS['init_command'] to 'PRAGMA journal_mode=WAL;'.",
            id="jobqueue.W002",
        )
    ]
    assert check_databases(None, [alias]) == (told if alias == "default" else [])


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("repeatable read", "repeatable read"),
        ("Serializable", "serializable"),
        (None, "the server's default"),
    ],
)
def test_w003_mysql_that_locks_gaps(
    alias: str, options: dict[str, Any], level: str | None, shown: str
) -> None:
    options["isolation_level"] = level
    told = [
        Warning(
            f"DATABASES[{alias!r}]: at isolation level {shown}, claims lock gaps between rows, "
            "and enqueuing waits for them.",
            hint="Set OPTIONS['isolation_level'] to 'read committed', Django's default.",
            id="jobqueue.W003",
        )
    ]
    assert check_databases(None, [alias]) == (told if alias == "mariadb" else [])


@pytest.mark.parametrize("level", ["read committed", "READ COMMITTED"])
def test_w003_is_silent_at_read_committed(alias: str, options: dict[str, Any], level: str) -> None:
    options["isolation_level"] = level
    assert check_databases(None, [alias]) == []
    del options["isolation_level"]
    assert check_databases(None, [alias]) == []


@pytest.mark.parametrize(
    ("use_tz", "zone", "warned"),
    [
        (False, "Europe/Berlin", True),
        (False, "America/Santiago", True),
        (False, "Asia/Tokyo", False),
        (False, "UTC", False),
        (True, "Europe/Berlin", False),
    ],
)
def test_w004_local_times_that_jump(use_tz: bool, zone: str, warned: bool) -> None:
    told = Warning(
        f"Without USE_TZ, times are stored as local time of {zone}, where clocks are changed: "
        "every live worker then looks an hour silent, or a dead one alive.",
        hint="Set USE_TZ to True, or TIME_ZONE to one without daylight saving time.",
        id="jobqueue.W004",
    )
    with override_settings(USE_TZ=use_tz, TIME_ZONE=zone):
        assert of_ours(run_checks()) == ([told] if warned else [])


def test_databases_are_looked_at_only_when_asked_for(alias: str, options: dict[str, Any]) -> None:
    options.clear()
    assert of_ours(run_checks()) == []
    assert check_databases(None, None) == []


class NowhereRouter:
    """Keeps the tables of the queue out of every database."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool:
        return False


def test_a_database_without_the_tables_is_left_alone(
    alias: str, options: dict[str, Any], settings: Any
) -> None:
    options.clear()
    settings.DATABASE_ROUTERS = [NowhereRouter()]
    assert check_databases(None, [alias]) == []
