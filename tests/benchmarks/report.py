"""What a benchmark has found: rows, medians and ratios, as a table or as JSON."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

LIMIT = "limit"
OURS = "jobqueue"


def tell(text: str) -> None:
    """Print progress, on stderr: stdout is for the report."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


class NotRun(Exception):
    """A system that can't take part; the message says why."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One measured value."""

    metric: str
    value: float
    unit: str


@dataclass(slots=True)
class Report:
    """The readings of one benchmark, in the order in which they came."""

    benchmark: str
    _readings: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)

    def add(self, system: str, readings: Iterable[Reading]) -> None:
        """Take in what one run of one system gave."""
        for reading in readings:
            key = (system, reading.metric, reading.unit)
            self._readings.setdefault(key, []).append(reading.value)
            tell(f"  {system}: {reading.metric}: {number(reading.value)} {reading.unit}")

    def leave_out(self, system: str, reason: str) -> None:
        """Note that a system could not be measured."""
        self.not_run[system] = reason
        tell(f"  {system}: not run: {reason}")

    def rows(self) -> list[dict[str, Any]]:
        """Return the medians, each with its ratio to the limit's of the same metric.

        In settings that the limit has none of, such as those of ``single, prepared``, it is that
        to the limit's ``single``.
        """
        medians = {key: statistics.median(values) for key, values in self._readings.items()}
        rows = [
            {
                "system": system,
                "metric": metric,
                "value": value,
                "unit": unit,
                "ratio_to_limit": _ratio(value, _limit(medians, metric, unit)),
            }
            for (system, metric, unit), value in medians.items()
        ]
        rows += [
            {
                "system": system,
                "metric": f"not run: {reason}",
                "value": None,
                "unit": None,
                "ratio_to_limit": None,
            }
            for system, reason in self.not_run.items()
        ]
        return rows

    def as_json(self) -> str:
        """Return all of it as one object."""
        return json.dumps({"benchmark": self.benchmark, "rows": self.rows()})

    def as_table(self) -> str:
        """Return all of it for a person, one metric after the other, the greatest value first."""
        head = ("metric", "system", "value", "unit", "x limit")
        rows = sorted(self.rows(), key=lambda row: (row["metric"], -(row["value"] or 0)))
        cells = [head] + [
            (
                row["metric"],
                row["system"],
                "-" if row["value"] is None else number(row["value"]),
                row["unit"] or "",
                "" if row["ratio_to_limit"] is None else f"{row['ratio_to_limit']:.2f}",
            )
            for row in rows
        ]
        widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
        lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
        return "\n".join([self.benchmark, *(line.rstrip() for line in lines)])


def _limit(medians: Mapping[tuple[str, str, str], float], metric: str, unit: str) -> float | None:
    without_last_setting = metric.rpartition(", ")[0]
    return medians.get((LIMIT, metric, unit), medians.get((LIMIT, without_last_setting, unit)))


def _ratio(value: float, limit: float | None) -> float | None:
    return round(value / limit, 4) if limit else None


def number(value: float) -> str:
    """Return a value as a person reads it."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
