"""Which units fail again and again, and for how long they are left alone. Pure.

A unit that fails fast looks idle and would draw all traffic. After a few failures in a row it gets none for
a short time, doubled with each further failure; one success clears it. Refusals say nothing about health,
and requests that were on the unit together when it failed say one thing, not many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FAILURES_IN_A_ROW = 3
"""One may be the request's fault, and two a coincidence."""

FIRST_SUSPENSION_S = 2.0
"""About what a new attempt by a client takes to come back."""

MAX_SUSPENSION_S = 60.0
"""A repaired unit is found again within a minute."""


@dataclass(slots=True)
class Health:
    """One unit's record; the time until which it is left alone is returned, not kept."""

    failures: int = 0
    failed_s: float = -math.inf
    """When the newest failure that counted was seen."""

    def settled(self, outcome: str, reserved_s: float, now_s: float) -> float | None:
        """Take the outcome of a reservation made at `reserved_s`; return until when the unit is suspect,
        None for no change."""
        if outcome == "done":
            self.failures = 0
            return 0.0
        if outcome != "failed" or reserved_s < self.failed_s:
            return None
        self.failures += 1
        self.failed_s = now_s
        beyond = self.failures - FAILURES_IN_A_ROW
        if beyond < 0:
            return None
        # Past this exponent the product is above the maximum anyway.
        return now_s + min(FIRST_SUSPENSION_S * (1 << min(beyond, 10)), MAX_SUSPENSION_S)
