"""The link: what the rest of the grid uses to listen, to dial, and to stay connected.

    LinkServer    listens, admits peers that hold the cell's secret
    dial          one connection to one address
    LinkPool      one link an address, dialled on demand
    Reconnecting  one link to one peer whose address may change

The connection is in `peer.py`, its streams in `streams.py`, the handshake in `greeting.py`, the bytes in
`codec.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import cast

from grid.errors import GridError, UnitLost
from grid.wire.greeting import Dialling, Identity, Listening
from grid.wire.handshake import MIN_SECRET_BYTES
from grid.wire.peer import CELL_BEATS, CLOSE_S, Beats, Handler, Peer
from grid.wire.streams import STREAM_BUFFER_BYTES, Link, LinkStream

__all__ = [
    "CELL_BEATS",
    "STREAM_BUFFER_BYTES",
    "Beats",
    "Handler",
    "Link",
    "LinkPool",
    "LinkServer",
    "LinkStream",
    "Peer",
    "Reconnecting",
    "Resolve",
    "dial",
]

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""Three messages take a millisecond; a loop that is loading a model may hold them up for longer."""

MAX_STRANGERS = 64
"""Connections that have not proved themselves yet; a stranger costs a socket and 4 KiB for `HANDSHAKE_S`."""

BACKLOG = 256
"""All gateways of a cell may come back at once after this peer restarts."""

Resolve = Callable[[], Awaitable[tuple[str, int]]]
"""Returns a peer's current address."""


def _identity(role: str, peer_id: str, secret: bytes) -> Identity:
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"the link secret has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed")
    return Identity(role, peer_id, secret)


class LinkServer:
    """Listens on one port. `handler` hears of every authenticated peer and of nothing else."""

    def __init__(
        self, *, role: str, peer_id: str, secret: bytes, handler: Handler, beats: Beats = CELL_BEATS
    ) -> None:
        self._me = _identity(role, peer_id, secret)
        self._handler = handler
        self._beats = beats
        self._server: asyncio.Server | None = None
        self._strangers: dict[Listening, asyncio.TimerHandle] = {}
        self.peers: set[Peer] = set()
        self.strangers_refused = 0

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen, and return the address; port 0 takes a free one. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._greet, host, port, backlog=BACKLOG)
        name = self._server.sockets[0].getsockname()
        return name[0], name[1]

    async def close(self, code: str = "closed", message: str = "") -> None:
        """Stop listening, say goodbye to every peer, and wait until they are gone."""
        if self._server is not None:
            self._server.close()
        for stranger in list(self._strangers):
            stranger.send_away(code, message)
        peers = list(self.peers)
        for peer in peers:
            peer.close(code, message)
        if peers:
            await asyncio.wait([peer.closed for peer in peers], timeout=2 * CLOSE_S)

    def _greet(self) -> asyncio.Protocol:
        if len(self._strangers) >= MAX_STRANGERS:
            self.strangers_refused += 1
            return _Refusing()
        stranger = Listening(
            self._me, handler=self._handler, beats=self._beats, admit=self._admit, refuse=self._refuse
        )
        self._strangers[stranger] = asyncio.get_running_loop().call_later(
            HANDSHAKE_S, stranger.send_away, "protocol_error", "the handshake took too long"
        )
        return stranger

    def _admit(self, stranger: Listening, peer: Peer, unread: bytes) -> None:
        self._strangers.pop(stranger).cancel()
        self.peers.add(peer)
        peer.closed.add_done_callback(lambda _: self.peers.discard(peer))
        peer.start(unread)

    def _refuse(self, stranger: Listening) -> None:
        self.strangers_refused += 1
        self._strangers.pop(stranger).cancel()


