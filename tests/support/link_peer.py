"""A process that listens on the link and answers, to be frozen or killed by a test. Prints its port."""

from __future__ import annotations

import asyncio

from grid.wire.link import LinkServer, Peer
from grid.wire.messages import Tokens, WireMessage

SECRET = b"a secret that only tests share.."


class Echo:
    """Answers every message of a stream with one token."""

    def connected(self, peer: Peer) -> None: ...

    def received(self, peer: Peer, message: WireMessage) -> None:
        peer.send(Tokens(message.stream, 1, 0, (1,), "x"))

    def disconnected(self, peer: Peer, reason: str) -> None: ...


async def main() -> None:
    server = LinkServer(role="unit", peer_id="child", secret=SECRET, handler=Echo())
    _, port = await server.start("127.0.0.1")
    print(port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
