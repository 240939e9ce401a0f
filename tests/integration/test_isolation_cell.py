"""A unit that fails one request in ten, in a real cell: found out, tried with canaries and condemned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.local_cell import CHAT_MODEL, LocalCell, cell_config, local_cell

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BAD, GOOD = f"{CHAT_MODEL}-bad-0", f"{CHAT_MODEL}-good-0"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCell]:
    base = cell_config(Path(tmp_path_factory.mktemp("cell")))
    model = base.models[0].model_dump(exclude_unset=True)
    pools = [{"name": "good"}, {"name": "bad", "simulated": {"fail_every": 10}}]
    models = [model | {"pools": pools}, base.models[1].model_dump(exclude_unset=True)]
    config = base.model_validate(base.model_dump(exclude_unset=True) | {"models": models})
    async with local_cell(config) as running:
        yield running


async def unit(cell: LocalCell, unit_id: str) -> dict[str, Any]:
    async with cell.client(cell.operator_key) as client:
        listed = (await client.get("/v1/units")).json()["units"]
    [found] = [each for each in listed if each["unit_id"] == unit_id]
    return found


async def test_it_is_isolated_within_twenty_of_its_requests_and_condemned_by_canaries(
    cell: LocalCell,
) -> None:
    body = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
    bad = cell.units[BAD]
    async with cell.client() as client:
        for _ in range(200):
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 6
            if (await cell.placement.stats())["isolated_units"]:
                break
    counters = (await bad.describe())["counters"]
    assert counters["done"] + counters["failed"] <= 20
    assert counters["failed"] == 2

    async with asyncio.timeout(20):
        while not (await cell.placement.outlook()).condemned:  # noqa: ASYNC110  the supervisor asks, too
            await asyncio.sleep(0.01)
    [condemned] = (await cell.placement.outlook()).condemned
    assert (condemned.unit_id, condemned.is_isolated) == (BAD, True)
    assert condemned.incarnation == (await bad.describe())["card"]["incarnation"]
    assert "failed 2 of its newest" in condemned.reason


async def test_people_see_it(cell: LocalCell) -> None:
    row = await unit(cell, BAD)
    assert row["state"] == "isolated"
    assert "failed 2 of its newest" in row["isolated"]
    assert (await unit(cell, GOOD))["state"] == "ready"
    async with cell.client(cell.operator_key) as client:
        metrics = (await client.get("/v1/metrics", params={"detail": "hardware"})).json()
        exposed = (await client.get("/metrics")).text
    assert {each["unit_id"]: each["health"] for each in metrics["hardware"]}[BAD] == "isolated"
    [line] = [line for line in exposed.splitlines() if "zerogrid_unit_health" in line and BAD in line]
    assert 'health="isolated"' in line
