"""What each process of a run is told, by the environment."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Self

VARIABLE = "JOBQUEUE_CHAOS"


@dataclass(frozen=True, slots=True)
class Scene:
    """What a process of the run is told, by the environment.

    Attributes:
        database: its entry of ``DATABASES``: the server's, or that of the proxy before it.
        history: the directory of the logs.
        seed: decides what it does at random.
        lease: seconds that a worker may stay silent.
        skew: seconds by which its clock is said to be wrong.
        began: the run's ``time.monotonic()`` when the process was started.
        without_fence: to have it write by id alone, which must be found out.
    """

    database: dict[str, Any] = field(default_factory=dict)
    history: str = ""
    seed: int = 0
    lease: float = 2.5
    skew: float = 0.0
    began: float = 0.0
    without_fence: bool = False

    @classmethod
    def read(cls) -> Self:
        """Return what the environment says."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def variables(self) -> dict[str, str]:
        """Return the environment that says this."""
        return {
            VARIABLE: json.dumps(asdict(self)),
            "DJANGO_SETTINGS_MODULE": "tests.chaos.settings",
        }
