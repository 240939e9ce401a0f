"""Does the link keep up with bare asyncio and msgpack, at one token a message?

    python benchmarks/link.py [--json OUT] [--rounds N] [--seconds S]

A server process makes tokens as fast as its connection takes them, one step of all streams a loop turn; this
process counts them for each stream. Bare: one `asyncio.Protocol` on each side, one msgpack list a token in
msgpack's C extension, all of a loop turn joined into one write, nothing checked. Link: `Tokens` messages
through `Peer.send`, checked on arrival, one reader task for each stream on `LinkStream.receive`. Both use
uvloop and loopback in the same two processes, whose heap is frozen after start as a server's should be.
Rounds alternate; the ratio is the median over neighbouring rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import platform
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import msgpack  # type: ignore[import-untyped]
import uvloop

from grid.wire.link import Link, LinkServer, Peer, dial
from grid.wire.messages import Done, Submit, Tokens, WireMessage
from grid.words import Sampling

SECRET = b"a secret of the benchmark only.."
STREAM_COUNTS = (1, 100)
TARGET = 0.70
TEXT = " token"
FIRST_ID = 40_000
"""Ids of real vocabularies take three or five bytes on the wire."""


# --- the server process ---------------------------------------------------------------------


class BareServer(asyncio.Protocol):
    """Takes `[streams, tokens]`; answers with that many tokens on each stream."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=256 * 1024)
        self.can_write = asyncio.Event()
        self.can_write.set()
        self.pack = msgpack.Packer().pack

    def pause_writing(self) -> None:
        self.can_write.clear()

    def resume_writing(self) -> None:
        self.can_write.set()

    def data_received(self, data: bytes) -> None:
        streams, tokens = msgpack.unpackb(data)
        self.task = asyncio.ensure_future(self.produce(streams, tokens))

    async def produce(self, streams: int, tokens: int) -> None:
        pack = self.pack
        for index in range(tokens):
            frames = [
                pack([23, stream, 1, index, [FIRST_ID + index], TEXT]) for stream in range(1, streams + 1)
            ]
            self.transport.write(b"".join(frames))
            if self.can_write.is_set():
                await asyncio.sleep(0)
            else:
                await self.can_write.wait()


class TokenMaker:
    """A unit's handler: starts to answer once the last of the announced streams has been submitted."""

    def __init__(self) -> None:
        self.submitted: list[Submit] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def connected(self, peer: Peer) -> None: ...

    def disconnected(self, peer: Peer, reason: str) -> None: ...

    def received(self, peer: Peer, message: WireMessage) -> None:
        assert isinstance(message, Submit)
        self.submitted.append(message)
        if len(self.submitted) == message.priority:
            task = asyncio.ensure_future(self.produce(peer, self.submitted))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            self.submitted = []

    async def produce(self, peer: Peer, submitted: list[Submit]) -> None:
        streams = [submit.stream for submit in submitted]
        for index in range(submitted[0].sampling.max_output_tokens):
            for stream in streams:
                peer.send(Tokens(stream, 1, index, (FIRST_ID + index,), TEXT))
            await asyncio.sleep(0)
            while peer.is_paused:  # noqa: ASYNC110  as a unit does, which never waits for one peer
                await asyncio.sleep(0.0002)
        for stream in streams:
            peer.send(Done(stream, 1, "length", 0, 0, index + 1, 0.0))


def serve(pipe: Connection) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        bare = await loop.create_server(BareServer, "127.0.0.1", 0)
        link = LinkServer(role="unit", peer_id="maker", secret=SECRET, handler=TokenMaker())
        _, link_port = await link.start("127.0.0.1")
        gc.freeze()
        pipe.send((bare.sockets[0].getsockname()[1], link_port))
        await loop.run_in_executor(None, pipe.poll, None)

    uvloop.run(main())


# --- the client process ---------------------------------------------------------------------


