"""A pool of units as the planner keeps it: how many are wanted, and how their starts have gone. Pure.

A start that fails is tried again, ever later up to a bound. What no node can take is a failure once the nodes
of a cluster had the time to join.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from grid.model import Model
from grid.units.nodes import demands
from grid.units.scaling import Role, Wanted

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 60.0
"""A broken model costs one start a minute, and is back a minute after it was mended."""

STABLE_S = 10.0
"""A unit that served this long was no failed start: the next one starts at once."""

GAVE_UP_AFTER = 3
"""Failed starts in a row after which whoever waits for the model may stop waiting. Tries go on."""

UNSATISFIED_AFTER_S = 30.0
"""Nodes of a cluster that is starting join within this; later, the lack of one is a failure."""

FAILURES_KEPT = 8

UNIT_PREFIX = "unit-"
"""Of every unit's id; no other actor of the cell has it."""

NO_NODE = "no node for it: "

STARTS_AT_ONCE = {"light": 4, "gpu": 4, "gpu share": 1, "cpu": 1}
"""On one node. Light engines load in a second; whole GPUs are not shared, but the disk and RAM that weights
come through are; engines on shares of one GPU would each measure the memory that the other is taking; an
engine on CPU cores takes them all while it loads."""


class Stage(StrEnum):
    PLACING = "placing"
    """Ray has been asked; the process has not answered yet."""
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(slots=True)
class PlannedUnit:
    """A unit from its start until its process is gone."""

    unit_id: str
    pool: str
    """Its `Wish.prefix`."""
    node_id: str
    stage: Stage
    since_s: float
    gpu_uuids: tuple[str, ...] = ()
    incarnation: str = ""
    """Known once it is ready."""
    role: Role = Role.SERVING
    role_since_s: float = -math.inf
    """What placement says of it may be older."""


@dataclass(slots=True)
class Wish:
    """A pool, how many units of it are wanted, and how its starts have gone."""

    model: Model
    label: str
    prefix: str
    """Of the ids of its units; no other pool's."""
    wanted: Wanted
    failed_in_a_row: int = 0
    not_before_s: float = 0.0
    lacking: str = ""
    lacking_since_s: float = 0.0
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=FAILURES_KEPT))

    def failed(self, failure: str, served_s: float, now_s: float) -> None:
        """A unit ended by itself, `served_s` after it was ready, or never became so."""
        self.failures.append(failure)
        self.failed_in_a_row = 0 if served_s >= STABLE_S else self.failed_in_a_row + 1
        if self.failed_in_a_row:
            self.not_before_s = now_s + min(
                FIRST_BACKOFF_S * 2.0 ** (self.failed_in_a_row - 1), LAST_BACKOFF_S
            )

    def lack(self, lacking: str, now_s: float) -> None:
        """Remember since when no node fits, "" for one does; once that is long enough, it is a failure."""
        if not lacking:
            self.lacking = ""
        elif not self.lacking:
            self.lacking, self.lacking_since_s = lacking, now_s
        else:
            self.lacking = lacking
            if self.lacks(now_s):
                # Free memory and the like change all the time; what failed before is worth keeping.
                if self.failures and self.failures[-1].startswith(NO_NODE):
                    self.failures.pop()
                self.failures.append(f"{NO_NODE}{lacking}")

    def lacks(self, now_s: float) -> bool:
        """Return whether no node has fitted for so long that waiting won't help."""
        return bool(self.lacking) and now_s - self.lacking_since_s >= UNSATISFIED_AFTER_S

    def gave_up(self, now_s: float) -> bool:
        """Return whether whoever waits for a unit may stop waiting."""
        return self.failed_in_a_row >= GAVE_UP_AFTER or self.lacks(now_s)


def unit_prefix(model: str, pool: str = "") -> str:
    """Return the beginning of the ids of a pool's units, such as `unit-smollm2-135m-instruct-`."""
    return f"{UNIT_PREFIX}{re.sub(r'[^a-z0-9.]+', '-', f'{model}-{pool}'.lower()).strip('-')}-"


def start_kind(model: Model) -> str:
    """Return the key of STARTS_AT_ONCE for a model."""
    if model.engine in ("simulated", "embedding") and demands(model)[1] == 0:
        return "light"
    if model.gpus == 0:
        return "cpu"
    return "gpu share" if model.gpus < 1 else "gpu"


def needs(model: Model) -> str:
    """Return in words what a unit of a model takes of its node."""
    cpus, gpus = demands(model)
    return f"{cpus:g} CPU cores and {gpus:g} GPUs"
