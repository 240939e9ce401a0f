"""The link on loopback sockets, on both event loops: who is let in, what a stream sees, how things end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from grid.errors import DeadlineExceeded, Saturated, Unauthorised, UnitLost
from grid.wire import greeting, handshake
from grid.wire import link as link_module
from grid.wire.codec import MAX_FRAME_BYTES, STRANGER_FRAME_BYTES, Decoder, encode
from grid.wire.link import Link, LinkPool, LinkServer, Peer, Reconnecting, dial
from grid.wire.messages import (
    Bye,
    Cancel,
    Done,
    Fleet,
    Hello,
    Prove,
    Refused,
    Tokens,
    Watch,
    Welcome,
    WireMessage,
)

SECRET = b"a secret that only tests share.."
OTHER_SECRET = b"a secret of quite another cell.."
ROOT = Path(__file__).parents[3]
CHILD = ROOT / "tests" / "support" / "link_peer.py"


class Unit:
    """A listener's handler. Answers as the test says, and keeps what it heard."""

    def __init__(self) -> None:
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()
        self.heard: asyncio.Queue[WireMessage] = asyncio.Queue()
        self.left: asyncio.Queue[str] = asyncio.Queue()
        self.answer: Callable[[Peer, WireMessage], None] = lambda peer, message: None

    def connected(self, peer: Peer) -> None:
        self.peers.put_nowait(peer)

    def received(self, peer: Peer, message: WireMessage) -> None:
        self.heard.put_nowait(message)
        self.answer(peer, message)

    def disconnected(self, peer: Peer, reason: str) -> None:
        self.left.put_nowait(reason)


class Cell:
    """One listening unit, and ways to reach it."""

    def __init__(self) -> None:
        self.unit = Unit()
        self.server = LinkServer(role="unit", peer_id="u-1", secret=SECRET, handler=self.unit)
        self.address = ("", 0)

    async def dial(self, secret: bytes = SECRET, handler: Unit | None = None) -> Link:
        return await dial(*self.address, role="gateway", peer_id="g-1", secret=secret, handler=handler)

    async def raw(self) -> Raw:
        return Raw(*await asyncio.open_connection(*self.address))


class Raw:
    """A socket whose bytes a test writes itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.decoder = Decoder()
        self.unread: list[WireMessage] = []

    async def next(self) -> WireMessage:
        while not self.unread:
            data = await self.reader.read(65536)
            assert data, "the connection ended"
            self.unread += self.decoder.feed(data)
        return self.unread.pop(0)

    async def ends(self) -> None:
        """Wait until the other side has closed."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    async def greet(self) -> tuple[Hello, Prove]:
        """Go through the handshake as a dialler that holds the secret."""
        hello = handshake.hello("gateway", "raw", os.urandom(handshake.NONCE_BYTES))
        self.writer.write(encode(hello))
        welcome = await self.next()
        assert isinstance(welcome, Welcome)
        proof = handshake.prove(SECRET, hello, welcome)
        self.writer.write(encode(proof))
        return hello, proof

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    cell = Cell()
    cell.address = await cell.server.start("127.0.0.1")
    yield cell
    await cell.server.close()


def tokens(stream: int, index: int, text: str = "x") -> Tokens:
    return Tokens(stream, 1, index, (index,), text)


# --- who is let in --------------------------------------------------------------------------


async def test_both_sides_know_whom_they_talk_to(cell: Cell) -> None:
    link = await cell.dial()
    peer = await cell.unit.peers.get()
    assert (link.role, link.peer_id, link.host, link.port) == ("unit", "u-1", *cell.address)
    assert (peer.role, peer.peer_id) == ("gateway", "g-1")
    assert link.is_open
    assert not link.is_paused
    assert link.link_id != peer.link_id


async def test_a_dialler_with_another_secret_is_told_so(cell: Cell) -> None:
    with pytest.raises(Unauthorised, match="does not hold this cell's link secret"):
        await cell.dial(secret=OTHER_SECRET)
    assert cell.unit.peers.empty()


