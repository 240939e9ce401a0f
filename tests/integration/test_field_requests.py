"""Requests from the field, sent as they stand (ids replaced) to the example cell of simulated GPUs, and to a
cell of CPU cores such as `make demo` has. They are no part of the repository: without them all skip."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.calls import events, settled
from support.local_cell import LocalCell, local_cell
from support.shared import contract_folder

from gateway.http.shapes.pipelines import PlanView
from grid.config import Config, Model, load

CONTRACTS = contract_folder()
EXAMPLE = Path(__file__).parents[2] / "examples/cells/three-regions.yaml"
HEADERS = {"anthropic-version": "2024-06-15", "content-type": "application/json"}
ALIASED = "claude-3-sonnet-20240620"

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not CONTRACTS.is_dir(), reason=f"{CONTRACTS} is absent: put the field's requests beside GRID_DATA"
    ),
]


def in_folder(config: Config, folder: Path, **changes: Any) -> Config:
    """Return `config` with its state in `folder` and simulated units that wait for nothing."""
    models = tuple(
        model.model_copy(update={"simulated": model.simulated.model_copy(update={"full_speed": True})})
        for model in config.models
    )
    cell = config.cell.model_copy(update={"state_dir": folder})
    return config.model_copy(update={"cell": cell, "models": models, **changes})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCell]:
    async with local_cell(in_folder(load(EXAMPLE), tmp_path_factory.mktemp("cell"))) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cell: LocalCell) -> AsyncIterator[httpx.AsyncClient]:
    async with cell.client() as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def source_id(client: httpx.AsyncClient) -> str:
    """A data source with the name that one request uses and the id that another is given."""
    return await filled_source(client)


async def filled_source(client: httpx.AsyncClient) -> str:
    made = await client.post("/v1/data-sources", json={"name": "my-vector-db", "type": "qdrant"})
    assert made.status_code == 201, made.text
    source_id: str = made.json()["data_source_id"]
    texts = {"reset": "To reset your password, open the settings.", "draft": "Passwords: a draft."}
    documents = [
        {"id": name, "text": text, "metadata": {"status": "draft" if name == "draft" else "published"}}
        for name, text in texts.items()
    ]
    added = await client.post(f"/v1/data-sources/{source_id}/documents", json={"documents": documents})
    assert added.status_code == 200, added.text
    return source_id


async def send(
    client: httpx.AsyncClient, name: str, path: str, replaced: Mapping[str, str] | None = None
) -> httpx.Response:
    """Send the request `name` byte by byte, with nothing but ids replaced."""
    body = (CONTRACTS / f"{name}.json").read_text()
    for old, new in (replaced or {}).items():
        assert old in body
        body = body.replace(old, new)
    return await client.post(path, content=body, headers=HEADERS)


async def deployed(client: httpx.AsyncClient, answer: httpx.Response) -> dict[str, Any]:
    """Return the pipeline that was created, once it is not `deploying` any more."""
    assert answer.status_code == 201, answer.text
    assert answer.json()["status"] == "deploying"
    return await settled(client, answer.json()["pipeline_id"])


async def ran(client: httpx.AsyncClient, name: str) -> list[tuple[str, dict[str, Any]]]:
    """Run a one-shot contract; return its events."""
    answer = await send(client, name, "/v1/pipeline")
    assert answer.status_code == 200, answer.text
    found = events(answer.text)
    assert found[0][0] == "start"
    assert found[-1][0] == "done"
    assert sum(data["tokens"] for name, data in found if name == "token") > 0
    return found


async def test_a_one_shot_without_input_is_planned(client: httpx.AsyncClient) -> None:
    answer = await send(client, "one_shot", "/v1/pipeline")
    assert answer.status_code == 200, answer.text
    assert answer.json()["request_id"].startswith("req_")
    plan = PlanView.model_validate(answer.json())
    assert plan.runnable
    assert plan.steps[0].chosen is not None
    assert plan.steps[0].chosen.simulated


async def test_a_named_source_and_a_streaming_step(client: httpx.AsyncClient, source_id: str) -> None:
    view = await deployed(client, await send(client, "rag", "/v1/pipelines"))
    assert view["status"] == "active", view["reason"]
    answer = await send(client, "invoke", f"/v1/pipelines/{view['pipeline_id']}/invoke")
    assert answer.status_code == 200, answer.text
    found = events(answer.text)
    (first, start), (second, retrieval), *_, (last, done) = found
    assert (first, second, last) == ("start", "retrieval", "done")
    assert retrieval["documents"][0]["id"] == "reset"
    assert any("1024" in warning for warning in start["warnings"]), "the ignored dimension is said"
    assert done["placement"][-1]["simulated"]


async def test_the_support_pipeline_is_active_and_its_dry_run_computes_nothing(
    cell: LocalCell, client: httpx.AsyncClient, source_id: str
) -> None:
    answer = await send(client, "support_pipeline", "/v1/pipelines", {"ds-abc123": source_id})
    view = await deployed(client, answer)
    assert view["status"] == "active", view["reason"]
    assert view["pipeline_id"].startswith("pl-")
    steps_before = {name: (await unit.describe())["counters"] for name, unit in cell.units.items()}
    dry = await send(client, "dry_run", f"/v1/pipelines/{view['pipeline_id']}/dry-run")
    assert dry.status_code == 200, dry.text
    plan = PlanView.model_validate(dry.json())
    chosen = plan.steps[-1].chosen
    assert chosen is not None
    assert (chosen.model, chosen.region) == ("simulated-70b", "us-east-1"), "its preferred region"
    assert sum(plan.steps[-1].rejected_by_code.values()) + plan.steps[-1].candidate_count == len(cell.units)
    assert {name: (await unit.describe())["counters"] for name, unit in cell.units.items()} == steps_before
    assert not any((await cell.running()).values())


async def test_hints_are_obeyed(client: httpx.AsyncClient) -> None:
    (_, start), *_, (_, done) = await ran(client, "hints")
    assert start["model"] == "simulated-8b"
    assert done["placement"][-1]["region"] == "us-west-2"


async def test_chunks_are_as_large_as_asked(client: httpx.AsyncClient) -> None:
    found = await ran(client, "stream_control")
    tokens = [data for name, data in found if name == "token"]
    assert max(token["tokens"] for token in tokens) >= 16
    assert [token["index"] for token in tokens] == [
        sum(before["tokens"] for before in tokens[:position]) for position in range(len(tokens))
    ]
    assert sum(token["tokens"] for token in tokens) == found[-1][1]["usage"]["output_tokens"]


async def test_a_cache_where_none_is_configured_is_a_warning(client: httpx.AsyncClient) -> None:
    (_, start), *_ = await ran(client, "semantic_cache")
    assert any(warning.startswith("cache_strategy:") for warning in start["warnings"])


async def test_one_contract_gets_the_best_variant_of_each_gpu(client: httpx.AsyncClient) -> None:
    await ran(client, "quantization")
    asked = json.loads((CONTRACTS / "quantization.json").read_text())
    del asked["input"]
    plan = PlanView.model_validate((await client.post("/v1/pipeline", json=asked)).json())
    runs = {(each.gpu_type, each.precision) for each in plan.steps[0].candidates}
    assert runs == {
        ("H100", "fp8"),
        ("A100-80", "int8"),
        ("A100-80", "bf16"),
        ("L40S", "fp8"),
        ("L4", "fp8"),
    }
    asked["execution_hints"]["quantization"] = "bf16"
    plan = PlanView.model_validate((await client.post("/v1/pipeline", json=asked)).json())
    assert {(each.gpu_type, each.precision) for each in plan.steps[0].candidates} == {("A100-80", "bf16")}
    assert plan.steps[0].rejected_by_code["precision"] == 6


async def test_the_alias_is_listed_as_simulated(client: httpx.AsyncClient) -> None:
    rows = {row["id"]: row for row in (await client.get("/v1/models")).json()["data"]}
    assert (rows[ALIASED]["alias_of"], rows[ALIASED]["simulated"], rows[ALIASED]["units"]) == (
        *("simulated-8b", True, 7),
    )


async def test_cpu_cores_do_not_satisfy_a_gpus_memory(tmp_path: Path) -> None:
    """The demo's cell, with its real model's place taken by a simulated one on CPU cores."""
    demo = Config()
    chat = Model(
        name="smollm2-135m-instruct",
        engine="simulated",
        gpu="CPU",
        parameters_b=0.135,
        memory_grant_mb=demo.models[0].memory_grant_mb,
        context_tokens=demo.models[0].context_tokens,
    )
    names = ("claude-3-opus-20240620", "claude-3-sonnet-20240620")
    aliases = {name: {"model": chat.name, "ignore_dimension": True} for name in names}
    config = Config.model_validate(
        {"models": [chat.model_dump(exclude_unset=True), demo.models[1]], "aliases": aliases}
    )
    async with local_cell(in_folder(config, tmp_path)) as cell, cell.client() as client:
        source_id = await filled_source(client)
        answer = await send(client, "support_pipeline", "/v1/pipelines", {"ds-abc123": source_id})
        view = await deployed(client, answer)
        assert view["status"] == "failed"
        assert "is granted 4096 MB; the request asks for 20000 MB" in view["reason"]
