"""How many units of a pool should serve, by recent demand, and what its other units are kept for. Pure.

A pool grows at once and shrinks late: starting a unit takes long, and demand comes in waves. Units on standby
come on top of those that serve, within the pool's maximum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from grid.model import Model
from grid.words import UnitState

TARGET_BUSY = 0.8
"""Of its slots, how many a unit has taken when another one is wanted beside it: starts take time."""

SHRINK_AFTER_S = 300.0
"""So long fewer units must have been enough before there are fewer: loading one again takes a minute, and
demand that comes in waves must not end and start units with each."""


class Role(StrEnum):
    """What a ready unit is kept for."""

    SERVING = "serving"
    WARM = "warm"
    ASLEEP = "asleep"


ROLES = {UnitState.READY: Role.SERVING, UnitState.STANDBY: Role.WARM, UnitState.ASLEEP: Role.ASLEEP}
"""By what a unit says of itself; one that drains or failed has none."""


@dataclass(slots=True)
class Wanted:
    """Of one pool: how many units should serve."""

    model: Model
    units: int
    _less_since_s: float = math.inf
    """Since when fewer would have been enough,"""
    _less: int = 0
    """and how many at the most."""
    _refused: int = 0
    """As placement counted last."""

    @property
    def total(self) -> int:
        """Units that there should be, serving or on standby."""
        return max(self.units, min(self.units + self.model.standby.units, self.model.max_units))

    def bounded(self, units: int) -> int:
        return min(max(units, self.model.min_units), self.model.max_units)

    def follow(self, requests: float, refused: int, serving: int, now_s: float) -> float:
        """Take the demand; return how many of `requests` are left for other pools of the model.

        `refused` counts requests for which no unit had room; `serving` units serve now: those beyond the
        wanted ones were taken in, so they were needed, if only for a moment.
        """
        slots = TARGET_BUSY * self.model.max_running
        needed = math.ceil(requests / slots)
        if refused > self._refused:
            needed = max(needed, serving + 1)
        self._refused = refused
        needed = self.bounded(needed)
        self.units = self.bounded(max(self.units, needed, serving))
        if needed >= self.units:
            self._less_since_s = math.inf
        elif self._less_since_s == math.inf:
            self._less_since_s, self._less = now_s, needed
        else:
            self._less = max(self._less, needed)
            if now_s >= self._less_since_s + SHRINK_AFTER_S:
                self.units, self._less_since_s = self._less, math.inf
        return max(0.0, requests - needed * slots)

    def roles(self, ready: Sequence[Role]) -> list[Role]:
        """Return what each ready unit should be; `ready` are their roles now, in the order of their age.

        Those that serve longest go on, and who is asleep is the last to be woken.
        """
        standby = self.model.standby
        # Whoever serves beyond what is wanted, with no standby to fill, goes on: it costs nothing.
        serving = max(self.units, len(ready) - standby.units)
        order = sorted(range(len(ready)), key=lambda place: (list(Role).index(ready[place]), place))
        roles = [Role.ASLEEP] * len(ready)
        for rank, place in enumerate(order):
            if rank < serving:
                roles[place] = Role.SERVING
            elif rank < serving + standby.warm:
                roles[place] = Role.WARM
        return roles
