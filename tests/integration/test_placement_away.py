"""The placement actor is lost while requests run and come: streams go on, calls go by the last view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.local_cell import CHAT_MODEL, LocalCell, cell_config, local_cell
from support.waiting import until

from grid.config import Simulated

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CHAT: dict[str, Any] = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCell]:
    base = cell_config(Path(tmp_path_factory.mktemp("away")))
    chat = base.models[0].model_copy(
        update={"min_units": 3, "max_units": 3, "simulated": Simulated(speed=4.0), "max_running": 16}
    )
    async with local_cell(
        base.model_copy(update={"models": (chat, *base.models[1:])}), replicas=2
    ) as running:
        yield running


async def known(cell: LocalCell) -> None:
    """Return when every replica has the whole fleet from an actor that is there."""
    for _, services in cell.replicas:
        await until(lambda placement=services.placement: placement._there.is_set())
        await until(lambda placement=services.placement: len(placement.fleet.units) == len(cell.units))


async def test_streams_go_on_and_calls_are_placed_while_it_is_away(cell: LocalCell) -> None:
    await known(cell)
    async with cell.client() as client, cell.client(replica=1) as other:
        body = {**CHAT, "max_tokens": 300, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            await cell.lose_placement()
            calls = [
                each.post("/v1/chat/completions", json=CHAT) for _ in range(12) for each in (client, other)
            ]
            answers = await asyncio.gather(*calls)
            assert {each.status_code for each in answers} == {200}
            assert {services.placement.connected for _, services in cell.replicas} == {False}
            assert (await client.get("/readyz")).status_code == 200
            *_, last, _ = [line async for line in lines]
            assert last == "data: [DONE]"
        loads = [(await unit.describe())["counters"] for unit in cell.units.values()]
        assert sum(counters["done"] > 0 for counters in loads) == 3, "the calls were spread"

        refused = await client.post("/v1/chat/completions", json={**CHAT, "model": "nobody-runs-this"})
        assert refused.status_code in (400, 404)


async def test_a_new_actor_learns_the_loads_from_the_units(cell: LocalCell) -> None:
    """What was decided without it runs on: it is unknown as a reservation, and counted as load."""
    async with cell.client() as client:
        body = {**CHAT, "max_tokens": 2000, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            await cell.restart_placement()
            await until(lambda: sum(cell.placement._view.loads().values()) == 1)
            assert cell.placement._view.reservations == 0
            await known(cell)
        await cell.until_idle()
        await until(lambda: sum(cell.placement._view.loads().values()) == 0)


async def test_calls_never_fail_however_often_it_restarts(cell: LocalCell) -> None:
    await known(cell)
    statuses: list[int] = []
    stop = asyncio.Event()

    async def call_on(replica: int) -> None:
        async with cell.client(replica=replica) as client:
            while not stop.is_set():
                answer = await client.post("/v1/chat/completions", json=CHAT)
                statuses.append(answer.status_code)

    callers = [asyncio.create_task(call_on(number % 2)) for number in range(6)]
    for _ in range(3):
        before = len(statuses)
        await cell.lose_placement()
        await until(lambda before=before: len(statuses) > before + 20)
        await cell.restart_placement()
        await until(lambda before=before: len(statuses) > before + 60)
    stop.set()
    await asyncio.gather(*callers)
    assert set(statuses) == {200}
    await known(cell)
    await cell.until_idle()
