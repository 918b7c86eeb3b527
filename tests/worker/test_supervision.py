"""What a supervisor does with its children, whatever they are; each runs as a program."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobqueue.worker.log import Log
from jobqueue.worker.supervisor import Slot, Supervisor, SupervisorOptions
from tests.helpers import TIMEOUT, child_environment, wait_until


def hear_interrupts() -> None:
    """Undo what a shell does to a program that it runs in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Nursery:
    """A supervisor of children of one kind."""

    def __init__(
        self, directory: Path, child: str, processes: int, output: int | None = None, **options: Any
    ) -> None:
        self.output = directory / "output"
        options.setdefault("preexec_fn", hear_interrupts)
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.worker.nursery", child, str(processes)],
                cwd=directory,
                env=child_environment(),
                stdout=output or file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )

    def events(self, name: str = "") -> list[dict[str, Any]]:
        lines = [line for line in self.output.read_text().splitlines() if line.startswith("{")]
        return [event for event in map(json.loads, lines) if name in ("", event["event"])]

    def wait_for(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.events(name)) >= count, f"not {count} times {name}")
        return self.events(name)

    def children(self, count: int) -> list[psutil.Process]:
        parent = psutil.Process(self.process.pid)
        wait_until(lambda: len(parent.children()) == count, f"there are not {count} children")
        return parent.children()

    def end(self) -> int:
        return self.process.wait(TIMEOUT)


@contextmanager
def nursery(directory: Path, child: str, processes: int = 1, **options: Any) -> Iterator[Nursery]:
    started = Nursery(directory, child, processes, **options)
    try:
        yield started
    finally:
        with_group = psutil.Process(started.process.pid) if started.process.poll() is None else None
        if with_group:
            os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()


def assert_spread(waits: Sequence[float], *limits: float) -> None:
    for wait, limit in zip(waits, limits, strict=True):
        assert limit / 2 <= wait <= limit


def test_it_gives_up_when_no_child_ever_comes_up(tmp_path):
    """So that an operator sees it; with growing waits, never a busy loop."""
    with nursery(tmp_path, "never_up", processes=2) as crew:
        assert crew.end() == 1
    crashed = crew.events("crashed")
    assert len(crashed) >= 2 * 5
    assert crashed[0]["message"].endswith(
        f" ended with status 1; another one starts in {crashed[0]['wait']:g} s."
    )
    assert crew.events()[-1]["message"] == "No worker process came up, in 5 tries: giving up."
    assert "RuntimeError: no module named so" in crew.output.read_text()


def test_it_does_not_give_up_once_a_child_has_been_up(tmp_path):
    with nursery(tmp_path, "once_up") as crew:
        crew.wait_for("crashed", 8)
        crew.process.terminate()
        assert crew.end() == 0


def test_a_child_that_lived_for_long_is_forgiven_what_was_before(tmp_path):
    with nursery(tmp_path, "well_for_a_while") as crew:
        waits = [event["wait"] for event in crew.wait_for("crashed", 5)]
    assert_spread(waits[:5], 0.02, 0.04, 0.08, 0.02, 0.04)


def test_the_next_child_is_told_which_workers_are_dead_until_one_has_buried_them(tmp_path):
    with nursery(tmp_path, "bury") as crew:
        workers = [event["worker"] for event in crew.wait_for("crashed", 5)]
    assert workers[:5] == ["w1", None, "w3", "w4", "w5"]
    assert (tmp_path / "dead").read_text().splitlines()[:5] == ["", "w1", "w1", "w1,w3", "w4"]


def test_a_child_that_ends_without_a_farewell_has_crashed_whatever_its_status(tmp_path):
    with nursery(tmp_path, "silent_end") as crew:
        events = crew.wait_for("crashed", 2)
    assert [event["status"] for event in events][:2] == [0, 0]
    assert_spread([event["wait"] for event in events][:2], 0.02, 0.04)


@pytest.fixture
def idle() -> Supervisor:
    """A supervisor that does not run."""
    options = SupervisorOptions(1, grace=1, silence=1)
    return Supervisor(lambda link, dead: 0, options, Log(sys.stdout, sys.stderr))


def test_waits_have_a_limit_however_often_a_child_crashes(idle):
    slot = Slot(start_at=None, failures=5000)
    assert_spread([idle._back_off(slot)], 30)
    assert slot.failures == 5001


def test_processes_that_crash_together_do_not_come_back_together(idle):
    assert len({idle._back_off(Slot(start_at=None)) for _ in range(20)}) > 1


def test_it_waits_for_what_is_due_and_not_for_what_a_stop_has_called_off(idle):
    """Or it would run in circles for the rest of the grace."""
    (slot,) = idle._slots
    for start_at, pause in {100.0: 0, 100.3: 0.3, 200.0: 1.0}.items():
        slot.start_at = start_at
        assert idle._pause(now=100.0) == pytest.approx(pause)
    slot.start_at, idle._is_stopping = 99.0, True
    assert idle._pause(now=100.0) == 1.0


