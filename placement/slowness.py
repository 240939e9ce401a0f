"""Which units have become far slower than they were, and than those of their kind are now. Pure.

Both must hold, for a while: a whole machine that is busy slows all its units, and a new kind of request all
of a kind; neither is a unit's fault. What is observed is the logarithm of a step's time over what is
predicted for any unit of the kind under that load (`speeds.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

FAR = math.log(4.0)
"""Throttled GPUs are up to two or three times as slow, and prices see that; beyond it something is broken."""

FAR_S = 10.0
"""Long enough that no garbage collection, copy or start beside it is taken for a broken unit."""

RECENT_SHARE = 0.2
USUAL_SHARE = 0.005
"""Of the newest observation in what is recent (five observations) and in what is usual (two hundred)."""

LEAST_OBSERVATIONS = 20
"""Before, nothing is usual yet."""

LEAST_OTHERS = 2
"""With fewer units alike, nobody can say who of them is slow."""


class Slow(NamedTuple):
    unit_id: str
    factor: float
    """How many times its usual step time."""


@dataclass(slots=True)
class _Unit:
    kind: Hashable
    recent: float
    usual: float
    observed_s: float
    observations: int = 1
    far_since_s: float = math.inf


class Slowness:
    """Bounded by the units of the view."""

    def __init__(self) -> None:
        self._units: dict[str, _Unit] = {}

    def observed(self, unit_id: str, kind: Hashable, off: float, now_s: float) -> None:
        unit = self._units.get(unit_id)
        if unit is None or unit.kind != kind:
            self._units[unit_id] = _Unit(kind, off, off, now_s)
            return
        unit.observed_s = now_s
        unit.observations += 1
        unit.recent += RECENT_SHARE * (off - unit.recent)
        share = max(USUAL_SHARE, 1.0 / unit.observations)
        # What is far off is no part of what is usual, or a broken unit would soon be a usual one.
        if off - unit.usual < FAR / 2 or unit.observations < LEAST_OBSERVATIONS:
            unit.usual += share * (off - unit.usual)

    def leave(self, unit_id: str) -> None:
        self._units.pop(unit_id, None)

    def found(self, now_s: float) -> list[Slow]:
        """Return the units that have been far off for FAR_S, each once; to be asked about once a second."""
        slow: list[Slow] = []
        alike: dict[Hashable, list[float]] = {}
        # Who does nothing now says nothing.
        working = {name: unit for name, unit in self._units.items() if unit.observed_s > now_s - FAR_S}
        for unit_id, unit in working.items():
            if unit.observations < LEAST_OBSERVATIONS or unit.recent - unit.usual < FAR:
                unit.far_since_s = math.inf
                continue
            if unit.kind not in alike:
                alike[unit.kind] = [other.recent for other in working.values() if other.kind == unit.kind]
            others = alike[unit.kind]
            if len(others) <= LEAST_OTHERS or unit.recent - statistics.median(others) < FAR:
                unit.far_since_s = math.inf
            elif unit.far_since_s == math.inf:
                unit.far_since_s = now_s
            elif now_s >= unit.far_since_s + FAR_S:
                slow.append(Slow(unit_id, math.exp(unit.recent - unit.usual)))
        for each in slow:
            # It has to be found out anew, from what it does once it works again.
            unit = self._units[each.unit_id]
            unit.recent, unit.far_since_s = unit.usual, math.inf
        return slow
