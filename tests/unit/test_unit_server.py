"""The shell around a unit: paused peers, cancelled tasks, engines that raise. No sockets, no time."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from support.fleet import make_card

from grid.engines.base import EngineLoad, Prepared, Sink, Step
from grid.errors import InvalidRequest, UnitLost
from grid.units import counting
from grid.units import events as ev
from grid.units import outbox as held
from grid.units.server import UnitServer
from grid.units.unit import Unit
from grid.wire.link import Peer
from grid.wire.messages import Cancel, Count, Counted, Done, Failed, Refused, Submit, Tokens, WireMessage
from grid.words import Message, Sampling


class FakePeer:
    def __init__(self, number: int) -> None:
        self.link_id = number
        self.peer_id = f"gw{number}"
        self.is_paused = False
        self.sent: list[WireMessage] = []
        self.closed: tuple[str, str] | None = None
        self.server: UnitServer | None = None

    def send(self, message: WireMessage) -> None:
        self.sent.append(message)

    send_lazily = send

    def close(self, code: str, message: str) -> None:
        self.closed = (code, message)
        assert self.server is not None
        self.server.disconnected(cast(Peer, self), message)


class HandCranked:
    """An engine whose steps the test gives, to whichever generation it names."""

    def __init__(self) -> None:
        self.sinks: dict[str, Sink] = {}
        self.cancelled: list[str] = []

    async def prepare(self, messages: Any, documents: Any, max_output_tokens: int) -> Any:
        if "explode" in messages[0].text:
            raise RuntimeError(f"can't read {messages[0].text}")
        return Prepared((1,), b"h", 0)

    def generate(self, generation: Any, sink: Sink) -> Any:
        request = generation.engine_id.split("/")[0]
        if request == "impossible":
            raise InvalidRequest("no such thing", param="prompt")
        self.sinks[request] = sink
        return HandCrankedRun(self, request)

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0, 0, 0)


class HandCrankedRun:
    def __init__(self, engine: HandCranked, request: str) -> None:
        self.engine, self.request = engine, request

    def cancel(self) -> None:
        if sink := self.engine.sinks.pop(self.request, None):
            self.engine.cancelled.append(self.request)
            sink.released(None)


class Stage:
    def __init__(self) -> None:
        card = make_card("u", model="m", max_running=4, max_waiting=0)
        self.engine = HandCranked()
        self.deaths: list[str] = []
        self.server = UnitServer(
            Unit(card), cast(Any, self.engine), secret=b"s" * 32, died=self.deaths.append
        )

    def peer(self, number: int) -> FakePeer:
        peer = FakePeer(number)
        peer.server = self.server
        self.server.connected(cast(Peer, peer))
        return peer

    def submit(self, peer: FakePeer, stream: int, name: str, text: str = "hi") -> None:
        submit = Submit(stream, name, 0, "", "m", (Message("user", text),), (), Sampling(9), "", 0.0)
        self.server.received(cast(Peer, peer), submit)

    async def step(self, name: str, *ids: int, finish: str | None = None) -> None:
        await self.settle()
        sink = self.engine.sinks[name]
        sink.step(Step(ids, "x" * len(ids), finish, 0, 0.0))
        if finish is not None:
            del self.engine.sinks[name]
            sink.released(None)

    async def settle(self) -> None:
        """Let every task run as far as it can without time passing."""
        for _ in range(10):
            await asyncio.sleep(0)


async def test_a_paused_peer_stalls_nobody_and_loses_nothing() -> None:
    stage = Stage()
    slow, quick = stage.peer(1), stage.peer(2)
    stage.submit(slow, 1, "a")
    stage.submit(quick, 1, "b")
    await stage.settle()
    slow.is_paused = True
    before = len(slow.sent)
    for index in range(3):
        await stage.step("a", index)
        await stage.step("b", index)
    await stage.step("a", 3, finish="stop")
    assert len(slow.sent) == before
    assert [frame for frame in quick.sent if isinstance(frame, Tokens)] == [
        Tokens(1, 0, index, (index,), "x") for index in range(3)
    ]
    slow.is_paused = False
    stage.server._tick()
    caught_up, done = slow.sent[before:]
    assert caught_up == Tokens(1, 0, 0, (0, 1, 2, 3), "xxxx")
    assert isinstance(done, Done)
    await stage.server.close()


async def test_a_peer_that_never_reads_is_closed_and_its_slot_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MAX_HELD_BYTES", 100)
    stage = Stage()
    peer = stage.peer(1)
    stage.submit(peer, 1, "a")
    await stage.settle()
    peer.is_paused = True
    await stage.step("a", 1)
    await stage.step("a", 2)
    assert peer.closed is not None
    assert peer.closed[0] == "saturated"
    await stage.settle()
    assert stage.engine.cancelled == ["a"]
    assert stage.server.unit.is_idle


def count(stream: int, text: str = "hi", model: str = "m") -> Count:
    return Count(stream, "req_1", model, (Message("user", text),))


async def test_a_prompt_is_counted_beside_admission() -> None:
    stage = Stage()
    peer = stage.peer(1)
    stage.submit(peer, 1, "a")
    stage.server.received(cast(Peer, peer), count(2))
    await stage.settle()
    assert Counted(2, 1) in peer.sent
    assert stage.server.unit.in_engine == 1, "the count took no slot"
    stage.server.received(cast(Peer, peer), count(3, model="other"))
    stage.server.received(cast(Peer, peer), count(4, text="explode, secret"))
    await stage.settle()
    wrong, broken = peer.sent[-2:]
    assert isinstance(wrong, Refused)
    assert (wrong.stream, wrong.param) == (3, "model")
    assert isinstance(broken, Refused)
    assert (broken.code, broken.message) == ("internal_error", "the engine raised RuntimeError")
    await stage.server.close()


async def test_counts_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "MAX_COUNTS", 1)
    stage = Stage()
    peer = stage.peer(1)
    stage.server.received(cast(Peer, peer), count(1))
    stage.server.received(cast(Peer, peer), count(2))
    await stage.settle()
    refused, counted = peer.sent
    assert isinstance(refused, Refused)
    assert (refused.stream, refused.code) == (2, "saturated")
    assert counted == Counted(1, 1)
    await stage.server.close()


async def test_a_count_for_a_peer_that_does_not_read_waits_with_the_rest() -> None:
    stage = Stage()
    peer = stage.peer(1)
    peer.is_paused = True
    stage.server.received(cast(Peer, peer), count(1))
    await stage.settle()
    assert peer.sent == []
    assert stage.server._timer is not None, "somebody looks again when the peer reads"
    peer.is_paused = False
    stage.server._tick()
    assert peer.sent == [Counted(1, 1)]
    await stage.server.close()


async def test_cancel_reaches_the_engine_and_frees_the_slot() -> None:
    stage = Stage()
    peer = stage.peer(1)
    stage.submit(peer, 1, "a")
    await stage.step("a", 5)
    stage.server.received(cast(Peer, peer), Cancel(1))
    assert isinstance(peer.sent[-1], Failed), "answered at once"
    await stage.settle()
    assert stage.engine.cancelled == ["a"]
    assert stage.server.unit.is_idle
    assert stage.server.unit.counters.cancel_to_free_ms > 0
    assert not stage.deaths


async def test_cancel_in_the_turn_of_the_submit() -> None:
    """The tasks of engine and tokeniser have not run yet when they are cancelled."""
    stage = Stage()
    peer = stage.peer(1)
    stage.submit(peer, 1, "a")
    stage.server.received(cast(Peer, peer), Cancel(1))
    await stage.settle()
    [refused] = peer.sent
    assert isinstance(refused, Refused)
    assert refused.code == "cancelled"
    assert stage.server.unit.is_idle


async def test_an_engine_error_ends_the_stream_without_telling_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    peer = stage.peer(1)
    stage.submit(peer, 1, "a", text="explode, secret prompt")
    await stage.settle()
    [refused] = peer.sent
    assert isinstance(refused, Refused)
    assert (refused.code, refused.message) == ("internal_error", "the engine raised RuntimeError")
    assert "secret prompt" not in caplog.text
    assert "RuntimeError" in caplog.text
    assert stage.server.unit.is_idle


async def test_a_generation_that_can_not_begin_ends_its_stream() -> None:
    stage = Stage()
    peer = stage.peer(1)
    stage.submit(peer, 1, "impossible")
    await stage.settle()
    failed = peer.sent[-1]
    assert isinstance(failed, Failed)
    assert (failed.code, failed.message) == ("invalid_request", "no such thing")
    assert stage.server.unit.is_idle


async def test_an_engine_that_dies_under_one_stream_is_dead_for_all() -> None:
    stage = Stage()
    peer = stage.peer(1)
    for number, name in enumerate("ab"):
        stage.submit(peer, number, name)
    await stage.settle()
    stage.engine.sinks.pop("a").released(UnitLost("power cut"))
    assert [(f.stream, f.code) for f in peer.sent if isinstance(f, Failed)] == [
        (0, "unit_lost"),
        (1, "unit_lost"),
    ]
    assert stage.engine.cancelled == ["b"]
    assert stage.deaths == ["power cut"]


async def test_a_bug_in_the_unit_costs_its_stream_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage()
    peer = stage.peer(1)
    for number, name in enumerate("ab"):
        stage.submit(peer, number, name)
    await stage.settle()
    with monkeypatch.context() as broken:
        broken.setitem(stage.server.unit._handlers, ev.Stepped, lambda event, now_s: 1 / 0)
        await stage.step("a", 1)
    await stage.step("b", 1, finish="stop")
    ends = {frame.stream: type(frame) for frame in peer.sent if isinstance(frame, (Failed, Done))}
    assert ends == {0: Failed, 1: Done}
    assert "ZeroDivisionError" in caplog.text
    assert stage.server.unit.is_idle


# --- sleep ----------------------------------------------------------------------------------


class Napping(HandCranked):
    """Wakes only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.may_wake = asyncio.Event()

    async def sleep(self) -> None:
        self.said.append("sleep")

    async def wake(self) -> None:
        await self.may_wake.wait()
        self.said.append("wake")


async def test_a_request_wakes_an_engine_that_sleeps_and_waits_for_it() -> None:
    stage = Stage()
    stage.server._engine = engine = cast(Any, Napping())
    stage.engine = engine
    peer = stage.peer(1)
    assert await stage.server.sleep()
    assert await stage.server.sleep(), "it sleeps already"
    for stream, name in enumerate(("a", "b")):
        stage.submit(peer, stream, name)
    await stage.settle()
    assert (engine.said, engine.sinks) == (["sleep"], {})
    engine.may_wake.set()
    await stage.settle()
    assert engine.said == ["sleep", "wake"], "both woke it once"
    assert set(engine.sinks) == {"a", "b"}
    assert not await stage.server.sleep(), "it has work"
    for name in ("a", "b"):
        await stage.step(name, 5, finish="stop")
    assert await stage.server.sleep()
    await stage.server.wake()
    await stage.server.wake()
    assert engine.said == ["sleep", "wake", "sleep", "wake"]


async def test_an_engine_that_can_not_sleep_stays_awake() -> None:
    stage = Stage()
    assert not await stage.server.sleep()
    await stage.server.wake()
