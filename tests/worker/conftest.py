"""Every test begins with no gate and nothing seen, and lets go of what still waits at one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker import handlers


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    handlers.reset()
    yield
    handlers.reset()
