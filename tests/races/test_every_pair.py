"""Every pair of actors on every engine, one of them stopped: the end is the one of the model.

A race is named by its schedule, which a failure prints; one command runs it again and shows every
statement of both::

    python -m tests.races.replay "sqlite: running | worker.complete @2 / operator.force-cancel"

What must be: the row, the history, the workers and both answers are those that the model gives for
the order in which the atomic writes of the two took effect. ``actors`` says what is atomic.

With ``JOBQUEUE_ALL_PAIRS=1`` every pair is run at every pause point, from every state in which one
of the two can do anything: to be run by hand, for it is some 75,000 races. On every push there are
some 10,000 of them:

* from states in which the first can do something, without a second that sends what another does;
* at the points that decide by the model: before each statement that locks or writes and carries one
  of its steps, and before COMMIT;
* with one of the three final states on each engine, a job's last attempt only for who asks, and a
  job that is asked to stop only with a worker or a sweep as the first;
* on SQLite and MariaDB, which differ in their locks and not in what is decided, without a job that
  is asked to stop, the last attempt, the lost reply, and a first that sends what another does;
* on MariaDB, but for the final state, with workers and sweeps alone as the first.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest

from jobqueue import broker, coordinator, sweep, transitions
from jobqueue.lifecycle import Verb
from tests import helpers, servers
from tests.races import cast, pairs, replay, tables
from tests.races.schedule import Schedule, Stuck

EVERY = os.environ.get("JOBQUEUE_ALL_PAIRS") == "1"
SHOWN = 5

# Where the order is a different one on each engine: refused, passed over, waited for.
EXAMPLES = [
    "sqlite: running | worker.complete @2 / operator.force-cancel",
    "postgresql: running | worker.complete @3 / operator.force-cancel",
    "mariadb: scheduled | promote @4 / worker.claim-to-running",
    "postgresql: running | sweep.dead-worker @3 / worker.heartbeat",
    "mariadb: running | worker.fail @4 / worker.retry",
]
REPLAYED = os.environ.get("JOBQUEUE_SCHEDULE")


def _firsts() -> Iterator[Any]:
    for name in helpers.ENGINES:
        alias = helpers.engine(name)
        for first in pairs.firsts(name, every=EVERY):
            yield pytest.param(alias.values[0], first, id=f"{name}-{first}", marks=alias.marks)


@pytest.mark.parametrize(("alias", "first"), list(_firsts()), indirect=["alias"])
def test_every_pair_ends_as_in_the_model(alias, first):
    """At each of its pause points somebody else acts; each of the others in turn."""
    faults, number = [], 0
    with tables.table(alias) as table:
        for race in pairs.schedules(table, first, every=EVERY):
            number += 1
            faults += _faults(table, race)
    assert number > 0
    assert not faults, f"{len(faults)} of {number} races:\n" + "\n".join(faults[:SHOWN])


def _faults(table: tables.Table, race: Schedule) -> Iterator[str]:
    try:
        run, faults = pairs.play(table, race)
    except Stuck as stuck:
        pytest.fail(f"{race}\n  {stuck}")
    if faults:
        yield f'python -m tests.races.replay "{race}"\n  ' + "\n  ".join(faults) + f"\n{run}"


def _replayed(line: str) -> Any:
    alias = helpers.engine(Schedule.parse(line).engine)
    return pytest.param(alias.values[0], line, id=line, marks=alias.marks)


@pytest.mark.parametrize(
    ("alias", "line"),
    [_replayed(line) for line in ([REPLAYED] if REPLAYED else EXAMPLES)],
    indirect=["alias"],
)
def test_schedule_gives_the_same_race_again(alias, line):
    """The same statements in the same order; ``tests.races.replay`` runs this one."""
    race = Schedule.parse(line)
    with tables.table(alias) as table:
        run, faults = pairs.play(table, race)
        sys.stdout.write(f"\n{race}\n{run}\n")
        again, _ = pairs.play(table, race)
    assert not faults, "\n".join(faults)
    assert [entry.outline for entry in run.log] == [entry.outline for entry in again.log]


def test_schedule_is_read_as_it_is_printed():
    for line in EXAMPLES:
        assert str(Schedule.parse(line)) == line
    message = "'running | start' is no schedule; one looks like this: sqlite: running | "
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        Schedule.parse("running | start")


ACTOR = "known are: worker.start | worker.complete |"
STATE = "known are: scheduled | waiting |"
UNKNOWN = {
    "sqlite: running | worker.finish @2 / operator.fail": f"actor 'worker.finish'; {ACTOR}",
    "sqlite: running | worker.fail @2 / nobody": f"actor 'nobody'; {ACTOR}",
    "sqlite: asleep | worker.fail @2 / operator.fail": f"state 'asleep'; {STATE}",
    "oracle: running | worker.fail @2 / operator.fail": (
        "engine 'oracle'; known are: sqlite | postgresql | mariadb\n"
    ),
}


@pytest.mark.parametrize("line", UNKNOWN)
def test_replay_says_in_one_line_what_is_known(capsys, line):
    assert replay.main([line]) == 2
    said, message = capsys.readouterr()
    assert (said, message.count("\n")) == ("", 1)
    assert message.startswith(f"there is no {UNKNOWN[line]}")


def test_replay_of_an_engine_that_is_missing_is_no_success(capsys, monkeypatch):
    """Its test would be skipped, and a skipped race shows nothing."""
    monkeypatch.setattr(servers, "missing_engines", lambda: {"mariadb": "mariadbd isn't installed"})
    assert replay.main([EXAMPLES[-1]]) == 2
    assert capsys.readouterr().err == "mariadb can't be run here: mariadbd isn't installed\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], f"{replay.__doc__}\n"),
        (["running"], "'running' is no schedule; one looks like this: sqlite: running | "),
        (["x: running | start @1 / prune"], "there is no engine 'x'; known are: "),
    ],
)
def test_replay_ends_with_status_2_if_there_is_no_such_schedule(arguments, message):
    command = [sys.executable, "-m", "tests.races.replay", *arguments]
    environment = helpers.child_environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)


# -- The table is complete

WRITE_NO_JOB = {
    *("broker.register", "broker.leave", "broker.next_due", "broker.compare"),
    "sweep.stale_rules",
}


@pytest.mark.parametrize("alias", [helpers.engine("sqlite")], indirect=True)
def test_every_function_that_writes_a_job_takes_part(alias):
    """A new verb, and a new public function, needs an actor: what they call is looked at."""
    modules = (broker, coordinator, sweep, transitions)
    public = {code: name for module in modules for name, code in _public(module)}
    called: set[str] = set()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in public:
            called.add(public[frame.f_code])

    with tables.table(alias) as table:
        for name, scene in pairs.solos(table):
            table.reset(scene.world)
            sys.setprofile(look)
            try:
                cast.ACTORS[name].call(scene.first)
            finally:
                sys.setprofile(None)
    assert called | WRITE_NO_JOB == set(public.values())
    assert {actor.verb for actor in cast.ACTORS.values()} >= set(Verb)


def _public(module: ModuleType) -> Iterator[tuple[str, CodeType]]:
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__ and not name.startswith("_"):
            short = module.__name__.rpartition(".")[2]
            yield f"{short}.{name}", inspect.unwrap(function).__code__