class _Refusing(asyncio.Protocol):
    """Hangs up: too many strangers are waiting already."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


async def dial(
    host: str,
    port: int,
    *,
    role: str,
    peer_id: str,
    secret: bytes,
    handler: Handler | None = None,
    timeout_s: float = HANDSHAKE_S,
    beats: Beats = CELL_BEATS,
) -> Link:
    """Return an authenticated link. Raises Unauthorised for another secret, UnitLost for anything else."""
    me = _identity(role, peer_id, secret)
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            transport, greeting = await loop.create_connection(
                lambda: Dialling(me, handler=handler, beats=beats), host, port
            )
            return await greeting.link
    except TimeoutError:
        raise UnitLost(f"{host}:{port} did not answer within {timeout_s} s") from None
    except OSError as error:
        raise UnitLost(f"{host}:{port} can't be reached: {error.strerror or error}") from None
    finally:
        if transport is not None and not (greeting.link.done() and not greeting.link.cancelled()):
            transport.abort()


class LinkPool:
    """One link for each address, dialled when first asked for; a dead one is dialled anew."""

    def __init__(self, *, role: str, peer_id: str, secret: bytes) -> None:
        self._me = _identity(role, peer_id, secret)
        self._links: dict[tuple[str, int], Link] = {}
        self._dials: dict[tuple[str, int], asyncio.Task[Link]] = {}
        self._is_closed = False

    async def get(self, host: str, port: int) -> Link:
        """Return an open link. Concurrent callers share one dial. Raises Unauthorised or UnitLost."""
        address = (host, port)
        link = self._links.get(address)
        if link is not None and link.is_open:
            return link
        if self._is_closed:
            raise UnitLost("the link pool is closed")
        task = self._dials.get(address)
        if task is None:
            task = asyncio.create_task(self._dial(address))
            self._dials[address] = task
        return await asyncio.shield(task)

    async def _dial(self, address: tuple[str, int]) -> Link:
        try:
            link = await dial(*address, role=self._me.role, peer_id=self._me.peer_id, secret=self._me.secret)
        finally:
            del self._dials[address]
        self._links[address] = link
        link.closed.add_done_callback(lambda _: self._forget(address, link))
        return link

    def _forget(self, address: tuple[str, int], link: Link) -> None:
        if self._links.get(address) is link:
            del self._links[address]

    async def close(self) -> None:
        self._is_closed = True
        dials = list(self._dials.values())
        for task in dials:
            task.cancel()
        await asyncio.gather(*dials, return_exceptions=True)
        links = list(self._links.values())
        for link in links:
            link.close()
        if links:
            await asyncio.wait([link.closed for link in links], timeout=2 * CLOSE_S)


class Reconnecting:
    """Keeps one link to a peer. The address is resolved before every dial, because restarts change it."""

    def __init__(
        self,
        resolve: Resolve,
        *,
        role: str,
        peer_id: str,
        secret: bytes,
        handler: Handler | None = None,
        on_connected: Callable[[Link], None] | None = None,
        backoff_s: tuple[float, float] = (0.05, 1.0),
        beats: Beats = CELL_BEATS,
    ) -> None:
        self._resolve = resolve
        self._me = _identity(role, peer_id, secret)
        self._handler = handler
        self._on_connected = on_connected
        self._backoff_s = backoff_s
        self._beats = beats
        self._link: Link | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.last_error = ""
        """Why the newest attempt failed; empty while connected."""

    @property
    def link(self) -> Link | None:
        """The link while it is open."""
        return self._link if self._link is not None and self._link.is_open else None

    async def start(self) -> None:
        """Begin to dial; returns at once. `wait` waits for the link."""
        self._task = asyncio.create_task(self._stay_connected())

    async def wait(self, timeout_s: float) -> Link:
        """Return the open link, waiting for it if need be. Raises UnitLost after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while (link := self.link) is None:
                    self._changed.clear()
                    await self._changed.wait()
                return link
        except TimeoutError:
            reason = f" ({self.last_error})" if self.last_error else ""
            raise UnitLost(f"not connected within {timeout_s} s{reason}") from None

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._link is not None and self._link.is_open:
            self._link.close()
            await self._link.closed

    async def _stay_connected(self) -> None:
        shortest_s, longest_s = self._backoff_s
        wait_s = shortest_s
        while True:
            try:
                link = await self._dial()
            except (
                Exception
            ) as error:  # resolve() is the caller's and may fail in any way; all mean "not now"
                self.last_error = error.message if isinstance(error, GridError) else type(error).__name__
                log.debug("link of %s %s: %s", self._me.role, self._me.peer_id, self.last_error)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, longest_s)
            else:
                wait_s = shortest_s
                reason = await asyncio.shield(link.closed)
                log.info("link with %s %s ended (%s); dialling again", link.role, link.peer_id, reason)
                await asyncio.sleep(wait_s)

    async def _dial(self) -> Link:
        host, port = await self._resolve()
        link = await dial(
            host,
            port,
            role=self._me.role,
            peer_id=self._me.peer_id,
            secret=self._me.secret,
            handler=self._handler,
            beats=self._beats,
        )
        self._link = link
        self.last_error = ""
        if self._on_connected is not None:
            self._on_connected(link)
        self._changed.set()
        return link
