"""The command line of a chaos run, and what it prints."""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from tests import servers
from tests.chaos.checker import Violation
from tests.chaos.run import ChaosError, Options, Verdict, perform
from tests.chaos.targets import TARGETS

tqdm: Any
try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

OUTCOMES: Final = ("lost", "doubled", "stuck")
MAX_SHOWN: Final = 20
MAX_LINES: Final = 12
INTERRUPTED: Final = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, and return the exit status."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if reason := servers.missing_engines().get(parsed.engine):
        parser.error(f"--engine {parsed.engine} can't be run here: {reason}")
    as_json = parsed.__dict__.pop("json")
    options = Options(**vars(parsed))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with _Progress(options) as progress:
            verdict = perform(options, progress.tick)
    except ChaosError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        _say("Interrupted: all that was started has been ended.")
        return INTERRUPTED
    for violation in verdict.violations[:MAX_SHOWN]:
        _say(as_text(violation))
    if len(verdict.violations) > MAX_SHOWN:
        _say(f"and {len(verdict.violations) - MAX_SHOWN} violations more")
    if verdict.directory:
        _say(f"The logs are in {verdict.directory}.")
    sys.stdout.write(json.dumps(as_dict(verdict)) + "\n" if as_json else as_table(verdict))
    return 1 if verdict.violations else 0


def as_dict(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict as one JSON object."""
    return {
        "seed": verdict.options.seed,
        "engine": verdict.options.engine,
        "jobs": verdict.jobs,
        "faults": verdict.faults,
        "rescued": verdict.rescued,
        "refused": verdict.refused,
        **{outcome: verdict.count(outcome) for outcome in OUTCOMES},
    }


def as_table(verdict: Verdict) -> str:
    """Return the verdict as lines for a person."""
    told = as_dict(verdict)
    rows = [("seed", told["seed"]), ("engine", told["engine"]), ("jobs", f"{told['jobs']:,}")]
    rows += [(f"  {kind.replace('_', ' ')}", n) for kind, n in verdict.faults.items()]
    rows += [
        (f"  {kind.replace('_', ' ')}", f"not run: {why}") for kind, why in verdict.not_run.items()
    ]
    rows.insert(3, ("faults", sum(verdict.faults.values())))
    rows += [(name, told[name]) for name in ("rescued", "refused", *OUTCOMES)]
    rows.append(("violations", len(verdict.violations)))
    width = max(len(name) for name, _ in rows)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)


def as_text(violation: Violation) -> str:
    """Return a violation with the log lines that show it."""
    job = f"job {violation.job_id}: " if violation.job_id is not None else ""
    lines = [f"    {line}" for line in violation.lines]
    if len(lines) > MAX_LINES:
        lines = [f"    ({len(lines) - MAX_LINES} earlier lines)", *lines[-MAX_LINES:]]
    return "\n".join([f"VIOLATION {violation.kind}: {job}{violation.what}", *lines])


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


class _Progress:
    """A bar on stderr, if that is a terminal and tqdm is installed."""

    def __init__(self, options: Options) -> None:
        shows = tqdm is not None and sys.stderr.isatty()
        self._bar = tqdm(total=options.seconds, unit="s", leave=False) if shows else None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def tick(self, seconds: float, doing: str) -> None:
        """Show how far the run is."""
        if self._bar is not None:
            self._bar.set_description(doing, refresh=False)
            self._bar.update(round(seconds - self._bar.n, 1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=(
            "Run workers on a database of their own, strike both at random, and prove from the "
            "processes' logs that no job was lost, doubled or stuck. Ends with status 0 if so."
        ),
    )
    add = parser.add_argument
    add("--seconds", type=_number(float, 1, 86_400), default=120.0, help="how long to strike")
    add(
        "--seed",
        type=_number(int, 0, 2**32 - 1),
        default=random.randrange(2**32),
        help="decides the faults; drawn at random if not given",
    )
    add("--engine", choices=list(TARGETS), default="postgresql")
    add(
        "--workers",
        type=_number(int, 1, 64),
        default=4,
        help="worker processes, 2 of each 3 under a parent",
    )
    add("--sweeps", type=_number(int, 0, 16), default=2, help="processes that only sweep")
    add("--json", action="store_true", help="print one JSON object on stdout and nothing else")
    add("--keep", action="store_true", help="keep the logs, and say where")
    add(
        "--without-fence",
        action="store_true",
        help="write jobs by id alone, to see that this is found out",
    )
    return parser


def _number(kind: type, low: float, high: float) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            name = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {name} from {low:,} to {high:,}")
        return value

    return read
