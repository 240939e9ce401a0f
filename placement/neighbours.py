"""How much units slow each other that share a GPU, learned for each GPU. Pure.

    step = what the unit takes alone * (1 + slowing * neighbours at work)

Memory bandwidth and multiprocessors are shared whatever the shares of memory, so a neighbour slows a unit
while it works at all, and how much depends on both engines: it is learned, by an extended Kalman filter of
`slowing`. Of its own speed a unit learns while it is alone; beside neighbours at work little, and from what
it observes divided by what they cost it, so that it is not taken for a slow one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from grid.words import UnitCard

PRIOR_SLOWING = 0.3
"""Of one neighbour at work: between none, where both wait for their hosts, and 1, where one of two engines
has all of the memory bandwidth in turn."""
PRIOR_DOUBT = 0.6
"""Standard deviation of that."""
MAX_SLOWING = 4.0
DRIFT = 0.005
"""Standard deviation of how far the truth wanders between two observations: neighbours' work changes."""
NOISE = 0.4
"""Of one observed step time, as a logarithm: `speeds.REPORT_NOISE`, and the unit's own factor."""
OUTLIER = 3.0
"""Standard deviations beyond which an observation counts as if it lay there."""
CROWDED_NOISE = 4.0
"""How many times noisier than alone an observation beside neighbours is, as far as the unit itself goes: else
what a unit shares would be learned twice, and unlearned slowly."""
PUBLISH_STEP = 0.03
"""A unit's speeds follow its neighbours once they are changed by that much."""


MAX_LOOKED_AT = 256
"""GPUs looked at in one tick, a fraction of a millisecond; thousands are seen within a second."""


class SharedGpu:
    """A GPU, or several that the same units share."""

    __slots__ = ("_variance", "slowing", "units")

    def __init__(self) -> None:
        self.units: dict[str, Slowed] = {}
        self.slowing = PRIOR_SLOWING
        self._variance = PRIOR_DOUBT**2

    def look(self, works: Mapping[str, bool]) -> list[Slowed]:
        """Take in which of its units work now; return those whose published factor is another."""
        at_work, changed = sum(works.values()), []
        for unit_id, slowed in self.units.items():
            slowed.neighbours = at_work - works[unit_id]
            if slowed.publish():
                changed.append(slowed)
        return changed

    def factor(self, neighbours: int) -> float:
        return 1.0 + self.slowing * neighbours

    def observed(self, off: float, neighbours: int) -> None:
        """A step took `exp(off)` times what its unit would take alone, while so many neighbours worked."""
        if not neighbours:
            return
        self._variance += DRIFT**2
        factor = self.factor(neighbours)
        slope = neighbours / factor
        spread = slope * slope * self._variance + NOISE**2
        bound = OUTLIER * math.sqrt(spread)
        surprise = min(max(off - math.log(factor), -bound), bound)
        gain = self._variance * slope / spread
        self.slowing = min(max(self.slowing + gain * surprise, 0.0), MAX_SLOWING)
        self._variance *= 1.0 - gain * slope


class Slowed:
    """One unit among its neighbours."""

    __slots__ = ("gpu", "neighbours", "published", "unit_id")

    def __init__(self, unit_id: str, gpu: SharedGpu | None) -> None:
        self.unit_id = unit_id
        self.gpu = gpu
        self.neighbours = 0
        """At work now."""
        self.published = 1.0

    @property
    def factor(self) -> float:
        return 1.0 if self.gpu is None else self.gpu.factor(self.neighbours)

    @property
    def noise(self) -> float:
        """How much noisier what it observes now is than alone."""
        return CROWDED_NOISE if self.neighbours else 1.0

    def observed(self, off: float) -> None:
        if self.gpu is not None:
            self.gpu.observed(off, self.neighbours)

    def publish(self) -> bool:
        """Return whether the published factor had to follow."""
        factor = self.factor
        if factor == self.published or (
            factor != 1.0 and abs(factor - self.published) <= PUBLISH_STEP * self.published
        ):
            return False
        self.published = factor
        return True


class Neighbours:
    """Of all units that own a share of a GPU. Bounded by them."""

    def __init__(self) -> None:
        self._gpus: dict[tuple[str, ...], SharedGpu] = {}
        self._next = 0

    def join(self, card: UnitCard) -> Slowed:
        """Return what slows a unit. Whoever keeps it says `leave` in the end."""
        if not 0 < card.gpus < 1 or not card.gpu_uuids:
            return Slowed(card.unit_id, None)
        key = (card.node_id, *card.gpu_uuids)
        gpu = self._gpus.setdefault(key, SharedGpu())
        slowed = gpu.units[card.unit_id] = Slowed(card.unit_id, gpu)
        return slowed

    def leave(self, card: UnitCard) -> None:
        key = (card.node_id, *card.gpu_uuids)
        gpu = self._gpus.get(key)
        if gpu is not None and gpu.units.pop(card.unit_id, None) is not None and not gpu.units:
            del self._gpus[key]

    def due(self) -> list[SharedGpu]:
        """Return the GPUs whose units are to be looked at now, all of them in turn."""
        gpus = list(self._gpus.values())
        first = self._next if self._next < len(gpus) else 0
        self._next = first + MAX_LOOKED_AT
        return gpus[first : self._next]
