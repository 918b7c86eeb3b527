"""The faults of a run: a schedule drawn from the seed, and the hand that strikes."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from tests.chaos import families
from tests.chaos.families import Families
from tests.chaos.proxy import Proxy
from tests.chaos.stage import Stage

# Seconds between two strikes.
EVERY: Final = (0.4, 1.8)
# After how many it is tried again to end one.
AGAIN: Final = 0.5
# How often each kind is drawn before any comes again.
DECK: Final[Mapping[str, int]] = {
    "kill": 4,
    "freeze": 3,
    "kill_child": 2,
    "kill_parent": 1,
    "freeze_child": 1,
    "lost_reply": 5,
    "cut": 3,
    "stall": 1,
    "terminate": 3,
    "restart": 1,
    "exhaust": 1,
    "read_only": 1,
    "hold_lock": 3,
}
OF_PROCESSES: Final = frozenset({"kill", "freeze"})
OF_FAMILIES: Final = frozenset({"kill_child", "kill_parent", "freeze_child"})
OF_PROXY: Final = frozenset({"lost_reply", "cut", "stall"})


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault: when, in seconds from the beginning, of which kind, and what its dice say."""

    at: float
    kind: str
    seed: int


def schedule(seed: int, seconds: float, kinds: Collection[str]) -> list[Strike]:
    """Return the faults of a run; the same seed gives the same ones."""
    dice = random.Random(f"faults {seed}")
    return list(_strikes(dice, seconds, sorted(kinds)))


def _strikes(dice: random.Random, seconds: float, kinds: list[str]) -> Iterator[Strike]:
    at = 0.0
    while True:
        deck = dice.sample(kinds, counts=[DECK[kind] for kind in kinds], k=_size(kinds))
        for kind in deck:
            at += dice.uniform(*EVERY)
            if at >= seconds:
                return
            yield Strike(round(at, 3), kind, dice.randrange(2**32))


def _size(kinds: list[str]) -> int:
    return sum(DECK[kind] for kind in kinds)


class Striker:
    """Carries out a schedule, and what it began and must end again.

    ``counts`` has the faults that took place: one for which there was nothing to strike is none.
    """

    def __init__(
        self,
        strikes: list[Strike],
        stage: Stage,
        kin: Families,
        target: Any,
        proxy: Proxy | None,
        lease: float,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._stage = stage
        self._families = kin
        self._target = target
        self._proxy = proxy
        self._lease = lease
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        for strike in strikes:
            self._later(strike.at, lambda strike=strike: self._strike(strike))

    def carry_out(self, now: float) -> None:
        """Do all that is due by ``now``."""
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()

    def heal(self) -> None:
        """End the faults: what was begun is ended, and nothing more is begun."""
        self._due.clear()
        for member in self._stage.members:
            self._stage.thaw(member)
        self._families.thaw()
        if self._proxy:
            self._proxy.disarm()
            self.counts["lost_reply"] = self._proxy.replies_lost
            self.counts["cut"] = self._proxy.cuts
        self._target.heal()
        self.counts += self._stage.counts

    def _later(self, at: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._due, (at, next(self._order), act))

    def _strike(self, strike: Strike) -> None:
        dice = random.Random(strike.seed)
        # What can't be struck, such as a database that somebody else has locked, is no fault.
        with suppress(*self._target.errors):
            getattr(self, f"_{strike.kind}")(strike.at, dice)

    # -- One of each kind

    def _kill(self, at: float, dice: random.Random) -> None:
        if members := self._stage.of("worker", "sweep"):
            self._stage.kill(dice.choice(members))
            self.counts["kill"] += 1

    def _kill_child(self, at: float, dice: random.Random) -> None:
        self.counts["kill_child"] += self._families.kill_child(dice)

    def _kill_parent(self, at: float, dice: random.Random) -> None:
        self.counts["kill_parent"] += self._families.kill_parent(dice)

    def _freeze_child(self, at: float, dice: random.Random) -> None:
        if self._families.freeze_child(dice):
            self.counts["freeze_child"] += 1
            self._later(at + self._lease + dice.uniform(0.3, 2), self._families.thaw)

    def _freeze(self, at: float, dice: random.Random) -> None:
        if members := self._stage.of("worker", "sweep", families.ROLE):
            member = dice.choice(members)
            self._stage.freeze(member)
            self.counts["freeze"] += 1
            self._later(at + self._lease + dice.uniform(0.3, 2), lambda: self._stage.thaw(member))

    def _lost_reply(self, at: float, dice: random.Random) -> None:
        assert self._proxy is not None
        self._proxy.lose_replies(dice.randint(1, 6))

    def _cut(self, at: float, dice: random.Random) -> None:
        assert self._proxy is not None
        self._proxy.cut(dice.choice([0, 0.2, 1]), dice.randrange(2**32))

    def _stall(self, at: float, dice: random.Random) -> None:
        assert self._proxy is not None
        proxy = self._proxy
        proxy.stall()
        self.counts["stall"] += 1
        until = at + dice.uniform(0.5, self._lease * 1.5)
        if dice.random() < 0.5:  # nobody hears what was under way
            self._later(until, lambda: proxy.cut(1, 0))
        self._later(until, proxy.flow)

    def _terminate(self, at: float, dice: random.Random) -> None:
        self.counts["terminate"] += self._target.terminate(dice)

    def _restart(self, at: float, dice: random.Random) -> None:
        self._target.restart(dice)
        self.counts["restart"] += 1

    def _exhaust(self, at: float, dice: random.Random) -> None:
        self._lasting("exhaust", at + dice.uniform(1, 3))

    def _read_only(self, at: float, dice: random.Random) -> None:
        self._lasting("read_only", at + dice.uniform(1, 3))

    def _hold_lock(self, at: float, dice: random.Random) -> None:
        self._lasting("hold_lock", at + dice.uniform(0.5, self._lease * 1.3))

    def _lasting(self, kind: str, until: float) -> None:
        """Begin what the target begins with True, and ends with False."""
        act = getattr(self._target, kind)
        act(True)
        self.counts[kind] += 1
        self._later(until, lambda: self._end(until, act))

    def _end(self, at: float, act: Callable[[bool], object]) -> None:
        try:
            act(False)
        except self._target.errors:
            self._later(at + AGAIN, lambda: self._end(at + AGAIN, act))
