"""System checks: what is wrong with the set-up, found before any job is touched."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections, router
from django.utils import timezone

from jobqueue import conf, db
from jobqueue.models import Job


@register
def check_settings(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """E001: ``settings.JOBQUEUE`` has a setting that doesn't exist or can't be used."""
    _, problems = conf.read_project()
    return [Error(problem, id="jobqueue.E001") for problem in problems]


@register
def check_time_zone(app_configs: Sequence[AppConfig] | None, **kwargs: Any) -> list[CheckMessage]:
    """W004: stored times jump when the clocks are changed, and with them every lease and wait."""
    zone = timezone.get_default_timezone()
    offsets = {datetime(2001, month, 1, tzinfo=zone).utcoffset() for month in range(1, 13)}
    if settings.USE_TZ or len(offsets) == 1:
        return []
    return [
        Warning(
            f"Without USE_TZ, times are stored as local time of {settings.TIME_ZONE}, where clocks "
            "are changed: every live worker then looks an hour silent, or a dead one alive.",
            hint="Set USE_TZ to True, or TIME_ZONE to one without daylight saving time.",
            id="jobqueue.W004",
        )
    ]


@register(Tags.database)
def check_databases(
    app_configs: Sequence[AppConfig] | None,
    databases: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[CheckMessage]:
    """W001 to W003: a database's options make it slow or unsafe for jobs."""
    messages: list[CheckMessage] = []
    for alias in databases or ():
        if router.allow_migrate_model(alias, Job):
            check = _ENGINES.get(connections[alias].vendor)
            messages += check(alias, connections[alias].settings_dict["OPTIONS"]) if check else ()
    return messages


@register(Tags.database)
def check_columns(
    app_configs: Sequence[AppConfig] | None,
    databases: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[CheckMessage]:
    """E002: a column can't hold the times that are written to it and compared."""
    table = Job._meta.db_table
    return [
        Error(
            f"DATABASES[{alias!r}]: {table} has columns that cut off microseconds: "
            f"{', '.join(names)}. No claim would match what it wrote.",
            hint="Change them to DATETIME(6).",
            id="jobqueue.E002",
        )
        for alias in databases or ()
        if router.allow_migrate_model(alias, Job)
        and (names := db.columns_without_microseconds(alias, table))
    ]


def _check_sqlite(alias: str, options: dict[str, Any]) -> list[CheckMessage]:
    messages: list[CheckMessage] = []
    if options.get("transaction_mode") != "IMMEDIATE":
        messages.append(
            Warning(
                f"DATABASES[{alias!r}]: a transaction that reads and then writes fails at once "
                "when another writer came first, whatever the timeout.",
                hint="Set OPTIONS['transaction_mode'] to 'IMMEDIATE'.",
                id="jobqueue.W001",
            )
        )
    if "wal" not in str(options.get("init_command", "")).lower():
        messages.append(
            Warning(
                f"DATABASES[{alias!r}]: without write-ahead logging, readers and the writer "
                "wait for each other.",
                hint="Set OPTIONS['init_command'] to 'PRAGMA journal_mode=WAL;'.",
                id="jobqueue.W002",
            )
        )
    return messages


def _check_mysql(alias: str, options: dict[str, Any]) -> list[CheckMessage]:
    # Django's default is READ COMMITTED.
    level = str(options.get("isolation_level", "read committed") or "the server's default").lower()
    if level == "read committed":
        return []
    return [
        Warning(
            f"DATABASES[{alias!r}]: at isolation level {level}, claims lock gaps between rows, "
            "and enqueuing waits for them.",
            hint="Set OPTIONS['isolation_level'] to 'read committed', Django's default.",
            id="jobqueue.W003",
        )
    ]


_ENGINES = {"sqlite": _check_sqlite, "mysql": _check_mysql}
