"""Importing the app and declaring things opens no connection and asks no router."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILD = """
import importlib, json, pkgutil, sys
import django
from django.conf import settings
from django.db.backends.base.base import BaseDatabaseWrapper

attempts, asked = [], []
connect = BaseDatabaseWrapper.connect
BaseDatabaseWrapper.connect = lambda self: attempts.append(self.alias) or connect(self)

class Router:
    def db_for_read(self, model, **hints):
        asked.append(model.__name__)
    db_for_write = db_for_read

settings.configure(
    DATABASES={"default": DATABASE},
    DATABASE_ROUTERS=[Router()],
    INSTALLED_APPS=["django.contrib." + app for app in (
        "admin", "auth", "contenttypes", "messages", "sessions")] + ["jobqueue"],
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    USE_TZ=True,
)
django.setup()

import jobqueue
names = [module.name for module in pkgutil.walk_packages(jobqueue.__path__, "jobqueue.")]
for name in names:
    importlib.import_module(name)

from datetime import timedelta
from django.utils import timezone
from jobqueue import conf, db
from jobqueue.backoff import Backoff
from jobqueue.enqueue import enqueue
from jobqueue.models import Job, JobEvent, Queue, Worker
from jobqueue.testing.factories import JobFactory, TASK
from jobqueue.worker.process import WorkerOptions, WorkerProcess

now = timezone.now()
querysets = [
    Job.objects.all(), Job.objects.claimable("default", now), Job.objects.due(now),
    Job.objects.held(), Job.objects.held_by("w"), Job.objects.finished_before(now),
    Job.objects.in_queues(["a"]).filter(events__kind="failed"), Job.objects.using("default"),
    Job.objects.using("default").matching(1, Job(task=TASK).fingerprint), Worker.objects.alive(),
    JobEvent.objects.filter(job__queue="a"), Queue.objects.exclude(name="a"),
]
conf.get()
WorkerProcess(WorkerOptions(queues=["a"]))
Backoff.parse(timedelta(seconds=1)).delay(3)
before = {"modules": len(names), "attempts": len(attempts), "asked": list(asked)}

errors = []
for use in (Job.objects.exists, lambda: enqueue(TASK)):
    try:
        use()
    except django.db.OperationalError as error:
        errors.append(type(error).__name__)
after = {"attempts": len(attempts) > 0, "asked": asked, "errors": errors}
print(json.dumps({"before": before, "after": after}))
"""

UNREACHABLE: dict[str, dict[str, Any]] = {
    "postgresql": {"HOST": "127.0.0.1", "PORT": "1", "OPTIONS": {"connect_timeout": 1}},
    "sqlite3": {},
}


@pytest.mark.parametrize("engine", UNREACHABLE)
def test_nothing_is_asked_of_a_database_that_can_t_be_reached(engine: str, tmp_path: Path) -> None:
    """Routing is looked up at call time, so a project's routers need not be ready at import."""
    name = str(tmp_path / "no" / "such" / "directory")
    database = {"ENGINE": f"django.db.backends.{engine}", "NAME": name[:60], **UNREACHABLE[engine]}
    child = subprocess.run(
        [sys.executable, "-c", CHILD.replace("DATABASE}", f"{database!r}}}")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent.parent,
        timeout=60,
    )
    assert child.returncode == 0, child.stderr
    told = json.loads(child.stdout)

    modules = list((Path(__file__).parent.parent / "jobqueue").rglob("*.py"))
    assert told["before"] == {"modules": len(modules) - 1, "attempts": 0, "asked": []}
    # The same would have been seen before, had there been anything to see.
    assert told["after"] == {
        "attempts": True,
        "asked": ["Job", "Job"],
        "errors": ["OperationalError", "OperationalError"],
    }
