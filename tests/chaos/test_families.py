"""What must follow when a child is killed, or its parent, is missed when it doesn't."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.chaos import log
from tests.chaos.families import NEWS_TAKE, ROLE, Families, Loss, Orphan, count
from tests.chaos.scene import Scene
from tests.chaos.stage import Member, Stage
from tests.helpers import wait_until

SLEEP = [sys.executable, "-I", "-S", "-c", "input()"]


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    with subprocess.Popen(SLEEP, stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def families(tmp_path) -> Families:
    """The families of a stage without processes."""
    return Families(Stage(Scene(), tmp_path / "output", None), tmp_path)


def missing(families: Families) -> list[tuple[str, str]]:
    """Return kinds and texts of what has not followed, without patience."""
    return [(violation.kind, violation.what) for violation in families.settle(patience=0)]


@pytest.fixture
def parent(families, stranger) -> Member:
    """A parent in its first life, in which it has no children."""
    member = Member("parent-1", ROLE, (), process=stranger, started=1)
    families._stage.members.append(member)
    return member


def test_two_of_three_workers_have_a_parent():
    assert [count(workers) for workers in (1, 2, 3, 4, 6, 8)] == [0, 0, 1, 1, 2, 2]


def test_child_without_its_parent_is_missed_to_end(families, stranger):
    families.orphans.append(Orphan(psutil.Process(stranger.pid), time.monotonic()))
    what = f"process {stranger.pid} runs without its parent"
    assert missing(families) == [("outlived its parent", what)]
    stranger.kill()  # and nobody reaps it
    wait_until(lambda: missing(families) == [], "a dead process is missed")


@pytest.mark.parametrize(
    ("claims", "was_frozen", "is_found"),
    [(2, False, True), (1, False, False), (2, True, False)],
    ids=["two claims", "one that was under way", "by one that was frozen"],
)
def test_child_without_its_parent_claims_no_more(
    tmp_path, families, stranger, claims, was_frozen, is_found
):
    since = time.monotonic() - 2 * NEWS_TAKE
    families.orphans.append(Orphan(psutil.Process(stranger.pid), since, was_frozen))
    writer = log.Log(tmp_path / f"{ROLE}-{stranger.pid}{log.SUFFIX}")
    for _ in range(claims):
        change = [["waiting", 0, None], ["running", 1, "w1"]]
        writer.ask("write", jobs=[[7, 1, *change]], owner=False)
    what = f"process {stranger.pid} claimed 2 times without its parent"
    assert (("outlived its parent", what) in missing(families)) == is_found


def test_parent_without_its_children_is_found(families, parent):
    assert missing(families) == [("not replaced", "parent-1 has 0 of 2 children")]


@pytest.mark.parametrize(
    ("life", "buried", "is_missed"),
    [(1, ["w1"], True), (1, ["w1", "w2"], False), (2, ["w1"], False)],
    ids=["the older of its leases", "the last one", "by a parent that was killed itself"],
)
def test_killed_child_must_be_buried(tmp_path, families, parent, life, buried, is_missed):
    """The one that it had last, and by the parent that has lost it."""
    writer = log.Log(tmp_path / f"{ROLE}-1{log.SUFFIX}")
    for worker_id in ("w1", "w2"):
        writer.write("led", worker=worker_id, pid=os.getpid())
    writer.write("bury", workers=buried)
    families.losses.append(Loss(parent, 1, os.getpid()))
    parent.started = life
    found = [what for kind, what in missing(families) if kind == "not buried"]
    what = f"process {os.getpid()} was killed, and nobody buried its worker w2"
    assert found == ([what] if is_missed else [])
