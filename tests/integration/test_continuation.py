"""Streams of a whole cell in one process whose units are lost, silenced, broken or drained in the middle.

An answer that is read to its end is that of a run that nothing disturbed, whatever happened to its units.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from support.local_cell import CHAT_MODEL, LocalCell, cell_config, local_cell
from support.relay import RelayedPool

from gateway.pipeline import watch
from gateway.trust.keyfiles import LINK_KEY_FILE, read_secret, secret_path
from grid.config import Simulated
from grid.engines.simulated import SimulatedEngine
from grid.units.actor import UnitActor

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TOKENS = 120
CONTRACT: dict[str, Any] = {
    "pipeline": {
        "steps": [
            {"type": "generation", "model": CHAT_MODEL, "max_output_tokens": TOKENS, "temperature": 0.0}
        ]
    }
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCell]:
    base = cell_config(Path(tmp_path_factory.mktemp("continuation")))
    chat = base.models[0].model_copy(
        update={"simulated": Simulated(speed=1.0), "min_units": 3, "max_units": 3}
    )
    config = base.model_copy(update={"models": (chat, *base.models[1:])})
    async with local_cell(config) as running:
        secret = read_secret(secret_path(config.cell.state_dir, LINK_KEY_FILE))
        links = RelayedPool(role="gateway", peer_id="gateway-relayed", secret=secret)
        running.services.runner._links = links
        yield running
        await links.close()


@dataclass
class Answer:
    text: str = ""
    tokens: int = 0
    done: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)


async def ask(
    cell: LocalCell, hurt: Callable[[UnitActor], object] | None = None, at: int = 20, **generation: Any
) -> Answer:
    """Return a whole answer; once it has `at` tokens, `hurt` its unit."""
    step = {**CONTRACT["pipeline"]["steps"][0], **generation}
    body = {"pipeline": {"steps": [step]}, "input": "Go on.", "stream": True}
    answer, event = Answer(), ""
    async with (
        asyncio.timeout(15),
        cell.client() as client,
        client.stream("POST", "/v1/pipeline", json=body) as response,
    ):
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = orjson.loads(line.removeprefix("data: "))
                if event == "token":
                    assert data["index"] == answer.tokens, "no token lost, repeated or reordered"
                    answer.text += data["text"]
                    answer.tokens += data["tokens"]
                elif event == "done":
                    answer.done = data
                elif event == "error":
                    answer.error = data["error"]
                if hurt is not None and answer.tokens >= at:
                    await asyncio.ensure_future(_async(hurt, holder(cell, response.headers["x-request-id"])))
                    hurt = None
    await cell.until_idle()
    return answer


async def _async(hurt: Callable[[UnitActor], object], unit: UnitActor) -> None:
    result = hurt(unit)
    if asyncio.iscoroutine(result):
        await result


def holder(cell: LocalCell, request_id: str) -> UnitActor:
    """Return the unit that makes this answer; a canary may run on another."""
    for unit in cell.units.values():
        jobs = unit._ready.unit._jobs.values()
        if any(getattr(job.request, "request_id", "") == request_id for job in jobs):
            return unit
    raise AssertionError(f"no unit runs {request_id}")


def relay_of(cell: LocalCell, unit: UnitActor) -> Any:
    card = unit._ready.unit.card
    return cell.services.runner._links.relay(card.host, card.port)  # type: ignore[attr-defined]


async def test_a_link_that_is_cut(cell: LocalCell) -> None:
    whole = await ask(cell)
    assert (whole.tokens, whole.done["moves"], whole.done["exact"]) == (TOKENS, 0, True)
    cut = await ask(cell, lambda unit: relay_of(cell, unit).cut())
    assert (cut.text, cut.tokens) == (whole.text, TOKENS)
    assert (cut.done["moves"], cut.done["exact"]) == (1, True)
    assert cut.done["usage"]["input_tokens"] == whole.done["usage"]["input_tokens"]
    await cell.services.recorder.flush()
    async with cell.client(cell.operator_key) as operator:
        scrape = (await operator.get("/metrics")).text
    assert f'zerogrid_stream_move_gap_seconds_count{{model_name="{CHAT_MODEL}"}} 1' in scrape


async def test_a_unit_that_falls_silent(cell: LocalCell) -> None:
    whole = await ask(cell)
    silenced: list[UnitActor] = []

    def silence(unit: UnitActor) -> None:
        silenced.append(unit)
        relay_of(cell, unit).black_hole()

    still = await ask(cell, silence)
    relay_of(cell, silenced[0]).heal()
    assert (still.text, still.done["moves"]) == (whole.text, 1)
    budget = cell.services.runner.watch.budget
    assert (budget.spent, budget.refunded) == (1, 1)


async def test_a_unit_that_drains(cell: LocalCell) -> None:
    whole = await ask(cell)
    drained: list[str] = []

    async def drain(unit: UnitActor) -> None:
        drained.append(unit._unit_id)
        async with cell.client(cell.operator_key) as operator:
            assert (await operator.post(f"/v1/units/{drained[0]}/drain", json={})).status_code == 200

    moved = await ask(cell, drain)
    assert (moved.text, moved.done["moves"]) == (whole.text, 1)
    assert moved.done["placement"][0]["unit_id"] != drained[0]
    assert moved.done["usage"]["cu_seconds"] > 0
    async with cell.client(cell.operator_key) as operator:
        await operator.post(f"/v1/units/{drained[0]}/drain", json={"draining": False})


async def test_an_engine_that_is_stuck_under_a_unit_that_is_well(
    cell: LocalCell, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = await ask(cell)
    free = asyncio.Event()

    def stick(unit: UnitActor) -> None:
        assert isinstance(unit._engine, SimulatedEngine)
        task = unit._engine._task
        assert task is not None
        task.cancel()
        unit._engine._task = asyncio.create_task(_freed(unit._engine, free))

    async def _freed(engine: SimulatedEngine, free: asyncio.Event) -> None:
        await free.wait()
        await engine._run()

    monkeypatch.setattr(watch, "STUCK_LEAST_S", 0.3)
    stuck = await ask(cell, stick)
    free.set()
    assert (stuck.text, stuck.done["moves"]) == (whole.text, 1)


async def test_what_counts_the_output_of_one_engine_ends_with_what_there_is(cell: LocalCell) -> None:
    broken = await ask(cell, lambda unit: relay_of(cell, unit).cut(), frequency_penalty=0.5)
    assert broken.error["code"] == "unit_lost"
    assert "frequency_penalty" in broken.error["message"]
    assert 20 <= broken.tokens < TOKENS


async def test_an_engine_that_dies(cell: LocalCell) -> None:
    whole = await ask(cell)

    def crash(unit: UnitActor) -> None:
        assert isinstance(unit._engine, SimulatedEngine)
        unit._engine.crash("a test broke it")

    broken = await ask(cell, crash, at=1)
    assert (broken.text, broken.tokens, broken.done["moves"]) == (whole.text, TOKENS, 1)
