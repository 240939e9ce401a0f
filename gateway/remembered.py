"""A bounded memory of what is slow to read: each value for a short time, and one read of it at a time.

Who asks while a value is being read waits for that read, so the end of a busy value's time costs one read,
not one for each call under way. While the source is away, values that were read before are used for longer,
up to a bound of their owner's, and at most one read at a time finds out whether it is back.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from grid.errors import Rejected

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

PATIENCE_S = 0.25
"""A read takes a millisecond; one that takes this long is of a source that hangs, where an older value
exists."""


class Remembered(Generic[Key, Value]):
    """Keeps `bound` values for `keep_s` by `clock`, counted from the beginning of their reads; for `away_s`
    more while reads raise Rejected or hang."""

    def __init__(self, *, keep_s: float, bound: int, clock: Callable[[], float], away_s: float = 0.0) -> None:
        self._keep_s = keep_s
        self._bound = bound
        self._clock = clock
        self._away_s = away_s
        self._is_away = False
        self._values: OrderedDict[Key, tuple[float, Value]] = OrderedDict()
        self._reads: dict[Key, asyncio.Task[Value]] = {}

    async def get(self, key: Key, read: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        """Return the value of `key`. Raises what `read` raises; that is not remembered."""
        known = self._values.get(key)
        if known is not None and known[0] > self._clock():
            return known[1]
        usable = known is not None and known[0] + self._away_s > self._clock()
        if known is not None and usable and self._is_away and self._reads:
            return known[1]
        reading = self._reads.get(key)
        if reading is None:
            reading = self._reads[key] = asyncio.create_task(self._read(key, read))
            reading.add_done_callback(_retrieve)
        if known is None or not usable:
            # One caller that leaves must not end the read for the others.
            return await asyncio.shield(reading)
        try:
            async with asyncio.timeout(0 if self._is_away else PATIENCE_S):
                return await asyncio.shield(reading)
        except TimeoutError:
            self._is_away = True
        except Rejected:
            pass
        return known[1]

    def forget(self, which: Callable[[Key, Value], bool]) -> None:
        """Drop the values that `which` names, and remember nothing of the reads under way."""
        self._reads.clear()
        for key in [key for key, (_, value) in self._values.items() if which(key, value)]:
            del self._values[key]

    async def _read(self, key: Key, read: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        until_s = self._clock() + self._keep_s
        own = asyncio.current_task()
        try:
            value = await read()
        except Rejected:
            self._is_away = True
            raise
        except Exception:
            # The source has answered: what it does not have any more must not come back while it is away.
            self._values.pop(key, None)
            raise
        else:
            self._is_away = False
            if self._reads.get(key) is own:
                self._values[key] = (until_s, value)
                self._values.move_to_end(key)
                if len(self._values) > self._bound:
                    self._values.popitem(last=False)
            return value
        finally:
            if self._reads.get(key) is own:
                del self._reads[key]


def _retrieve(reading: asyncio.Task[Any]) -> None:
    """Take a failure that nobody waits for any more, so that it is not logged as lost."""
    if not reading.cancelled():
        reading.exception()
