"""The bounded memory of slow reads: one read at a time, and nothing older than it may be."""

from __future__ import annotations

import asyncio

import pytest

from gateway.remembered import Remembered
from grid.errors import Rejected


class Source:
    """Returns how often it was read, once `ready` is set."""

    def __init__(self) -> None:
        self.reads = 0
        self.begun = asyncio.Event()
        self.ready = asyncio.Event()
        self.now_s = 0.0
        self.error: Exception | None = None

    async def read(self) -> int:
        self.reads += 1
        mine = self.reads
        self.begun.set()
        await self.ready.wait()
        if self.error is not None:
            raise self.error
        return mine

    def remembered(self, bound: int = 8) -> Remembered[str, int]:
        return Remembered(keep_s=1.0, bound=bound, clock=lambda: self.now_s, away_s=10.0)


async def test_callers_share_one_read_and_then_its_value() -> None:
    source = Source()
    memory = source.remembered()
    callers = [asyncio.create_task(memory.get("a", source.read)) for _ in range(5)]
    await asyncio.sleep(0)
    source.ready.set()
    assert await asyncio.gather(*callers) == [1] * 5
    source.now_s = 0.99
    assert await memory.get("a", source.read) == 1


async def test_a_value_ages_from_the_beginning_of_its_read() -> None:
    source = Source()
    memory = source.remembered()
    caller = asyncio.create_task(memory.get("a", source.read))
    await source.begun.wait()
    source.now_s = 1.0
    source.ready.set()
    assert await caller == 1
    assert await memory.get("a", source.read) == 2


async def test_a_caller_that_leaves_takes_the_read_from_nobody() -> None:
    source = Source()
    memory = source.remembered()
    first, second = (asyncio.create_task(memory.get("a", source.read)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait((first,))
    source.ready.set()
    assert first.cancelled()
    assert await second == 1


async def test_a_failure_is_told_to_all_who_wait_and_not_remembered() -> None:
    source = Source()
    memory = source.remembered()
    source.error = KeyError("gone")
    source.ready.set()
    told = await asyncio.gather(*(memory.get("a", source.read) for _ in range(3)), return_exceptions=True)
    assert [type(error) for error in told] == [KeyError] * 3
    source.error = None
    assert await memory.get("a", source.read) == source.reads == 2


async def test_a_read_that_began_before_forgetting_is_neither_joined_nor_kept() -> None:
    source = Source()
    memory = source.remembered()
    before = asyncio.create_task(memory.get("a", source.read))
    await source.begun.wait()
    memory.forget(lambda key, _: key == "a")
    source.ready.set()
    assert await memory.get("a", source.read) == 2
    assert await before == 1
    assert await memory.get("a", source.read) == 2


@pytest.mark.parametrize(("bound", "reads"), [(2, 2), (1, 3)])
async def test_the_oldest_leaves_at_the_bound(bound: int, reads: int) -> None:
    source = Source()
    source.ready.set()
    memory = source.remembered(bound)
    for key in ("a", "b", "a"):
        await memory.get(key, source.read)
    assert source.reads == reads


async def test_while_the_source_is_away_an_older_value_will_do_for_a_while() -> None:
    source = Source()
    source.ready.set()
    memory = source.remembered()
    assert await memory.get("a", source.read) == 1
    source.error = Rejected("away")
    source.now_s = 10.9
    assert await memory.get("a", source.read) == 1
    with pytest.raises(Rejected):
        await memory.get("b", source.read)
    source.now_s = 11.1
    with pytest.raises(Rejected):
        await memory.get("a", source.read)


async def test_a_source_that_hangs_holds_nobody_up_twice() -> None:
    source = Source()
    memory = source.remembered()
    source.ready.set()
    for key in ("a", "b"):
        await memory.get(key, source.read)
    source.ready.clear()
    source.now_s = 2.0
    assert await memory.get("a", source.read) == 1
    before = source.reads
    assert [await memory.get(key, source.read) for key in ("b", "a", "b")] == [2, 1, 2]
    assert source.reads == before, "one read asks whether the source is back"
    source.ready.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert await memory.get("a", source.read) == 3


async def test_what_the_source_has_denied_does_not_come_back_while_it_is_away() -> None:
    source = Source()
    source.ready.set()
    memory = source.remembered()
    assert await memory.get("a", source.read) == 1
    source.now_s, source.error = 2.0, KeyError("revoked")
    with pytest.raises(KeyError):
        await memory.get("a", source.read)
    source.error = Rejected("away")
    with pytest.raises(Rejected):
        await memory.get("a", source.read)
