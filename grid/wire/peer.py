"""One authenticated connection, from either side: frames out, frames in, beats, the end.

Owns the socket after the handshake. Everything runs in the event loop and nothing here waits. The dialling
side beats and the listening side answers, so both hear something while the other lives.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import NamedTuple, Protocol

from grid.wire.codec import MAX_RUN, Decoder, ProtocolError, encode
from grid.wire.messages import Bye, Hello, Ping, Pong, Prove, Tokens, Welcome, WireMessage

log = logging.getLogger(__name__)

WRITE_HIGH_BYTES = 256 * 1024
"""Above this many unsent bytes a peer counts as paused, and producers should skip it."""

MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""A peer that leaves this much unread is cut off: four frames of the largest size."""

LARGE_READ_BYTES = 64 * 1024
"""After so much at once, readers get a turn before the next read, or a burst would overflow a ready one."""

LAZY_S = 0.002
"""How long a message that nobody waits for may wait for others, so that it costs no write of its own."""

CLOSE_S = 1.0
"""How long an orderly close may take to send what is still buffered."""


class Beats(NamedTuple):
    """When a peer is in doubt, and when it counts as lost: after own beats in a row without any byte from it.

    Only punctual beats count, never wall time: an observer that is late itself says nothing about its peer.
    After `silent` beats it is in doubt, which ends nothing; once they have lasted `lost_s` it is cut.
    """

    busy_s: float
    """Between beats while streams are open."""
    idle_s: float
    """Between beats otherwise, and on the listening side."""
    silent: int
    lost_s: float


CELL_BEATS = Beats(busy_s=0.04, idle_s=1.0, silent=3, lost_s=1.0)
"""A cut ends streams, so it waits until the peer can't be merely slow: an engine in the peer's loop stalls it
for up to 90 ms, and on a machine with more work than cores a process that is well has got no time for 160."""


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
        self._lazy_timer: asyncio.TimerHandle | None = None
        self._reason = ""
        self._beats = beats
        self._silent = 0
        self._heard = False
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def start(self, received: bytes) -> None:
        """Take over the socket from the handshake, which read `received` beyond its last frame."""
        self._transport.set_protocol(self)
        self._next_beat()
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

    def send_lazily(self, message: WireMessage) -> None:
        """Send in order, with the next message that is sent or within LAZY_S."""
        if not self.is_open:
            self.sends_dropped += 1
            return
        self._end_run()
        self._unsent.append(encode(message))
        if not self._is_flush_due and self._lazy_timer is None:
            self._lazy_timer = self._loop.call_later(LAZY_S, self._flush)

    def _end_run(self) -> None:
        run = self._run
        for start in range(0, len(run), MAX_RUN):
            self._unsent.append(encode(*run[start : start + MAX_RUN]))
        run.clear()

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._lazy_timer is not None:
            self._lazy_timer.cancel()
            self._lazy_timer = None
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
            if len(data) >= LARGE_READ_BYTES and self.is_open:
                self._transport.pause_reading()
                self._loop.call_soon(self._resume_reading)

    def _resume_reading(self) -> None:
        if self.is_open:
            self._transport.resume_reading()

    def _deliver(self, messages: list[WireMessage]) -> None:
        for message in messages:
            self._take(message)

    def _take(self, message: WireMessage) -> None:
        if not self.is_open:
            self.frames_dropped += 1
        elif isinstance(message, Ping):
            self.send(Pong(0, message.tick))
        elif isinstance(message, Pong):
            pass  # any byte was the sign of life
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

    def _next_beat(self) -> None:
        self._beat_after(self._beats.idle_s)

    def _beat_after(self, interval_s: float) -> None:
        self._beat_interval_s = interval_s
        self._beat_due = self._loop.time() + interval_s
        self._beat_timer = self._loop.call_at(self._beat_due, self._beat)

    def _beat(self) -> None:
        late_s = self._loop.time() - self._beat_due
        if self._heard:
            self._heard = False
            self._silent = 0
        elif late_s < self._beats.busy_s / 2:
            self._silent += 1
            if self._silent % self._beats.silent == 0:
                self._in_doubt()
            silent_s = self._silent * self._beat_interval_s
            if self._silent >= self._beats.silent and silent_s >= self._beats.lost_s:
                self._cut(
                    f"silent: no byte for {self._silent} beats of {self._beat_interval_s * 1000:.0f} ms"
                )
                return
        self._next_beat()

    def _in_doubt(self) -> None:
        """The peer has missed `silent` beats, or as many again: streams may have come meanwhile. The
        listening side does nothing about it."""

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
