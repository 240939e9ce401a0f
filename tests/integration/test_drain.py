"""Draining a unit of a whole cell in one process: from the operator's call over placement to the unit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.local_cell import CHAT_MODEL, LocalCell, cell_config, local_cell

from gateway.http.shapes.operations import UnitView
from grid.config import Simulated
from grid.units.planner_events import RESTART_REASON

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

UNIT = f"{CHAT_MODEL}-0"
CHAT: dict[str, Any] = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCell]:
    base = cell_config(Path(tmp_path_factory.mktemp("drain")))
    chat = base.models[0].model_copy(update={"simulated": Simulated(speed=4.0)})
    async with local_cell(base.model_copy(update={"models": (chat, *base.models[1:])})) as running:
        yield running


async def drain(cell: LocalCell, unit_id: str = UNIT, **order: bool) -> httpx.Response:
    async with cell.client(cell.operator_key) as operator:
        return await operator.post(f"/v1/units/{unit_id}/drain", json=order)


async def until_state(cell: LocalCell, state: str) -> None:
    async with cell.client() as client, asyncio.timeout(10):
        while True:
            units = (await client.get("/v1/units")).json()["units"]
            if [unit["state"] for unit in units if unit["unit_id"] == UNIT] == [state]:
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def streaming(client: httpx.AsyncClient, tokens: int) -> AsyncIterator[AsyncIterator[str]]:
    """Yield the lines of an answer that has begun."""
    body = {**CHAT, "max_tokens": tokens, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        yield lines


async def test_what_runs_ends_by_itself_and_nothing_new_comes(cell: LocalCell) -> None:
    async with cell.client() as client, streaming(client, 400) as lines:
        answer = await drain(cell)
        assert answer.status_code == 200
        assert UnitView.model_validate(answer.json()).state == "draining"
        await until_state(cell, "draining")
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert "drain" in refused.json()["error"]["message"]
        assert (await cell.units[UNIT].describe())["load"]["running"] == 1
        *_, last, _ = [line async for line in lines]
        assert last == "data: [DONE]"
        await until_state(cell, "drained")
        assert (await drain(cell, draining=False)).json()["state"] == "ready"
        await until_state(cell, "ready")
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200


async def test_only_an_operator_drains_and_only_a_unit_that_is_there(cell: LocalCell) -> None:
    async with cell.client() as tenant:
        assert (await tenant.post(f"/v1/units/{UNIT}/drain")).status_code == 403
    assert (await drain(cell, "unit-nowhere-0")).status_code == 404
    assert (await drain(cell, "unit-nowhere-0", restart=True)).status_code == 404
    assert (await drain(cell, draining=False, restart=True)).status_code == 400


async def test_a_restart_waits_for_the_last_stream(cell: LocalCell) -> None:
    unit = cell.units[UNIT]
    ended = asyncio.ensure_future(unit.ended())
    async with cell.client() as client, streaming(client, 200) as lines:
        assert (await drain(cell, restart=True)).status_code == 200
        await until_state(cell, "draining")
        assert not ended.done()
        assert [line async for line in lines][-2] == "data: [DONE]"
    async with asyncio.timeout(10):
        assert await ended == RESTART_REASON
