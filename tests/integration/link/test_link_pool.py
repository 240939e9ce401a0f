"""Links that are kept: one for each peer, dialled anew when it has died."""

from __future__ import annotations

import asyncio

import pytest
from support.link import OTHER_SECRET, SECRET, Cell

from grid.errors import Unauthorised, UnitLost
from grid.wire.link import Link, LinkPool, Reconnecting


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
