"""Print what the explorer finds: ``python -m tests.explorer``.

First what was visited; then, for each guard that is dropped, the shortest counterexample; last the
table of what killed each. Exit status 1 if an invariant doesn't hold or a mutant survives.
"""

from __future__ import annotations

import argparse
import os
import sys

import django


def main() -> int:
    """Explore, drop the guards, and print both."""
    argparse.ArgumentParser(prog="python -m tests.explorer", description=__doc__).parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from tests.explorer import report

    is_broken = False
    for name, bounds in report.EXPLORATIONS.items():
        found = report.explore(bounds)
        say(report.figures(name, found), *(f"    {line}" for line in found.way))
        is_broken = is_broken or bool(found.broken)
    deaths = []
    for death in report.kill_all():
        deaths.append(death)
        if death.found.broken:
            say("", f"without {death.guard!r} it doesn't hold that {death.killer}:")
            say(*(f"    {line}" for line in death.found.way))
    say("", *report.table(deaths))
    survivors = [death.guard for death in deaths if death.killer == report.SURVIVED]
    say("", f"survivors: {', '.join(survivors) or 'none'}")
    return int(is_broken or bool(survivors))


def say(*lines: str) -> None:
    """Print lines at once, also into a pipe."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
