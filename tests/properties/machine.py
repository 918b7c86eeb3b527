"""The public API as a state machine: several jobs, workers with old copies, a clock that errs.

Each rule does one thing twice, in the database and in the mirror; the answers must be the same, and
then every row. Copies of jobs are kept for as long as an example lasts, so that each rule acts on
an old one as readily as on a fresh one. What must hold whatever the model says is in ``History``.
"""

from __future__ import annotations

from collections import Counter

from tests.properties.around import Workers
from tests.properties.clock import Clock
from tests.properties.operators import Operators, Sweeps
from tests.properties.owners import Owners


class QueueMachine(Workers, Owners, Operators, Sweeps):
    """Everything that anybody can do, in any order."""

    @classmethod
    def on(cls, alias: str, clock: Clock) -> type[QueueMachine]:
        """Return the machine on one engine, by this clock."""
        machine = type(f"QueueMachineOn{alias.title()}", (cls,), {})
        machine.alias, machine.clock, machine.answers = alias, clock, Counter()
        return machine
