"""Signals, forks and dead children: what a supervisor asks of the operating system."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, NoReturn

from jobqueue.worker.link import Link

resource: ModuleType | None
try:
    import resource
except ImportError:  # pragma: no cover  (Windows)
    resource = None

CRASHED: Final = 1
# Writes the stacks of all threads to stderr.
DUMP: Final = getattr(signal, "SIGUSR1", 0)
CAN_FORK: Final = hasattr(os, "fork")


class Ears:
    """Signals, heard in the main thread: each wakes who waits for ``fd``, and is in ``heard``."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.heard: list[int] = []
        self.before: dict[int, Any] = {}
        self.fd, self._inner = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._inner, False)

    @property
    def fds(self) -> tuple[int, int]:
        """Both ends of the pipe."""
        return self.fd, self._inner

    def __enter__(self) -> Ears:
        self.before = {n: signal.signal(n, self._hear) for n in self.numbers}
        self._wakeup_before = signal.set_wakeup_fd(self._inner, warn_on_full_buffer=False)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.forget()
        for fd in self.fds:
            os.close(fd)

    def forget(self) -> None:
        """Have signals do what they did before."""
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self.before.items():
            # None: whoever set it did so behind Python's back, where nobody can read it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def empty(self) -> None:
        """Take out of the pipe what has woken us."""
        with suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.heard.append(number)


def fork_child(
    work: Callable[[Link], int], ears: Ears, lifeline: int, to_close: Iterable[int]
) -> tuple[int, int]:
    """Start a child that does ``work`` and ends with what it returns.

    Args:
        work: called in the child.
        ears: the parent's, which the child must not have.
        lifeline: at its end the child hears of the parent's.
        to_close: other files of the parent's.

    Returns:
        The child's id, and the file from which its messages can be read.

    Raises:
        OSError: there are too many processes or files, or too little memory.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    inward, outward = os.pipe()
    # A signal that comes before the child has its own handlers waits until it has.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ears.numbers)
    pid = -1
    try:
        pid = os.fork()
        if pid == 0:
            _be_child(work, ears, Link(lifeline, outward), (inward, *to_close), mask)
    finally:
        os.close(outward)
        if pid < 0:
            os.close(inward)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid, inward


def _be_child(
    work: Callable[[Link], int],
    ears: Ears,
    link: Link,
    to_close: Iterable[int],
    mask: Iterable[int],
) -> NoReturn:
    """Work, and end: whatever happens, a child must not go on as its parent."""
    status = CRASHED
    try:
        ears.forget()
        for fd in (*ears.fds, *to_close):
            os.close(fd)
        _take_signals(link)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = work(link)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(status)


def _take_signals(link: Link) -> None:
    """Stop on SIGTERM, however often: a service manager and the parent may both send it.

    Of a terminal's signals, which go to the whole group, the parent makes what is to be made.
    """
    signal.signal(signal.SIGTERM, lambda *_: link.stop())
    # Not SIG_IGN, which whatever a handler starts would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGHUP, lambda *_: None)
    dump_stacks_on_signal()


def dump_stacks_on_signal() -> None:
    """Have SIGUSR1 write the stacks of all threads to stderr, or nothing if that is no file."""
    with suppress(OSError, ValueError, AttributeError):
        signal.signal(DUMP, lambda *_: None)
        faulthandler.register(DUMP)


@contextmanager
def dumping_stacks_on_signal() -> Iterator[None]:
    """Do so while the block lasts."""
    with suppress(OSError, ValueError, AttributeError):
        faulthandler.register(DUMP)
    try:
        yield
    finally:
        with suppress(ValueError, AttributeError):
            faulthandler.unregister(DUMP)


def dump_stacks() -> None:
    """Write the stacks of all threads to stderr, if that is a file."""
    with suppress(OSError, ValueError, AttributeError):
        faulthandler.dump_traceback()


def reap(pids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield those of our children that have ended, with their exit codes.

    The first process of a container reaps everybody's orphans too. Elsewhere other children may be
    somebody else's, who waits for them.
    """
    ended = dict(_reap_everybody()) if os.getpid() == 1 else {}
    for pid in pids:
        found, status = (pid, ended[pid]) if pid in ended else os.waitpid(pid, os.WNOHANG)
        if found:
            yield pid, os.waitstatus_to_exitcode(status)


def _reap_everybody() -> Iterator[tuple[int, int]]:
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def has_terminal() -> bool:
    """Whether somebody sits in front of this process."""
    with suppress(OSError, ValueError, AttributeError):
        return sys.stdin.isatty()
    return False


def signal_name(code: int) -> str | None:
    """Return the name of the signal that an exit code tells of, if it does."""
    with suppress(ValueError):
        return signal.Signals(-code).name
    return None


def was_ignored(number: int) -> bool:
    """Whether a signal was switched off by whoever started us, as ``nohup`` does."""
    return signal.getsignal(number) is signal.SIG_IGN


def resident_bytes() -> int:
    """Return how much memory this process takes up; where that can't be told, its peak, or 0."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    if resource is None:
        return 0
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024
