"""The handshake as it runs on a socket: two small protocols that hand it over to a `Peer` or `Link`.

Until then nothing but handshake frames is read, with a stranger's limits, and nothing but them is sent.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, cast

from grid.errors import GridError, Unauthorised, UnitLost
from grid.wire import handshake
from grid.wire.codec import STRANGER_FRAME_BYTES, Decoder, ProtocolError, encode
from grid.wire.handshake import HandshakeError
from grid.wire.messages import Bye, Hello, Prove, Welcome, WireMessage
from grid.wire.peer import Beats, Handler, Peer
from grid.wire.streams import Link


class Identity(NamedTuple):
    """Who this side is, and the cell's link secret that proves it."""

    role: str
    peer_id: str
    secret: bytes

    def __repr__(self) -> str:
        return f"Identity({self.role!r}, {self.peer_id!r})"


class _Greeting(asyncio.Protocol, ABC):
    """What both sides of a handshake share: bytes to frames, and the ways to fail."""

    def __init__(self, me: Identity) -> None:
        self._me = me
        self._decoder = Decoder(STRANGER_FRAME_BYTES)
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            while not self._is_over and (messages := self._decoder.first(data)):
                data = b""
                if len(messages) != 1:
                    raise HandshakeError("protocol_error", "each handshake message has a frame of its own")
                self._heard(messages[0])
        except HandshakeError as error:
            self._fail(error.code, error.reason)
        except ProtocolError as error:
            self._fail("protocol_error", error.reason)

    @abstractmethod
    def _heard(self, message: WireMessage) -> None:
        """Take the next message of the handshake. Raises HandshakeError."""

    def _fail(self, code: str, reason: str) -> None:
        if not self._is_over:
            self._transport.write(encode(Bye(0, code, reason[:1024])))
            self._transport.close()
            self._over(code, reason)

    def _over(self, code: str, reason: str) -> None:
        """The handshake has failed; called once."""
        self._is_over = True

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_over:
            self._over("lost", f"the connection ended in the handshake{f': {exc}' if exc else ''}")


class Listening(_Greeting):
    """The listener's side. Calls `admit(peer, unread bytes)` or, if it fails, `refuse(reason)`: one, once."""

    def __init__(
        self,
        me: Identity,
        *,
        handler: Handler,
        beats: Beats,
        admit: Callable[[Listening, Peer, bytes], None],
        refuse: Callable[[Listening], None],
    ) -> None:
        super().__init__(me)
        self._handler = handler
        self._beats = beats
        self._admit = admit
        self._refuse = refuse
        self._greeted: tuple[Hello, Welcome] | None = None

    def send_away(self, code: str, reason: str) -> None:
        self._fail(code, reason)

    def _heard(self, message: WireMessage) -> None:
        if self._greeted is None and isinstance(message, Hello):
            nonce = secrets.token_bytes(handshake.NONCE_BYTES)
            answer = handshake.welcome(self._me.secret, message, self._me.role, self._me.peer_id, nonce)
            self._greeted = message, answer
            self._transport.write(encode(answer))
        elif self._greeted is not None and isinstance(message, Prove):
            hello, welcome = self._greeted
            handshake.check(self._me.secret, hello, welcome, message)
            self._is_over = True
            peer = Peer(
                self._transport,
                role=hello.role,
                peer_id=hello.peer_id,
                handler=self._handler,
                beats=self._beats,
            )
            self._admit(self, peer, self._decoder.rest())
        else:
            raise HandshakeError("protocol_error", f"{type(message).__name__} has no place in the handshake")

    def _over(self, code: str, reason: str) -> None:
        super()._over(code, reason)
        self._refuse(self)


class Dialling(_Greeting):
    """The dialler's side. `link` resolves with the Link, or with Unauthorised or UnitLost."""

    def __init__(self, me: Identity, *, handler: Handler | None, beats: Beats) -> None:
        super().__init__(me)
        self._handler = handler
        self._beats = beats
        self._hello = handshake.hello(me.role, me.peer_id, secrets.token_bytes(handshake.NONCE_BYTES))
        self.link: asyncio.Future[Link] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport.write(encode(self._hello))

    def _heard(self, message: WireMessage) -> None:
        if isinstance(message, Bye):
            self._transport.close()
            self._over(message.code, message.message)
        elif isinstance(message, Welcome):
            proof = handshake.prove(self._me.secret, self._hello, message)
            self._is_over = True
            self._transport.write(encode(proof))
            link = Link(
                self._transport,
                role=message.role,
                peer_id=message.peer_id,
                handler=self._handler,
                beats=self._beats,
            )
            link.start(self._decoder.rest())
            if self.link.done():
                link.close("closed", "nobody waits for this link any more")
            else:
                self.link.set_result(link)
        else:
            raise HandshakeError("protocol_error", f"{type(message).__name__} has no place in the handshake")

    def _over(self, code: str, reason: str) -> None:
        super()._over(code, reason)
        kind: type[GridError] = Unauthorised if code == "unauthorised" else UnitLost
        if not self.link.done():
            self.link.set_exception(kind(f"handshake failed: {reason}"))
