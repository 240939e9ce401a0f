"""Samples on their way into the view: gathered, because many at once cost little more than one, and taken in
turns of the loop that are short, because decisions wait meanwhile. Their order is kept.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from placement.samples import Batch

GATHER_S = 0.01
"""How long a sample may wait for others: a tenth of the time until the next of its unit."""

MAX_TURN_UNITS = 256
"""Samples of one turn of the loop, which take up to a millisecond: decisions wait no longer for them."""


class Intake:
    """`take` must not raise. A sample that finds none waiting and none just taken is taken at once."""

    def __init__(self, take: Callable[[Sequence[Batch]], None], clock: Callable[[], float]) -> None:
        self._take = take
        self._clock = clock
        self._waiting: deque[Batch] = deque()
        """Bounded by what peers send in GATHER_S, and by the loop's turns, which take more than comes in."""
        self._turn: asyncio.Handle | None = None
        self._taken_s = -GATHER_S

    def add(self, batch: Batch, at_once: bool = False) -> None:
        """Take a batch when it is due, or `at_once`, with all that came before."""
        self._waiting.append(batch)
        wait_s = 0.0 if at_once else self._taken_s + GATHER_S - self._clock()
        if wait_s > 0:
            if self._turn is None:
                self._turn = asyncio.get_running_loop().call_later(wait_s, self._take_some)
            return
        self._take_some()
        while at_once and self._waiting:
            self._take_some()

    def close(self) -> None:
        if self._turn is not None:
            self._turn.cancel()

    def _take_some(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
        batches, links, units = [], set(), 0
        # A sender that is in a turn twice would have the view take each batch by itself.
        while self._waiting and units < MAX_TURN_UNITS and self._waiting[0].link not in links:
            batch = self._waiting.popleft()
            batches.append(batch)
            links.add(batch.link)
            units += len(batch.units)
        self._turn = asyncio.get_running_loop().call_soon(self._take_some) if self._waiting else None
        self._take(batches)
        self._taken_s = self._clock()
