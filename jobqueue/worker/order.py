"""What travels to an executor's process: the first of ours that is imported there.

So it imports nothing that needs Django's apps, and sets Django up before it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import django
from django.apps import apps
from django.utils.module_loading import import_string


@dataclass(slots=True)
class Order:
    """A job to be run elsewhere."""

    pk: int
    task: str
    args: Any
    kwargs: Any
    attempt: int
    version: int
    checkpoint: Any
    timeout: timedelta | None


def carry_out(order: Order) -> Any:
    """Run a job in this process, wherever that is; see ``remote.run``."""
    if not apps.ready:
        django.setup()
    return import_string("jobqueue.worker.remote.run")(order)
