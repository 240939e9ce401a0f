"""Three times what a cell can do, for a few seconds: everybody is answered, tenants get even shares, and
nothing is left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import pytest
from support.calls import declared, generation
from support.local_cell import cell_config, local_cell

from grid.config import Config

pytestmark = pytest.mark.slow

SLOTS, TOKENS = 8, 100
WAIT_MS = 1500.0
BURST_S = 3.0


def small_cell(state_dir: Path) -> Config:
    """Two units of four slots; an answer takes about 0.6 s."""
    config = cell_config(state_dir)
    chat = config.models[0]
    paced = chat.simulated.model_copy(update={"full_speed": False})
    chat = chat.model_copy(
        update={"max_running": SLOTS // 2, "min_units": 2, "max_units": 2, "gpu": "H100", "simulated": paced}
    )
    return config.model_copy(
        update={
            "models": (chat, *config.models[1:]),
            "placement": config.placement.model_copy(update={"queue_wait_ms": WAIT_MS}),
        }
    )


async def ask(client: httpx.AsyncClient, path: str) -> tuple[int, float, float]:
    """Return status, seconds until the answer, and `retry-after`."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    answer = await client.post(path, json={"input": "Hello", "stream": False})
    if answer.status_code == 200:
        assert answer.json()["usage"]["output_tokens"] == TOKENS
    else:
        assert answer.json()["error"]["code"] == {429: "saturated", 503: "overloaded"}[answer.status_code]
    return answer.status_code, loop.time() - began_s, float(answer.headers.get("retry-after", 0))


async def test_three_times_the_capacity(tmp_path: Path) -> None:
    async with local_cell(small_cell(tmp_path)) as cell:
        keys = {"one": cell.tenant_key, "two": await cell.tenant("two")}
        clients = {tenant: cell.client(key) for tenant, key in keys.items()}
        body = generation(max_output_tokens=TOKENS, temperature=0.0)
        paths = {
            tenant: f"/v1/pipelines/{await declared(client, body)}/invoke"
            for tenant, client in clients.items()
        }
        loop = asyncio.get_running_loop()
        _, alone_s, _ = await ask(clients["one"], paths["one"])
        per_s = SLOTS / alone_s

        # "one" asks for six times what "two" asks for, which is a little less than half of what there is.
        gap_s = {"one": 1 / (2.6 * per_s), "two": 1 / (0.43 * per_s)}
        asked: dict[str, list[asyncio.Task[tuple[int, float, float]]]] = {"one": [], "two": []}
        began_s = loop.time()
        while (now_s := loop.time() - began_s) < BURST_S:
            for tenant, tasks in asked.items():
                while len(tasks) * gap_s[tenant] <= now_s:
                    tasks.append(asyncio.create_task(ask(clients[tenant], paths[tenant])))
            await asyncio.sleep(0.01)
        answers = {tenant: await asyncio.gather(*tasks) for tenant, tasks in asked.items()}

        statuses = {tenant: Counter(status for status, _, _ in told) for tenant, told in answers.items()}
        served = sum(counts[200] for counts in statuses.values())
        assert statuses["one"][429] > 0, "its own requests are the cause"
        share = min(0.8 * len(answers["two"]), 0.7 * statuses["one"][200])
        assert statuses["two"][200] >= share, "whoever asks for no more than its share gets it"
        assert served >= 3 * SLOTS
        for told in answers.values():
            for status, _, retry_after_s in told:
                assert (retry_after_s >= 1) == (status != 200)
        for client in clients.values():
            await client.aclose()
        await cell.until_idle()
        stats = await cell.placement.stats()
        assert stats["waiting"] == 0
        assert stats["counts"].get("bugs", 0) == 0
        assert stats["counts"]["decided_after_waiting"] > 0
