"""The gateway on a whole cell in one process: answers, streams, tenants, data sources, keys, documents."""

from __future__ import annotations

import asyncio
import re
from itertools import pairwise
from typing import Any

import openai
import pytest
from support.calls import declared, events, generation, settled
from support.local_cell import CHAT_MODEL, DIMENSION, EMBEDDING_MODEL, LocalCell

from gateway.http.shapes.data_sources import DataSourceView, DocumentsAnswer
from gateway.http.shapes.errors import ErrorEnvelope
from gateway.http.shapes.operations import KeyList, NewKeyView, Readiness, UnitList
from gateway.http.shapes.pipelines import PipelineList
from gateway.http.shapes.runs import DoneEvent, InvokeAnswer, RetrievalView, StartEvent, TokenEvent

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_pipeline_is_declared_becomes_active_and_goes(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client)
        async with client.stream("GET", "/v1/pipelines") as listed:
            await listed.aread()
        PipelineList.model_validate(listed.json())
        assert pipeline_id in {row["pipeline_id"] for row in listed.json()["pipelines"]}
        assert (await settled(client, pipeline_id))["status"] == "active"
        gone = await client.delete(f"/v1/pipelines/{pipeline_id}")
        assert gone.json() == {"deleted": True, "id": pipeline_id}
        assert (await client.get(f"/v1/pipelines/{pipeline_id}")).status_code == 404


async def test_an_answer_streams_in_the_order_of_the_specification(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client)
        answer = await client.post(f"/v1/pipelines/{pipeline_id}/invoke", json={"input": "hello"})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-processing-region"] == "eu-central-1"
    said = events(answer.text)
    names = [name for name, _ in said]
    assert names[0] == "start"
    assert names[-1] == "done"
    assert set(names[1:-1]) == {"token"}
    start = StartEvent.model_validate(said[0][1])
    tokens = [TokenEvent.model_validate(data) for name, data in said if name == "token"]
    done = DoneEvent.model_validate(said[-1][1])
    assert start.request_id == answer.headers["x-request-id"]
    assert tokens[0].index == 0
    for earlier, later in pairwise(tokens):
        assert later.index == earlier.index + earlier.tokens
    assert sum(token.tokens for token in tokens) == done.usage.output_tokens == 16
    assert done.finish_reason == "length"
    assert done.placement[0].simulated


@pytest.mark.parametrize(
    ("body", "accept"),
    [({"stream": False}, "*/*"), ({}, "application/json"), ({"stream": False}, "text/event-stream")],
)
async def test_the_same_answer_comes_whole(cell: LocalCell, body: dict[str, Any], accept: str) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client, generation(temperature=0.0))
        path = f"/v1/pipelines/{pipeline_id}/invoke"
        streamed = events((await client.post(path, json={"input": "hello"})).text)
        answer = await client.post(path, json={"input": "hello", **body}, headers={"accept": accept})
    assert answer.status_code == 200
    whole = InvokeAnswer.model_validate(answer.json())
    assert whole.output == "".join(data["text"] for name, data in streamed if name == "token")
    assert whole.request_id == answer.headers["x-request-id"]
    assert answer.headers["x-processing-region"] == "eu-central-1"


async def test_the_body_asks_for_a_stream_louder_than_the_accept_header(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client, generation(stream=False))
        path = f"/v1/pipelines/{pipeline_id}/invoke"
        whole = await client.post(path, json={"input": "x"})
        streamed = await client.post(
            path, json={"input": "x", "stream": True}, headers={"accept": "application/json"}
        )
    assert whole.headers["content-type"] == "application/json"
    assert streamed.headers["content-type"].startswith("text/event-stream")


