"""The handlers as tasks of ``django.tasks``, which finds them by the module that they are in."""

from __future__ import annotations

import handlers
from django.tasks import task


@task
def noop(number=0):
    """Do nothing."""


@task
def sleep_1ms(number=0):
    """Wait, as for a network."""
    handlers.sleep_1ms()


@task
def sleep_10ms(number=0):
    """Wait, as for a network."""
    handlers.sleep_10ms()


@task
def stamp(sent):
    """Write down when this began."""
    handlers.stamp(sent)


TASKS = {"noop": noop, "1 ms": sleep_1ms, "10 ms": sleep_10ms, "stamp": stamp}
