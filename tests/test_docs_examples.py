"""The examples of the documentation: they compile, they run, they print what the page shows."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.utils.module_loading import import_string

from jobqueue import coordinator
from jobqueue.models import Job
from tests.asserting import servers_only
from tests.documentation import DOCS, PAGES, README, ROOT, Block, blocks, importable, write_files
from tests.helpers import TIMEOUT, run_in_thread
from tests.races.scenes import job_in

PYTHON = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(blocks(page))
    if block.language == "python"
]
TESTED = [
    pytest.param(page, block.text, name, id=f"{page.stem}-{number}{name and '-'}{name}")
    for page in PAGES
    for number, block in enumerate(blocks(page))
    if block.language == "python" and block.tested
    for name in re.findall(r"^def (test_\w+)", block.text, re.M) or [""]
]


@pytest.mark.parametrize("block", PYTHON)
def test_python_compiles_and_imports_what_exists(block: Block) -> None:
    """No example has a syntax error, or takes from this package what isn't there."""
    tree = ast.parse(block.text if block.text[0] != " " else f"if 1:\n{block.text}")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jobqueue"):
            assert all(import_string(f"{node.module}.{alias.name}") for alias in node.names)


@pytest.mark.parametrize(("page", "code", "function"), TESTED)
def test_examples_run(page: Path, code: str, function: str, alias: str, tmp_path: Path) -> None:
    """A block that is marked as tested runs; one that holds tests passes, on each engine.

    It may import the files that other such blocks of its page show.
    """
    with importable(files_of(page), tmp_path), as_default(alias):
        namespace: dict[str, Any] = {"__name__": "example"}
        exec(compile(code, "example", "exec"), namespace)
        if function:
            namespace[function]()


def files_of(page: Path) -> list[str]:
    """Return the tested blocks that say in their first line what file they are."""
    return [block.text for block in blocks(page) if block.tested and block.text.startswith("# ")]


@contextmanager
def as_default(alias: str) -> Iterator[None]:
    """Let an example that names no database, in this thread, use the engine under test."""
    default = connections["default"]
    connections["default"] = connections[alias]
    try:
        yield
    finally:
        connections["default"] = default


@servers_only
def test_the_recipe_for_a_whole_transaction_heals_a_deadlock(alias: str, tmp_path: Path) -> None:
    """Two that meet crosswise, at rows that nobody but the database guards, both end right."""
    users = [User.objects.create(username=name).pk for name in ("acme", "emca")]
    jobs = {actor: job_in("waiting") for actor in ("ann", "bob")}
    begun: list[str] = []
    meeting = threading.Barrier(2, timeout=TIMEOUT)

    def crosswise(actor: str, first: int, second: int) -> None:
        begun.append(actor)
        User.objects.filter(pk=first).update(first_name=actor)
        coordinator.edit(jobs[actor].pk, priority=1, actor=actor)
        if begun.count(actor) == 1:
            meeting.wait()
        User.objects.filter(pk=second).update(last_name=actor)

    with importable(files_of(DOCS / "how-to/coordinate-jobs.md"), tmp_path):
        in_one_transaction = import_string("shop.transactions.in_one_transaction")
        ann = run_in_thread(in_one_transaction, lambda: crosswise("ann", *users), using=alias)
        back = users[::-1]
        bob = run_in_thread(in_one_transaction, lambda: crosswise("bob", *back), using=alias)
        ann.result()
        bob.result()
    assert sorted(begun) != ["ann", "bob"], "nobody had to begin anew"
    names = User.objects.order_by("pk").values_list("first_name", "last_name")
    assert list(names) == [("ann", "bob"), ("bob", "ann")]
    for job in jobs.values():
        assert Job.objects.get(pk=job.pk).priority == 1
        assert [event.kind for event in job.events.all()] == ["edited"]


# -- Following a page in a project of its own


def test_the_tutorial_can_be_followed(tmp_path: Path) -> None:
    """Each step in its order, with real processes, ends as the page says."""
    page = blocks(DOCS / "tutorial.md")
    output, session = "", ""
    for block in page:
        if block.language == "pycon":
            session += block.text
            continue
        run_session(session, tmp_path)
        session = ""
        match block.language:
            case "python":
                write_files(block.text, tmp_path)
            case "console":
                output = run(without_installation(block.text), tmp_path, killed="--lease")
            case "text":
                assert block.text in output
    run_session(session, tmp_path)


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    """Settings, handler, enqueue, worker and sweep as the README has them."""
    run("django-admin startproject mysite .", tmp_path)
    for block in blocks(README):
        if block.language == "python":
            write_files(block.text, tmp_path)
    (lines,) = (b.text for b in blocks(README) if "manage.py migrate" in b.text)
    migrate, worker, sweep, status = (line.split("  #")[0] for line in lines.splitlines())
    run(migrate, tmp_path)
    run("python manage.py shell -c 'import shop.orders'", tmp_path)
    assert "1 completed" in run(f"{worker} --burst", tmp_path)
    assert "0 examined" in run(sweep, tmp_path)
    assert "finished: 1 completed" in run(status, tmp_path)
    query = ">>> from jobqueue.models import Job\n>>> Job.objects.get().result\n{'sent': 42}\n"
    run_session(query, tmp_path)


def without_installation(script: str) -> str:
    """Leave out what the session's environment has already."""
    done = ("python -m venv", "pip install")
    return "\n".join(line for line in script.splitlines() if not line.startswith(done))


def run(script: str, directory: Path, killed: str = "") -> str:
    """Run a shell script, and return what it printed; one with ``killed`` in it may be killed."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "DATABASE_URL"},
        "DJANGO_SETTINGS_MODULE": "mysite.settings",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}",
    }
    done = subprocess.run(
        ["bash", "-ec", script],
        check=False,
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    fine = (-9, 137) if killed and killed in script else (0,)
    assert done.returncode in fine, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


DOCTEST = """
import doctest, sys, django
django.setup()
sys.exit(doctest.testfile("session.txt", False, optionflags=doctest.ELLIPSIS).failed)
"""


def run_session(session: str, directory: Path) -> None:
    """Run what a reader types into ``manage.py shell``, and compare what the page shows."""
    if session:
        (directory / "session.txt").write_text(session)
        run(f"python -c {shlex.quote(DOCTEST)}", directory)