async def test_chunks_are_as_large_as_asked(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(
            client,
            generation(max_output_tokens=40),
            stream_control={"min_tokens_per_chunk": 16, "max_latency_ms": 60000},
        )
        said = events((await client.post(f"/v1/pipelines/{pipeline_id}/invoke", json={"input": "x"})).text)
    sizes = [data["tokens"] for name, data in said if name == "token"]
    assert sum(sizes) == 40
    assert all(size >= 16 for size in sizes[:-1])


async def test_a_query_that_contradicts_its_data_source_is_refused_at_once(cell: LocalCell) -> None:
    embedding = {"model": EMBEDDING_MODEL, "dimension": DIMENSION + 1}
    asked = {"type": "retrieval", "source": "sized", "query_embedding": embedding}
    contract = {"pipeline": {"steps": [asked, generation()]}}
    async with cell.client(await cell.tenant("sized")) as client:
        early = (await client.post("/v1/pipelines", json=contract)).json()["pipeline_id"]
        await client.post("/v1/data-sources", json={"name": "sized", "type": "qdrant"})
        late = await client.post("/v1/pipelines", json=contract)
        reason = ""
        async with asyncio.timeout(5):
            while "query_embedding.dimension" not in reason:
                view = (await client.get(f"/v1/pipelines/{early}")).json()
                reason = view["reason"] or ""
    assert (late.status_code, late.json()["error"]["param"]) == (
        400,
        "pipeline.steps[0].query_embedding.dimension",
    )
    assert view["status"] == "failed"


async def test_documents_are_found_and_shown_before_the_answer(cell: LocalCell) -> None:
    async with cell.client() as client:
        created = await client.post("/v1/data-sources", json={"name": "help", "type": "qdrant"})
        assert created.status_code == 201, created.text
        source = DataSourceView.model_validate(created.json())
        assert source.embedding_model == EMBEDDING_MODEL
        documents = [
            {
                "id": "a",
                "text": "Reset your password on the sign in page.",
                "metadata": {"status": "published"},
            },
            {"id": "b", "text": "Invoices are sent monthly.", "metadata": {"status": "published"}},
            {"id": "c", "text": "Reset the password: draft.", "metadata": {"status": "draft"}},
        ]
        path = f"/v1/data-sources/{source.data_source_id}"
        added = await client.post(f"{path}/documents", json={"documents": documents})
        assert added.status_code == 200, added.text
        counts = DocumentsAnswer.model_validate(added.json())
        assert (counts.added, counts.replaced, counts.document_count) == (3, 0, 3)
        again = await client.post(f"{path}/documents", json={"documents": documents[:1]})
        assert again.json()["replaced"] == 1
        view = DataSourceView.model_validate((await client.get(path)).json())
        assert (view.document_count, view.dimension) == (3, DIMENSION)
        retrieval = {"type": "retrieval", "source": "help", "top_k": 2, "filter": {"status": "published"}}
        pipeline_id = await declared(client, retrieval, generation())
        invoke = f"/v1/pipelines/{pipeline_id}/invoke"
        said = events((await client.post(invoke, json={"input": "How do I reset my password?"})).text)
        assert [name for name, _ in said][:2] == ["start", "retrieval"]
        shown = RetrievalView.model_validate(said[1][1])
        assert [document.id for document in shown.documents] == ["a", "b"]
        assert shown.documents[0].score > shown.documents[1].score
        whole = await client.post(invoke, json={"input": "Invoices?", "stream": False})
        answer = InvokeAnswer.model_validate(whole.json())
        assert answer.retrieval[0].documents[0].id == "b"
        assert {step.type for step in answer.timing} == {"retrieval", "generation"}
        listed = (await client.get("/v1/data-sources")).json()["data_sources"]
        assert source.data_source_id in {row["data_source_id"] for row in listed}
        deleted = await client.delete(path, params={"force": "true"})
        assert deleted.json() == {"deleted": True, "id": source.data_source_id}
        assert (await client.get(path)).status_code == 404


async def test_idempotency_keys_make_one_pipeline(cell: LocalCell) -> None:
    body = {"name": "once", "pipeline": {"steps": [generation()]}}
    other = {**body, "name": "twice"}
    async with cell.client() as client:
        headers = {"idempotency-key": "k-1"}
        first = await client.post("/v1/pipelines", json=body, headers=headers)
        second = await client.post("/v1/pipelines", json=body, headers=headers)
        reused = await client.post("/v1/pipelines", json=other, headers=headers)
    assert first.json()["pipeline_id"] == second.json()["pipeline_id"]
    assert reused.status_code == 422
    assert reused.json()["error"]["code"] == "idempotency_key_reused"


async def test_warnings_say_what_the_cell_does_not_do(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client, cache_strategy={"type": "semantic"})
        answer = await client.post(
            f"/v1/pipelines/{pipeline_id}/invoke", json={"input": "x", "stream": False}
        )
    assert any("cache_strategy" in warning for warning in answer.json()["warnings"])


# --- the official OpenAI client -------------------------------------------------------------


def openai_client(cell: LocalCell, key: str | None = None) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cell.base_url}/v1", api_key=key or cell.tenant_key, max_retries=0)


