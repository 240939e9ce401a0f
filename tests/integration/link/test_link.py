"""The link on loopback sockets, on both event loops: what a stream sees, what a call gets, how things end."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.link import SECRET, Cell, Unit, tokens

from grid.errors import DeadlineExceeded, Saturated, UnitLost
from grid.wire import handshake
from grid.wire.codec import MAX_FRAME_BYTES, STRANGER_FRAME_BYTES, encode
from grid.wire.link import Peer, dial
from grid.wire.messages import Bye, Cancel, Done, Fleet, Hello, Refused, Tokens, Watch, Welcome, WireMessage

ROOT = Path(__file__).parents[3]
CHILD = ROOT / "tests" / "support" / "link_peer.py"


# --- streams ----------------------------------------------------------------------------------


async def test_frames_behind_the_proof_are_read(cell: Cell) -> None:
    raw = await cell.raw()
    hello = handshake.hello("gateway", "eager", bytes(32))
    raw.writer.write(encode(hello))
    welcome = await raw.next()
    assert isinstance(welcome, Welcome)
    big = Refused(1, "x", "y" * (2 * STRANGER_FRAME_BYTES))
    raw.writer.write(encode(handshake.prove(SECRET, hello, welcome)) + encode(Watch(1)) + encode(big))
    assert await cell.unit.heard.get() == Watch(1)
    assert await cell.unit.heard.get() == big
    await raw.close()


async def test_concurrent_streams_are_not_mixed_up(cell: Cell) -> None:
    async def produce(peer: Peer, stream: int) -> None:
        for index in range(50):
            peer.send(tokens(stream, index, f"{stream}:{index}"))
            await asyncio.sleep(0)
        peer.send(Done(stream, 1, "length", 1, 0, 50, 0.0))

    producing = set()

    def answer(peer: Peer, message: WireMessage) -> None:
        producing.add(asyncio.ensure_future(produce(peer, message.stream)))

    async def consume() -> None:
        stream = link.open()
        stream.send(Watch(stream.id))
        frames: list[WireMessage] = []
        while not frames or not isinstance(frames[-1], Done):
            frames += await stream.receive()
        expected = [tokens(stream.id, index, f"{stream.id}:{index}") for index in range(50)]
        assert frames[:-1] == expected
        stream.close()

    cell.unit.answer = answer
    link = await cell.dial()
    await asyncio.gather(*[consume() for _ in range(40)])
    await asyncio.gather(*producing)
    assert link.frames_dropped == 0


async def test_a_stream_holds_so_many_bytes_and_others_go_on(cell: Cell) -> None:
    def answer(peer: Peer, message: WireMessage) -> None:
        if message.stream == 1:
            for index in range(40):
                peer.send(tokens(1, index, "y" * 100))
        else:
            peer.send(tokens(message.stream, 0))

    cell.unit.answer = answer
    link = await cell.dial()
    slow = link.open(max_bytes=2000)
    slow.send(Watch(slow.id))
    assert await link.call(Watch, timeout_s=10) == tokens(2, 0)
    with pytest.raises(Saturated, match="more than 2000 bytes"):
        await slow.receive()
    assert await link.call(Watch, timeout_s=10) == tokens(3, 0)


async def test_a_stream_that_is_read_may_carry_any_number_of_bytes(cell: Cell) -> None:
    cell.unit.answer = lambda peer, message: peer.send(tokens(1, 0, "y" * 1000))
    link = await cell.dial()
    stream = link.open(max_bytes=2000)
    for _ in range(20):
        stream.send(Watch(stream.id))
        assert len(await stream.receive()) == 1


async def test_a_burst_is_no_fault_of_a_reader_that_is_ready(cell: Cell) -> None:
    def answer(peer: Peer, message: WireMessage) -> None:
        for index in range(4000):
            peer.send(tokens(1, index, "y" * 1000))

    cell.unit.answer = answer
    link = await cell.dial()
    stream = link.open()
    stream.send(Watch(stream.id))
    received = 0
    while received < 4000:
        received += len(await stream.receive())
    assert received == 4000


async def test_one_message_above_the_bound_is_too_much_also_for_a_waiting_reader(cell: Cell) -> None:
    cell.unit.answer = lambda peer, message: peer.send(tokens(1, 0, "y" * 3000))
    link = await cell.dial()
    stream = link.open(max_bytes=2000)
    stream.send(Watch(stream.id))
    with pytest.raises(Saturated):
        await stream.receive()


async def test_frames_for_a_closed_stream_are_dropped_and_counted(cell: Cell) -> None:
    def answer(peer: Peer, message: WireMessage) -> None:
        peer.send(tokens(1, 0))
        peer.send(tokens(message.stream, 0))

    cell.unit.answer = answer
    link = await cell.dial()
    closed = link.open()
    closed.close()
    closed.close()
    assert await link.call(Watch, timeout_s=10) == tokens(2, 0)
    assert link.frames_dropped == 1


async def test_a_diallers_handler_hears_what_no_stream_claims(cell: Cell) -> None:
    gateway = Unit()
    link = await cell.dial(handler=gateway)
    assert await gateway.peers.get() is link
    peer = await cell.unit.peers.get()
    late, pushed = tokens(77, 0), Fleet(0, 1, ())
    peer.send(late)
    peer.send(pushed)
    assert await gateway.heard.get() == late
    assert await gateway.heard.get() == pushed
    link.close()
    assert await gateway.left.get() == "closed"


# --- calls ------------------------------------------------------------------------------------


async def test_a_refused_call_raises_the_error_it_names(cell: Cell) -> None:
    refusal = Refused(1, "saturated", "full", retry_after_s=2.5, details={"message": "m", "waiting": 3})
    cell.unit.answer = lambda peer, message: peer.send(refusal)
    link = await cell.dial()
    with pytest.raises(Saturated, match="full") as raised:
        await link.call(Watch, timeout_s=10)
    assert raised.value.retry_after_s == 2.5
    assert raised.value.details == {"message": "m", "waiting": 3}


async def test_a_call_that_nobody_answers_ends_in_time(cell: Cell) -> None:
    link = await cell.dial()
    with pytest.raises(DeadlineExceeded, match=r"unit u-1 did not answer within 0\.01 s"):
        await link.call(Watch, timeout_s=0.01)
    assert link.is_open


async def test_a_call_ends_when_its_link_does(cell: Cell) -> None:
    cell.unit.answer = lambda peer, message: peer.close("draining", "the unit stops")
    link = await cell.dial()
    with pytest.raises(UnitLost, match=r"unit u-1 is gone \(draining: the unit stops\)"):
        await link.call(Watch, timeout_s=10)
    with pytest.raises(UnitLost):
        await link.call(Watch, timeout_s=10)


async def test_an_answer_may_have_the_size_of_a_frame(cell: Cell) -> None:
    answer = Refused(1, "x", "y" * (MAX_FRAME_BYTES // 2))
    cell.unit.answer = lambda peer, message: peer.send(answer)
    link = await cell.dial()
    stream = link.open(MAX_FRAME_BYTES)
    stream.send(Watch(stream.id))
    assert await stream.receive() == [answer]


# --- the end ----------------------------------------------------------------------------------


async def test_messages_that_came_before_the_end_are_handed_out(cell: Cell) -> None:
    def answer(peer: Peer, message: WireMessage) -> None:
        peer.send(tokens(message.stream, 0))
        peer.close("draining")

    cell.unit.answer = answer
    link = await cell.dial()
    stream = link.open()
    stream.send(Watch(stream.id))
    assert await link.closed == "draining"
    assert await stream.receive() == [tokens(stream.id, 0)]
    with pytest.raises(UnitLost):
        await stream.receive()


async def test_a_server_that_closes_says_goodbye_to_everyone(cell: Cell) -> None:
    links = [await cell.dial() for _ in range(3)]
    for _ in links:
        await cell.unit.peers.get()
    await cell.server.close("draining", "the cell stops")
    assert [await link.closed for link in links] == ["draining: the cell stops"] * 3
    assert not cell.server.peers
    with pytest.raises(UnitLost, match="can't be reached"):
        await cell.dial()


async def test_a_server_that_closes_tells_strangers_too(cell: Cell) -> None:
    raw = await cell.raw()
    raw.writer.write(encode(Hello(0, 1, "gateway", "early", bytes(32))))
    assert isinstance(await raw.next(), Welcome)
    await cell.server.close("draining", "the cell stops")
    assert await raw.next() == Bye(0, "draining", "the cell stops")
    await raw.close()


async def test_a_dialler_that_closes_says_goodbye(cell: Cell) -> None:
    link = await cell.dial()
    link.close("closed", "done here")
    assert await cell.unit.left.get() == "closed: done here"
    link.send(Cancel(1))
    link.open().send(Cancel(2))
    assert link.sends_dropped == 2


async def test_a_connection_that_breaks_is_seen(cell: Cell) -> None:
    raw = await cell.raw()
    await raw.greet()
    peer = await cell.unit.peers.get()
    await raw.close()
    assert (await cell.unit.left.get()).startswith("lost")
    assert not peer.is_open
    peer.send(Watch(1))
    assert peer.sends_dropped == 1


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ((MAX_FRAME_BYTES + 1).to_bytes(4, "big") + b"\x17", "the limit is 16777216"),
        (b"\x00\x00\x00\x03\x17abc", "Tokens: "),
    ],
)
async def test_a_malformed_frame_closes_with_a_reason_after_the_good_ones(
    cell: Cell, data: bytes, reason: str
) -> None:
    raw = await cell.raw()
    await raw.greet()
    raw.writer.write(encode(Watch(3)) + data)
    goodbye = await raw.next()
    assert isinstance(goodbye, Bye)
    assert goodbye.code == "protocol_error"
    assert reason in goodbye.message
    await raw.ends()
    assert await cell.unit.heard.get() == Watch(3)
    assert reason in await cell.unit.left.get()
    await raw.close()


async def test_a_handler_that_fails_costs_one_connection(
    cell: Cell, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(peer: Peer, message: WireMessage) -> None:
        if isinstance(message, Cancel):
            raise ValueError("a bug")
        peer.send(tokens(message.stream, 0))

    cell.unit.answer = answer
    hurt, other = await cell.dial(), await cell.dial()
    with pytest.raises(UnitLost, match="internal_error: a handler failed"):
        await hurt.call(Cancel, timeout_s=10)
    assert await other.call(Watch, timeout_s=10) == tokens(1, 0)
    assert "handler of the link with gateway g-1 failed" in caplog.text


class Child:
    """The other end in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(CHILD), stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    yield Child(process, int(await process.stdout.readline()))
    if process.returncode is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    await process.communicate()


async def test_a_killed_peer_is_seen_by_its_socket(child: Child) -> None:
    link = await dial("127.0.0.1", child.port, role="gateway", peer_id="g", secret=SECRET)
    stream = link.open()
    stream.send(Watch(stream.id))
    assert await stream.receive() == [Tokens(stream.id, 1, 0, (1,), "x")]
    child.process.kill()
    with pytest.raises(UnitLost, match="lost"):
        await stream.receive()


async def test_a_frozen_peer_is_seen_by_its_silence(child: Child) -> None:
    link = await dial("127.0.0.1", child.port, role="gateway", peer_id="g", secret=SECRET)
    stream = link.open()
    stream.send(Watch(stream.id))
    assert await stream.receive() == [Tokens(stream.id, 1, 0, (1,), "x")]
    child.process.send_signal(signal.SIGSTOP)
    with pytest.raises(UnitLost, match=r"silent: no byte for [0-9]+ beats of 40 ms"):
        await stream.receive()
    assert not link.is_open
