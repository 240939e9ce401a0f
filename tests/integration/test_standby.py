"""A model with no unit that serves: its first request takes in a warm one, or wakes one that sleeps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.local_cell import CHAT_MODEL, LocalCell, cell_config, local_cell
from support.waiting import until

from grid.model import Simulated, Standby
from grid.units.scaling import Role
from grid.words import UnitState

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

WARM, ASLEEP = f"{CHAT_MODEL}-0", f"{CHAT_MODEL}-1"
CHAT: dict[str, Any] = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCell]:
    base = cell_config(Path(tmp_path_factory.mktemp("standby")))
    chat = base.models[0].model_copy(
        update={
            "min_units": 0,
            "max_units": 2,
            "max_running": 1,
            "standby": Standby(warm=1, asleep=1),
            "simulated": Simulated(speed=4.0),
        }
    )
    async with local_cell(base.model_copy(update={"models": (chat, *base.models[1:])})) as running:
        yield running


def states(cell: LocalCell) -> dict[str, UnitState]:
    return {u.card.unit_id: UnitState(u.load.state) for u in cell.services.placement.fleet.units}


async def test_they_are_seen_and_get_nothing_until_they_are_needed(cell: LocalCell) -> None:
    await until(lambda: states(cell).get(ASLEEP) == UnitState.ASLEEP)
    assert states(cell)[WARM] == UnitState.STANDBY
    async with cell.client(cell.operator_key) as client:
        listed = (await client.get("/v1/units")).json()["units"]
        assert {u["unit_id"]: u["state"] for u in listed if u["model"] == CHAT_MODEL} == {
            WARM: "standby",
            ASLEEP: "asleep",
        }
        assert (await client.get("/readyz")).status_code == 200


async def test_the_first_request_takes_in_the_warm_one_and_the_next_wakes_the_other(cell: LocalCell) -> None:
    async with cell.client() as client:
        body = {**CHAT, "max_tokens": 800, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            assert (await cell.units[WARM].describe())["load"]["running"] == 1
            await until(lambda: states(cell)[WARM] == UnitState.READY)
            assert states(cell)[ASLEEP] == UnitState.ASLEEP

            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            assert (await cell.units[ASLEEP].describe())["counters"]["done"] == 1
        await until(lambda: states(cell)[ASLEEP] == UnitState.READY)
    await cell.until_idle()


async def test_back_on_standby_they_get_nothing_again(cell: LocalCell) -> None:
    """As the supervisor puts them there."""
    for unit_id, role in ((WARM, Role.WARM), (ASLEEP, Role.ASLEEP)):
        await cell.units[unit_id].set_role(role)
    await until(lambda: states(cell) | {WARM: UnitState.STANDBY, ASLEEP: UnitState.ASLEEP} == states(cell))
    outlook = await cell.placement.outlook()
    assert dict(outlook.states) == {WARM: UnitState.STANDBY, ASLEEP: UnitState.ASLEEP}
    [demand] = [each for each in outlook.demand if each.model == CHAT_MODEL]
    assert (demand.requests, demand.refused) == (0, 0)


async def test_a_placement_actor_that_restarts_finds_them_as_they_are(cell: LocalCell) -> None:
    await cell.lose_placement()
    await cell.restart_placement()
    await until(lambda: len(cell.placement._view.units) == len(cell.units))
    async with cell.client() as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    await until(lambda: UnitState.READY in states(cell).values())