async def test_the_official_client_holds_a_conversation(cell: LocalCell) -> None:
    async with openai_client(cell) as client:
        messages: list[Any] = [{"role": "developer", "content": "Be brief."}]
        for question in ("Hello?", "And then?"):
            messages.append({"role": "user", "content": question})
            answer = await client.chat.completions.create(model=CHAT_MODEL, messages=messages, max_tokens=12)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 12
            assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
            assert answer.choices[0].finish_reason == "length"
            messages.append(answer.choices[0].message.model_dump())
        assert len(messages) == 5


async def test_the_official_client_streams_and_counts(cell: LocalCell) -> None:
    async with openai_client(cell) as client:
        stream = await client.chat.completions.create(
            model="gpt-4o-mini",
            messages=[
                {"role": "user", "content": "Hello?"},
                {"role": "assistant", "content": "Hello."},
                {"role": "user", "content": "More?"},
            ],
            max_completion_tokens=20,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(
            model=CHAT_MODEL,
            messages=[
                {"role": "user", "content": "Hello?"},
                {"role": "assistant", "content": "Hello."},
                {"role": "user", "content": "More?"},
            ],
            max_completion_tokens=20,
            temperature=0,
        )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-2].choices[0].finish_reason == "length"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_a_pipeline_answers_as_a_model(cell: LocalCell) -> None:
    async with cell.client() as client:
        pipeline_id = await declared(client, generation(max_output_tokens=9))
    async with openai_client(cell) as client_:
        messages: Any = [{"role": "user", "content": "x"}]
        own = await client_.chat.completions.create(model=pipeline_id, messages=messages)
        shorter = await client_.chat.completions.create(model=pipeline_id, messages=messages, max_tokens=3)
    assert own.usage is not None
    assert shorter.usage is not None
    assert (own.usage.completion_tokens, shorter.usage.completion_tokens) == (9, 3)


