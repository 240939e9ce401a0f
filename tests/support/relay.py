"""A TCP relay that can be cut and black-holed: what becomes of a link, as both of its ends see it."""

from __future__ import annotations

import asyncio
import contextlib

from grid.wire.link import Link, LinkPool

CHUNK_BYTES = 64 * 1024


class Relay:
    """Stands before one address. Bytes in a black hole are kept from the other side for ever."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, port: int = 0) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._joined, "127.0.0.1", port)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    def black_hole(self) -> None:
        """From now on nothing passes, and nothing is refused."""
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    def cut(self) -> None:
        """Reset all connections; new ones are taken."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        for source, sink in ((reader, back), (there, writer)):
            self._writers.add(sink)
            task = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await source.read(CHUNK_BYTES):
                    await self._open.wait()
                    sink.write(data)
                    await sink.drain()
        finally:
            self._writers.discard(sink)
            sink.transport.abort()


class RelayedPool(LinkPool):
    """A pool of links whose connections all go through relays."""

    def __init__(self, *, role: str, peer_id: str, secret: bytes) -> None:
        super().__init__(role=role, peer_id=peer_id, secret=secret)
        self._relays: dict[tuple[str, int], tuple[Relay, tuple[str, int]]] = {}

    async def get(self, host: str, port: int) -> Link:
        if (host, port) not in self._relays:
            relay = Relay(host, port)
            self._relays[host, port] = (relay, await relay.start())
        return await super().get(*self._relays[host, port][1])

    def relay(self, host: str, port: int) -> Relay:
        """Return the relay before an address that was dialled."""
        return self._relays[host, port][0]

    async def close(self) -> None:
        await super().close()
        for relay, _ in self._relays.values():
            await relay.close()
