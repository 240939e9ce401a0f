"""The measured pace of a unit: how long a stream still runs. Pure arithmetic over what ended before."""

from __future__ import annotations

import math

from grid.words import UNKNOWN

SMOOTHING = 0.2
"""Weight of the newest stream: the last ten or so decide, so that a change of load shows soon."""

FALLBACK_S_PER_TOKEN = 0.05
"""Before anything was measured and without a prior: 20 tokens a second, a small model on CPU cores."""


class Pace:
    """Seconds per output token and output tokens per stream, exponentially weighted.

    An embedding request counts as a stream of one token.
    """

    def __init__(self, decode_ms_prior: float = UNKNOWN) -> None:
        self._s_per_token = decode_ms_prior / 1000 if decode_ms_prior > 0 else FALLBACK_S_PER_TOKEN
        self._tokens: float | None = None
        self._measured = False

    def ended(self, tokens: int, busy_s: float) -> None:
        """A stream finished by itself after `busy_s` seconds in the engine, prefill included."""
        if tokens < 1:
            return
        pace = busy_s / tokens
        self._s_per_token = self._blend(self._s_per_token if self._measured else None, pace)
        self._tokens = self._blend(self._tokens, float(tokens))
        self._measured = True

    def remaining_s(self, produced: int, budget: int, busy_s: float) -> float:
        """Expected seconds until a running stream ends: what is left of the usual length at its own pace."""
        expected = float(budget) if self._tokens is None else min(float(budget), self._tokens)
        if produced == 0:
            return max(expected * self._s_per_token - busy_s, 0.0)
        left = max(expected - produced, 1.0)
        return left * busy_s / produced

    @staticmethod
    def _blend(old: float | None, new: float) -> float:
        assert 0.0 <= new < math.inf
        return new if old is None else old + SMOOTHING * (new - old)
