"""Redis freezes or dies while a cell works: known calls go on, new things wait, no count is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.calls import declared, generation, settled
from support.local_cell import LocalCell, cell_config, local_cell

from gateway.redis_server import EmbeddedRedis
from gateway.trust.tenants import REVOCATION_S
from grid.config import Simulated

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCell]:
    base = cell_config(Path(tmp_path_factory.mktemp("cell")))
    chat = base.models[0].model_copy(update={"simulated": Simulated(speed=4.0)})
    async with local_cell(base.model_copy(update={"models": (chat, *base.models[1:])})) as running:
        yield running


def freeze(server: EmbeddedRedis) -> Callable[[], object]:
    """Stop the server where it stands; return what lets it go on."""
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return lambda: os.kill(pid, signal.SIGCONT)


def kill(server: EmbeddedRedis) -> Callable[[], object]:
    """Return what starts it again, on the same socket and with its file."""
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return server.start


@asynccontextmanager
async def away(cell: LocalCell, how: Callable[[EmbeddedRedis], Callable[[], object]]) -> AsyncIterator[None]:
    back = how(EmbeddedRedis(cell.config.cell.state_dir))
    try:
        yield
    finally:
        await asyncio.to_thread(back)


async def invoke(client: httpx.AsyncClient, pipeline_id: str) -> httpx.Response:
    return await client.post(f"/v1/pipelines/{pipeline_id}/invoke", json={"input": "x", "stream": False})


async def counted(client: httpx.AsyncClient, pipeline_id: str, calls: int) -> dict[str, Any]:
    """Return the pipeline's usage once so many calls are in it. Fails after ten seconds."""
    async with asyncio.timeout(10):
        while True:
            answer = await client.get("/v1/usage", params={"pipeline_id": pipeline_id})
            if answer.status_code == 200 and answer.json()["total"]["calls"] >= calls:
                total: dict[str, Any] = answer.json()["total"]
                return total
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("how", [freeze, kill])
async def test_what_is_known_goes_on_and_what_is_new_waits(
    cell: LocalCell, how: Callable[[EmbeddedRedis], Callable[[], object]]
) -> None:
    unknown = await cell.tenant("stranger")
    async with cell.client() as client, cell.client(unknown) as stranger:
        pipeline_id = await declared(client, generation(max_output_tokens=4), name=f"p-{how.__name__}")
        long_id = await declared(client, generation(max_output_tokens=1200), name=f"long-{how.__name__}")
        for each in (pipeline_id, long_id):
            assert (await settled(client, each))["status"] == "active"
        assert (await invoke(client, pipeline_id)).status_code == 200
        calls = 1

        async with client.stream("POST", f"/v1/pipelines/{long_id}/invoke", json={"input": "x"}) as running:
            lines = running.aiter_lines()
            assert (await anext(lines)) == "event: start"
            async with away(cell, how):
                began = asyncio.get_running_loop().time()
                while asyncio.get_running_loop().time() < began + REVOCATION_S + 1.0:
                    assert (await invoke(client, pipeline_id)).status_code == 200
                    calls += 1
                body = {"name": f"new-{how.__name__}", "pipeline": {"steps": [generation()]}}
                refused = await client.post("/v1/pipelines", json=body)
                assert refused.status_code == 503
                error = refused.json()["error"]
                assert error["retryable"]
                assert "state store (Redis) does not answer" in error["message"]
                assert int(refused.headers["retry-after"]) >= 1
                assert (await stranger.get("/v1/pipelines")).status_code == 503, "its key was never read"
            assert "event: done" in [line async for line in lines]

        used = await counted(client, pipeline_id, calls)
        assert (used["calls"], used["output_tokens"]) == (calls, 4 * calls)
        assert (await counted(client, long_id, 1))["output_tokens"] == 1200
        assert (await client.post("/v1/pipelines", json=body)).status_code == 201
        assert (await stranger.get("/v1/pipelines")).status_code == 200
