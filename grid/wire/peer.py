"""One authenticated connection, from either side: frames out, frames in, streams, beats, the end.

Owns the socket after the handshake. Everything runs in the event loop and nothing here waits except
`LinkStream.receive` and `Link.call`. The dialling side opens streams and beats; the listening side answers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from grid.errors import DeadlineExceeded, GridError, Saturated, UnitLost, revive
from grid.wire.codec import MAX_FRAME_BYTES, MAX_RUN, Decoder, ProtocolError, encode
from grid.wire.messages import Bye, Hello, Ping, Pong, Prove, Refused, Tokens, Welcome, WireMessage

log = logging.getLogger(__name__)

STREAM_BUFFER_BYTES = 1024 * 1024
"""Wire bytes that may wait for a stream's reader: an answer of 8,000 tokens is about 200 KB."""

WRITE_HIGH_BYTES = 256 * 1024
"""Above this many unsent bytes a peer counts as paused, and producers should skip it."""

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""A peer that leaves this much unread is cut off: four frames of the largest size."""

CLOSE_S = 1.0
"""How long an orderly close may take to send what is still buffered."""


class Beats(NamedTuple):
    """When a silent peer counts as dead: after `silent` punctual beats in a row without any received byte."""

    busy_s: float
    """Between beats while streams are open."""
    idle_s: float
    """Between beats otherwise, and on the listening side."""
    silent: int


CELL_BEATS = Beats(busy_s=0.04, idle_s=1.0, silent=3)
"""A frozen peer shows within about 150 ms; an engine in the peer's loop stalls it for up to 90 ms."""


class Handler(Protocol):
    """Takes a connection's events, in order, in the event loop. Must not block, and must not raise."""

    def connected(self, peer: Peer) -> None: ...

    def received(self, peer: Peer, message: WireMessage) -> None:
        """A message that no open stream of this side claims."""

    def disconnected(self, peer: Peer, reason: str) -> None: ...


