"""Who is let in: the handshake on real sockets, from both sides, and what strangers get."""

from __future__ import annotations

import asyncio

import pytest
from support.link import OTHER_SECRET, SECRET, Cell, Unit

from grid.errors import Unauthorised, UnitLost
from grid.wire import greeting
from grid.wire import link as link_module
from grid.wire.codec import STRANGER_FRAME_BYTES, encode
from grid.wire.link import LinkServer, dial
from grid.wire.messages import Bye, Hello, Prove, Watch, Welcome


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
