"""Revisions of a pipeline over HTTP: what is served meanwhile, what calls in flight run, conflicts, pages."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from support.calls import declared, events, generation, settled
from support.local_cell import LocalCell

from gateway.http.shapes.pipelines import PipelineList, PipelineView
from gateway.http.shapes.runs import InvokeAnswer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


def contract(tokens: int, **rest: Any) -> dict[str, Any]:
    return {"name": "p", "pipeline": {"steps": [generation(max_output_tokens=tokens)]}, **rest}


async def revised(client: httpx.AsyncClient, pipeline_id: str, body: dict[str, Any]) -> PipelineView:
    answer = await client.put(f"/v1/pipelines/{pipeline_id}", json=body)
    assert answer.status_code == 200, answer.text
    return PipelineView.model_validate(answer.json())


async def ran(client: httpx.AsyncClient, pipeline_id: str) -> tuple[int, int]:
    """Return which revision answers, and with how many tokens."""
    answer = await client.post(f"/v1/pipelines/{pipeline_id}/invoke", json={"input": "x", "stream": False})
    assert answer.status_code == 200, answer.text
    whole = InvokeAnswer.model_validate(answer.json())
    return whole.revision, whole.usage.output_tokens


async def test_a_new_revision_is_deployed_and_then_runs(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client, generation(max_output_tokens=3))
        assert (await settled(client, pipeline_id))["serving_revision"] == 1
        view = await revised(client, pipeline_id, contract(5, description="better"))
        assert (view.revision, view.status, view.serving_revision) == (2, "deploying", 1)
        assert view.contract["description"] == "better"
        after = await settled(client, pipeline_id)
        assert (after["revision"], after["status"], after["serving_revision"]) == (2, "active", 2)
        assert await ran(client, pipeline_id) == (2, 5)


async def test_a_revision_that_fails_says_why_and_the_last_one_goes_on(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client, generation(max_output_tokens=3))
        await settled(client, pipeline_id)
        too_much = {"execution_hints": {"min_gpu_memory_mb": 90_000_000}}
        await revised(client, pipeline_id, contract(5, **too_much))
        failed = await settled(client, pipeline_id)
        assert (failed["status"], failed["revision"], failed["serving_revision"]) == ("failed", 2, 1)
        assert "90000000 MB" in failed["reason"]
        assert await ran(client, pipeline_id) == (1, 3)
        await cell.services.recorder.flush()
        read = (await client.get(f"/v1/pipelines/{pipeline_id}")).json()
        assert [step["calls"] for step in read["step_metrics"]] == [1], "of the revision that serves"
        await revised(client, pipeline_id, contract(7))
        await settled(client, pipeline_id)
        assert await ran(client, pipeline_id) == (3, 7)


async def test_a_call_in_flight_finishes_on_the_revision_it_began_with(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client, generation(max_output_tokens=3000))
        await settled(client, pipeline_id)
        path = f"/v1/pipelines/{pipeline_id}/invoke"
        async with client.stream("POST", path, json={"input": "x"}) as answer:
            lines = answer.aiter_lines()
            first = [await anext(lines), await anext(lines)]
            async with cell.client() as other:
                await revised(other, pipeline_id, contract(5))
                await settled(other, pipeline_id)
                assert await ran(other, pipeline_id) == (2, 5)
            rest = [line async for line in lines]
        said = events("\n".join([*first, *rest]))
    assert said[0][1]["revision"] == 1
    assert said[-1][0] == "done"
    assert said[-1][1]["usage"]["output_tokens"] == 3000


async def test_changes_at_the_same_time_are_revisions_of_their_own(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client)
        views = await asyncio.gather(*(revised(client, pipeline_id, contract(n)) for n in range(1, 7)))
        assert sorted(view.revision for view in views) == [2, 3, 4, 5, 6, 7]
        newest = max(views, key=lambda view: view.revision)
        now = await settled(client, pipeline_id)
        assert (now["revision"], now["contract"]) == (7, newest.contract)


async def test_an_idempotency_key_makes_one_revision(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client)
        path, key = f"/v1/pipelines/{pipeline_id}", {"idempotency-key": "put-1"}
        first = await client.put(path, json=contract(2), headers=key)
        await settled(client, pipeline_id)
        again = await client.put(path, json=contract(2), headers=key)
        reused = await client.put(path, json=contract(3), headers=key)
    assert (first.json()["revision"], again.json()["revision"]) == (2, 2)
    assert (first.json()["status"], again.json()["status"]) == ("deploying", "active")
    assert (reused.status_code, reused.json()["error"]["code"]) == (422, "idempotency_key_reused")


@pytest.mark.parametrize(
    ("pipeline_id", "body", "status", "param"),
    [
        ("pl-0", contract(1), 404, "pipeline_id"),
        (None, {"name": "p"}, 400, "pipeline"),
        (None, {"pipeline": {"steps": [generation(model="nobody")]}}, 400, "pipeline.steps[0].model"),
        (None, contract(1, speed=9), 400, "speed"),
    ],
)
async def test_a_wrong_revision_names_its_field_and_changes_nothing(
    cell: LocalCell, pipeline_id: str | None, body: dict[str, Any], status: int, param: str
) -> None:
    async with cell.client() as client:
        own = await declared(client)
        before = await settled(client, own)
        answer = await client.put(f"/v1/pipelines/{pipeline_id or own}", content=json.dumps(body))
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert (await client.get(f"/v1/pipelines/{own}")).json() == before


async def test_a_list_comes_in_pages(cell: LocalCell) -> None:
    key = await cell.tenant("pages")
    async with cell.client(key) as client:
        ids = [await declared(client) for _ in range(5)]
        seen: list[str] = []
        after = ""
        while True:
            answer = await client.get(
                "/v1/pipelines", params={"limit": 2, **({"after": after} if after else {})}
            )
            page = PipelineList.model_validate(answer.json())
            assert len(page.pipelines) <= 2
            seen += [view.pipeline_id for view in page.pipelines]
            if page.next is None:
                break
            after = page.next
        assert sorted(seen) == sorted(ids)
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("after=x", "after")):
            wrong = await client.get(f"/v1/pipelines?{query}")
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)
