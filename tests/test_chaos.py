"""Chaos on each engine ends with nothing lost, doubled or stuck; its tools do what they say."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import servers
from tests.chaos import cli, faults, log
from tests.chaos.checker import Violation
from tests.chaos.history import Status, gather
from tests.chaos.proxy import Proxy
from tests.chaos.run import Options, Verdict, find_libfaketime
from tests.chaos.scene import Scene
from tests.chaos.stage import Stage
from tests.chaos.targets import TARGETS
from tests.helpers import child_environment, run_in_thread, wait_until

# A machine that is busy is slow, and the run is judged by what it did, not by how fast.
PATIENCE = 240
# By which coverage.py begins in child processes: here it would take most of the processors' time.
MEASURING = {"COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"}


def test_the_seed_decides_the_schedule():
    """The same seed strikes likewise, another one otherwise; each kind comes."""
    kinds = set(faults.DECK)
    one = faults.schedule(1, 120, kinds)
    assert one == faults.schedule(1, 120, kinds) != faults.schedule(2, 120, kinds)
    assert {strike.kind for strike in one} == kinds
    assert [strike.at for strike in one] == sorted(strike.at for strike in one)
    assert one[-1].at < 120


@pytest.fixture
def through_proxy(postgres_server) -> Iterator[tuple[Proxy, Callable[[], Any]]]:
    """A proxy before a server with a table ``t``; and what opens a connection through it."""
    import psycopg

    direct = psycopg.connect(
        host=str(postgres_server.directory), user="postgres", dbname="postgres", autocommit=True
    )
    direct.execute("CREATE TABLE t (id int)")
    with ExitStack() as stack:
        stack.enter_context(direct)
        proxy = stack.enter_context(Proxy(postgres_server.directory / ".s.PGSQL.5432"))

        def connect() -> Any:
            given = {"host": "127.0.0.1", "port": proxy.port, "sslmode": "disable"}
            connection = psycopg.connect(user="postgres", dbname="postgres", **given)
            stack.callback(connection.close)  # its own end would commit first, on a cut line
            return connection

        yield proxy, connect


def test_proxy_delivers_commit_and_loses_its_reply(through_proxy):
    """airflow#63183: the client is cut off, and the row is there."""
    import psycopg

    proxy, connect = through_proxy
    proxy.lose_replies(1)
    writer = connect()
    writer.execute("INSERT INTO t VALUES (1)")
    with pytest.raises(psycopg.OperationalError):
        writer.commit()
    assert connect().execute("SELECT id FROM t").fetchall() == [(1,)]
    assert proxy.replies_lost == 1


def test_proxy_stalls_and_flows_again(through_proxy):
    proxy, connect = through_proxy
    reader = connect()
    reader.execute("SELECT 1")
    proxy.stall()
    asked = run_in_thread(lambda: reader.execute("SELECT 2").fetchone())
    late = run_in_thread(connect)
    wait_until(lambda: len(proxy._links) == 2, "the second connection has not come")
    assert not asked.done
    assert not late.done
    proxy.flow()
    assert asked.result() == (2,)
    late.result()


def test_proxy_cuts(through_proxy):
    import psycopg

    proxy, connect = through_proxy
    reader = connect()
    reader.execute("SELECT 1")
    proxy.cut(1, seed=0)
    with pytest.raises(psycopg.OperationalError):
        reader.execute("SELECT 2")
    assert proxy.cuts == 1


def test_process_that_ends_by_itself_is_a_violation(tmp_path):
    """It wasn't struck: a worker that dies of an error is found, with what it wrote."""
    scene = Scene(TARGETS["sqlite"](tmp_path).entry(), str(tmp_path))
    with Stage(scene, tmp_path / "output", None) as stage:
        stage.add("worker", 1, "--no-such-option")
        wait_until(lambda: stage.look() or stage.ended, "the worker has not ended")
    (violation, *_) = stage.ended
    assert violation.kind == "process ended"
    assert violation.what.startswith("worker-1 ended by itself with status 2; it wrote:\n")
    assert "unrecognized arguments: --no-such-option" in violation.what


