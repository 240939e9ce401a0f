"""A peer on a scripted transport and clock: when it counts as silent, what one loop turn writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from grid.errors import UnitLost
from grid.wire import peer as peer_module
from grid.wire.codec import Decoder, encode
from grid.wire.messages import Bye, Ping, Pong, Progress, Tokens, Watch, WireMessage
from grid.wire.peer import CELL_BEATS, Peer
from grid.wire.streams import Link

BUSY_S, IDLE_S, IDLE_SILENT, LOST_S = CELL_BEATS
SILENT = round(LOST_S / BUSY_S)
"""Beats without a byte that end a link with open streams."""


class Clock:
    """Stands for the loop where a peer asks it for time and timers; one timer at a time is all it needs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.due_s = 0.0
        self.timer: Callable[[], None] | None = None
        self.soon: list[Callable[[], None]] = []
        self.later: list[Callable[[], None]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, due_s: float, call: Callable[[], None]) -> Clock:
        self.due_s, self.timer = due_s, call
        return self

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Clock:
        self.later.append(call)
        return Clock()

    def call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def cancel(self) -> None:
        self.timer = None

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for call in soon:
            call()

    def beat(self, late_s: float = 0.0) -> None:
        """Let the timer fire, `late_s` after it was due, and what it sent leave."""
        assert self.timer is not None, "no beat is due"
        self.now_s = self.due_s + late_s
        timer, self.timer = self.timer, None
        timer()
        self.turn()


