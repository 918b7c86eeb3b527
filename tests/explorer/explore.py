"""Visit every state that can be reached, and say what breaks, with the shortest way there."""

from __future__ import annotations

import gc
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field

from tests.explorer import invariants
from tests.explorer.actors import IDLE, Actors, Bounds, Label, State
from tests.explorer.canonical import Canonical
from tests.explorer.values import Row
from tests.explorer.writes import FRESH, SILENT, Writes


@dataclass(slots=True)
class Found:
    """What an exploration found.

    Attributes:
        states: how many were visited.
        transitions: how many steps lead from one to another.
        seconds: how long it took a processor.
        broken: the invariant that didn't hold, if one did not.
        way: the shortest way there, a line per step.
        answers: which verbs got which answers.
        reached: the job's states, each with the number of visited states in which it is.
    """

    states: int = 0
    transitions: int = 0
    seconds: float = 0.0
    broken: str | None = None
    way: list[str] = field(default_factory=list)
    answers: set[tuple[str, str]] = field(default_factory=set)
    reached: Counter[str] = field(default_factory=Counter)


class Explorer:
    """One exploration, breadth first."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.writes = Writes()
        self.actors = Actors(self.writes, bounds)
        self.numbers: dict[State, int] = {}
        self.states: list[State] = []
        self._known: dict[State, int] = {}
        self.parents = array("l")
        self.next = array("l")  # of each state, one after the other, those that a job may count on
        self.ends = array("l")
        self.canonical = Canonical(self.writes, bounds)

    def run(self) -> Found:
        """Explore until everything was visited or something broke."""
        began = time.process_time()
        found = Found()
        gc.disable()  # Nothing here goes in circles, and to look for it costs a third of the time.
        try:
            self._visit_all(found)
        finally:
            gc.enable()
        found.states, found.answers = len(self.states), self.writes.answers
        found.seconds = time.process_time() - began
        return found

    def _visit_all(self, found: Found) -> None:
        self._add(self.canonical(self._first()), -1)
        current = 0
        while current < len(self.states) and not found.broken:
            self._visit(current, found)
            current += 1
        if not found.broken:
            self._check_visible(found)

    def _first(self) -> State:
        row = Row(max_attempts=self.bounds.max_attempts, timeout=self.bounds.timeout)
        many = self.bounds.workers
        return State(
            row=self.writes.row_id(row),
            events=0,
            claims=0,
            acts=1 if self.bounds.acts is None else self.bounds.acts,
            asked=False,
            accepted=0,
            leases=(FRESH,) * many,
            executions=(),
            sweeps=(IDLE,) * self.bounds.sweeps,
            beats=(0,) * many,
        )

    def _visit(self, current: int, found: Found) -> None:
        state = self.states[current]
        row = self.writes.rows[state.row]
        found.reached[row.state if row else "gone"] += 1
        seen = set()
        for _, raw, counts, broken in self.actors.steps(state):
            found.transitions += 1
            if broken:
                self._tell(current, broken, found)
                return
            if raw == state:
                continue
            number = self._known.get(raw)
            if number is None:
                after = self.canonical(raw)
                number = self.numbers.get(after)
                if number is None:
                    number = self._add(after, current)
                self._known[raw] = number
            if counts:
                seen.add(number)
        self.next.extend(seen)
        self.ends.append(len(self.next))

    def _add(self, state: State, parent: int) -> int:
        number = self.numbers[state] = len(self.states)
        self.states.append(state)
        self.parents.append(parent)
        return number

    # -- What is told of it

    def _tell(self, current: int, broken: str, found: Found) -> None:
        lines, raw = self.way_to(current)
        steps = self.actors.steps(raw)
        last = next(self.said(label) for label, _, _, why in steps if why == broken)
        found.broken, found.way = broken, [*lines, last]

    def way_to(self, number: int) -> tuple[list[str], State]:
        """Return the shortest way to a state, a line per step, and the state as it came about.

        The steps are taken anew: two workers that were exchanged to store a state keep their names.
        """
        numbers = [number]
        while self.parents[numbers[-1]] >= 0:
            numbers.append(self.parents[numbers[-1]])
        raw, lines = self._first(), []
        for wanted in reversed(numbers[:-1]):
            for label, after, _, _ in self.actors.steps(raw):
                if self.canonical(after) == self.states[wanted]:
                    raw, line = self.canonical.without_the_late(after), label
                    break
            else:
                raise AssertionError("a state without a way to it")
            lines.append(self.said(line))
        return lines, raw

    # -- From everywhere to an end

    def _check_visible(self, found: Found) -> None:
        """Look for states from which no job would ever end, if no operator comes."""
        good = bytearray(self._is_end(state) for state in self.states)
        changed = True
        while changed:
            changed = False
            for number in range(len(good) - 1, -1, -1):
                if not good[number]:
                    begin = self.ends[number - 1] if number else 0
                    if any(good[n] for n in self.next[begin : self.ends[number]]):
                        good[number] = changed = True
        bad = good.find(0)
        if bad >= 0:
            found.broken = invariants.VISIBLE
            lines, raw = self.way_to(bad)
            found.way = [*lines, f"and so it stays: {self.writes.rows[raw.row]}"]

    def _is_end(self, s: State) -> bool:
        row = self.writes.rows[s.row]
        if row is None or row.state in invariants.FINALS:
            return True
        is_last = s.claims == self.bounds.claims or not any(w in (FRESH, SILENT) for w in s.leases)
        # Whoever registers next would find it; that this is beyond the bounds is no fault of its.
        return is_last and row.state == "waiting"

    def said(self, label: Label) -> str:
        """Return a step as a line."""
        who, what, answer, row = label
        decided_on = f" [{self.writes.rows[row]}]" if row >= 0 else ""
        return f"{who} {what}{decided_on}" + (f" -> {answer}" if answer else "")
