"""Every benchmark runs by its real command, at a size at which its figures mean nothing."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests import servers
from tests.benchmarks import chart, measuring, stores, venvs
from tests.benchmarks.__main__ import BENCHMARKS
from tests.benchmarks.report import NotRun, Reading, Report
from tests.benchmarks.system import all_systems
from tests.helpers import child_environment

BOTH = {"jobqueue", "limit"}
# Command line, metrics, and the systems that have a value for each.
SMALL: dict[str, tuple[str, dict[str, set[str]]]] = {
    "enqueue": (
        "--jobs 40",
        {
            "single": BOTH,
            "single, prepared": {"jobqueue"},
            "bulk": BOTH,
            "bulk, prepared": {"jobqueue"},
        },
    ),
    "drain": (
        "--jobs 60 --handler noop --settings tuned",
        {"noop, tuned": BOTH},
    ),
    "sqlite": (
        "--jobs 30 --only jobqueue --handler noop --settings default",
        {"noop, default": {"jobqueue"}},
    ),
    "latency": ("--jobs 2", {"p50": BOTH, "p95": BOTH, "p99": BOTH}),
    "sweep": ("--jobs 30", {"stale jobs taken back": BOTH}),
    "growth": (
        "--rows 50",
        {
            "claim of 100, 50 finished": BOTH,
            "claim of 100, 50 scheduled": BOTH,
            "claim of 100, 50 waiting in other queues": BOTH,
            "50 scheduled, times 50 finished": BOTH,
            "50 waiting in other queues, times 50 finished": BOTH,
        },
    ),
    "fence": (
        "--jobs 40",
        {
            "claim and complete 40, by id": BOTH,
            "claim and complete 40, fenced": BOTH,
            "what the fence adds": BOTH,
        },
    ),
    "bloat": (
        "--jobs 40",
        {
            "claim of 100, fresh": BOTH,
            "claim of 100, 40 jobs later under an old snapshot": BOTH,
            "the later one, times a fresh one": BOTH,
            "dead rows under an old snapshot": BOTH,
            "HOT share of claims and completions": BOTH,
            "HOT share of progress and heartbeats": {"jobqueue"},
            "HOT share of progress and heartbeats, under an old snapshot": {"jobqueue"},
        },
    ),
    "memory": (
        "--jobs 30",
        {"RSS after 3 jobs": {"jobqueue"}, "growth to 30 jobs": {"jobqueue"}},
    ),
}

needs_postgres = pytest.mark.skipif(
    "postgresql" in servers.missing_engines(), reason="needs PostgreSQL"
)


def command(*words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run ``python -m tests.benchmarks`` as a person does."""
    return subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", *words],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Future[Any]]]:
    """Run all benchmarks, two at a time, on one server."""
    servers.run_dir().mkdir(exist_ok=True)
    servers.run_dir().chmod(0o711)
    server = servers.PostgresServer(servers.run_dir() / f"pg-{secrets.token_hex(3)}")
    server.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            yield {
                name: pool.submit(
                    command,
                    *(name, "--json", "--repeat", "1", "--socket", str(server.directory)),
                    *options.split(),
                    *([] if "--only" in options else ["--only", *only(name)]),
                )
                for name, (options, _) in SMALL.items()
            }
    finally:
        server.stop()
        shutil.rmtree(server.directory)


def only(name: str) -> list[str]:
    about = {system.name: system.about for system in all_systems(Path()).values()}
    return [system for system in sorted(BOTH) if name in about[system]["benchmarks"]]