async def test_the_official_client_raises_its_own_errors(cell: LocalCell) -> None:
    messages: Any = [{"role": "user", "content": "x"}]
    async with openai_client(cell) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="gpt-99", messages=messages)
        assert unknown.value.code == "model_not_found"
        assert unknown.value.param == "model"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=CHAT_MODEL, messages=messages, n=2)
        assert refused.value.param == "n"
        assert refused.value.request_id is not None
        assert refused.value.request_id.startswith("req_")
        with pytest.raises(openai.BadRequestError) as too_long:
            await client.chat.completions.create(
                model=CHAT_MODEL, messages=[{"role": "user", "content": "word " * 100_000}], stream=True
            )
        assert too_long.value.code == "context_overflow"
        assert len([model async for model in client.models.list()]) == 3
    async with openai_client(cell, "zg-wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model=CHAT_MODEL, messages=messages)


# --- tenants, keys, operations ----------------------------------------------------------------


async def test_tenants_do_not_see_each_other(cell: LocalCell) -> None:
    other_key = await cell.tenant("other")
    async with cell.client() as client, cell.client(other_key) as other:
        pipeline_id = await declared(client)
        source = await client.post("/v1/data-sources", json={"name": "mine", "type": "qdrant"})
        source_id = source.json()["data_source_id"]
        foreign = [
            await other.get(f"/v1/pipelines/{pipeline_id}"),
            await other.delete(f"/v1/pipelines/{pipeline_id}"),
            await other.post(f"/v1/pipelines/{pipeline_id}/invoke", json={"input": "x"}),
            await other.get(f"/v1/data-sources/{source_id}"),
            await other.delete(f"/v1/data-sources/{source_id}"),
        ]
        for answer in foreign:
            unknown_path = (
                str(answer.request.url.path).replace(pipeline_id, "pl-0").replace(source_id, "ds-0")
            )
            unknown = await other.request(answer.request.method, unknown_path, json={"input": "x"})
            assert answer.status_code == unknown.status_code == 404
            mine, theirs = answer.json()["error"], unknown.json()["error"]
            assert {**mine, "message": ""} == {**theirs, "message": ""}
        assert (await other.get("/v1/pipelines")).json() == {"pipelines": [], "next": None}
        assert (await client.get(f"/v1/pipelines/{pipeline_id}")).status_code == 200


async def test_operator_routes_are_the_operators(cell: LocalCell) -> None:
    async with cell.client(cell.operator_key) as operator, cell.client() as tenant:
        for method, path in (("GET", "/v1/keys"), ("POST", "/v1/keys")):
            refused = await tenant.request(method, path, json={"tenant_id": "x"})
            assert refused.status_code == 403
            ErrorEnvelope.model_validate(refused.json())
        units = UnitList.model_validate((await operator.get("/v1/units")).json())
        assert {unit.unit_id for unit in units.units} == set(cell.units)
        assert {unit.state for unit in units.units} == {"ready"}
        made = await operator.post("/v1/keys", json={"tenant_id": "acme", "label": "for tests"})
        assert made.status_code == 201
        new = NewKeyView.model_validate(made.json())
        async with cell.client(new.key) as acme:
            assert (await acme.get("/v1/pipelines")).status_code == 200
        listed = await operator.get("/v1/keys")
        KeyList.model_validate(listed.json())
        assert new.key_id in {key["key_id"] for key in listed.json()["keys"]}
        assert new.key not in listed.text
        assert (await operator.delete(f"/v1/keys/{new.key_id}")).status_code == 200
        async with cell.client(new.key) as acme:
            assert (await acme.get("/v1/pipelines")).status_code == 401


async def test_open_routes_need_no_key(cell: LocalCell) -> None:
    async with cell.client("") as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        ready = await client.get("/readyz")
        assert ready.status_code == 200
        Readiness.model_validate(ready.json())
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/nowhere")).status_code == 401


async def test_the_page_for_people_is_whole_and_loads_nothing(cell: LocalCell) -> None:
    async with cell.client("") as client:
        answer = await client.get("/docs")
        document = (await client.get("/openapi.json")).json()
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    text = answer.text
    assert not re.findall(r"<script|<link|<img|<iframe|@import|https?://|src=", text)
    for path in document["paths"]:
        assert path in text
    targets, ids = set(re.findall(r'href="#([^"]+)"', text)), set(re.findall(r'id="([^"]+)"', text))
    assert targets <= ids
    assert set(document["components"]["schemas"]) <= ids


async def test_the_document_names_every_route_and_resolves(cell: LocalCell) -> None:
    async with cell.client("") as client:
        document = (await client.get("/openapi.json")).json()
    assert set(document["paths"]) >= {
        "/v1/pipelines/{pipeline_id}/invoke",
        "/v1/chat/completions",
        "/v1/keys",
    }
    components = document["components"]
    known = {f"#/components/{kind}/{name}" for kind, parts in components.items() for name in parts}

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [ref for value in node.values() for ref in references(value)]
        return [ref for item in node for ref in references(item)] if isinstance(node, list) else []

    named = references(document)
    assert named
    assert set(named) <= known
    invoke = document["paths"]["/v1/pipelines/{pipeline_id}/invoke"]["post"]["responses"]
    assert {"200", "400", "401", "429", "503"} <= set(invoke)
    assert "text/event-stream" in invoke["200"]["content"]
    assert document["paths"]["/healthz"]["get"]["security"] == []


async def test_request_ids_are_ours_and_the_callers_comes_back(cell: LocalCell) -> None:
    async with cell.client() as client:
        answer = await client.get("/v1/pipelines", headers={"x-request-id": "mine-1"})
        assert answer.headers.get_list("x-request-id") == [answer.headers["x-request-id"]]
        assert answer.headers["x-request-id"].startswith("req_")
        assert answer.headers["x-client-request-id"] == "mine-1"
        again = await client.get("/v1/pipelines", headers={"x-client-request-id": "mine-2"})
        assert again.headers["x-client-request-id"] == "mine-2"
        assert again.headers["x-request-id"] != answer.headers["x-request-id"]
