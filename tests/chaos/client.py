"""The entry of a run's processes: ``python -m tests.chaos.client ROLE [ARGUMENT ...]``."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import django
from django.core.management import execute_from_command_line

from tests.chaos.scene import Scene

COMMANDS = {"worker": "run_worker", "parent": "run_worker", "sweep": "sweep_stale_jobs"}
# How far a skewed clock may be off what it was told, and how long a process may take to start.
TOLERANCE = 120.0


def main() -> None:
    """Do what ``ROLE`` says until told to stop."""
    role, *arguments = sys.argv[1:]
    scene = Scene.read()
    if scene.skew:
        use_wrong_clock(scene)
    django.setup()
    from tests.chaos import load, recording

    if scene.without_fence:
        recording.remove_fence()
    recording.start(Path(scene.history), role)
    if role in COMMANDS:
        execute_from_command_line(["manage.py", COMMANDS[role], *arguments])
    else:
        load.ROLES[role](scene.seed, *arguments)


def use_wrong_clock(scene: Scene) -> None:
    """Check that the host's time of day is wrong here, and that the monotonic clock is not."""
    age = time.monotonic() - scene.began
    wrong = time.time() - float(Path("/proc/uptime").read_text().split()[0]) - boot_time()
    if not 0 <= age < TOLERANCE or abs(wrong - scene.skew) > TOLERANCE:
        sys.exit(
            f"libfaketime gives {wrong:+.0f} s for {scene.skew:+.0f} s; started {age:.0f} s ago"
        )
    # libfaketime 0.9.10 shifts the absolute time that Python's sleep() gives to clock_nanosleep(),
    # although that is one of the monotonic clock.
    time.sleep = lambda seconds: threading.Event().wait(seconds) and None  # type: ignore[assignment]


def boot_time() -> float:
    """Return when the host was started, as its kernel says."""
    lines = Path("/proc/stat").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("btime")))


if __name__ == "__main__":
    main()
