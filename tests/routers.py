"""A router that sends every query to the engine under test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# In the environment, so that worker processes that a test starts follow it.
ALIAS_VARIABLE = "JOBQUEUE_TEST_ALIAS"


def current_alias() -> str | None:
    """Return the alias of the engine under test, None outside such tests."""
    return os.environ.get(ALIAS_VARIABLE)


@contextmanager
def use_alias(alias: str) -> Iterator[None]:
    """Send every query of this process, in all its threads, to ``alias``."""
    previous = current_alias()
    os.environ[ALIAS_VARIABLE] = alias
    try:
        yield
    finally:
        if previous is None:
            del os.environ[ALIAS_VARIABLE]
        else:
            os.environ[ALIAS_VARIABLE] = previous


class CurrentAliasRouter:
    """Answer with the engine under test; leave migrations alone."""

    def db_for_read(self, model: type, **hints: Any) -> str | None:
        return current_alias()

    def db_for_write(self, model: type, **hints: Any) -> str | None:
        return current_alias()

    def allow_relation(self, obj1: Any, obj2: Any, **hints: Any) -> bool:
        return True

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> None:
        return None
