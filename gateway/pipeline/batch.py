"""Several runs of one call side by side, their events merged as they come. The shell of a list of inputs.

Each run is by itself: one that is refused or fails says so under its number, and the others go on. A run that
finds every unit full while others of its call hold places waits for one of these to end, so a long list is
worked off at the cell's pace. Closing the generator, or cancelling whoever waits, ends all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from gateway.pipeline.events import Finished, RunEvent, RunFailed
from grid.errors import GridError, InternalError, Saturated

MAX_IN_FLIGHT = 32
"""Of one call: enough to fill some units, few beside the 2,000 streams that a replica takes."""
MAX_MERGED = 64
"""Pieces of news that wait for a slow client; beyond it the runs wait, within the bounds of their streams."""

Run = AsyncGenerator[list[RunEvent], None]


class Told(NamedTuple):
    """One event of the run with that number; an error stands for a run that nothing accepted."""

    number: int
    event: RunEvent | GridError

    @property
    def is_last(self) -> bool:
        return isinstance(self.event, Finished | RunFailed | GridError)


async def side_by_side(
    runs: Sequence[Callable[[], Run]], in_flight: int = MAX_IN_FLIGHT
) -> AsyncGenerator[list[Told], None]:
    """Yield what the runs tell, at once all that is there, until each has told its last event."""
    crew = _Crew(runs)
    workers = [asyncio.create_task(crew.work()) for _ in range(min(in_flight, len(runs)))]
    left = len(runs)
    try:
        while left:
            told = await crew.told()
            left -= sum(each.is_last for each in told)
            yield told
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


class _Crew:
    """Workers that take the runs in order, one at a time each."""

    def __init__(self, runs: Sequence[Callable[[], Run]]) -> None:
        self._runs = runs
        self._waiting = deque(range(len(runs)))
        self._busy = 0
        self._merged: asyncio.Queue[list[Told] | Exception] = asyncio.Queue(MAX_MERGED)

    async def told(self) -> list[Told]:
        """Wait for at least one event, and return all that are there. Raises a worker's bug."""
        all_told: list[Told] = []
        while not all_told or not self._merged.empty():
            told = await self._merged.get()
            if isinstance(told, Exception):
                raise told
            all_told += told
        return all_told

    async def work(self) -> None:
        while self._waiting:
            number = self._waiting.popleft()
            self._busy += 1
            try:
                await self._carry_out(number)
            except Saturated as full:
                if self._busy > 1:
                    # Places of this call's other runs come free: one worker fewer asks for them.
                    self._waiting.appendleft(number)
                    return
                await self._merged.put([Told(number, full)])
            except GridError as error:
                await self._merged.put([Told(number, error)])
            except Exception as bug:
                await self._merged.put(bug)
                return
            finally:
                self._busy -= 1

    async def _carry_out(self, number: int) -> None:
        ended = False
        async with aclosing(self._runs[number]()) as run:
            async for events in run:
                told = [Told(number, event) for event in events]
                ended = told[-1].is_last
                await self._merged.put(told)
        if not ended:
            raise InternalError("the run ended without saying how")
