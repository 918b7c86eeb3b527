"""A process that reports progress of a running job: ``python -m tests.races.reporter ID SEED``.

It says "ready", waits for a line, reports 1 to 100 in a random order, and exits with an error if a
figure that it reported is not, from then on, the least that it reads.
"""

from __future__ import annotations

import random
import sys

import django


def report_all(job_id: int, seed: int) -> None:
    """Report 1..100, each with its figure as the note; check each report after it returns."""
    from jobqueue import transitions
    from jobqueue.models import Job

    job = Job.objects.get(pk=job_id)
    percents = list(range(1, 101))
    random.Random(seed).shuffle(percents)
    highest = 0
    for percent in percents:
        transitions.record_progress(job, percent, str(percent))
        highest = max(highest, percent)
        found = Job.objects.values_list("progress", flat=True).get(pk=job_id)
        assert found >= highest, f"{found} after {highest} was reported"


def main() -> None:
    """Run as a process of its own."""
    django.setup()
    print("ready", flush=True)  # noqa: T201
    sys.stdin.readline()
    report_all(int(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
