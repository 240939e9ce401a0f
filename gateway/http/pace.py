"""How long a stream waits between writes: not at all, until the replica's loop lags, or its streams or their
tokens are many.

A write costs more than a token, so a crowded replica that writes each token by itself falls behind all its
streams. With a pause, tokens that come meanwhile leave together. The first token is never held.
"""

from __future__ import annotations

import asyncio

TICK_S = 0.05
"""How often the loop's lag is measured; 20 wake-ups a second cost a thousandth of a core."""
MEMORY = 0.5
"""Weight of the past: a lag or a rush is believed after two ticks and forgotten as soon."""
LAGGING_S = 0.01
"""Of one turn of the loop; an idle one lags by a fraction of a millisecond."""
MANY_STREAMS = 64
"""At 10 ms a token, 6,400 writes a second: about half of a core."""
MANY_TOKENS_PER_S = 6_400.0
"""The same work, from fewer and faster streams. Tokens and not writes, which a pause makes few."""
PAUSE_S = 0.025
"""Two or three tokens of a fast model; no reader sees it."""


class Pace:
    """One per replica. `streams` is kept by its owner."""

    def __init__(self) -> None:
        self.streams = 0
        self.lag_s = 0.0
        self.tokens_per_s = 0.0
        self._tokens = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to measure, in the running loop."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(TICK_S, self._tick, loop, loop.time() + TICK_S)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def pause_s(self, most_s: float) -> float:
        """Return how long to wait before the next write, `most_s` at most; 0 for not at all."""
        crowded = self.streams >= MANY_STREAMS or (
            self.streams > 1 and (self.lag_s > LAGGING_S or self.tokens_per_s >= MANY_TOKENS_PER_S)
        )
        return min(PAUSE_S, most_s) if crowded else 0.0

    def wrote(self, tokens: int) -> None:
        self._tokens += tokens

    def measured(self, late_s: float) -> None:
        """Take one measurement, a tick after the last: how late the loop was, and what it wrote meanwhile."""
        late_s = max(late_s, 0.0)
        self.lag_s = MEMORY * self.lag_s + (1 - MEMORY) * late_s
        self.tokens_per_s = MEMORY * self.tokens_per_s + (1 - MEMORY) * self._tokens / (TICK_S + late_s)
        self._tokens = 0

    def _tick(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self.measured(loop.time() - due_s)
        self._timer = loop.call_later(TICK_S, self._tick, loop, loop.time() + TICK_S)