class Peer(asyncio.Protocol):
    """The other end of one authenticated connection."""

    _numbers = itertools.count(1)

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        role: str,
        peer_id: str,
        handler: Handler | None,
        beats: Beats = CELL_BEATS,
    ) -> None:
        self.role = role
        self.peer_id = peer_id
        self.host, self.port = transport.get_extra_info("peername")[:2]
        self.link_id = next(self._numbers)
        """Unique in this process."""
        self.is_open = True
        self.is_paused = False
        self.sends_dropped = 0
        """Messages for this peer that came after it had closed."""
        self.frames_dropped = 0
        """Frames that nobody here was waiting for any more."""
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[str] = self._loop.create_future()
        """Resolves with the reason once the connection is gone."""
        self._transport = transport
        self._handler = handler
        self._decoder = Decoder()
        self._unsent: list[bytes] = []
        self._run: list[Tokens] = []
        """Tokens sent this turn after the newest frame in `_unsent`: they will be one frame."""
        self._is_flush_due = False
        self._reason = ""
        self._beats = beats
        self._silent = 0
        self._heard = False
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def start(self, received: bytes) -> None:
        """Take over the socket from the handshake, which read `received` beyond its last frame."""
        self._transport.set_protocol(self)
        self._beat_after(self._beats.idle_s)
        self._tell(lambda handler: handler.connected(self))
        if received:
            self.data_received(received)

    @property
    def unknown_kinds(self) -> int:
        """Frames that were skipped because a newer release sent them."""
        return self._decoder.unknown_kinds

    # --- out ----------------------------------------------------------------------------------

    def send(self, message: WireMessage) -> None:
        """Queue a message; all of one loop turn leave in one write. On a closed peer: ignored and counted.

        Raises TooLarge or TypeError for a message that no frame can carry.
        """
        if not self.is_open:
            self.sends_dropped += 1
            return
        if type(message) is Tokens:
            self._run.append(message)
        else:
            frame = encode(message)
            self._end_run()
            self._unsent.append(frame)
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _end_run(self) -> None:
        run = self._run
        for start in range(0, len(run), MAX_RUN):
            self._unsent.append(encode(*run[start : start + MAX_RUN]))
        run.clear()

    def _flush(self) -> None:
        self._is_flush_due = False
        self._end_run()
        if not self._unsent:
            return
        self._transport.write(b"".join(self._unsent))
        self._unsent.clear()
        if self.is_paused and self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._cut("slow_peer: it does not read what is sent to it")

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False

    # --- in -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._heard = True
        try:
            messages = self._decoder.feed(data)
        except ProtocolError as error:
            self._deliver(error.messages)
            self.close("protocol_error", error.reason)
        else:
            self._deliver(messages)

    def _deliver(self, messages: list[WireMessage]) -> None:
        for message in messages:
            self._take(message)

    def _take(self, message: WireMessage) -> None:
        if not self.is_open:
            self.frames_dropped += 1
        elif isinstance(message, Ping):
            self.send(Pong(0, message.tick))
        elif isinstance(message, Pong):
            pass
        elif isinstance(message, Bye):
            self._end(f"{message.code}: {message.message}" if message.message else message.code)
            self._hang_up()
        elif isinstance(message, (Hello, Welcome, Prove)):
            self.close("protocol_error", "a handshake message after the handshake")
        elif self._handler is None:
            self.frames_dropped += 1
        else:
            self._tell(lambda handler: handler.received(self, message))

    def _tell(self, call: Callable[[Handler], None]) -> None:
        """A handler that raises is a bug; it costs this one connection, not the loop's others."""
        if self._handler is None:
            return
        try:
            call(self._handler)
        except Exception:
            log.exception("the handler of the link with %s %s failed", self.role, self.peer_id)
            self.close("internal_error", "a handler failed")

    # --- beats --------------------------------------------------------------------------------

    def _beat_after(self, interval_s: float) -> None:
        self._beat_interval_s = interval_s
        self._beat_due = self._loop.time() + interval_s
        self._beat_timer = self._loop.call_at(self._beat_due, self._beat)

    def _beat(self) -> None:
        """Count own punctual beats, never wall time: after a late one it was this side that was stuck."""
        late_s = self._loop.time() - self._beat_due
        if self._heard:
            self._heard = False
            self._silent = 0
        elif late_s < self._beats.busy_s / 2:
            self._silent += 1
            if self._silent >= self._beats.silent:
                self._cut(
                    f"silent: no byte for {self._silent} beats of {self._beat_interval_s * 1000:.0f} ms"
                )
                return
        self._next_beat()

    def _next_beat(self) -> None:
        self._beat_after(self._beats.idle_s)

    # --- the end ------------------------------------------------------------------------------

    def close(self, code: str = "closed", message: str = "") -> None:
        """Say why, send what is buffered, close. A second close does nothing."""
        if not self.is_open:
            return
        self.send(Bye(0, code, message[:1024]))
        self._flush()
        self._end(f"{code}: {message}" if message else code)
        self._hang_up()

    def _hang_up(self) -> None:
        self._transport.close()
        self._loop.call_later(CLOSE_S, self._transport.abort)

    def _cut(self, reason: str) -> None:
        self._end(reason)
        self._transport.abort()

    def _end(self, reason: str) -> None:
        if self.is_open:
            self.is_open = False
            self._reason = reason
            self._unsent.clear()
            self._run.clear()
            self._beat_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"lost: {exc}" if exc else "lost: the connection ended without a goodbye")
        self._tell(lambda handler: handler.disconnected(self, self._reason))
        if not self.closed.done():
            self.closed.set_result(self._reason)


class Link(Peer):
    """The dialling side of a connection."""

    def __init__(self, transport: asyncio.Transport, **settings: Any) -> None:
        super().__init__(transport, **settings)
        self._streams: dict[int, LinkStream] = {}
        self._stream_numbers = itertools.count(1)
        self._ticks = itertools.count()

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
            raise revive(
                answer.code,
                answer.message,
                param=answer.param,
                retry_after_s=answer.retry_after_s,
                details=answer.details,
            )
        return answer

    def _deliver(self, messages: list[WireMessage]) -> None:
        streams = self._streams
        decoded_bytes = self._decoder.decoded_bytes
        overdue: set[LinkStream] = set()
        for message in messages:
            stream = streams.get(message[0])
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
        self.send(Ping(0, next(self._ticks)))
        self._beat_after(self._beats.busy_s if self._streams else self._beats.idle_s)

    def _end(self, reason: str) -> None:
        super()._end(reason)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream._fail(self._lost())

    def _lost(self) -> UnitLost:
        return UnitLost(f"the link with {self.role} {self.peer_id} is gone ({self._reason})")


class LinkStream:
    """One conversation on a link. Has one reader at a time."""

    __slots__ = ("_error", "_link", "_max_bytes", "_measure_at", "_queue", "_waiter", "id")

    def __init__(self, link: Link, number: int, max_bytes: int) -> None:
        self.id = number
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
