"""Supervisors of children that do as they are told, each run as a program of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jobqueue.worker import supervisor
from jobqueue.worker.link import Link
from jobqueue.worker.log import Log
from jobqueue.worker.supervisor import Supervisor, SupervisorOptions

# Crashes follow one another, and stubborn children are killed, faster than in production.
supervisor.FIRST_WAIT = 0.02  # type: ignore[misc]
supervisor.LONGEST_WAIT = 0.1  # type: ignore[misc]
supervisor.KILL_MARGIN = 0.3  # type: ignore[misc]
supervisor.HEALTHY_AFTER = 0.5  # type: ignore[misc]


def never_up(link: Link, dead: Sequence[str]) -> int:
    """Raise, as an import that fails does."""
    raise RuntimeError("no module named so")


def once_up(link: Link, dead: Sequence[str]) -> int:
    """Come up once, and crash ever after."""
    if not Path("once").exists():
        Path("once").touch()
        link.send(worker="first")
    return 9


def well_for_a_while(link: Link, dead: Sequence[str]) -> int:
    """Crash three times, live long enough to be forgiven, and crash again."""
    with Path("starts").open("a") as file:
        file.write("x")
    starts = Path("starts").stat().st_size
    link.send(worker=f"w{starts}")
    if starts == 4:
        time.sleep(0.7)
    return 9


def bury(link: Link, dead: Sequence[str]) -> int:
    """Crash: the second one before it is up, the third one before it has buried anybody."""
    with Path("dead").open("a") as file:
        file.write(",".join(dead) + "\n")
    lives = len(Path("dead").read_text().splitlines())
    if lives != 2:
        link.send(worker=f"w{lives}")
    if lives not in (2, 3):
        link.send(buried=True)
    return 9


def silent_end(link: Link, dead: Sequence[str]) -> int:
    """End with 0, without having said so."""
    link.send(worker="silent")
    return 0


def stubborn(link: Link, dead: Sequence[str]) -> int:
    """Hear SIGTERM, and go on."""
    link.send(worker="stubborn")
    while True:
        time.sleep(60)


def obedient(link: Link, dead: Sequence[str]) -> int:
    """Work until told to stop, or the parent is gone."""
    stopped: list[bool] = []
    link.call_on_stop(lambda: stopped.append(True))
    link.send(worker="obedient")
    while not (stopped or link.wait(0.02)):
        link.send(healthy=True)
    link.send(settled={"obeyed": 1})
    return 0


def stopped_at_birth(link: Link, dead: Sequence[str]) -> int:
    """Be told to stop before there is anybody to hear it: see ``main``."""
    return obedient(link, dead)


def main(child: str, processes: str) -> int:
    """Supervise, and tell of it as JSON, one line per event."""

    class Lines:
        def write(self, text: str) -> None:
            sys.stdout.write(text + "\n")

        def flush(self) -> None:
            sys.stdout.flush()

    if child == "stopped_at_birth":
        os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    options = SupervisorOptions(int(processes), grace=0.1, silence=1.5)
    return Supervisor(globals()[child], options, Log(Lines(), Lines(), as_json=True)).run()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
