"""Server-sent events: encoding, and the one loop that writes a stream of them.

A stream takes everything that is ready and writes it in one send, so a burst costs one write and a slow
client is felt by the run (which stops being asked for more), never by other streams.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import orjson

from gateway.pipeline.events import RunEvent

KEEP_ALIVE_S = 10.0
"""Below the idle limits of common proxies (30 to 60 s), with room for one lost beat."""
KEEP_ALIVE = b": keep-alive\n\n"
MAX_READY_EVENTS = 256
"""Events that wait for a slow client before the run is no longer asked for more."""
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


class ReadyEvents:
    """Runs a generator of events in a task of its own and hands out whatever is ready.

    `close` ends the run wherever it stands; it is safe at any moment and returns when the run has cleaned
    up. An exception of the run comes out of `take`, after the events before it.
    """

    def __init__(self, run: AsyncGenerator[RunEvent, None]) -> None:
        self._run = run
        self._ready: deque[RunEvent] = deque()
        self._wakened = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._error: BaseException | None = None
        self._ended = False
        self._task = asyncio.ensure_future(self._pump())

    async def _pump(self) -> None:
        try:
            async for item in self._run:
                self._ready.append(item)
                self._wakened.set()
                if len(self._ready) >= MAX_READY_EVENTS:
                    self._room.clear()
                    await self._room.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._error = error
        finally:
            await self._run.aclose()
            self._ended = True
            self._wakened.set()

    async def take(self, timeout_s: float) -> list[RunEvent] | None:
        """Return everything ready, at least one event; [] after `timeout_s` without any; None at the end."""
        if not self._ready and not self._ended:
            timer = asyncio.get_running_loop().call_later(timeout_s, self._wakened.set)
            try:
                await self._wakened.wait()
            finally:
                timer.cancel()
        self._wakened.clear()
        if self._ready:
            items = list(self._ready)
            self._ready.clear()
            self._room.set()
            return items
        if not self._ended:
            return []
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return None

    async def close(self) -> None:
        if not self._task.done():
            self._task.cancel()
        await asyncio.wait([self._task])
        self._ended = True


async def write_events(
    ready: ReadyEvents,
    first: Sequence[RunEvent],
    encode: Callable[[RunEvent], bytes],
    write: Callable[[bytes], Awaitable[None]],
) -> RunEvent:
    """Write `first` and all the rest, and a comment after each idle `KEEP_ALIVE_S`; return the last event."""
    items: Sequence[RunEvent] | None = first
    last = first[-1]
    while items is not None:
        if items:
            last = items[-1]
            await write(b"".join(map(encode, items)))
        else:
            await write(KEEP_ALIVE)
        items = await ready.take(KEEP_ALIVE_S)
    return last
