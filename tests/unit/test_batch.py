"""Runs side by side: each tells its own end, at most so many at once, and leaving ends all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted import until

from gateway.pipeline.batch import MAX_MERGED, Run, Told, side_by_side
from gateway.pipeline.events import Chunk, Finished, RunEvent, RunFailed, Started
from grid.errors import GridError, InternalError, InvalidRequest, Saturated, UnitLost
from grid.words import Usage

STARTED = Started("r", "", 0, "m", (), (), 1, 0)
FINISHED = Finished("stop", Usage(), 1.0, 1.0, (), (), True)
FAILED = RunFailed(UnitLost("gone"), Usage(), "")


class Work:
    """Runs whose scripts are played event by event; an error in a script is raised."""

    def __init__(self, *scripts: list[RunEvent | Exception]) -> None:
        self.scripts = scripts
        self.running: set[int] = set()
        self.most = 0
        self.may_end: dict[int, asyncio.Event] = {}

    def runs(self) -> list[Callable[[], Run]]:
        return [partial(self._run, number) for number in range(len(self.scripts))]

    async def _run(self, number: int) -> AsyncGenerator[list[RunEvent], None]:
        self.running.add(number)
        self.most = max(self.most, len(self.running))
        try:
            for item in self.scripts[number]:
                await asyncio.sleep(0)
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, Finished) and number in self.may_end:
                    await self.may_end[number].wait()
                yield [item]
        finally:
            self.running.discard(number)


async def collect(work: Work, in_flight: int = 3) -> list[Told]:
    return [told async for news in side_by_side(work.runs(), in_flight) for told in news]


ENDINGS = {
    "finished": [STARTED, Chunk(0, "x", 1), FINISHED],
    "failed": [STARTED, FAILED],
    "refused": [InvalidRequest("no")],
}


@settings(deadline=None)
@given(st.lists(st.sampled_from(sorted(ENDINGS)), min_size=1, max_size=20), st.integers(1, 5))
def test_every_run_tells_all_it_has_in_order_and_one_end(endings: list[str], in_flight: int) -> None:
    work = Work(*(list(ENDINGS[ending]) for ending in endings))
    told = asyncio.run(collect(work, in_flight))
    for number, ending in enumerate(endings):
        own = [each.event for each in told if each.number == number]
        assert own == ENDINGS[ending]
        assert [each.is_last for each in told if each.number == number] == [False] * (len(own) - 1) + [True]
    assert work.most <= in_flight
    assert not work.running


async def test_a_full_cell_is_waited_for_while_own_runs_hold_places() -> None:
    class TwoPlaces(Work):
        async def _run(self, number: int) -> AsyncGenerator[list[RunEvent], None]:
            if len(self.running) == 2:
                raise Saturated("full", retry_after_s=1.0)
            async with aclosing(super()._run(number)) as run:
                async for events in run:
                    yield events

    told = await collect(TwoPlaces(*[[STARTED, FINISHED] for _ in range(9)]), in_flight=5)
    assert sorted(each.number for each in told if each.event is FINISHED) == list(range(9))


async def test_a_cell_that_others_fill_refuses_each_by_itself() -> None:
    work = Work(*[[Saturated("full")] for _ in range(4)])
    told = await collect(work)
    assert sorted(each.number for each in told) == list(range(4))
    assert all(isinstance(each.event, Saturated) for each in told)


async def test_closing_ends_what_runs_and_begins_nothing_more() -> None:
    work = Work(*[[STARTED, FINISHED] for _ in range(6)])
    work.may_end = {number: asyncio.Event() for number in range(6)}
    news = side_by_side(work.runs(), 3)
    await anext(news)
    await until(lambda: len(work.running) == 3)
    await news.aclose()
    assert not work.running
    assert work.most == 3


async def test_a_reader_that_is_slow_holds_the_runs() -> None:
    work = Work([STARTED, *[Chunk(n, "x", 1) for n in range(10 * MAX_MERGED)], FINISHED])
    news = side_by_side(work.runs())
    first = await anext(news)
    for _ in range(20 * MAX_MERGED):
        await asyncio.sleep(0)
    second = await anext(news)
    assert len(first) + len(second) <= 2 * (MAX_MERGED + 1)
    rest = [told async for more in news for told in more]
    assert [told.event for told in (*first, *second, *rest)] == work.scripts[0]


async def test_a_bug_is_not_an_outcome() -> None:
    with pytest.raises(KeyError):
        await collect(Work([STARTED, FINISHED], [STARTED, KeyError("bug")]))


async def test_a_run_without_an_end_is_told_as_a_failure() -> None:
    (told,) = [told for told in await collect(Work([STARTED])) if told.is_last]
    assert isinstance(told.event, GridError)
    assert isinstance(told.event, InternalError)
