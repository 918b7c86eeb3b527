"""The public suite, on the engines that this project is tested on."""

from __future__ import annotations

import pytest
from django.test import TransactionTestCase

from jobqueue.testing.conformance import ConformanceMixin
from tests import servers


def on(engine: str) -> pytest.MarkDecorator:
    """Skip a class where its engine is missing, as ``helpers.engine`` skips a test."""
    reason = servers.missing_engines().get(engine)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


class SQLiteConforms(ConformanceMixin, TransactionTestCase):
    """SQLite, in a file."""

    databases = {"default"}


@on("postgresql")
class PostgreSQLConforms(ConformanceMixin, TransactionTestCase):
    """PostgreSQL."""

    using = "postgresql"
    databases = {"postgresql"}


@on("mariadb")
class MariaDBConforms(ConformanceMixin, TransactionTestCase):
    """MariaDB."""

    using = "mariadb"
    databases = {"mariadb"}
