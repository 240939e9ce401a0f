"""Whether a sample still tells the truth, and whose fault it is when it doesn't. Pure.

A unit whose newest sample is too old counts as saturated. Two things must not be taken for that: an
observer that was itself held up, and an observer that lost most units at once.
"""

from __future__ import annotations

import numpy as np

from placement.columns import Floats, Mask

TICK_S = 0.1
"""How often the observer ticks: the rate of the samples that it watches."""

PUNCTUAL_S = 2 * TICK_S
"""A gap between ticks counts up to this; beyond it the observer was held up and could not have read."""

MASS_STALE_UNITS = 3
"""With fewer reporting units, "most" says nothing about whose fault it is."""


class ObservedClock:
    """Time in which the observer was able to see: it advances with punctual ticks, never over a stall."""

    def __init__(self, now_s: float) -> None:
        self._ticked_s = now_s
        self.observed_s = 0.0
        """At the newest tick."""

    def read(self, now_s: float) -> float:
        return self.observed_s + min(max(now_s - self._ticked_s, 0.0), PUNCTUAL_S)

    def tick(self, now_s: float) -> None:
        self.observed_s = self.read(now_s)
        self._ticked_s = now_s


def fresh(sampled_s: Floats, observed_s: float, stale_after_s: float) -> tuple[Mask, bool]:
    """Return which units' samples can be trusted, and whether most went stale together.

    `sampled_s` is -inf for a unit that never reported: never fresh, and no witness. Most went stale
    together when more than half of the reporting units have a stale sample and these samples lie within
    one `stale_after_s`; then all of them are trusted, because units don't fail like that.
    """
    recent = sampled_s >= observed_s - stale_after_s
    if np.count_nonzero(recent) == len(recent):
        return recent, False
    reported = sampled_s > -np.inf
    stale = reported & ~recent
    if not stale.any():
        return recent, False
    last_s = sampled_s[stale].max()
    together = stale & (sampled_s >= last_s - stale_after_s)
    witnesses = int(np.count_nonzero(reported))
    if witnesses < MASS_STALE_UNITS or 2 * int(np.count_nonzero(together)) <= witnesses:
        return recent, False
    return recent | together, True
