"""Event encoding, and the loop between a run and a client that may be slow or hears nothing for a while."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from gateway.http import sse
from gateway.http.sse import KEEP_ALIVE, event, write_events
from gateway.pipeline.events import Chunk, Finished, RunEvent
from grid.errors import Saturated
from grid.words import Usage

END = Finished("stop", Usage(), 0.0, 0.0, (), (), True)


def encode(item: RunEvent) -> bytes:
    return item.text.encode() if isinstance(item, Chunk) else b"|end"


def chunk(index: int) -> Chunk:
    return Chunk(index, f"<{index}>", 1)


class Client:
    """Keeps what is written to it; `slow` makes each write wait a turn of the loop."""

    def __init__(self, *, slow: bool = False) -> None:
        self.writes: list[bytes] = []
        self._slow = slow

    async def write(self, part: bytes) -> None:
        if self._slow:
            await asyncio.sleep(0)
        self.writes.append(part)


def test_an_event_is_one_data_line_whatever_its_text() -> None:
    encoded = event("token", {"text": "a\nb\r\n\u2028c"})
    assert encoded.startswith(b"event: token\ndata: ")
    assert encoded.endswith(b"\n\n")
    assert encoded.count(b"\n") == 3
    assert b"\r" not in encoded


async def test_what_comes_together_goes_out_in_one_write() -> None:
    async def rest() -> AsyncGenerator[list[RunEvent], None]:
        yield [chunk(1), chunk(2)]
        yield [chunk(3), END]

    client = Client()
    assert await write_events([chunk(0)], rest(), encode, client.write) is END
    assert client.writes == [b"<0>", b"<1><2>", b"<3>|end"]


async def test_a_run_is_not_asked_for_more_while_a_write_waits() -> None:
    client = Client(slow=True)
    made = 0

    async def rest() -> AsyncGenerator[list[RunEvent], None]:
        nonlocal made
        for index in range(1, 50):
            assert len(client.writes) == index
            made += 1
            yield [chunk(index)]

    await write_events([chunk(0)], rest(), encode, client.write)
    assert made == 49
    assert b"".join(client.writes) == b"".join(b"<%d>" % index for index in range(50))


async def test_silence_is_filled_with_comments_and_their_end_with_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.001)
    beaten = asyncio.Event()
    client = Client()

    async def write(part: bytes) -> None:
        await client.write(part)
        if client.writes.count(KEEP_ALIVE) == 3:
            beaten.set()

    async def rest() -> AsyncGenerator[list[RunEvent], None]:
        await beaten.wait()
        yield [END]

    await write_events([chunk(0)], rest(), encode, write)
    assert client.writes == [b"<0>", *[KEEP_ALIVE] * (len(client.writes) - 2), b"|end"]
    assert client.writes.count(KEEP_ALIVE) >= 3
    assert not [task for task in asyncio.all_tasks() if "KeepAlive" in repr(task) and not task.cancelling()]


async def test_an_error_comes_out_after_the_events_before_it() -> None:
    async def rest() -> AsyncGenerator[list[RunEvent], None]:
        yield [chunk(1)]
        raise Saturated("full")

    client = Client()
    async with aclosing(rest()) as run:
        with pytest.raises(Saturated):
            await write_events([chunk(0)], run, encode, client.write)
    assert client.writes == [b"<0>", b"<1>"]
