"""Conversations return to the unit that has their beginning in its cache; another tenant's never share it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.calls import declared, generation
from support.local_cell import LocalCell, cell_config, local_cell

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

UNITS = 4
MANUAL = " ".join(f"Paragraph {number} of the manual says what it says." for number in range(60))
QUESTION = {"role": "user", "content": "Where do I begin?"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCell]:
    config = cell_config(Path(tmp_path_factory.mktemp("cell")))
    models = tuple(
        model.model_copy(update={"min_units": UNITS, "max_units": UNITS}) for model in config.models[:1]
    )
    async with local_cell(config.model_copy(update={"models": models})) as running:
        yield running


async def say(client: httpx.AsyncClient, pipeline_id: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    call = {"messages": messages, "stream": False}
    answer = await client.post(f"/v1/pipelines/{pipeline_id}/invoke", json=call)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


async def test_the_turns_of_a_conversation_meet_what_is_cached(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client, generation(system_prompt=MANUAL))
        messages, units = [QUESTION], set()
        for turn in range(6):
            said = await say(client, pipeline_id, messages)
            await cell.until_idle()
            units.add(said["placement"][0]["unit_id"])
            usage = said["usage"]
            assert (usage["cached_tokens"] > 0.8 * usage["input_tokens"]) == (turn > 0)
            messages += [{"role": "assistant", "content": said["output"]}, QUESTION]
        assert len(units) == 1
        plan = (await client.post(f"/v1/pipelines/{pipeline_id}/dry-run", json={"messages": messages})).json()
    step = plan["steps"][0]
    assert step["chosen"]["unit_id"] in units
    assert step["chosen"]["cached_tokens"] > 0.8 * usage["input_tokens"]
    assert [each["cached_tokens"] for each in step["candidates"][1:]] == [0] * (UNITS - 1)


async def test_another_tenant_meets_nothing_of_it(cell: LocalCell) -> None:
    async with cell.client(await cell.tenant("other")) as client:
        pipeline_id = await declared(client, generation(system_prompt=MANUAL))
        plan = (await client.post(f"/v1/pipelines/{pipeline_id}/dry-run", json={"input": "Hello?"})).json()
        assert {each["cached_tokens"] for each in plan["steps"][0]["candidates"]} == {0}
        assert (await say(client, pipeline_id, [QUESTION]))["usage"]["cached_tokens"] == 0
