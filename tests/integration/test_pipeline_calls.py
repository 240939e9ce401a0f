"""Dry-runs, one-shot contracts and step graphs on a whole cell in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.calls import declared, events, generation, settled
from support.local_cell import CHAT_MODEL, EMBEDDING_MODEL, LocalCell, cell_config, local_cell

from gateway.http.shapes.pipelines import PlanView
from gateway.http.shapes.runs import DoneEvent, InvokeAnswer, RetrievalView, StepEvent
from grid import AsyncGrid
from grid.errors import ContextOverflow
from grid.runs import Answer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCell]:
    config = cell_config(Path(tmp_path_factory.mktemp("cell")))
    aliases = {
        name: {"model": CHAT_MODEL}
        for name in ("claude-3-sonnet-20240620", "claude-3-opus-20240620", "claude-3-haiku-20240307")
    }
    config = type(config).model_validate({**config.model_dump(), "aliases": aliases})
    async with local_cell(config) as running:
        async with running.client() as client:
            made = await client.post("/v1/data-sources", json={"name": "help", "type": "qdrant"})
            path = f"/v1/data-sources/{made.json()['data_source_id']}/documents"
            documents = [
                {"id": "password", "text": "Reset your password on the sign in page."},
                {"id": "invoice", "text": "Invoices are sent monthly."},
            ]
            assert (await client.post(path, json={"documents": documents})).status_code == 200
        yield running


def retrieval(**fields: Any) -> dict[str, Any]:
    return {"type": "retrieval", "source": "help", "top_k": 1, **fields}


# --- dry-run --------------------------------------------------------------------------------------


OF_TIME_OR_DRY_RUNS = {"decided_dry", "reports_of_units", "batches_of_nodes", "canaries"}
"""Counts of placement that rise with time, or with what is looked at here."""


async def state_of(cell: LocalCell) -> dict[str, Any]:
    """Everything that a call could leave behind: in Redis, in placement, in the units."""
    await cell.until_idle()  # what earlier calls left is still being settled
    await cell.services.recorder.flush()
    redis = cell.services.redis
    keys = [key async for key in redis.scan_iter() if not key.startswith(b"zg:lease:")]
    stats = await cell.placement.stats()
    counts = {name: count for name, count in stats["counts"].items() if name not in OF_TIME_OR_DRY_RUNS}
    units = {name: (await unit.describe())["load"] for name, unit in cell.units.items()}
    return {
        "redis": {key: await redis.dump(key) for key in sorted(keys)},
        "placement": (counts, stats["reservations"], stats["load"]),
        "units": {name: (load["running"], load["waiting"], load["steps"]) for name, load in units.items()},
    }


async def test_a_dry_run_tells_the_whole_plan_and_leaves_nothing_behind(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client, retrieval(), generation(max_output_tokens=20))
        await settled(client, pipeline_id)
        before = await state_of(cell)
        answer = await client.post(f"/v1/pipelines/{pipeline_id}/dry-run", json={"input": "anything"})
        after = await state_of(cell)
    assert answer.status_code == 200, answer.text
    assert before == after
    plan = PlanView.model_validate(answer.json())
    assert plan.request_id == answer.headers["x-request-id"]
    assert (plan.pipeline_id, plan.revision, plan.runnable) == (pipeline_id, 1, True)
    find, write = plan.steps
    assert (find.type, find.model, write.type, write.model) == (
        "retrieval",
        EMBEDDING_MODEL,
        "generation",
        CHAT_MODEL,
    )
    for step in plan.steps:
        assert step.chosen is not None
        assert step.candidates == [step.chosen]
        assert {rejection.code for rejection in step.rejections} == {"task"}
        units = {step.chosen.unit_id, *(rejection.unit_id for rejection in step.rejections)}
        assert units == set(cell.units), "every unit is a candidate or told why not"
        assert step.chosen.total_ms == pytest.approx(
            step.chosen.network_ms
            + step.chosen.queue_ms
            + step.chosen.prefill_ms
            + step.chosen.decode_ms
            + step.chosen.pressure_ms,
            abs=0.01,
        )
        assert step.chosen.cu_seconds >= 0
    assert write.uses == [find.step_id]
    assert find.chosen is not None
    assert write.begins_ms == pytest.approx(find.chosen.total_ms, abs=0.01)
    assert plan.cu_seconds > 0
    assert plan.total_ms > plan.ttft_ms > write.begins_ms


async def test_a_dry_run_of_what_cannot_run_says_why(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client, execution_hints={"min_gpu_memory_mb": 90_000_000})
        answer = await client.post(f"/v1/pipelines/{pipeline_id}/dry-run", json={"input": "x"})
        unknown = await client.post("/v1/pipelines/pl-0/dry-run", json={"input": "x"})
        listed = await client.post(f"/v1/pipelines/{pipeline_id}/dry-run", json={"inputs": ["x"]})
        empty = await client.post(f"/v1/pipelines/{pipeline_id}/dry-run", json={})
    assert answer.status_code == 200
    plan = PlanView.model_validate(answer.json())
    (step,) = plan.steps
    assert not plan.runnable
    assert step.chosen is None
    assert step.refusal is not None
    assert (step.refusal.status, step.refusal.code) == (503, "no_eligible_unit")
    assert {rejection.code: rejection.unit_id for rejection in step.rejections} == {
        "memory": f"{CHAT_MODEL}-0",
        "task": f"{EMBEDDING_MODEL}-0",
    }
    assert plan.execution_hints["min_gpu_memory_mb"] == 90_000_000
    assert unknown.status_code == 404
    assert (listed.status_code, listed.json()["error"]["param"]) == (400, "inputs")
    assert (empty.status_code, empty.json()["runnable"]) == (200, False)


async def test_a_dry_run_warns_of_a_prompt_that_seems_too_long(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client)
        path = f"/v1/pipelines/{pipeline_id}"
        fits, long = [
            (await client.post(f"{path}/dry-run", json={"input": "word " * words})).json()["warnings"]
            for words in (10, 6_000)
        ]
        refused = await client.post(f"{path}/invoke", json={"input": "word " * 6_000})
    assert fits == []
    assert len(long) == 1
    assert "about 75" in long[0]
    assert "context_overflow" in long[0]
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_overflow")


# --- one-shot -------------------------------------------------------------------------------------


def one_shot(**parts: Any) -> dict[str, Any]:
    """Return a contract that names its model as another provider does."""
    return {"pipeline": {"steps": [generation(model="claude-3-sonnet-20240620")]}, **parts}


async def test_a_contract_without_input_is_planned_and_not_kept(cell: LocalCell) -> None:
    async with cell.client() as client:
        before = await state_of(cell)
        answer = await client.post("/v1/pipeline", json=one_shot())
        wrong = await client.post("/v1/pipeline", json={"pipeline": {"steps": [generation(model="nobody")]}})
        placeholder = await client.post(
            "/v1/pipeline", json={"pipeline": {"steps": [generation(system_prompt="For {{company}}.")]}}
        )
        after = await state_of(cell)
    assert answer.status_code == 200, answer.text
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    plan = PlanView.model_validate(answer.json())
    assert (plan.pipeline_id, plan.revision, plan.runnable) == ("", 0, True)
    assert before == after
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "pipeline.steps[0].model")
    assert placeholder.status_code == 200, "without a call there are no values to miss"


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("stream_control", {"min_tokens_per_chunk": 16, "max_latency_ms": 200, "flush_on_eos": True}),
        ("cache_strategy", {"type": "semantic", "similarity_threshold": 0.9, "ttl_seconds": 60}),
        ("execution_hints", {"quantization": "int4"}),
    ],
)
async def test_a_one_shot_contract_runs_as_it_stands(
    cell: LocalCell, part: str, value: dict[str, Any]
) -> None:
    body = one_shot(input="Where is my parcel?", **{part: value})
    async with cell.client() as client:
        streamed = await client.post("/v1/pipeline", json=body)
        whole = await client.post("/v1/pipeline", json=body, headers={"accept": "application/json"})
        assert (await client.get("/v1/pipelines")).status_code == 200
    assert streamed.headers["content-type"].startswith("text/event-stream")
    said = events(streamed.text)
    assert (said[0][0], said[-1][0]) == ("start", "done")
    assert said[0][1]["pipeline_id"] == ""
    tokens = [data["tokens"] for event, data in said if event == "token"]
    answer = InvokeAnswer.model_validate(whole.json())
    assert sum(tokens) == answer.usage.output_tokens
    if part == "stream_control":
        assert all(count >= 16 for count in tokens[:-1])


async def test_hints_of_a_one_shot_are_obeyed_and_seen_in_the_plan(cell: LocalCell) -> None:
    hints = {"min_gpu_memory_mb": 12_000, "prefer_region": ["us-west-2"], "avoid_models": ["claude-3-haiku"]}
    body = one_shot(input="Where is my parcel?", execution_hints=hints)
    async with cell.client() as client:
        refused = await client.post("/v1/pipeline", json=body)
        del body["input"]
        plan = PlanView.model_validate((await client.post("/v1/pipeline", json=body)).json())
    assert refused.status_code == 503, "claude-3-haiku's alias is the only model"
    assert "avoid" in refused.json()["error"]["message"] or "MB" in refused.json()["error"]["message"]
    assert plan.execution_hints == {**hints, "quantization": None}
    assert not plan.runnable


# --- step graphs ----------------------------------------------------------------------------------


async def test_retrievals_side_by_side_and_a_draft_before_the_answer(cell: LocalCell) -> None:
    steps = [
        retrieval(id="one"),
        retrieval(id="two", uses=[]),
        generation(id="draft", uses=["one"], system_prompt="Draft.", temperature=0.0),
        generation(id="final", uses=["two", "draft"], max_output_tokens=8, temperature=0.0),
    ]
    async with cell.client() as client:
        body = {"pipeline": {"steps": steps}, "input": "How do I reset my password?"}
        said = events((await client.post("/v1/pipeline", json=body)).text)
        whole = await client.post("/v1/pipeline", json={**body, "stream": False})
    assert [name for name, _ in said][:4] == ["start", "retrieval", "retrieval", "step"]
    assert [name for name, _ in said][-1] == "done"
    assert said[0][1]["steps"] == ["one", "two", "draft", "final"]
    step = StepEvent.model_validate(said[3][1])
    assert (step.step_id, step.finish_reason) == ("draft", "length")
    assert all(RetrievalView.model_validate(data).documents for _, data in said[1:3]), (
        "each is held by the prompt that uses it"
    )
    done = DoneEvent.model_validate(said[-1][1])
    assert [timing.step_id for timing in done.timing] == ["one", "two", "draft", "final"]
    assert done.usage.output_tokens == 16 + 8, "what both wrote"
    assert sum(data["tokens"] for name, data in said if name == "token") == 8
    answer = InvokeAnswer.model_validate(whole.json())
    assert [(earlier.step_id, earlier.output) for earlier in answer.earlier] == [("draft", step.output)]
    assert answer.output == "".join(data["text"] for name, data in said if name == "token")
    await cell.until_idle()


async def test_a_later_step_that_is_refused_is_a_real_status(cell: LocalCell) -> None:
    steps = [generation(id="draft"), generation(id="final", max_output_tokens=4095)]
    async with cell.client() as client:
        answer = await client.post("/v1/pipeline", json={"pipeline": {"steps": steps}, "input": "x"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_overflow"
    await cell.until_idle()


@pytest.mark.parametrize(
    ("steps", "param"),
    [
        ([retrieval(uses=["later"]), generation(id="later")], "pipeline.steps[0].uses[0]"),
        ([retrieval(id="a"), generation(id="a")], "pipeline.steps[1].id"),
        ([generation(), retrieval()], "pipeline.steps[1]"),
    ],
)
async def test_a_wrong_graph_names_its_field(
    cell: LocalCell, steps: list[dict[str, Any]], param: str
) -> None:
    async with cell.client() as client:
        answers: list[httpx.Response] = [
            await client.post("/v1/pipeline", json={"pipeline": {"steps": steps}, "input": "x"}),
            await client.post("/v1/pipelines", json={"pipeline": {"steps": steps}}),
        ]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# --- the client -----------------------------------------------------------------------------------


async def test_the_client_plans_runs_once_updates_and_takes_lists(cell: LocalCell) -> None:
    contract = {"name": "by-client", "pipeline": {"steps": [generation(max_output_tokens=3)]}}
    async with AsyncGrid(cell.base_url, cell.tenant_key) as grid:
        assert (await grid.plan(contract))["runnable"]
        assert (await grid.run_once(contract, "Hi")).usage.output_tokens == 3
        assert (await grid.stream_once(contract, "Hi").read()).usage.output_tokens == 3
        assert (await grid.apply_pipeline(contract))["revision"] == 1
        pipeline = grid.pipeline("by-client")
        assert (await pipeline.dry_run("Hi"))["revision"] == 1
        longer = {"name": "by-client", "pipeline": {"steps": [generation(max_output_tokens=5)]}}
        made = await pipeline.update(longer)
        active = await pipeline.wait_active(revision=made["revision"])
        assert (active["revision"], active["serving_revision"]) == (2, 2)
        good, bad = await pipeline.invoke_all(["Hi", "word " * 5000])
        assert isinstance(good, Answer)
        assert (good.usage.output_tokens, good.revision) == (5, 2)
        assert isinstance(bad, ContextOverflow)
        assert (await grid.apply_pipeline(contract))["revision"] == 3
        assert len([one for one in await grid.pipelines() if one["name"] == "by-client"]) == 1
