"""A bounded memory of what is slow to read: each value for a short time, and one read of it at a time.

Who asks while a value is being read waits for that read, so the end of a busy value's time costs one read,
not one for each call under way.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Remembered(Generic[Key, Value]):
    """Keeps `bound` values for `keep_s` by `clock`, counted from the beginning of their reads."""

    def __init__(self, *, keep_s: float, bound: int, clock: Callable[[], float]) -> None:
        self._keep_s = keep_s
        self._bound = bound
        self._clock = clock
        self._values: OrderedDict[Key, tuple[float, Value]] = OrderedDict()
        self._reads: dict[Key, asyncio.Task[Value]] = {}

    async def get(self, key: Key, read: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        """Return the value of `key`. Raises what `read` raises; that is not remembered."""
        known = self._values.get(key)
        if known is not None and known[0] > self._clock():
            return known[1]
        reading = self._reads.get(key)
        if reading is None:
            reading = self._reads[key] = asyncio.create_task(self._read(key, read))
            reading.add_done_callback(_retrieve)
        # One caller that leaves must not end the read for the others.
        return await asyncio.shield(reading)

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
