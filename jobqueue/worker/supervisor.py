"""The parent of worker processes: starts, watches, replaces and stops them.

It runs no threads and opens no database connection, so that it may fork at any time; and it knows
nothing of jobs: what a worker process does is handed to it as a function.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from jobqueue.backoff import Backoff
from jobqueue.worker import system
from jobqueue.worker.link import Inbox, Link
from jobqueue.worker.log import Log

# What a worker process ends with that is to be replaced at once: it has run enough jobs, or takes
# up too much memory, or holds a thread that hangs.
RECYCLE: Final = 75
# What the parent ends with, beside 0, and 128 + the number of a signal that came twice.
TROUBLE: Final = 1

FIRST_WAIT: Final = 0.5
LONGEST_WAIT: Final = 30.0
# A process that lived for so long owes nothing to those that crashed before it.
HEALTHY_AFTER: Final = 60.0
# How often each process is started in vain, before the parent gives up, if none ever came up.
START_TRIES: Final = 5
# How long a process may take beyond the grace.
KILL_MARGIN: Final = 5.0
# How often a process says that it is well, how long that holds, and how often the file is touched.
BEAT: Final = 0.5
BEAT_HOLDS: Final = 6 * BEAT
TOUCH_EVERY: Final = 2.0
LONGEST_PAUSE: Final = 1.0

STOPPING: Final = (signal.SIGTERM, signal.SIGINT)


class Work(Protocol):
    """What a worker process does."""

    def __call__(self, link: Link, dead: Sequence[str]) -> int:
        """Work; return the exit status.

        Args:
            link: to the parent.
            dead: ids of workers whose processes are known to be gone.
        """


@dataclass(frozen=True, slots=True)
class SupervisorOptions:
    """How to supervise; times in seconds.

    Attributes:
        processes: how many to keep running.
        grace: what the processes themselves wait for running jobs when told to stop.
        silence: how long a process may say nothing before it is killed, for it hangs.
        burst: a process that ends with 0 has drained the queues, and isn't replaced.
        health_file: touched every few seconds while all processes are well.
    """

    processes: int
    grace: float
    silence: float
    burst: bool = False
    health_file: Path | None = None


@dataclass(slots=True)
class Slot:
    """The place of one worker process, and of those that follow it there.

    Attributes:
        start_at: when the next one is due; ``None`` while one runs, and when none shall follow.
        failures: how many crashed in a row.
        dead: the worker ids of crashed ones, for the next one to bury.
        kill_at: when the one that was told to stop has had its time.
    """

    start_at: float | None
    failures: int = 0
    dead: list[str] = field(default_factory=list)
    pid: int = 0
    inbox: Inbox | None = None
    began: float = 0.0
    kill_at: float | None = None

    @property
    def is_up(self) -> bool:
        """Whether its process has a lease."""
        return self.inbox is not None and self.inbox.worker_id is not None


class Supervisor:
    """Runs in the main thread of a process.

    Args:
        work: what a worker process does.
        options: how to supervise.
        log: where to tell of it.
        before_fork: called before each fork, to close what a child must not inherit.
    """

    def __init__(
        self,
        work: Work,
        options: SupervisorOptions,
        log: Log,
        before_fork: Callable[[], None] = lambda: None,
    ) -> None:
        self.settled: Counter[str] = Counter()
        self._work = work
        self._options = options
        self._log = log
        self._before_fork = before_fork
        self._slots = [Slot(start_at=0.0) for _ in range(options.processes)]
        self._is_stopping = False
        self._left_by: int | None = None
        self._rolling: list[Slot] = []
        self._ever_up = False
        self._has_killed = False
        self._touched_at = 0.0
        self._looked_at = 0.0

    def run(self) -> int:
        """Supervise until told to stop, drained, or no process can be started; return the status.

        0: stopped as asked, or drained. 1: no process came up, or one did not stop in time and had
        to be killed. 128 + its number: a second signal.
        """
        self._remove_health_file()
        with ExitStack() as stack:
            self._lifeline, self._lifeline_end = os.pipe()
            # The end of this is what children that still run hear.
            stack.callback(os.close, self._lifeline_end)
            stack.callback(os.close, self._lifeline)
            stack.callback(self._remove_health_file)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            optional = [n for n in (signal.SIGHUP, system.DUMP) if not system.was_ignored(n)]
            self._ears = stack.enter_context(system.Ears((*STOPPING, signal.SIGCHLD, *optional)))
            self._selector.register(self._ears.fd, selectors.EVENT_READ)
            return self._supervise()

    def _supervise(self) -> int:
        while True:
            self._obey()
            self._reap()
            if self._left_by is not None:
                return 128 + self._left_by
            if self._has_given_up():
                return TROUBLE
            if not self._running and (self._is_stopping or not self._starting):
                return TROUBLE if self._has_killed else 0
            self._start_due()
            self._kill_overdue()
            self._roll()
            self._touch()
            self._listen()

    @property
    def _running(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.inbox]

    @property
    def _starting(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.start_at is not None]

    # -- Signals

    def _obey(self) -> None:
        while self._ears.heard:
            number = self._ears.heard.pop(0)
            if number == system.DUMP:
                system.dump_stacks()
                for slot in self._running:
                    _send(slot, number)
            elif number in STOPPING or (number == signal.SIGHUP and system.has_terminal()):
                self._stop(number)
            elif number == signal.SIGHUP and not self._is_stopping and not self._options.burst:
                self._log.tell("rolling", "Replacing all worker processes, one after another.")
                self._rolling = self._running

    def _stop(self, number: int) -> None:
        """Stop all processes: the first time with grace, the second time at once."""
        name = signal.Signals(number).name
        if not self._is_stopping:
            self._is_stopping = True
            for slot in self._running:
                self._terminate(slot)
            self._log.tell("stopping", f"Stopping on {name}.", signal=name)
            return
        self._left_by = number
        self._log.tell("leaving", f"Leaving at once on a second {name}.", signal=name)
        for slot in self._running:
            self._kill(slot)
        while self._running:
            self._reap()
            self._listen()

    def _terminate(self, slot: Slot) -> None:
        slot.kill_at = slot.kill_at or time.monotonic() + self._options.grace + KILL_MARGIN
        _send(slot, signal.SIGTERM)

    def _kill(self, slot: Slot) -> None:
        slot.kill_at = None
        _send(slot, signal.SIGKILL)

    def _kill_overdue(self) -> None:
        now = time.monotonic()
        # Else this process was frozen, and its children perhaps as well.
        was_listening = now - self._looked_at < 2 * LONGEST_PAUSE
        self._looked_at = now
        for slot in self._running:
            assert slot.inbox
            if not was_listening:
                slot.inbox.heard_at = now
            if slot.kill_at and now >= slot.kill_at:
                self._has_killed = self._has_killed or self._is_stopping
                self._kill(slot)
                self._tell_of(slot, "overdue", f"Process {slot.pid} did not stop in time: killed")
            elif now - slot.inbox.heard_at >= self._options.silence:
                slot.inbox.heard_at = now
                self._kill(slot)
                self._tell_of(slot, "silent", f"Process {slot.pid} hangs: killed")

    def _roll(self) -> None:
        """Stop the next process of a rolling restart, once all others are up."""
        while self._rolling and all(slot.is_up and not slot.kill_at for slot in self._slots):
            slot = self._rolling.pop(0)
            self._terminate(slot)

    # -- The life of a process

    def _start_due(self) -> None:
        for slot in self._starting:
            if not self._is_stopping and (slot.start_at or 0) <= time.monotonic():
                try:
                    self._start(slot)
                except OSError as error:
                    text = f"A process could not be started: {error}"
                    self._log.tell("start_failed", text, is_trouble=True)
                    self._back_off(slot)

    def _start(self, slot: Slot) -> None:
        self._before_fork()
        others = [slot.inbox.fd for slot in self._running if slot.inbox]
        fds = (self._lifeline_end, *others)
        work = partial(self._work, dead=tuple(slot.dead))
        slot.pid, fd = system.fork_child(work, self._ears, self._lifeline, fds)
        slot.began = now = time.monotonic()
        slot.start_at, slot.kill_at, slot.inbox = None, None, Inbox(fd, now)
        self._selector.register(fd, selectors.EVENT_READ, slot)

    def _reap(self) -> None:
        slots = {slot.pid: slot for slot in self._running}
        for pid, code in system.reap(slots):
            self._bid_farewell(slots[pid], code)

    def _bid_farewell(self, slot: Slot, code: int) -> None:
        """Decide what comes after a process that has ended."""
        assert slot.inbox
        now = time.monotonic()
        self._read(slot)
        self.settled += slot.inbox.settled
        self._release(slot)
        # A handler may end its process too, with any status, but not with a farewell.
        is_well = slot.inbox.has_said_farewell and code in (0, RECYCLE)
        if not is_well and slot.inbox.worker_id:
            slot.dead.append(slot.inbox.worker_id)
        if self._is_stopping or (self._options.burst and code == 0):
            if not is_well:
                self._tell_of(slot, "crashed", f"Process {slot.pid} ended with {_name(code)}", code)
        elif is_well:
            slot.failures, slot.start_at = 0, now
            text = f"Process {slot.pid} has ended as it should, and is replaced"
            self._tell_of(slot, "recycled", text, code)
        else:
            if now - slot.began >= HEALTHY_AFTER:
                slot.failures = 0
            wait = self._back_off(slot)
            text = f"Process {slot.pid} ended with {_name(code)}; another one starts in {wait:g} s"
            self._tell_of(slot, "crashed", text, code, wait=wait)
        slot.inbox = None

    def _release(self, slot: Slot) -> None:
        assert slot.inbox
        if slot.inbox.fd in self._selector.get_map():
            self._selector.unregister(slot.inbox.fd)
        slot.inbox.close()

    def _back_off(self, slot: Slot) -> float:
        slot.failures += 1
        # Spread: what crashed together, for want of memory, should not come back together.
        policy = Backoff(base=FIRST_WAIT, cap=LONGEST_WAIT, jitter=0.5)
        wait = round(policy.delay(slot.failures).total_seconds(), 3)
        slot.start_at = time.monotonic() + wait
        return wait

    def _has_given_up(self) -> bool:
        """Whether no process ever came up: then it isn't chance, and an operator should see it."""
        if self._ever_up or self._is_stopping or not self._starting:
            return False
        if self._running or min(slot.failures for slot in self._starting) < START_TRIES:
            return False
        text = f"No worker process came up, in {START_TRIES} tries: giving up."
        self._log.tell("gave_up", text, is_trouble=True)
        return True

    def _tell_of(
        self, slot: Slot, event: str, text: str, code: int | None = None, **facts: Any
    ) -> None:
        if code is not None:
            facts |= {"status": code, "signal": system.signal_name(code)}
        self._log.tell(
            event,
            f"{text}.",
            is_trouble=event != "recycled",
            child=slot.pid,
            worker=slot.inbox.worker_id if slot.inbox else None,
            **facts,
        )

    # -- Listening, and telling that all is well

    def _listen(self) -> None:
        """Wait until a signal or a message comes, or something is due."""
        for key, _ in self._selector.select(self._pause(time.monotonic())):
            if key.data is None:
                self._ears.empty()
            elif not self._read(key.data):
                self._selector.unregister(key.fd)

    def _pause(self, now: float) -> float:
        starting = [] if self._is_stopping else self._starting
        due = [slot.start_at - now for slot in starting if slot.start_at is not None]
        return max(0, min([LONGEST_PAUSE, *due]))

    def _read(self, slot: Slot) -> bool:
        """Take in what a process has sent; return whether more may come."""
        assert slot.inbox
        has_more = slot.inbox.read(time.monotonic())
        self._ever_up = self._ever_up or slot.is_up
        if slot.inbox.has_buried:
            slot.dead.clear()
        return has_more

    def _touch(self) -> None:
        file, now = self._options.health_file, time.monotonic()
        if file and now - self._touched_at >= TOUCH_EVERY and self._is_healthy(now):
            self._touched_at = now
            with suppress(OSError):
                file.touch()

    def _is_healthy(self, now: float) -> bool:
        well = [
            slot.inbox is not None
            and slot.inbox.healthy_at is not None
            and now - slot.inbox.healthy_at < BEAT_HOLDS
            for slot in self._slots
            if slot.inbox or slot.start_at is not None
        ]
        return self._is_stopping or all(well)

    def _remove_health_file(self) -> None:
        if self._options.health_file:
            with suppress(OSError):
                self._options.health_file.unlink(missing_ok=True)


def _send(slot: Slot, number: int) -> None:
    # Not reaped yet, so the number is nobody else's.
    with suppress(ProcessLookupError):
        os.kill(slot.pid, number)


def _name(code: int) -> str:
    return system.signal_name(code) or f"status {code}"
