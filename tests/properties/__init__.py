"""Properties: the public API against the model, on every engine.

Two profiles, chosen by ``HYPOTHESIS_PROFILE``:

* ``quick``, the default and what each push runs: few examples from a fixed seed. A push that has
  nothing to do with a rare interleaving must not fail by luck, nor pass by luck the second time;
  what fails here was broken by what was pushed.
* ``deep``, by hand: many and longer examples, others each time.

A failure prints the shortest sequence of steps that was found, as Python; a blob for
``@reproduce_failure``; and, in both profiles, the seed with the command that repeats the run::

    HYPOTHESIS_PROFILE=deep pytest tests/test_properties.py
    HYPOTHESIS_PROFILE=deep pytest "tests/test_properties.py::..." --hypothesis-seed=7

``HYPOTHESIS_EXAMPLES`` sets another number of examples.
"""

from __future__ import annotations

import os
import secrets

from hypothesis import HealthCheck, Phase, settings

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")
EXAMPLES, STEPS, TIMEOUT = {"quick": (100, 30, 900), "deep": (1000, 50, 4 * 3600)}[PROFILE]
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", EXAMPLES))
QUICK_SEED = 1

# For a property of one call.
pure = settings(derandomize=PROFILE == "quick", database=None, print_blob=True)
on_an_engine = settings(
    pure,
    max_examples=2 * EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def chosen_settings() -> settings:
    """Return those of the profile, for the machine alone: other tests have Hypothesis's own."""
    return settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        # A seed decides what is tried, and nothing else: not what failed here the last time.
        database=None,
        print_blob=True,
        # To explain would run a failure many times more, and a database is slow.
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def choose_seed(given: str | None) -> int:
    """Return the seed given on the command line, or else the profile's."""
    if given is not None:
        return int(given)
    return QUICK_SEED if PROFILE == "quick" else secrets.randbelow(2**32)


def how_to_repeat(test: str, seed: int) -> str:
    """Return the command that does the same again."""
    return (
        f"To repeat it: HYPOTHESIS_PROFILE={PROFILE} HYPOTHESIS_EXAMPLES={EXAMPLES} "
        f"pytest {test!r} --hypothesis-seed={seed}"
    )
