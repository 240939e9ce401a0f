"""How fast those who wait are served, in slot milliseconds a millisecond. Pure.

Where predictions are right, a pool that is full gives each of its slots on as soon as it is free, so it
serves as much predicted slot time a millisecond as it has slots. What is seen corrects that.
"""

from __future__ import annotations

import math

PRIOR_ANSWERS = 2.0
"""For how many answers' time the prior counts: slots that were taken together are free together, and until
then nothing is seen."""

LEAST_PRIOR_MS = 1000.0

REMEMBERED_MS = 10_000.0
"""Weight of the past: a unit that joined ten seconds ago counts mostly, one of a minute ago wholly."""


class Drain:
    __slots__ = ("_busy_ms", "_served_ms", "_since_s")

    def __init__(self) -> None:
        self._busy_ms = self._served_ms = 0.0
        self._since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Somebody waits from now on."""
        self._since_s = now_s

    def served(self, cost_ms: float, now_s: float) -> None:
        self._advance(now_s)
        self._served_ms += cost_ms

    def end(self) -> None:
        """Nobody waits any more."""
        self._since_s = None

    def rate(self, slots: int, answer_ms: float, now_s: float) -> float:
        """Return it for a pool of `slots`, each of which an answer holds for `answer_ms`; never 0."""
        self._advance(now_s)
        prior_ms = max(PRIOR_ANSWERS * answer_ms, LEAST_PRIOR_MS)
        return (max(slots, 1) * prior_ms + self._served_ms) / (prior_ms + self._busy_ms)

    def _advance(self, now_s: float) -> None:
        if self._since_s is None:
            return
        spent_ms = max(now_s - self._since_s, 0.0) * 1e3
        self._since_s = max(now_s, self._since_s)
        fade = math.exp(-spent_ms / REMEMBERED_MS)
        self._busy_ms = self._busy_ms * fade + spent_ms
        self._served_ms *= fade