def test_process_that_finds_no_database_is_started_again(tmp_path):
    """A supervisor would do likewise: a server may be away when a worker starts."""
    scene = Scene(TARGETS["sqlite"](tmp_path / "nowhere").entry(), str(tmp_path))
    with Stage(scene, tmp_path / "output", None) as stage:
        stage.add("worker", 1)
        (worker,) = stage.members
        wait_until(lambda: stage.look() or worker.started > 1, "the worker was not started again")
    assert stage.ended == []


# -- The command line


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "tests.chaos", *options]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "0"], "argument --seconds: '0' is not a number from 1 to 86,400"),
        (["--seconds", "nan"], "argument --seconds: 'nan' is not a number from 1 to 86,400"),
        (["--seed", "x"], "argument --seed: 'x' is not an integer from 0 to 4,294,967,295"),
        (["--workers", "0"], "argument --workers: '0' is not an integer from 1 to 64"),
        (["--sweeps", "-1"], "argument --sweeps: '-1' is not an integer from 0 to 16"),
        (["--engine", "oracle"], "argument --engine: invalid choice: 'oracle'"),
    ],
)
def test_bad_option_is_refused(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_engine_that_is_not_installed_is_refused(monkeypatch, capsys):
    missing = {"mariadb": "mariadbd is not installed"}
    monkeypatch.setattr(servers, "missing_engines", lambda: missing)
    with pytest.raises(SystemExit) as ended:
        cli.main(["--engine", "mariadb"])
    assert ended.value.code == 2
    message = "error: --engine mariadb can't be run here: mariadbd is not installed\n"
    assert capsys.readouterr().err.endswith(message)


def test_table():
    """A kind of fault that could not be had says so, and why."""
    verdict = Verdict(
        Options(5), jobs=1234, faults={"kill": 2, "lost_reply": 3}, not_run={"skew": "no library"}
    )
    verdict.violations.append(Violation("not final", "", 7))
    assert cli.as_table(verdict) == (
        "seed          5\n"
        "engine        postgresql\n"
        "jobs          1,234\n"
        "faults        5\n"
        "  kill        2\n"
        "  lost reply  3\n"
        "  skew        not run: no library\n"
        "rescued       0\n"
        "refused       0\n"
        "lost          0\n"
        "doubled       0\n"
        "stuck         1\n"
        "violations    1\n"
    )


class Run:
    """A run of its own, with what it puts into its directory for temporary files."""

    def __init__(self, *options: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="jq-"))
        self.directory.chmod(0o711)  # whoever PostgreSQL runs as must pass through
        environment = child_environment(TMPDIR=str(self.directory))
        for name in MEASURING & environment.keys():
            del environment[name]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def end(self) -> tuple[int, str, str]:
        """Wait for the end; return exit status, output and what it wrote to stderr."""
        output, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, output, errors

    def children(self) -> list[psutil.Process]:
        """Return the processes that it has started, and those of their own."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def has_workers(self) -> bool:
        """Say whether a worker has begun its log."""
        return any(self.directory.glob("*/history/worker-*"))

    def close(self) -> None:
        """End it, if it has not ended, and remove what it should have removed."""
        self.process.terminate()
        self.process.communicate(timeout=PATIENCE)
        shutil.rmtree(self.directory)


@contextmanager
def run(*options: str) -> Iterator[Run]:
    """Make a run that doesn't outlive the block."""
    started = Run(*options)
    try:
        yield started
    finally:
        started.close()


