"""Placement over real sockets: clients, units that report, and whoever leaves at a bad moment."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.fleet import make_card, make_load, make_request
from support.waiting import until

import placement.actor
from grid.config import Alias, Config, Placement
from grid.errors import Forbidden, InternalError, NoEligibleUnit, NotFound, Overloaded, Saturated
from grid.wire.link import Link, Peer, dial
from grid.wire.messages import Announce, DrainUnit, Fleet, Place, Refused, Report, Watch, WireMessage
from grid.words import UnitCard, UnitState
from placement.actor import PlacementActor
from placement.client import PlacementClient

SECRET = b"s" * 32
PATIENT = Placement(stale_after_ms=60_000)
"""Units report once in most of these tests, and the machine may be slow."""


@dataclass
class Ear:
    """A handler that keeps what it hears."""

    heard: list[WireMessage] = field(default_factory=list)

    def connected(self, peer: Peer) -> None: ...

    def received(self, peer: Peer, message: WireMessage) -> None:
        self.heard.append(message)

    def disconnected(self, peer: Peer, reason: str) -> None: ...


class Cell:
    """A placement actor that can be restarted, and whoever speaks to it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.is_up = False

    async def up(self) -> None:
        self.actor = PlacementActor(self.config, secret=SECRET, rng=random.Random(0))
        await self.actor.start()
        self.is_up = True

    async def down(self) -> None:
        if self.is_up:
            self.is_up = False
            await self.actor.close()

    async def resolve(self) -> tuple[str, int]:
        if not self.is_up:
            raise ValueError("no such actor")
        return await self.actor.address()

    @property
    def view(self) -> Any:
        return self.actor._view

    @property
    def counts(self) -> Any:
        return self.actor._counts

    async def link(self, role: str, ear: Ear | None = None) -> Link:
        host, port = await self.resolve()
        return await dial(host, port, role=role, peer_id=role, secret=SECRET, handler=ear)

    async def unit(self, card: UnitCard, **load: Any) -> Link:
        """A unit that has announced itself and reported once."""
        link = await self.link("unit")
        link.send(Announce(0, card))
        link.send(Report(0, card.node_id, (make_load(card, **load),)))
        await until(lambda: self.view.row(card.unit_id) is not None and self.reported(card))
        return link

    def reported(self, card: UnitCard) -> bool:
        row = self.view.row(card.unit_id)
        return row is not None and self.view.columns.sampled_s[row] >= 0

    @asynccontextmanager
    async def client(self, name: str = "gateway-0") -> AsyncIterator[PlacementClient]:
        client = PlacementClient(self.resolve, peer_id=name, secret=SECRET)
        await client.start()
        try:
            yield client
        finally:
            await client.close()


@pytest.fixture
async def cell() -> AsyncIterator[Cell]:
    cell = Cell(Config(placement=PATIENT, aliases={"nice": Alias(model="model-x")}))
    await cell.up()
    yield cell
    await cell.down()


# --- the ordinary way -----------------------------------------------------------------------


async def test_place_reserves_and_settle_releases(cell: Cell) -> None:
    await cell.unit(make_card())
    async with cell.client() as client:
        decision = await client.place(make_request(model="nice"), 5)
        assert (decision.chosen.unit_id, decision.model) == ("u0", "model-x")
        assert decision.decide_us > 0
        assert cell.view.loads() == {"u0": 1}
        client.settle(decision.reservation_id, "done", output_tokens=3)
        await until(lambda: cell.view.reservations == 0)
    assert cell.counts["settled"] == 1
    assert (await cell.actor.stats())["decide_us_p99"] > 0


async def test_refusals_come_back_as_the_errors_that_they_are(cell: Cell) -> None:
    await cell.unit(make_card(max_running=1, max_waiting=0), running=1)
    async with cell.client() as client:
        with pytest.raises(NoEligibleUnit) as refused:
            await client.place(make_request(model="none"), 5)
        assert refused.value.details["rejected_by_code"] == {"model": 1}
        assert len(refused.value.details["reasons"]) == 1
        assert refused.value.details["ever"] is False
        with pytest.raises(Overloaded, match="longest wait") as full:
            await client.place(make_request(deadline_ms=1.0), 5)
        assert full.value.retry_after_s > 0
        assert full.value.details["rejected_by_code"] == {"saturated": 1}
    assert cell.view.reservations == 0


async def test_a_dry_run_explains_everyone_and_reserves_nothing(cell: Cell) -> None:
    await cell.unit(make_card())
    await cell.unit(make_card("u1", region="us-east-1"))
    async with cell.client() as client:
        plan = await client.place(
            make_request(dry_run=True, explain=True, allowed_regions=("eu-central-1",)), 5
        )
    assert plan.chosen.unit_id == "u0"
    assert [(r.unit_id, r.code) for r in plan.rejections] == [("u1", "region")]
    assert cell.view.reservations == 0