async def test_a_proof_made_with_another_secret_is_refused(cell: Cell) -> None:
    raw = await cell.raw()
    raw.writer.write(encode(Hello(0, 1, "gateway", "liar", bytes(32))))
    assert isinstance(await raw.next(), Welcome)
    raw.writer.write(encode(Prove(0, bytes(32))) + encode(Watch(1)))
    goodbye = await raw.next()
    assert isinstance(goodbye, Bye)
    assert goodbye.code == "unauthorised"
    await raw.ends()
    assert cell.unit.peers.empty()
    assert cell.unit.heard.empty()
    assert cell.server.strangers_refused == 1
    await raw.close()


async def test_a_recorded_proof_opens_no_second_connection(cell: Cell) -> None:
    first = await cell.raw()
    hello, proof = await first.greet()
    await cell.unit.peers.get()
    second = await cell.raw()
    second.writer.write(encode(hello) + encode(proof))
    assert isinstance(await second.next(), Welcome)
    goodbye = await second.next()
    assert isinstance(goodbye, Bye)
    assert goodbye.code == "unauthorised"
    assert cell.unit.peers.empty()
    await first.close()
    await second.close()


async def test_a_listener_that_replays_a_welcome_is_not_believed(cell: Cell) -> None:
    raw = await cell.raw()
    raw.writer.write(encode(Hello(0, 1, "gateway", "recorder", bytes(32))))
    recorded = await raw.next()

    async def replay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode(recorded))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(replay, "127.0.0.1") as impostor:
        with pytest.raises(Unauthorised, match="the listener does not hold"):
            await dial(*impostor.sockets[0].getsockname(), role="gateway", peer_id="g-1", secret=SECRET)
    await raw.close()


async def test_a_welcome_proof_does_not_serve_as_the_diallers(cell: Cell) -> None:
    raw = await cell.raw()
    raw.writer.write(encode(Hello(0, 1, "gateway", "mirror", bytes(32))))
    welcome = await raw.next()
    assert isinstance(welcome, Welcome)
    raw.writer.write(encode(Prove(0, welcome.proof)))
    goodbye = await raw.next()
    assert isinstance(goodbye, Bye)
    assert goodbye.code == "unauthorised"
    await raw.close()


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (encode(Watch(1)), "Watch has no place in the handshake"),
        (encode(Prove(0, bytes(32))), "Prove has no place in the handshake"),
        (encode(Hello(0, 0, "gateway", "g", bytes(32))), "protocol version 0 is older"),
        (encode(Hello(0, 1, "gateway", "g", bytes(8))), "the nonce has 8 bytes"),
        (encode(Hello(0, 1, "", "g", bytes(32))), "role and peer id have"),
        (encode(Hello(0, 1, "gateway", "g" * 300, bytes(32))), "role and peer id have"),
        (encode(*[Hello(0, 1, "gateway", "g", bytes(32))] * 2), "a frame of its own"),
        ((STRANGER_FRAME_BYTES + 1).to_bytes(4, "big") + b"\x01", "the limit is 4096"),
        (b"GET / HTTP/1.1\r\n\r\n", "the limit is 4096"),
    ],
)
async def test_strangers_get_a_reason_and_nothing_else(cell: Cell, frame: bytes, reason: str) -> None:
    raw = await cell.raw()
    raw.writer.write(frame)
    goodbye = await raw.next()
    assert isinstance(goodbye, Bye)
    assert goodbye.code == "protocol_error"
    assert reason in goodbye.message
    await raw.ends()
    assert cell.unit.peers.empty()
    await raw.close()


async def test_a_stranger_that_says_nothing_is_sent_away(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "HANDSHAKE_S", 0.01)
    raw = await cell.raw()
    goodbye = await raw.next()
    assert isinstance(goodbye, Bye)
    assert "took too long" in goodbye.message
    await raw.close()