@pytest.mark.usefixtures("runs")  # which go on meanwhile
@pytest.mark.skipif("postgresql" in servers.missing_engines(), reason="there is no PostgreSQL")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_nothing_is_left_of_a_run_that_was_interrupted(number):
    with run("--seconds", "600", "--seed", "1", *FEWER) as interrupted:
        wait_until(interrupted.has_workers, "no worker was started", timeout=PATIENCE)
        children = interrupted.children()
        interrupted.process.send_signal(number)
        status, output, errors = interrupted.end()
        _, alive = psutil.wait_procs(children, timeout=20)
        assert not alive
        wait_until(lambda: not list(interrupted.directory.iterdir()), "files were left behind")
    assert output == ""
    if number == signal.SIGINT:
        assert (status, errors) == (130, "Interrupted: all that was started has been ended.\n")


# -- The runs: started together by the first test that needs one

FEWER = ("--workers", "3", "--sweeps", "1")
RUNS = {
    "postgresql": ("--engine", "postgresql", "--seconds", "30", "--seed", "4"),
    "mariadb": ("--engine", "mariadb", "--seconds", "12", "--seed", "4", *FEWER),
    "sqlite": ("--engine", "sqlite", "--seconds", "12", "--seed", "4", *FEWER),
    "postgresql without fence": (
        *("--engine", "postgresql", "--seconds", "20", "--seed", "4", "--without-fence"),
        *("--keep", *FEWER),
    ),
}
# Of the faults that each engine's schedule has by then, those that can't miss.
SURE = {
    "postgresql": {
        *("kill", "freeze", "kill_child", "kill_parent"),
        *("cut", "stall", "terminate", "restart", "read_only"),
    },
    "mariadb": {"kill", "freeze", "kill_parent"},
    "sqlite": {"kill", "freeze", "kill_parent", "hold_lock"},
}


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Run]]:
    """All runs that can be made here, at once: most of the time they wait."""
    missing = servers.missing_engines()
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(run("--json", *options))
            for name, options in RUNS.items()
            if options[1] not in missing
        }


@pytest.mark.parametrize("engine", TARGETS)
def test_chaos_loses_doubles_and_sticks_nothing(engine, runs):
    """airflow#63183, bull#1416: killed, frozen and cut off, every job still ends once."""
    if engine not in runs:
        pytest.skip(servers.missing_engines()[engine])
    status, output, errors = runs[engine].end()
    assert (status, errors) == (0, "")
    (line,) = output.splitlines()
    report = json.loads(line)
    keys = ("seed", "engine", "jobs", "faults", "rescued", "refused", "lost", "doubled", "stuck")
    assert tuple(report) == keys
    assert (report["seed"], report["engine"]) == (4, engine)
    assert [report[key] for key in ("lost", "doubled", "stuck")] == [0, 0, 0]
    assert report["jobs"] > 50
    assert report["rescued"] > 0
    assert set(report["faults"]) >= SURE[engine]
    has_skew = engine != "sqlite" and find_libfaketime() is not None
    assert ("skew" in report["faults"]) == has_skew
    assert list(runs[engine].directory.iterdir()) == []


@pytest.mark.parametrize("engine", ["postgresql"])
def test_queue_without_its_fence_is_found_out(engine, runs):
    """Written by id alone, jobs that were given to another are written over: exit status 1."""
    name = f"{engine} without fence"
    if name not in runs:
        pytest.skip(servers.missing_engines()[engine])
    status, output, errors = runs[name].end()
    assert status == 1
    assert json.loads(output)["doubled"] > 0
    assert "VIOLATION two writes of one version: job " in errors
    if engine == "postgresql":
        assert doubled_in_batches(runs[name])


def doubled_in_batches(run: Run) -> set[int]:
    """Return the jobs that owners have written over with one statement for many."""
    (logs,) = run.directory.glob("*/history")
    doubled = set()
    for job_id, life in gather(log.read(logs)).lives.items():
        accepted = [write for write in life.writes if write.status is Status.OK]
        versions = Counter(write.version for write in accepted)
        if any(
            write.by_owner and len(write.line.said["jobs"]) > 1 and versions[write.version] > 1
            for write in accepted
        ):
            doubled.add(job_id)
    return doubled
