"""When writes of a stream are spaced, and by how much."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from gateway.http import pace
from gateway.http.pace import LAGGING_S, MANY_STREAMS, MANY_TOKENS_PER_S, PAUSE_S, TICK_S, Pace
from gateway.http.runs import pauses
from gateway.http.sse import write_events
from gateway.pipeline.events import Chunk, Finished, RunEvent
from grid.words import Usage

END = Finished("stop", Usage(), 0.0, 0.0, (), (), True)


def crowded(streams: int, *lags_s: float) -> Pace:
    measured = Pace()
    measured.streams = streams
    for lag_s in lags_s:
        measured.measured(lag_s)
    return measured


def test_a_replica_with_time_does_not_pause() -> None:
    assert crowded(MANY_STREAMS - 1).pause_s(1.0) == 0.0
    assert crowded(8, LAGGING_S / 2).pause_s(1.0) == 0.0


def test_many_streams_or_a_lagging_loop_space_the_writes() -> None:
    assert crowded(MANY_STREAMS).pause_s(1.0) == PAUSE_S
    assert crowded(8, 0.1, 0.1).pause_s(1.0) == PAUSE_S


def test_a_lone_stream_gains_nothing_from_waiting() -> None:
    assert crowded(1, 0.1, 0.1).pause_s(1.0) == 0.0


def test_a_lag_is_forgotten() -> None:
    assert crowded(8, 0.05, 0.0, 0.0, 0.0, 0.0).pause_s(1.0) == 0.0


def test_few_streams_with_many_tokens_space_their_writes_until_they_slow_down() -> None:
    measured = crowded(8)
    for _ in range(8):
        measured.wrote(round(MANY_TOKENS_PER_S * TICK_S * 1.1))
        measured.measured(0.0)
    assert measured.pause_s(1.0) == PAUSE_S
    measured.measured(0.0)
    assert measured.pause_s(1.0) == 0.0


def test_a_late_measurement_counts_its_tokens_over_its_whole_time() -> None:
    measured = crowded(8)
    measured.wrote(round(MANY_TOKENS_PER_S * TICK_S * 2.2))
    measured.measured(LAGGING_S)
    assert measured.pause_s(1.0) == 0.0


def test_the_callers_bound_holds() -> None:
    assert crowded(MANY_STREAMS).pause_s(0.01) == 0.01
    assert crowded(MANY_STREAMS).pause_s(0.0) == 0.0


async def test_the_lag_of_the_running_loop_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "TICK_S", 0.001)
    measured = asyncio.Event()

    class Seen(Pace):
        def measured(self, late_s: float) -> None:
            assert late_s < 5.0
            super().measured(late_s)
            measured.set()

    seen = Seen()
    seen.start()
    await measured.wait()
    seen.close()
    assert seen.lag_s >= 0.0


async def test_only_text_is_waited_for() -> None:
    asked: list[str] = []
    writes: list[bytes] = []

    class Crowded(Pace):
        def pause_s(self, most_s: float) -> float:
            asked.append(writes[-1].decode())
            return most_s

    async def rest() -> AsyncGenerator[list[RunEvent], None]:
        yield [Chunk(0, "a", 1)]
        yield [Chunk(1, "b", 1), END]

    async def write(part: bytes) -> None:
        writes.append(part)

    def encode(item: RunEvent) -> bytes:
        return item.text.encode() if isinstance(item, Chunk) else b"|"

    await write_events([END], rest(), encode, write, pauses(Crowded(), 0.0001))
    assert writes == [b"|", b"a", b"b|"]
    assert asked == ["a"]
