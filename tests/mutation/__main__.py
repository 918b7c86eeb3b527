"""Drop each guard in turn, in the model and in the real code, and print by what it is killed."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys

import django

from tests import servers
from tests.helpers import ENGINES


def main() -> int:
    """Print the table; return 1 if a mutant survived, on whatever engine."""
    missing = servers.missing_engines()
    there = [engine for engine in ENGINES if engine not in missing]
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--engine", action="append", choices=there, help="default: all")
    parser.add_argument("--guard", action="append", help="by name, as in the table; default: all")
    parser.add_argument("--json", action="store_true", help="print one object, and nothing else")
    options = parser.parse_args()
    engines = options.engine or there

    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    with servers.running([ENGINES[engine] for engine in engines]):
        django.setup()
        logging.disable(logging.WARNING)  # of the writes that are refused, as they must be
        from tests.mutation import report
        from tests.mutation.table import TABLE

        if unknown := set(options.guard or ()) - set(TABLE):
            parser.error(f"there is no guard {', '.join(sorted(unknown))}")
        table = {name: TABLE[name] for name in options.guard or TABLE}
        deaths = {guard: report.killed_in_the_model(guard) for guard in table}
        with report.databases(engines):
            lines = report.lines(table, engines, deaths)
    survivors = [line for line in lines if not line.is_killed]
    if options.json:
        told = {"mutants": [line.as_dict() for line in lines], "survivors": len(survivors)}
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        counts = f"{len(table)} guards, {len(lines)} mutants, {len(survivors)} survivors"
        sys.stdout.write(f"{report.as_text(lines, engines)}\n\n{counts}\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