@needs_postgres
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_prints_one_object_of_rows(name: str, runs: dict[str, Future[Any]]) -> None:
    """Each metric of each system once, with its ratio to the limit where there is one."""
    done = runs[name].result()
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert done.stdout == json.dumps(report) + "\n"
    assert set(report) == {"benchmark", "rows"}
    assert report["benchmark"] == name
    found: dict[str, set[str]] = {}
    for row in report["rows"]:
        assert set(row) == {"system", "metric", "value", "unit", "ratio_to_limit"}
        assert isinstance(row["value"], int | float), row
        assert row["system"] not in found.setdefault(row["metric"], set())
        found[row["metric"]].add(row["system"])
    _, expected = SMALL[name]
    assert found == expected
    for row in report["rows"]:
        has_limit = "limit" in expected[row["metric"].removesuffix(", prepared")]
        # Nothing divides by what the limit may well have none of.
        assert (row["ratio_to_limit"] is not None) == (has_limit and limit_of(report, row) != 0)
    assert "Traceback" not in done.stderr


def limit_of(report: dict[str, Any], row: dict[str, Any]) -> Any:
    (value,) = (
        other["value"]
        for other in report["rows"]
        if other["metric"] == row["metric"].removesuffix(", prepared")
        and other["system"] == "limit"
    )
    return value