class Wire:
    """Stands for the transport: keeps what is written."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.buffered_bytes = 0
        self.is_closed = False
        self.is_aborted = False
        self.is_reading = True

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return "127.0.0.1", 4100

    def set_write_buffer_limits(self, high: int) -> None: ...

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.buffered_bytes

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_aborted = True

    def sent(self) -> list[WireMessage]:
        """Return the messages written since the last call."""
        writes, self.writes = self.writes, []
        return Decoder().feed(b"".join(writes))


class Rig:
    def __init__(self, kind: type[Peer]) -> None:
        self.clock = Clock()
        self.wire = Wire()
        self.peer = kind(cast(asyncio.Transport, self.wire), role="unit", peer_id="u", handler=None)
        self.peer._loop = cast(asyncio.AbstractEventLoop, self.clock)
        self.peer.start(b"")
        self.clock.turn()
        self.wire.writes.clear()


@pytest.fixture
async def dialler() -> Rig:
    return Rig(Link)


@pytest.fixture
async def listener() -> Rig:
    return Rig(Peer)


def link(rig: Rig) -> Link:
    assert isinstance(rig.peer, Link)
    return rig.peer


async def test_a_second_of_silence_ends_a_link_with_open_streams(dialler: Rig) -> None:
    stream = link(dialler).open()
    for _ in range(SILENT - 1):
        dialler.clock.beat()
        assert dialler.peer.is_open
    dialler.clock.beat()
    assert dialler.clock.now_s == pytest.approx(LOST_S)
    assert not dialler.peer.is_open
    assert dialler.wire.is_aborted
    with pytest.raises(UnitLost, match="silent: no byte for 25 beats of 40 ms"):
        await stream.receive()


async def test_streams_hear_of_a_silence_long_before_it_ends_them(dialler: Rig) -> None:
    stream, told = link(dialler).open(), []
    stream.on_silent = lambda: told.append(dialler.clock.now_s)
    began_s = dialler.clock.now_s
    while not told:
        dialler.clock.beat()
    assert told[0] - began_s == pytest.approx(CELL_BEATS.silent * BUSY_S)
    dialler.clock.beat()
    assert len(told) == 1, "not at every beat"
    for _ in range(CELL_BEATS.silent - 1):
        dialler.clock.beat()
    assert len(told) == 2, "again while it lasts: a stream may have come since"
    dialler.peer.data_received(encode(Pong(0, 1)))
    dialler.clock.beat()
    for _ in range(CELL_BEATS.silent):
        dialler.clock.beat()
    assert len(told) == 3
    assert dialler.peer.is_open


async def test_late_beats_never_count_because_this_side_was_stuck(dialler: Rig) -> None:
    link(dialler).open()
    for _ in range(10 * SILENT):
        dialler.clock.beat(late_s=BUSY_S)
    assert dialler.peer.is_open
    for _ in range(SILENT):
        dialler.clock.beat()
    assert not dialler.peer.is_open


async def test_any_byte_is_a_sign_of_life(dialler: Rig) -> None:
    link(dialler).open()
    frame = encode(Tokens(99, 1, 0, (1,), "x"))
    for byte in frame:
        for _ in range(SILENT - 1):
            dialler.clock.beat()
        dialler.peer.data_received(bytes([byte]))
        dialler.clock.beat()
    assert dialler.peer.is_open


async def test_a_link_beats_fast_while_streams_are_open_and_slowly_otherwise(dialler: Rig) -> None:
    assert dialler.clock.due_s == pytest.approx(IDLE_S)
    stream = link(dialler).open()
    dialler.clock.turn()
    assert dialler.wire.sent() == [Ping(0, 0)]
    assert dialler.clock.due_s == pytest.approx(BUSY_S)
    link(dialler).open().close()
    dialler.clock.turn()
    assert dialler.wire.sent() == []
    dialler.clock.beat()
    assert dialler.wire.sent() == [Ping(0, int(BUSY_S * 1e6))]
    assert dialler.clock.due_s == pytest.approx(2 * BUSY_S)
    stream.close()
    dialler.clock.beat()
    assert dialler.clock.due_s == pytest.approx(2 * BUSY_S + IDLE_S)


async def test_the_listener_answers_beats_and_notices_their_absence(listener: Rig) -> None:
    listener.peer.data_received(encode(Ping(0, 7)))
    listener.clock.turn()
    assert listener.wire.sent() == [Pong(0, 7)]
    for _ in range(IDLE_SILENT + 1):
        assert listener.peer.is_open
        listener.clock.beat()
    assert listener.wire.sent() == []
    assert not listener.peer.is_open


async def test_one_turn_is_one_write_in_order_with_tokens_in_runs(listener: Rig) -> None:
    messages: list[WireMessage] = [
        Tokens(1, 1, 0, (1,), "a"),
        Tokens(2, 1, 0, (2,), "b"),
        Progress(3, 1, "waiting"),
        Tokens(1, 1, 1, (3,), "c"),
    ]
    for message in messages:
        listener.peer.send(message)
    assert listener.wire.writes == []
    listener.clock.turn()
    [write] = listener.wire.writes
    assert write == encode(*messages[:2]) + encode(messages[2]) + encode(messages[3])


async def test_what_nobody_waits_for_leaves_with_the_next_message(listener: Rig) -> None:
    listener.peer.send_lazily(Watch(1))
    listener.clock.turn()
    assert listener.wire.writes == []
    listener.peer.send(Watch(2))
    listener.clock.turn()
    assert len(listener.wire.writes) == 1
    assert listener.wire.sent() == [Watch(1), Watch(2)]


async def test_what_nobody_waits_for_leaves_by_itself_and_in_order(listener: Rig) -> None:
    listener.peer.send(Tokens(1, 1, 0, (1,), "a"))
    listener.clock.turn()
    listener.peer.send_lazily(Watch(1))
    listener.peer.send_lazily(Watch(2))
    [leave] = listener.clock.later
    leave()
    assert listener.wire.sent() == [Tokens(1, 1, 0, (1,), "a"), Watch(1), Watch(2)]
    listener.peer.close()
    listener.peer.send_lazily(Watch(3))
    assert listener.peer.sends_dropped == 1


async def test_a_turn_with_more_tokens_than_a_run_holds(listener: Rig) -> None:
    messages = [Tokens(n, 1, 0, (n,), "x") for n in range(peer_module.MAX_RUN + 1)]
    for message in messages:
        listener.peer.send(message)
    listener.clock.turn()
    assert listener.wire.sent() == messages


async def test_readers_get_a_turn_after_a_large_read(dialler: Rig) -> None:
    stream = link(dialler).open()
    data = encode(Tokens(stream.id, 1, 0, (1,), "x" * 2 * peer_module.LARGE_READ_BYTES))
    dialler.peer.data_received(data[:100])
    assert dialler.wire.is_reading
    dialler.peer.data_received(data[100:])
    assert not dialler.wire.is_reading
    assert len(await stream.receive()) == 1
    dialler.clock.turn()
    assert dialler.wire.is_reading


async def test_a_message_that_no_frame_can_carry_fails_at_its_sender(listener: Rig) -> None:
    listener.peer.send(Watch(1))
    with pytest.raises(TypeError, match="can't carry object"):
        listener.peer.send(Watch(cast(int, object())))
    listener.clock.turn()
    assert listener.wire.sent() == [Watch(1)]


async def test_a_peer_that_reads_nothing_is_cut_off(listener: Rig) -> None:
    listener.peer.pause_writing()
    listener.wire.buffered_bytes = peer_module.MAX_UNSENT_BYTES
    listener.peer.send(Watch(1))
    listener.clock.turn()
    assert listener.peer.is_open
    assert listener.peer.is_paused
    listener.wire.buffered_bytes += 1
    listener.peer.send(Watch(1))
    listener.clock.turn()
    assert not listener.peer.is_open
    assert listener.wire.is_aborted


async def test_close_says_why_after_what_was_queued_and_once(listener: Rig) -> None:
    listener.peer.send(Watch(1))
    listener.peer.close("draining", "the unit stops")
    listener.peer.close("closed")
    assert listener.wire.sent() == [Watch(1), Bye(0, "draining", "the unit stops")]
    assert listener.wire.is_closed
    listener.peer.send(Watch(2))
    listener.clock.turn()
    assert listener.wire.sent() == []
    assert listener.peer.sends_dropped == 1


async def test_a_second_handshake_is_a_protocol_error(listener: Rig) -> None:
    listener.peer.data_received(encode(peer_module.Hello(0, 1, "gateway", "g", bytes(32))))
    [goodbye] = listener.wire.sent()
    assert isinstance(goodbye, Bye)
    assert goodbye.code == "protocol_error"
    assert not listener.peer.is_open
