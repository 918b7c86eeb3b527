"""What the scripts of Django systems have in common."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from child import manage

HERE = str(Path(__file__).resolve().parent)


def configure(place, apps, *, keep_connections=True, settings=None):
    """Put Django's settings into the environment, for this process and its children."""
    os.environ["BENCH_DJANGO"] = json.dumps(
        {
            "place": place,
            "apps": apps,
            "conn_max_age": None if keep_connections else 0,
            "settings": settings or {},
        }
    )
    os.environ["DJANGO_SETTINGS_MODULE"] = "django_settings"
    paths = [HERE, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def migrate():
    """Create the tables."""
    subprocess.run(manage("migrate", "--verbosity=0"), check=True)


def start():
    """Make Django ready in this process."""
    import django

    django.setup()


def run(*words, **variables):
    """Become a Django command."""
    command = manage(*words)
    os.execve(command[0], command, {**os.environ, **variables})
