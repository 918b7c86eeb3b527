"""What the commands have in common: the database, JSON on stdout, arguments that are checked."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections, router

from jobqueue import conf
from jobqueue.models import Job
from jobqueue.sweep import Tick

tqdm: Any
try:
    from tqdm import tqdm
except ImportError:  # pragma: no cover  (an optional extra)
    tqdm = None

_UNITS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")


def duration(text: str) -> timedelta:
    """Read ``90``, ``90s``, ``15m``, ``12h``, ``30d`` or ``4w``."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration: give seconds, or a number with s, m, h, d or w"
        )
    try:
        return conf.check_seconds(float(match[1]) * _UNITS[match[2]], repr(text), zero=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive_duration(text: str) -> float:
    """Read a duration of more than zero; return seconds."""
    if not (seconds := duration(text).total_seconds()):
        raise argparse.ArgumentTypeError(f"{text!r} must be more than zero")
    return seconds


def count(high: int) -> Callable[[str], int]:
    """Return a reader of integers from 1 to ``high``."""

    def read(text: str) -> int:
        try:
            return conf.check_integer(int(text), "the value", 1, high)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} must be an integer from 1 to {high}"
            ) from None

    return read


def queue_name(text: str) -> str:
    """Read a queue's name: a known one, where ``JOBQUEUE["QUEUES"]`` lists them."""
    try:
        return conf.check_known_queue(text)
    except (ValueError, ImproperlyConfigured) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class JobQueueCommand(BaseCommand):
    """A command on one database; with ``--json`` stdout is for the report alone."""

    def add_arguments(self, parser: CommandParser) -> None:
        """Add ``--database``."""
        parser.add_argument(
            "--database", metavar="ALIAS", help="Database alias; default: where jobs are written."
        )

    def add_json_argument(self, parser: CommandParser) -> None:
        """Add ``--json``."""
        parser.add_argument(
            "--json",
            action="store_true",
            dest="as_json",
            help="Print one JSON object on stdout and nothing else.",
        )

    def database(self, options: Mapping[str, Any]) -> str:
        """Return the alias to work on."""
        alias: str = options["database"] or router.db_for_write(Job)
        if alias not in connections:
            known = ", ".join(connections)
            raise CommandError(f"There is no database {alias!r}; known: {known}.", returncode=2)
        return alias

    def print_report(self, report: Mapping[str, Any], *, as_json: bool) -> None:
        """Print a report: as JSON, or a line that a person can read."""
        if as_json:
            self.stdout.write(json.dumps(report))
        else:
            words = (f"{value} {name.replace('_', ' ')}" for name, value in report.items())
            self.stdout.write(", ".join(words))

    @contextmanager
    def progress(self, total: Callable[[], int] | None = None) -> Iterator[Tick | None]:
        """Show a progress bar on stderr if that is a terminal and tqdm is installed.

        Yields what is to be called with the number of jobs that are done, ``None`` without a bar.
        """
        if tqdm is None or not sys.stderr.isatty():
            yield None
            return
        known = total() if total else None
        with tqdm(total=known, unit="job", file=sys.stderr, leave=False) as bar:
            yield bar.update
