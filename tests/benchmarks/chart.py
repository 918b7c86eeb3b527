"""Bars drawn from what ``--json`` has printed: one picture for a page of the docs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.report import LIMIT, OURS

COLOURS = {OURS: "#0a7d5a", LIMIT: "#c8c8c8"}
PEER = "#5b7db1"
BAR = 0.28
LEAST_HEIGHT = 1.6


def main(argv: Sequence[str]) -> int:
    """Draw; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks chart",
        description="Draw the output of --json. Needs matplotlib, the extra 'benchmarks'.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.svg")
    parser.add_argument(
        "--metric", action="append", metavar="NAME", help="Only this; repeatable; default all."
    )
    options = parser.parse_args(argv)
    try:
        panels = [
            panel
            for file in options.files
            for panel in panels_of(json.loads(file.read_text()), options.metric)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"this is not what --json prints: {error}")
    if not panels:
        parser.error("there is nothing to draw in these files")
    try:
        import matplotlib
    except ImportError:
        parser.error("matplotlib is not installed: pip install 'django-jobqueue[benchmarks]'")
    matplotlib.use("svg")
    # The same input gives the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "jobqueue", "svg.fonttype": "none"})
    draw(panels, options.output)
    return 0


Panel = tuple[str, str, list[tuple[str, float]]]


def panels_of(report: dict[str, Any], metrics: Sequence[str] | None) -> list[Panel]:
    """Return for each metric its title, its unit, and the systems with their values, best first."""
    grouped: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for row in report["rows"]:
        is_wanted = metrics is None or row["metric"] in metrics
        if row["value"] is not None and is_wanted:
            bars = grouped.setdefault((row["metric"], row["unit"]), [])
            bars.append((row["system"], float(row["value"])))
    return [
        (
            f"{report['benchmark']}: {metric}",
            unit,
            sorted(bars, key=lambda bar: bar[1], reverse=unit.endswith("/s")),
        )
        for (metric, unit), bars in grouped.items()
    ]


def draw(panels: Sequence[Panel], output: Path) -> None:
    """Write one picture, a row of bars for each system."""
    from matplotlib import pyplot

    heights = [max(LEAST_HEIGHT, BAR * len(bars) + 1) for _, _, bars in panels]
    figure, axes = pyplot.subplots(
        len(panels),
        figsize=(8, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, (title, unit, bars) in zip(axes[:, 0], panels, strict=True):
        names = [name for name, _ in bars]
        values = [value for _, value in bars]
        drawn = axis.barh(names, values, color=[COLOURS.get(name, PEER) for name in names])
        axis.bar_label(drawn, [_label(value) for value in values], padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel(unit, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    figure.savefig(output, metadata={"Date": None})


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
