"""Event encoding, and the loop between a run and a client that may be slow, silent or gone."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from gateway.http import sse
from gateway.http.sse import KEEP_ALIVE, MAX_READY_EVENTS, ReadyEvents, event, write_events
from gateway.pipeline.events import Chunk, Finished, RunEvent
from grid.errors import Saturated
from grid.words import Usage

END = Finished("stop", Usage(), 0.0, 0.0, (), (), True)


def encode(item: RunEvent) -> bytes:
    return item.text.encode() if isinstance(item, Chunk) else b"|end"


def chunk(index: int) -> Chunk:
    return Chunk(index, f"<{index}>", 1)


def test_an_event_is_one_data_line_whatever_its_text() -> None:
    encoded = event("token", {"text": "a\nb\r\n\u2028c"})
    assert encoded.startswith(b"event: token\ndata: ")
    assert encoded.endswith(b"\n\n")
    assert encoded.count(b"\n") == 3
    assert b"\r" not in encoded


async def test_what_is_ready_goes_out_in_one_write() -> None:
    async def run() -> AsyncGenerator[RunEvent, None]:
        for index in range(5):
            yield chunk(index)
        yield END

    writes: list[bytes] = []

    async def write(part: bytes) -> None:
        writes.append(part)

    ready = ReadyEvents(run())
    first = await ready.take(1.0)
    assert first is not None
    assert await write_events(ready, first, encode, write) is END
    assert writes == [b"<0><1><2><3><4>|end"]
    await ready.close()


async def test_a_slow_client_gets_everything_in_order_and_bounds_what_waits() -> None:
    made = 0

    async def run() -> AsyncGenerator[RunEvent, None]:
        nonlocal made
        for index in range(3 * MAX_READY_EVENTS):
            made += 1
            yield chunk(index)
        yield END

    ready = ReadyEvents(run())
    taken: list[RunEvent] = []
    while (items := await ready.take(1.0)) is not None:
        assert len(items) <= MAX_READY_EVENTS
        assert made <= len(taken) + 2 * MAX_READY_EVENTS + 1
        taken += items
        await asyncio.sleep(0)
    assert [item.index for item in taken if isinstance(item, Chunk)] == list(range(3 * MAX_READY_EVENTS))
    assert taken[-1] is END
    await ready.close()


async def test_silence_is_filled_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.001)
    beaten = asyncio.Event()

    async def run() -> AsyncGenerator[RunEvent, None]:
        yield chunk(0)
        await beaten.wait()
        yield END

    writes: list[bytes] = []

    async def write(part: bytes) -> None:
        writes.append(part)
        if writes.count(KEEP_ALIVE) == 3:
            beaten.set()

    ready = ReadyEvents(run())
    first = await ready.take(1.0)
    assert first is not None
    await write_events(ready, first, encode, write)
    assert writes[0] == b"<0>"
    assert writes[-1] == b"|end"
    assert set(writes[1:-1]) == {KEEP_ALIVE}
    await ready.close()


async def test_an_error_comes_out_after_the_events_before_it() -> None:
    async def run() -> AsyncGenerator[RunEvent, None]:
        yield chunk(0)
        raise Saturated("full")

    ready = ReadyEvents(run())
    assert await ready.take(1.0) == [chunk(0)]
    with pytest.raises(Saturated):
        await ready.take(1.0)
    await ready.close()


@pytest.mark.parametrize("taken_first", [False, True])
async def test_closing_ends_the_run_and_waits_for_its_cleaning_up(taken_first: bool) -> None:
    cleaned: list[str] = []

    async def run() -> AsyncGenerator[RunEvent, None]:
        try:
            yield chunk(0)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append("cancelled the unit")

    ready = ReadyEvents(run())
    if taken_first:
        await ready.take(1.0)
    else:
        await asyncio.sleep(0)
    await ready.close()
    await ready.close()
    assert cleaned == ["cancelled the unit"]


async def test_closing_a_run_that_never_began_is_quiet() -> None:
    async def run() -> AsyncGenerator[RunEvent, None]:
        yield chunk(0)

    ready = ReadyEvents(run())
    await ready.close()
    assert await ready.take(0.0) is None