async def test_only_so_many_strangers_wait_at_once(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_STRANGERS", 1)
    waiting = await cell.raw()
    waiting.writer.write(encode(Hello(0, 1, "gateway", "slow", bytes(32))))
    assert isinstance(await waiting.next(), Welcome)
    surplus = await cell.raw()
    await surplus.ends()
    assert cell.server.strangers_refused == 1
    await waiting.close()
    await surplus.close()


async def test_a_listener_that_says_nothing_is_given_up(cell: Cell) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1") as mute:
        host, port = mute.sockets[0].getsockname()
        with pytest.raises(UnitLost, match="did not answer within"):
            await dial(host, port, role="gateway", peer_id="g", secret=SECRET, timeout_s=0.02)
    with pytest.raises(UnitLost, match="can't be reached"):
        await dial(host, port, role="gateway", peer_id="g", secret=SECRET)


def test_a_short_secret_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        LinkServer(role="unit", peer_id="u", secret=b"short", handler=Unit())


def test_a_secret_is_never_shown() -> None:
    assert "secret" not in repr(greeting.Identity("unit", "u-1", SECRET))


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


# --- pool and reconnecting ----------------------------------------------------------------------


async def test_a_pool_joins_concurrent_dials_and_survives_a_caller_that_leaves(cell: Cell) -> None:
    pool = LinkPool(role="gateway", peer_id="g-1", secret=SECRET)
    leaver = asyncio.ensure_future(pool.get(*cell.address))
    await asyncio.sleep(0)
    others = [asyncio.ensure_future(pool.get(*cell.address)) for _ in range(10)]
    await asyncio.sleep(0)
    leaver.cancel()
    links = await asyncio.gather(*others)
    assert len(set(links)) == 1
    assert await pool.get(*cell.address) is links[0]
    assert len(cell.server.peers) == 1
    await pool.close()
    assert await cell.unit.left.get() == "closed"
    with pytest.raises(UnitLost, match="pool is closed"):
        await pool.get(*cell.address)


async def test_a_pool_dials_anew_when_a_link_has_died(cell: Cell) -> None:
    pool = LinkPool(role="gateway", peer_id="g-1", secret=SECRET)
    first = await pool.get(*cell.address)
    (await cell.unit.peers.get()).close("draining")
    await first.closed
    second = await pool.get(*cell.address)
    assert second is not first
    assert second.is_open
    await pool.close()


async def test_a_pool_passes_on_why_a_dial_failed(cell: Cell) -> None:
    pool = LinkPool(role="gateway", peer_id="g-1", secret=OTHER_SECRET)
    for _ in range(2):
        with pytest.raises(Unauthorised):
            await pool.get(*cell.address)
    await pool.close()


async def test_reconnecting_follows_a_peer_to_its_new_address() -> None:
    first, second = Cell(), Cell()
    first.address = await first.server.start("127.0.0.1")
    addresses = [first.address]
    connected: asyncio.Queue[Link] = asyncio.Queue()

    async def resolve() -> tuple[str, int]:
        return addresses[-1]

    keeper = Reconnecting(
        resolve,
        role="gateway",
        peer_id="g-1",
        secret=SECRET,
        on_connected=connected.put_nowait,
        backoff_s=(0.001, 0.01),
    )
    assert keeper.link is None
    await keeper.start()
    link = await keeper.wait(10)
    assert await connected.get() is link
    assert keeper.link is link

    await first.server.close("draining")
    assert await link.closed == "draining"
    assert keeper.link is None
    with pytest.raises(UnitLost, match="not connected within"):
        await keeper.wait(0.01)
    second.address = await second.server.start("127.0.0.1")
    addresses.append(second.address)
    again = await keeper.wait(10)
    assert again is not link
    assert (again.host, again.port) == second.address
    assert await connected.get() is again

    await keeper.close()
    assert await second.unit.left.get() == "closed"
    assert keeper.link is None
    await second.server.close()


async def test_reconnecting_outlives_a_resolver_that_fails(cell: Cell) -> None:
    failures = [ValueError("no such actor"), TimeoutError()]

    async def resolve() -> tuple[str, int]:
        if failures:
            raise failures.pop()
        return cell.address

    keeper = Reconnecting(resolve, role="unit", peer_id="u-9", secret=SECRET, backoff_s=(0.001, 0.01))
    await keeper.start()
    assert (await keeper.wait(10)).peer_id == "u-1"
    assert keeper.last_error == ""
    await keeper.close()
