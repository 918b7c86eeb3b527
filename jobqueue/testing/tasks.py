"""Handlers for tests."""

from __future__ import annotations

from typing import Any


def succeed(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments."""
    return {"args": list(args), "kwargs": kwargs}


def fail(message: str = "failed on purpose") -> None:
    """Raise ``RuntimeError``."""
    raise RuntimeError(message)
