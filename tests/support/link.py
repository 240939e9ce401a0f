"""Both ends of a link: a listening unit, ways to reach it, and a socket whose bytes a test writes itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from grid.wire import handshake
from grid.wire.codec import Decoder, encode
from grid.wire.link import Link, LinkServer, Peer, dial
from grid.wire.messages import Hello, Prove, Tokens, Welcome, WireMessage

SECRET = b"a secret that only tests share.."
OTHER_SECRET = b"a secret of quite another cell.."


class Unit:
    """A listener's handler. Answers as the test says, and keeps what it heard."""

    def __init__(self) -> None:
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()
        self.heard: asyncio.Queue[WireMessage] = asyncio.Queue()
        self.left: asyncio.Queue[str] = asyncio.Queue()
        self.answer: Callable[[Peer, WireMessage], None] = lambda peer, message: None

    def connected(self, peer: Peer) -> None:
        self.peers.put_nowait(peer)

    def received(self, peer: Peer, message: WireMessage) -> None:
        self.heard.put_nowait(message)
        self.answer(peer, message)

    def disconnected(self, peer: Peer, reason: str) -> None:
        self.left.put_nowait(reason)


class Cell:
    """One listening unit, and ways to reach it."""

    def __init__(self) -> None:
        self.unit = Unit()
        self.server = LinkServer(role="unit", peer_id="u-1", secret=SECRET, handler=self.unit)
        self.address = ("", 0)

    async def dial(self, secret: bytes = SECRET, handler: Unit | None = None) -> Link:
        return await dial(*self.address, role="gateway", peer_id="g-1", secret=secret, handler=handler)

    async def raw(self) -> Raw:
        return Raw(*await asyncio.open_connection(*self.address))


class Raw:
    """A socket whose bytes a test writes itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.decoder = Decoder()
        self.unread: list[WireMessage] = []

    async def next(self) -> WireMessage:
        while not self.unread:
            data = await self.reader.read(65536)
            assert data, "the connection ended"
            self.unread += self.decoder.feed(data)
        return self.unread.pop(0)

    async def ends(self) -> None:
        """Wait until the other side has closed."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    async def greet(self) -> tuple[Hello, Prove]:
        """Go through the handshake as a dialler that holds the secret."""
        hello = handshake.hello("gateway", "raw", os.urandom(handshake.NONCE_BYTES))
        self.writer.write(encode(hello))
        welcome = await self.next()
        assert isinstance(welcome, Welcome)
        proof = handshake.prove(SECRET, hello, welcome)
        self.writer.write(encode(proof))
        return hello, proof

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def tokens(stream: int, index: int, text: str = "x") -> Tokens:
    return Tokens(stream, 1, index, (index,), text)
