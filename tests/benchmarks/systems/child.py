"""What the scripts of all systems have in common. Imports nothing but the standard library.

A script is run by the interpreter of its system's own environment::

    python run_x.py VERB '{"place": {...}, ...}'

It prints one JSON object on stdout. The verbs, of which each is a function of its options:

    setup     create the tables, where there are any
    enqueue   store jobs; tell the seconds that took
    worker    run one worker process (all of them, if the system starts them itself) for ever
    latency   store jobs one by one, each when the one before has begun
    work      given by this module: ``worker``, as often as there are to be processes
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

CHUNK = 10_000
PATIENCE = 10.0
START_PATIENCE = 60.0


def main(verbs, *, supervises=False):
    """Do what the command line asks for. ``supervises``: the system starts its processes itself."""
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    verb, options = sys.argv[1], json.loads(sys.argv[2])
    if verb == "work":
        work(options, 1 if supervises else options["processes"])
    else:
        answer = verbs[verb](**options)
        answer_to.write(json.dumps(answer or {}))
        answer_to.close()


def work(options, processes):
    """Run worker processes until one ends, or standard input does, as when the parent is killed."""
    command = [sys.executable, sys.argv[0], "worker", json.dumps(options)]
    for _ in range(processes):
        subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    _, status = os.wait()
    sys.exit(os.waitstatus_to_exitcode(status) or 1)


def _end_with_stdin():
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def timed(jobs, store, one_by_one, chunk=CHUNK):
    """Call ``store`` with ranges of job numbers, or with each number, and tell how long it took."""
    began = time.perf_counter()
    if one_by_one:
        for number in range(jobs):
            store(number)
    else:
        for first in range(0, jobs, chunk):
            store(range(first, min(first + chunk, jobs)))
    return {"jobs": jobs, "seconds": time.perf_counter() - began}


def in_pairs(pairs, once):
    """Time ``once(False)``, by id, and ``once(True)``, fenced, each first every other time."""
    seconds = {"by id": [], "fenced": []}
    for turn in range(pairs + 1):
        for is_fenced in (True, False) if turn % 2 else (False, True):
            began = time.perf_counter()
            once(is_fenced)
            seconds["fenced" if is_fenced else "by id"].append(time.perf_counter() - began)
    return {name: values[1:] for name, values in seconds.items()}  # The first opened connections.


def one_at_a_time(jobs, stamps, store):
    """Store a job when the one before has begun and its worker is idle again.

    ``store`` is called with the time, which the handler writes to the file ``stamps`` beside its
    own: clocks of two processes are the same on one host. The first job is for the workers to
    start with; its line counts for nothing.
    """
    path = Path(stamps)
    path.touch()
    sent = missed = 0
    while sent <= jobs and missed < 3:
        begun = path.stat().st_size
        store(time.monotonic())
        deadline = time.monotonic() + (PATIENCE if sent else START_PATIENCE)
        while path.stat().st_size == begun and time.monotonic() < deadline:
            time.sleep(0.001)
        missed = missed + 1 if path.stat().st_size == begun else 0
        sent += 1
        time.sleep(random.uniform(0.02, 0.12))
    return {"sent": sent - 1}


def manage(*words):
    """Return the command line of a Django command, in the settings that are in the environment."""
    return [sys.executable, "-m", "django", *words]