class BareClient(asyncio.Protocol):
    def __init__(self) -> None:
        self.unpacker = msgpack.Unpacker(use_list=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def run(self, streams: int, tokens: int) -> asyncio.Future[None]:
        self.counts = [0] * (streams + 1)
        self.missing = streams * tokens
        self.finished = asyncio.get_running_loop().create_future()
        self.transport.write(msgpack.packb([streams, tokens]))
        return self.finished

    def data_received(self, data: bytes) -> None:
        counts, count = self.counts, 0
        self.unpacker.feed(data)
        for _, stream, _, _, ids, _ in self.unpacker:
            counts[stream] += len(ids)
            count += 1
        self.missing -= count
        if not self.missing:
            self.finished.set_result(None)


async def run_bare(client: BareClient, streams: int, tokens: int) -> list[int]:
    await client.run(streams, tokens)
    return client.counts[1:]


async def run_link(link: Link, streams: int, tokens: int) -> list[int]:
    async def count() -> int:
        stream = link.open()
        stream.send(
            Submit(
                stream.id, "r", 1, "r/0/1", "m", (), (), Sampling(max_output_tokens=tokens), "", 0.0, streams
            )
        )
        counted = 0
        while True:
            for message in await stream.receive():
                if type(message) is Tokens:
                    counted += len(message.ids)
                else:
                    stream.close()
                    return counted

    return await asyncio.gather(*[count() for _ in range(streams)])


async def measure(ports: tuple[int, int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    loop = asyncio.get_running_loop()
    _, bare = await loop.create_connection(BareClient, "127.0.0.1", ports[0])
    link = await dial("127.0.0.1", ports[1], role="gateway", peer_id="counter", secret=SECRET)

    gc.freeze()

    async def rate(run: Any, streams: int, tokens: int) -> float:
        started = time.perf_counter()
        counts = await run(streams, tokens)
        elapsed = time.perf_counter() - started
        assert counts == [tokens] * streams, "a token was lost"
        return streams * tokens / elapsed

    runs = (lambda s, t: run_bare(bare, s, t), lambda s, t: run_link(link, s, t))
    rows = []
    for streams in STREAM_COUNTS:
        warm = [await rate(run, streams, 20_000 // streams) for run in runs]
        tokens = max(1, int(min(warm) * seconds / streams))
        pairs = [[await rate(run, streams, tokens) for run in runs] for _ in range(rounds)]
        rows.append(
            {
                "streams": streams,
                "tokens_per_round": tokens * streams,
                "bare_tokens_per_s": round(statistics.median(pair[0] for pair in pairs)),
                "link_tokens_per_s": round(statistics.median(pair[1] for pair in pairs)),
                "ratio": round(statistics.median(pair[1] / pair[0] for pair in pairs), 3),
                "ratio_lowest": round(min(pair[1] / pair[0] for pair in pairs), 3),
                "ratio_highest": round(max(pair[1] / pair[0] for pair in pairs), 3),
            }
        )
    link.close()
    bare.transport.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of rounds for each stream count")
    parser.add_argument("--seconds", type=float, default=1.0, help="aimed length of one round")
    arguments = parser.parse_args()

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        rows = uvloop.run(measure(ours.recv(), arguments.rounds, arguments.seconds))
    finally:
        server.terminate()
        server.join()

    print(f"{'streams':>7}  {'bare tokens/s':>13}  {'link tokens/s':>13}  {'ratio':>5}  (lowest to highest)")
    for row in rows:
        print(
            f"{row['streams']:>7}  {row['bare_tokens_per_s']:>13,}  {row['link_tokens_per_s']:>13,}"
            f"  {row['ratio']:>5.2f}  ({row['ratio_lowest']:.2f} to {row['ratio_highest']:.2f})"
        )
    reached = all(row["ratio"] >= TARGET for row in rows)
    print(f"target: {TARGET:.2f} of bare at each stream count: {'reached' if reached else 'missed'}")
    if arguments.json:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        arguments.json.write_text(json.dumps({"target": TARGET, **machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