async def test_two_hundred_at_once_spread_evenly(cell: Cell) -> None:
    for index in range(10):
        await cell.unit(make_card(f"u{index}", max_running=64))
    async with cell.client("a") as one, cell.client("b") as two:
        requests = [make_request(f"req_{number}") for number in range(200)]
        await asyncio.gather(*((one, two)[i % 2].place(request, 10) for i, request in enumerate(requests)))
        loads = cell.view.loads().values()
        assert sum(loads) == 200
        assert max(loads) - min(loads) <= 1


# --- waiting for a slot ---------------------------------------------------------------------


async def test_whoever_waits_is_answered_when_a_slot_frees(cell: Cell) -> None:
    await cell.unit(make_card(max_running=1))
    async with cell.client("a") as one, cell.client("b") as two:
        first = await one.place(make_request("req_1"), 5)
        waiting = [asyncio.create_task(two.place(make_request(f"req_{n}"), 30)) for n in (2, 3)]
        await until(lambda: cell.actor.figures()["waiting"] == 2)
        one.settle(first.reservation_id, "done")
        second = await waiting[0]
        assert second.queued_ms > 0
        two.settle(second.reservation_id, "done")
        assert (await waiting[1]).chosen.unit_id == "u0"
    assert cell.counts["decided_after_waiting"] == 2


async def test_whoever_stops_waiting_leaves_the_queue(cell: Cell) -> None:
    await cell.unit(make_card(max_running=1))
    async with cell.client("a") as one:
        await one.place(make_request("req_1"), 5)
        async with cell.client("b") as two:
            cancelled = asyncio.create_task(two.place(make_request("req_2"), 30))
            lost = asyncio.create_task(two.place(make_request("req_3"), 30))
            await until(lambda: cell.actor.figures()["waiting"] == 2)
            cancelled.cancel()
            await until(lambda: cell.actor.figures()["waiting"] == 1)
        await until(lambda: cell.actor.figures()["waiting"] == 0)
        lost.cancel()
        await asyncio.gather(cancelled, lost, return_exceptions=True)
        one.settle("req_1/s/0", "done")
        await until(lambda: cell.view.reservations == 0)
    assert cell.counts["waiting_lost"] == 1


async def test_the_time_that_a_caller_has_is_up_in_time(cell: Cell) -> None:
    await cell.unit(make_card(max_running=1))
    async with cell.client() as client:
        await client.place(make_request("req_1"), 5)
        with pytest.raises(Overloaded, match=r"no slot for 'model-x' was free within 0\.[4-9]"):
            await client.place(make_request("req_2", max_output_tokens=5, deadline_ms=400.0), 5)
    assert cell.actor.figures()["waiting"] == 0


async def test_who_waits_goes_on_waiting_when_placement_says_goodbye(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement.client, "AWAY_S", 60.0)
    await cell.unit(make_card(max_running=1))
    async with cell.client() as client:
        await client.place(make_request("req_1"), 5)
        await until(lambda: client.fleet.units and client.fleet.units[0].reserved == 1)
        waiting = asyncio.create_task(client.place(make_request("req_2"), 30))
        await until(lambda: cell.actor.figures()["waiting"] == 1)
        await cell.down()
        await until(lambda: not client._there.is_set())
        assert not waiting.done(), "the unit is full, and the next placement is soon there"
        assert client.decided_alone == 0
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_who_waits_asks_again_when_placement_restarts(cell: Cell) -> None:
    card = make_card(max_running=1)
    await cell.unit(card)
    async with cell.client() as client:
        await client.place(make_request("req_1"), 5)
        waiting = asyncio.create_task(client.place(make_request("req_2"), 30))
        await until(lambda: cell.actor.figures()["waiting"] == 1)
        await cell.down()
        await until(lambda: not client.connected)
        await cell.up()
        # The unit is there before the client may ask: it still works on the first request.
        unit = await cell.unit(card, running=1, reservations=("req_1/s/0",))
        try:
            await until(lambda: cell.actor.figures()["waiting"] == 1 or waiting.done())
            unit.send(Report(0, card.node_id, (make_load(card),)))
            assert (await waiting).chosen.unit_id == "u0"
        except NoEligibleUnit:
            # It was asked between the new actor's start and its first unit: then it must be told so.
            assert waiting.done()


# --- leaving at a bad moment ----------------------------------------------------------------