def test_every_benchmark_is_tried() -> None:
    assert set(SMALL) == set(BENCHMARKS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nothing", "argument NAME: invalid choice: 'nothing'"),
        ("drain --repeat 0", "argument --repeat: '0' must be an integer of at least 1"),
        ("drain --jobs -5", "argument --jobs: '-5' must be an integer of at least 1"),
        ("growth --rows many", "argument --rows: 'many' must be an integer of at least 1"),
        ("drain --handler 7", "argument --handler: invalid choice: '7'"),
        ("drain --only jobqueue --only nobody", "nobody: no such system in drain; there are"),
        ("sweep --only celery", "celery: no such system in sweep; there are jobqueue, limit"),
        ("chart no-such-file.json -o x.svg", "this is not what --json prints"),
        ("chart no-such-file.json", "the following arguments are required: -o/--output"),
    ],
)
def test_bad_input_ends_with_status_2_and_says_what_is_wrong(words: str, message: str) -> None:
    done = command(*words.split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr


@needs_postgres
def test_the_server_of_a_benchmark_is_durable() -> None:
    """Unlike that of the tests."""
    with stores.opened() as opened:
        assert opened.is_durable()
        directory = opened.directory
    assert not directory.exists()


def test_the_data_of_a_benchmark_are_not_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fsync costs nothing, nothing is durable, and everything fast."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and stores._is_memory(memory)):
        pytest.skip("there is no file system in memory")
    monkeypatch.setattr(tempfile, "tempdir", str(memory))
    with stores.opened() as opened:
        assert not stores._is_memory(opened.directory)


@pytest.mark.parametrize("name", all_systems(Path()))
def test_every_system_says_what_the_benchmarks_ask(name: str) -> None:
    about = all_systems(Path())[name].about
    assert set(about["benchmarks"]) <= set(BENCHMARKS)
    assert set(about["done"]) <= {"postgresql", "sqlite", "redis"}
    assert {"default", "tuned"} <= {setting.split(",")[0] for setting in about["settings"]}
    assert about["rate"] > 0
    assert about["enqueues"] > 0
    if name not in BOTH:
        assert about["requires"]
        assert tuple(map(int, about["python"].split("."))) <= (3, 13)


def test_a_peer_that_cannot_be_installed_is_in_the_report(tmp_path: Path) -> None:
    """With the reason, and without a value."""
    with pytest.raises(NotRun, match=r"it needs Python 9\.9, and none was found") as caught:
        venvs.python_of(tmp_path, "x", ["x"], "9.9")
    report = Report("drain")
    report.leave_out("x", str(caught.value))
    (row,) = report.rows()
    assert row == {
        "system": "x",
        "metric": "not run: it needs Python 9.9, and none was found",
        "value": None,
        "unit": None,
        "ratio_to_limit": None,
    }
    assert "not run: it needs Python 9.9" in report.as_table()


def test_rows_are_medians_with_ratios_to_the_limit() -> None:
    report = Report("drain")
    for value in (10.0, 30.0, 20.0):
        report.add("jobqueue", [Reading("noop", value, "jobs/s")])
        report.add("limit", [Reading("noop", 2 * value, "jobs/s")])
    values = {row["system"]: (row["value"], row["ratio_to_limit"]) for row in report.rows()}
    assert values == {"jobqueue": (20.0, 0.5), "limit": (40.0, 1.0)}


def test_settings_that_the_limit_has_none_of_are_measured_by_its_own() -> None:
    report = Report("enqueue")
    report.add("limit", [Reading("single", 40.0, "jobs/s")])
    report.add(
        "jobqueue", [Reading(f"single{more}", 30.0, "jobs/s") for more in ("", ", prepared")]
    )
    report.add("jobqueue", [Reading("bulk", 30.0, "jobs/s"), Reading("single", 3.0, "ms")])
    found = {(row["metric"], row["unit"]): row["ratio_to_limit"] for row in report.rows()[1:]}
    assert found == {
        ("single", "jobs/s"): 0.75,
        ("single, prepared", "jobs/s"): 0.75,
        ("bulk", "jobs/s"): None,
        ("single", "ms"): None,
    }


def test_a_rate_leaves_out_how_a_drain_begins_and_ends() -> None:
    """Ten seconds of starting, 1,000 jobs a second, and a straggler."""
    steady = [(10.0 + second, 1000 * second) for second in range(11)]
    samples = [(0.0, 0), *steady, (90.0, 10_001)]
    assert measuring.rate(samples) == pytest.approx(1000, rel=0.01)
    with pytest.raises(NotRun, match="too fast to be measured"):
        measuring.rate([(1.0, 50)])


def drained() -> Report:
    report = Report("drain")
    for metric, value in (("noop, default", 12345.0), ("noop, tuned", 13456.0)):
        report.add("jobqueue", [Reading(metric, value, "jobs/s")])
        report.add("limit", [Reading(metric, 2 * value, "jobs/s")])
        report.add("slow", [Reading(metric, value / 1000, "jobs/s")])
    report.add("slow", [Reading("noop, tuned, in threads", 77.0, "jobs/s")])
    report.leave_out("gone", "it can't be installed")
    return report


def test_a_chart_is_drawn_from_what_json_prints(tmp_path: Path) -> None:
    """The same from the same, with every value, and the better of the limit's as its line."""
    source, pictures = tmp_path / "drain.json", [tmp_path / "1.svg", tmp_path / "2.svg"]
    source.write_text(drained().as_json())
    for picture in pictures:
        done = command("chart", str(source), "-o", str(picture))
        assert done.returncode == 0, done.stderr
    text, again = (picture.read_text() for picture in pictures)
    assert text == again
    words = "drain: noop", "jobqueue", "12,345 default", "13,456 tuned", "limit 26,912", "jobs/s"
    for word in (*words, "12.3 default", "77 tuned, in threads", "more is better, logarithmic"):
        assert word in text


def test_settings_are_bars_of_one_panel() -> None:
    """A metric with settings or without them can be chosen; systems come best first."""
    report = json.loads(drained().as_json())
    (panel,) = chart.panels_of(report, ["noop"])
    assert panel.best_first() == [
        ("jobqueue", {"default": 12345.0, "tuned": 13456.0}),
        ("slow", {"default": 12.345, "tuned": 13.456, "tuned, in threads": 77.0}),
    ]
    (panel,) = chart.panels_of(report, ["noop, default"])
    assert panel.best_first() == [("jobqueue", {"default": 12345.0}), ("slow", {"default": 12.345})]
    assert panel.limit == 24690.0
    assert chart.panels_of(report, ["1 ms"]) == []


def test_of_times_the_least_is_the_best() -> None:
    report = Report("latency")
    times = {"limit": (1.0, 2.0), "steady": (4.0, 4.0), "tunable": (9.0, 3.0)}
    for system, values in times.items():
        for settings, value in zip(("default", "tuned"), values, strict=True):
            report.add(system, [Reading(f"p50, {settings}", value, "ms")])
    (panel,) = chart.panels_of(json.loads(report.as_json()), None)
    assert [system for system, _ in panel.best_first()] == ["tunable", "steady"]
    assert panel.limit == 1.0
