"""Bars drawn from what ``--json`` has printed: one picture for a page of the docs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.report import LIMIT, OURS, number

# Of default settings, and of tuned ones or where there is no choice.
COLOURS = {OURS: ("#7cc3a9", "#0a7d5a")}
PEERS = ("#b7c6de", "#5b7db1")
LINE = "#b03a2e"
BAR = 0.16
BETWEEN = 0.10
# For titles and scales.
AROUND = 0.9
# From this ratio of the greatest value to the least, small bars could not be told apart.
WIDE = 30


def main(argv: Sequence[str]) -> int:
    """Draw; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks chart",
        description="Draw the output of --json. Needs matplotlib, the extra 'benchmarks'.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.svg")
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="Only this, as the table names it or without its settings; repeatable; default all.",
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


@dataclass
class Panel:
    """One metric: by system the values in each of its settings; the limit's apart from them."""

    title: str
    unit: str
    bars: dict[str, dict[str, float]] = field(default_factory=dict)
    limits: list[float] = field(default_factory=list)

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return self.unit.endswith("/s")

    @property
    def limit(self) -> float | None:
        """The better of the limit's values: it has no settings, so they are two tries of one."""
        best = max if self.is_rate else min
        return best(self.limits) if self.limits else None

    def best_first(self) -> list[tuple[str, dict[str, float]]]:
        """The systems, each with its values, by the best of these."""
        best = max if self.is_rate else min
        return sorted(
            self.bars.items(), key=lambda item: best(item[1].values()), reverse=self.is_rate
        )

    def height(self) -> float:
        """Inches."""
        return AROUND + sum(BAR * len(bars) + BETWEEN for bars in self.bars.values())


def panels_of(report: dict[str, Any], metrics: Sequence[str] | None) -> list[Panel]:
    """Return a panel for each metric; one with settings is one metric."""
    panels: dict[tuple[str, str], Panel] = {}
    for row in report["rows"]:
        name, settings = _apart(row["metric"])
        is_wanted = not metrics or name in metrics or row["metric"] in metrics
        if row["value"] is None or not is_wanted:
            continue
        title = f"{report['benchmark']}: {name}"
        panel = panels.setdefault((name, row["unit"]), Panel(title, row["unit"]))
        if row["system"] == LIMIT:
            panel.limits.append(float(row["value"]))
        else:
            panel.bars.setdefault(row["system"], {})[settings] = float(row["value"])
    return [panel for panel in panels.values() if panel.bars]


def _apart(metric: str) -> tuple[str, str]:
    """Return a metric without its settings, and these: ``noop``, ``tuned, in threads``."""
    name, _, settings = metric.partition(", ")
    known = ("default", "tuned", "prepared")
    return (name, settings) if settings.startswith(known) else (metric, "")


def draw(panels: Sequence[Panel], output: Path) -> None:
    """Write one picture, in each panel a group of bars for each system and a line for the limit."""
    from matplotlib import pyplot

    heights = [panel.height() for panel in panels]
    figure, axes = pyplot.subplots(
        len(panels),
        figsize=(8, sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        _draw_bars(axis, panel)
        _draw_scale(axis, panel)
        _draw_limit(axis, panel)
    figure.get_layout_engine().set(hspace=0.03)
    figure.savefig(output, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def _draw_bars(axis: Any, panel: Panel) -> None:
    names, ticks = [], []
    for system, settings, value, at in _placed(panel):
        light, full = COLOURS.get(system, PEERS)
        is_default = settings == "default"
        axis.barh(-at, value, height=BAR, color=light if is_default else full)
        said = f" {settings}" if settings else ""
        axis.annotate(
            f"{number(value)}{said}",
            (value, -at),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color="#222222" if system == OURS else "#666666",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85},
        )
        if system not in names:
            names.append(system)
            ticks.append(-at - BAR * (len(panel.bars[system]) - 1) / 2)
    axis.set_yticks(ticks, names, fontsize=9)
    axis.set_ylim(AROUND - panel.height(), BAR)
    for label in axis.get_yticklabels():
        if label.get_text() == OURS:
            label.set_fontweight("bold")
            label.set_color(COLOURS[OURS][1])


def _placed(panel: Panel) -> Iterator[tuple[str, str, float, float]]:
    """Yield system, settings, value, and inches from above, of each bar."""
    at = 0.0
    for system, bars in panel.best_first():
        for settings, value in bars.items():
            yield system, settings, value, at
            at += BAR
        at += BETWEEN


def _draw_scale(axis: Any, panel: Panel) -> None:
    values = [value for bars in panel.bars.values() for value in bars.values() if value > 0]
    values += [panel.limit] if panel.limit else []
    better = "more is better" if panel.is_rate else "less is better"
    axis.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
    if values and max(values) > WIDE * min(values):
        axis.set_xscale("log")
        axis.set_xlim(min(values) / 2, max(values) * 4)
        better += ", logarithmic"
    else:
        axis.set_xlim(0, max(values, default=1) * 1.2)
    axis.xaxis.set_major_formatter(lambda value, _: number(value))
    axis.set_xlabel(f"{panel.unit} ({better})", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.grid(axis="x", color="#eeeeee")
    axis.set_axisbelow(True)


def _draw_limit(axis: Any, panel: Panel) -> None:
    if panel.limit is not None:
        axis.axvline(panel.limit, color=LINE, linewidth=1, linestyle="--", zorder=0.9)
        said = f"- - -  limit {number(panel.limit)}"
        axis.set_title(said, loc="right", fontsize=9, color=LINE)