async def test_a_caller_cancelled_at_any_moment_leaves_no_reservation(cell: Cell) -> None:
    await cell.unit(make_card(max_running=10_000))
    decided = 0
    async with cell.client() as client:
        await client.place(make_request("req_warm", dry_run=True), 5)
        for number in range(400):
            task = asyncio.create_task(client.place(make_request(f"req_{number}"), 5))
            for _ in range(number % 40):
                await asyncio.sleep(0)
            task.cancel()
            try:
                client.settle((await task).reservation_id, "cancelled")
                decided += 1
            except asyncio.CancelledError:
                pass
        # Asked after all others on the same link, so everything before it has been taken.
        last = await client.place(make_request("req_last"), 5)
        client.settle(last.reservation_id, "done")
        await until(lambda: cell.view.reservations == 0)
    assert 0 < decided < 400, "both endings must have been met"
    assert cell.counts["settled"] == cell.counts["decided"]
    assert cell.view.loads() == {"u0": 0}


async def test_a_caller_who_gave_up_and_asks_again_holds_one_reservation(cell: Cell) -> None:
    await cell.unit(make_card())
    async with cell.client() as client:
        await client.place(make_request("req_warm", dry_run=True), 5)
        for turns in range(12):
            request = make_request(f"req_{turns}")
            task = asyncio.create_task(client.place(request, 5))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.place(request, 5)
            await client.place(make_request("req_after", dry_run=True), 5)
            assert cell.view.reservations == 1
            client.settle(request.reservation_id, "done")
            await until(lambda: cell.view.reservations == 0)


async def test_a_timeout_is_a_refusal_and_leaves_no_reservation(cell: Cell) -> None:
    await cell.unit(make_card())
    async with cell.client() as client:
        await client.place(make_request("req_warm", dry_run=True), 5)
        with pytest.raises(Saturated, match="in time") as late:
            await client.place(make_request(), 0.0)
        assert late.value.retry_after_s > 0
        await until(lambda: cell.counts["decided"] == 1 and cell.view.reservations == 0)


async def test_a_lost_gateway_releases_what_no_unit_reports(cell: Cell) -> None:
    card = make_card()
    unit = await cell.unit(card)
    async with cell.client() as client:
        running = await client.place(make_request("req_1"), 5)
        await client.place(make_request("req_2"), 5)
        held = make_load(card, running=1, reservations=(running.reservation_id,))
        unit.send(Report(0, "node", (held,)))
        await until(lambda: bool(cell.view.columns.reported[0]))
    await until(lambda: cell.view.reservations == 1)
    assert cell.view.loads() == {"u0": 1}
    unit.send(Report(0, "node", (make_load(card),)))
    await until(lambda: cell.view.reservations == 0)
    assert cell.view.loads() == {"u0": 0}


async def test_a_forgotten_reservation_expires() -> None:
    cell = Cell(Config(placement=Placement(stale_after_ms=60_000, lease_s=0.2)))
    await cell.up()
    await cell.unit(make_card())
    async with cell.client() as client:
        await client.place(make_request(), 5)
        await until(lambda: cell.view.reservations == 0)
        assert cell.view.loads() == {"u0": 0}
    assert cell.counts["leases_expired"] == 1
    await cell.down()


# --- the fleet, pushed ----------------------------------------------------------------------


async def test_watchers_hear_of_units_that_join_change_and_leave(cell: Cell) -> None:
    card = make_card()
    seen: list[Fleet] = []
    async with cell.client() as client:
        client.on_fleet(lambda fleet: 1 / 0)
        client.on_fleet(seen.append)
        unit = await cell.unit(card)
        await until(lambda: bool(seen and seen[-1].units and seen[-1].units[0].load.state == UnitState.READY))
        operator = await cell.link("gateway")
        operator.send(DrainUnit(0, "u0"))
        await until(lambda: seen[-1].units[0].load.state == UnitState.DRAINING)
        with pytest.raises(NoEligibleUnit, match="operator"):
            await client.place(make_request(), 5)
        operator.send(DrainUnit(0, "u0", False))
        await until(lambda: seen[-1].units[0].load.state == UnitState.READY)
        unit.close()
        await until(lambda: not seen[-1].units)
        assert client.fleet == seen[-1]
        versions = [fleet.version for fleet in seen]
        assert versions == sorted(set(versions)), "told once a version, and versions only rise"
        with pytest.raises(NoEligibleUnit, match="no units"):
            await client.place(make_request(), 5)


@pytest.mark.slow
async def test_the_view_is_pushed_again_without_any_change(cell: Cell) -> None:
    ear = Ear()
    await cell.unit(make_card())
    watcher = await cell.link("gateway", ear)
    watcher.send(Watch(0))
    await until(lambda: len(ear.heard) >= 3)
    assert all(isinstance(message, Fleet) for message in ear.heard)
    assert len({message.version for message in ear.heard if isinstance(message, Fleet)}) == 1


async def test_units_that_join_together_are_pushed_together(cell: Cell) -> None:
    ear = Ear()
    watcher = await cell.link("gateway", ear)
    watcher.send(Watch(0))
    node = await cell.link("unit")
    for index in range(100):
        node.send(Announce(0, make_card(f"u{index}")))
    await until(lambda: any(isinstance(m, Fleet) and len(m.units) == 100 for m in ear.heard))
    assert len(ear.heard) < 20


