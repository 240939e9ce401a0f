"""The dialling side of a connection, and the streams that it opens there.

Streams are numbered here, and each holds only so many bytes for its reader, so that a slow reader never
blocks the connection. Nothing here waits except `LinkStream.receive` and `Link.call`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from grid.errors import DeadlineExceeded, GridError, Saturated, UnitLost
from grid.wire.codec import MAX_FRAME_BYTES, encode
from grid.wire.messages import Ping, Refused, WireMessage
from grid.wire.peer import Peer

STREAM_BUFFER_BYTES = 1024 * 1024
"""Wire bytes that may wait for a stream's reader: an answer of 8,000 tokens is about 200 KB."""


class Link(Peer):
    """The dialling side of a connection."""

    def __init__(self, transport: asyncio.Transport, **settings: Any) -> None:
        super().__init__(transport, **settings)
        self._streams: dict[int, LinkStream] = {}
        self._stream_numbers = itertools.count(1)

    def open(self, max_bytes: int = STREAM_BUFFER_BYTES) -> LinkStream:
        """Return a new stream; on a closed link, one whose `receive` raises UnitLost."""
        stream = LinkStream(self, next(self._stream_numbers), max_bytes)
        if not self.is_open:
            stream._fail(self._lost())
            return stream
        if not self._streams and self._beat_interval_s != self._beats.busy_s:
            self._beat_timer.cancel()
            self._silent = 0
            self._streams[stream.id] = stream
            self._next_beat()
        self._streams[stream.id] = stream
        return stream

    async def call(self, build: Callable[[int], WireMessage], timeout_s: float) -> WireMessage:
        """Send `build(stream)` and return the one answer.

        Raises the error that a `Refused` names, UnitLost when the link goes, DeadlineExceeded when no
        answer came within `timeout_s`.
        """
        stream = self.open(MAX_FRAME_BYTES)
        try:
            stream.send(build(stream.id))
            async with asyncio.timeout(timeout_s):
                answer = (await stream.receive())[0]
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.role} {self.peer_id} did not answer within {timeout_s} s"
            ) from None
        finally:
            stream.close()
        if isinstance(answer, Refused):
            raise answer.error()
        return answer

    def _deliver(self, messages: list[WireMessage]) -> None:
        streams = self._streams
        decoded_bytes = self._decoder.decoded_bytes
        overdue: set[LinkStream] = set()
        for message in messages:
            stream = streams.get(message.stream)
            if stream is None:
                self._take(message)
                continue
            stream._queue.append(message)
            if decoded_bytes > stream._measure_at:
                overdue.add(stream)
            if stream._waiter is not None:
                stream._wake()
        for stream in overdue:
            stream._measure(decoded_bytes)

    def _next_beat(self) -> None:
        self.send(Ping(0, int(self._loop.time() * 1e6)))
        self._beat_after(self._beats.busy_s if self._streams else self._beats.idle_s)

    def _in_doubt(self) -> None:
        for stream in list(self._streams.values()):
            if stream.on_silent is not None:
                stream.on_silent()

    def _end(self, reason: str) -> None:
        super()._end(reason)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream._fail(self._lost())

    def _lost(self) -> UnitLost:
        return UnitLost(f"the link with {self.role} {self.peer_id} is gone ({self._reason})")


class LinkStream:
    """One conversation on a link. Has one reader at a time."""

    __slots__ = ("_error", "_link", "_max_bytes", "_measure_at", "_queue", "_waiter", "id", "on_silent")

    def __init__(self, link: Link, number: int, max_bytes: int) -> None:
        self.id = number
        self.on_silent: Callable[[], None] | None = None
        """Called when the peer has missed so many beats that it is in doubt, and again while that lasts; it
        may still speak."""
        self._link = link
        self._max_bytes = max_bytes
        self._measure_at = link._decoder.decoded_bytes + max_bytes
        """Until the link has decoded this many bytes, the queue can't hold more than `max_bytes`."""
        self._queue: list[WireMessage] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: GridError | None = None

    def send(self, message: WireMessage) -> None:
        self._link.send(message)

    async def receive(self) -> list[WireMessage]:
        """Wait for at least one message and return all that have arrived.

        Raises UnitLost when the link is gone and everything that came before was handed out; Saturated, at
        once, when more bytes waited than the stream may hold.
        """
        while not self._queue:
            if self._error is not None:
                raise self._error
            self._waiter = self._link._loop.create_future()
            await self._waiter
        queue, self._queue = self._queue, []
        self._measure_at = self._link._decoder.decoded_bytes + self._max_bytes
        return queue

    def close(self) -> None:
        """Frames that still come for this stream are dropped and counted. Closing twice does nothing."""
        self._link._streams.pop(self.id, None)

    def _measure(self, decoded_bytes: int) -> None:
        """Weigh the queue itself: only now could it have grown too large."""
        held_bytes = sum(len(encode(message)) for message in self._queue)
        if held_bytes > self._max_bytes:
            self._queue.clear()
            self.close()
            self._fail(Saturated(f"more than {self._max_bytes} bytes waited for the reader of a stream"))
        else:
            self._measure_at = decoded_bytes + max(self._max_bytes - held_bytes, self._max_bytes // 16)

    def _fail(self, error: GridError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
