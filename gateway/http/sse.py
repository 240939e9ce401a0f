"""Server-sent events: encoding, and the one loop that writes a stream of them.

What a run hands over together goes out in one write, so a burst costs one. A slow client is felt by its own
run, which is not asked for more while a write waits, and never by other streams.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import orjson

Item = TypeVar("Item")
"""What a stream is made of: an event of a run, or one with more about it."""

KEEP_ALIVE_S = 5.0
"""A silence lasts at most twice as long: below the idle limits of common proxies (30 to 60 s)."""
KEEP_ALIVE = b": keep-alive\n\n"
SSE_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Reverse proxies that buffer by default let this response through as it comes.
    (b"x-accel-buffering", b"no"),
)


def event(name: str, payload: dict[str, Any]) -> bytes:
    """Return one event; JSON has no raw line breaks, so one `data:` line always holds it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(payload))


def data(payload: dict[str, Any]) -> bytes:
    """Return one unnamed event, as compatible routes send them."""
    return b"data: %b\n\n" % orjson.dumps(payload)


class KeepAlive:
    """Writes `words`, a comment, whenever nothing else was written for about `KEEP_ALIVE_S`, until closed.

    It costs a timer; the task that writes begins with the first silence.
    """

    def __init__(self, write: Callable[[bytes], Awaitable[None]], words: bytes = KEEP_ALIVE) -> None:
        self._write = write
        self._words = words
        self._written = False
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(KEEP_ALIVE_S, self._begin)

    def written(self) -> None:
        self._written = True

    def close(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        while True:
            if not self._written:
                await self._write(self._words)
            self._written = False
            await asyncio.sleep(KEEP_ALIVE_S)


async def write_events(
    first: list[Item],
    rest: AsyncGenerator[list[Item], None],
    encode: Callable[[Item], bytes],
    write: Callable[[bytes], Awaitable[None]],
    pause_s: Callable[[Item], float] = lambda _: 0.0,
    keep_alive: bytes = KEEP_ALIVE,
) -> Item:
    """Write `first` and all the rest, one write for what comes together; return the last event.

    `pause_s` is told of each write, by its last event, and says how long to let more gather.
    `keep_alive` is what is written into a silence.
    """
    beats = KeepAlive(write, keep_alive)
    items = first
    try:
        while True:
            last = items[-1]
            await write(encode(last) if len(items) == 1 else b"".join(map(encode, items)))
            beats.written()
            if pause := pause_s(last):
                await asyncio.sleep(pause)
            following = await anext(rest, None)
            if following is None:
                return last
            items = following
    finally:
        beats.close()