# --- restarts -------------------------------------------------------------------------------


async def test_a_client_outlives_the_actor(cell: Cell) -> None:
    await cell.unit(make_card())
    async with cell.client() as client:
        assert not (await client.place(make_request("req_1"), 5)).stale_view
        before = client.fleet.version
        await cell.down()
        await until(lambda: not client.connected)
        alone = await client.place(make_request("req_2"), 5)
        assert (alone.chosen.unit_id, alone.stale_view) == ("u0", True)
        await cell.up()
        await cell.unit(make_card("u9"))
        await until(lambda: client.connected)
        still = await client.place(make_request("req_3"), 5)
        assert (still.chosen.unit_id, still.stale_view) == ("u0", True), "the new actor may not know all yet"
        await until(lambda: client.fleet.version > before and len(client.fleet.units) == 1)
        client.settle("req_3/s/0", "done")
        there = await client.place(make_request("req_4"), 5)
        assert (there.chosen.unit_id, there.stale_view) == ("u9", False)
        assert cell.view.loads() == {"u9": 1}


async def test_an_actor_that_knows_all_again_is_asked_at_once(cell: Cell) -> None:
    await cell.unit(make_card())
    async with cell.client() as client:
        await until(lambda: bool(client.fleet.units) and not client.fleet.gathering)
        before = client.fleet.version
        await cell.down()
        await until(lambda: not client.connected)
        await cell.up()
        await cell.unit(make_card())
        await until(lambda: client.fleet.version > before)
        assert client.fleet.gathering
        assert not (await client.place(make_request(), 5)).stale_view


async def test_without_the_actor_the_caller_is_told_to_come_back(cell: Cell) -> None:
    await cell.down()
    async with cell.client() as client:
        with pytest.raises(Saturated, match=r"can't be reached.*ValueError") as away:
            await client.place(make_request(), 0.1)
        assert away.value.retry_after_s > 0
        client.settle("req_1/s/0", "done")
        assert not client.connected
        assert client.fleet == Fleet(0, 0, ())


async def test_a_unit_that_comes_back_by_another_link_is_not_taken_out_by_the_old_one(cell: Cell) -> None:
    card = make_card()
    old = await cell.unit(card)
    await cell.unit(card)
    old.close()
    await old.closed
    async with cell.client() as client:
        assert (await client.place(make_request(), 5)).chosen.unit_id == "u0"


# --- what peers get wrong -------------------------------------------------------------------


async def test_wrong_peers_and_wrong_reports_cost_nobody_anything(cell: Cell) -> None:
    ear = Ear()
    await cell.unit(make_card())
    impostor = await cell.link("unit", ear)
    impostor.send(Place(5, make_request()))
    impostor.send(Announce(0, make_card("u1", max_running=0)))
    impostor.send(Report(0, "node", (make_load(make_card(), running=3),)))
    impostor.send(Report(0, "node", (make_load(make_card("ghost")),)))
    impostor.send(Fleet(0, 1, ()))
    await until(lambda: len(ear.heard) == 2 and cell.counts["unexpected"] == 1)
    first, second = ear.heard
    assert isinstance(first, Refused)
    assert isinstance(second, Refused)
    assert (first.stream, first.code, second.code) == (5, "forbidden", "invalid_request")
    assert "max_running" in second.message
    assert cell.view.loads() == {"u0": 0}
    dropped = {"bad_card": 1, "foreign_unit": 1, "unknown_unit": 1}
    await until(lambda: cell.view.dropped == dropped)
    gateway = await cell.link("gateway")
    with pytest.raises(NotFound, match="grid units"):
        await gateway.call(lambda stream: DrainUnit(stream, "nobody"), 5)
    with pytest.raises(Forbidden):
        await gateway.call(lambda stream: Announce(stream, make_card()), 5)


async def test_a_bug_costs_one_message(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    await cell.unit(make_card())
    async with cell.client() as client:
        with monkeypatch.context() as broken:
            broken.setattr(placement.actor, "decide", lambda *_: 1 / 0)
            with pytest.raises(InternalError, match="ZeroDivisionError"):
                await client.place(make_request(), 5)
        assert (await client.place(make_request(), 5)).chosen.unit_id == "u0"
    assert cell.counts["bugs"] == 1


async def test_the_address_is_asked_again_after_a_failed_start() -> None:
    actor = PlacementActor(Config(), host="203.0.113.1", secret=SECRET)
    with pytest.raises(OSError):  # noqa: PT011  its text is the platform's
        await actor.address()
    actor._listen_on = ("127.0.0.1", 0)
    assert (await actor.address())[1] > 0
    await actor.close()