@pytest.mark.parametrize("output", ["/dev/full", "a pipe"])
def test_a_log_that_takes_nothing_ends_nobody(tmp_path, output):
    """As on a full disk, and of ``run_worker | head -1``."""
    reader, writer = os.pipe()
    file = os.open(output, os.O_WRONLY) if output == "/dev/full" else writer
    os.close(reader)
    with nursery(tmp_path, "obedient", output=file) as crew:
        for _ in range(2):
            (child,) = crew.children(1)
            child.kill()
            wait_until(lambda child=child: child not in crew.children(1), "it isn't replaced")
        crew.process.terminate()
        assert crew.end() == 0
    for each in {file, writer}:
        os.close(each)


@pytest.mark.parametrize("processes", [1, 3])
def test_children_that_do_not_stop_in_time_are_killed(tmp_path, processes):
    with nursery(tmp_path, "stubborn", processes) as crew:
        pids = {child.pid for child in crew.children(processes)}
        crew.process.terminate()
        assert crew.end() == 1
    assert {event["child"] for event in crew.events("overdue")} == pids
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_kills_the_children(tmp_path, number):
    """Nobody waits for a grace, or for children that can't hear."""
    with nursery(tmp_path, "stubborn", processes=2) as crew:
        pids = [child.pid for child in crew.children(2)]
        crew.process.send_signal(number)
        crew.wait_for("stopping")
        crew.process.send_signal(number)
        assert crew.end() == 128 + number
        assert not any(map(psutil.pid_exists, pids))
    assert crew.events("leaving")[0]["message"] == f"Leaving at once on a second {number.name}."


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_group_is_one_signal(tmp_path, number):
    """As of a terminal's Ctrl-C: what it does to the children is for the parent to say."""
    with nursery(tmp_path, "obedient", processes=2) as crew:
        crew.children(2)
        os.killpg(crew.process.pid, number)
        assert crew.end() == 0
    assert [event["event"] for event in crew.events()] == ["stopping"]


def test_a_child_that_says_nothing_is_killed_and_replaced(tmp_path):
    with nursery(tmp_path, "stubborn") as crew:
        (child,) = crew.children(1)
        (event,) = crew.wait_for("silent")
        assert event["child"] == child.pid
        assert crew.wait_for("crashed")[0]["signal"] == "SIGKILL"
        wait_until(lambda: crew.children(1) != [child], "it isn't replaced")


def test_the_silence_of_a_time_when_all_were_frozen_does_not_count(tmp_path):
    """As when a container is paused, or a virtual machine."""
    with nursery(tmp_path, "obedient") as crew:
        crew.children(1)
        os.killpg(crew.process.pid, signal.SIGSTOP)
        frozen = time.monotonic()
        wait_until(lambda: time.monotonic() - frozen > 3, "")
        crew.process.send_signal(signal.SIGCONT)  # The parent wakes up first.
        wait_until(
            lambda: psutil.Process(crew.process.pid).status() == psutil.STATUS_SLEEPING, "it sleeps"
        )
        os.killpg(crew.process.pid, signal.SIGCONT)
        crew.process.terminate()
        assert crew.end() == 0
        assert crew.events("silent") == []


def test_a_signal_that_comes_before_the_child_is_ready_is_not_lost(tmp_path):
    with nursery(tmp_path, "stopped_at_birth") as crew:
        assert crew.wait_for("recycled", 3)[0]["status"] == 0
        assert crew.events("crashed") == []


def test_a_fork_that_fails_is_tried_again(tmp_path):
    """Too many files, or processes, or too little memory: it passes."""
    with nursery(tmp_path, "obedient") as crew:
        (child,) = crew.children(1)
        pid = crew.process.pid
        files = psutil.Process(pid).num_fds()
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (files - 1, before[1]))
        child.kill()
        failed = crew.wait_for("start_failed")
        assert "Too many open files" in failed[0]["message"]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        crew.children(1)
        crew.process.terminate()
        assert crew.end() == 0


def test_sighup_in_front_of_a_terminal_stops(tmp_path):
    """Whoever closes the window does not want workers to live on."""
    ours, theirs = os.openpty()
    try:
        with nursery(tmp_path, "obedient", stdin=theirs) as crew:
            crew.children(1)
            crew.process.send_signal(signal.SIGHUP)
            assert crew.end() == 0
            assert [event["event"] for event in crew.events()] == ["stopping"]
    finally:
        os.close(ours)
        os.close(theirs)


def test_sighup_that_is_switched_off_stays_so(tmp_path):
    def as_nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with nursery(tmp_path, "obedient", stdin=subprocess.DEVNULL, preexec_fn=as_nohup) as crew:
        crew.children(1)
        crew.process.send_signal(signal.SIGHUP)
        crew.process.terminate()
        assert crew.end() == 0
        assert [event["event"] for event in crew.events()] == ["stopping"]


def test_files_of_the_parent_are_not_the_childrens(tmp_path):
    """Or a child would keep its own lifeline open, and hear nothing of its parent's end."""
    with nursery(tmp_path, "obedient", processes=3) as crew:
        # The one that is started first has the fewest to close, the last one the most.
        wait_until(
            lambda: len({child.num_fds() for child in crew.children(3)}) == 1, "some have more"
        )
        children = crew.children(3)
        crew.process.kill()
        wait_until(lambda: not any(is_working(child) for child in children), "orphans live on")


def is_working(child: psutil.Process) -> bool:
    return child.is_running() and child.status() != psutil.STATUS_ZOMBIE
