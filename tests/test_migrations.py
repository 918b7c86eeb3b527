"""Migrations: complete, and reversible on every engine."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connections
from django.db.migrations.executor import MigrationExecutor

from jobqueue.models import Job
from jobqueue.testing.factories import JobEventFactory, JobFactory, QueueFactory, WorkerFactory
from tests.asserting import unmigrated


def schema(alias: str) -> dict[str, Any]:
    """Return every table of the queue with its columns, constraints and indexes."""
    connection = connections[alias]
    found = {}
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            if table.startswith("jobqueue_"):
                described = connection.introspection.get_table_description(cursor, table)
                constraints = connection.introspection.get_constraints(cursor, table)
                # All but the third, its width in print: with mysqlclient that depends on the rows.
                columns = [(*column[:2], *column[3:8]) for column in described]
                found[table] = (columns, constraints)
    return found


@pytest.mark.django_db(databases="__all__")
def test_no_change_of_a_model_is_without_its_migration() -> None:
    call_command("makemigrations", "jobqueue", check=True, dry_run=True, verbosity=0)


@pytest.mark.django_db(databases="__all__")
def test_a_missing_migration_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job._meta.get_field("queue"), "max_length", 99)
    with pytest.raises(SystemExit):
        call_command("makemigrations", "jobqueue", check=True, dry_run=True, verbosity=0)


def test_the_app_can_be_taken_out_and_put_back(alias: str) -> None:
    for factory in (JobFactory, JobEventFactory, WorkerFactory, QueueFactory):
        factory()
    before = schema(alias)
    assert set(before) == {
        model._meta.db_table for model in apps.get_app_config("jobqueue").get_models()
    }

    with unmigrated(alias):
        assert schema(alias) == {}

    assert schema(alias) == before
    assert not Job.objects.exists()
    assert JobFactory().pk


def test_nothing_is_left_to_be_applied(alias: str) -> None:
    executor = MigrationExecutor(connections[alias])
    assert executor.migration_plan(executor.loader.graph.leaf_nodes()) == []
