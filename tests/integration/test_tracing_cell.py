"""The trace of a request over a whole cell in one process: every hop, with the times of the response."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.collector import Collector, Seen, collecting
from support.local_cell import CHAT_MODEL, EMBEDDING_MODEL, LocalCell, cell_config, local_cell

from grid.config import Tracing

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE_ID}-b7ad6b7169203331-01"
UNTRACED = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
SECRET_QUESTION = "Which port is the passphrase?"
WITHIN_MS = 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Collector, dict[str, Any]]]:
    """What a collector got of the requests below, and the answer to the traced invocation."""
    with collecting() as collector:
        base = cell_config(Path(tmp_path_factory.mktemp("traced")))
        config = base.model_copy(update={"tracing": Tracing(endpoint=collector.endpoint)})
        async with local_cell(config) as cell:
            answer = await asked(cell)
        # The cell has closed, so its last spans have left.
        yield collector, answer


async def asked(cell: LocalCell) -> dict[str, Any]:
    async with cell.client() as client:
        made = await client.post("/v1/data-sources", json={"name": "help", "type": "qdrant"})
        source = made.json()["data_source_id"]
        documents = [{"id": "a", "text": "The port is 8000."}]
        added = await client.post(f"/v1/data-sources/{source}/documents", json={"documents": documents})
        assert added.status_code == 200, added.text
        steps = [
            {"type": "retrieval", "data_source_id": source, "top_k": 1},
            {"type": "generation", "model": CHAT_MODEL, "max_output_tokens": 8},
        ]
        pipeline = await client.post("/v1/pipelines", json={"name": "p", "pipeline": {"steps": steps}})
        path = f"/v1/pipelines/{pipeline.json()['pipeline_id']}/invoke"
        body = {"input": SECRET_QUESTION, "stream": False}
        answer = await client.post(path, json=body, headers={"traceparent": CALLER})
        assert answer.status_code == 200, answer.text
        await client.post(path, json=body, headers={"traceparent": UNTRACED})
        chat = {"model": "no-such-model", "messages": [{"role": "user", "content": "Hi"}]}
        refused = await client.post("/v1/chat/completions", json=chat)
        assert refused.status_code == 404
        found: dict[str, Any] = answer.json()
        return found


def of_request(collector: Collector) -> list[Seen]:
    return [span for span in collector.spans if span.trace_id == TRACE_ID]


def one(spans: list[Seen], prefix: str, under: Seen | None = None) -> Seen:
    [found] = [
        span
        for span in spans
        if span.name.startswith(prefix) and (under is None or span.parent_id == under.span_id)
    ]
    return found


async def test_every_hop_shows_the_times_that_the_response_gives(
    told: tuple[Collector, dict[str, Any]],
) -> None:
    collector, answer = told
    spans = of_request(collector)
    whole = one(spans, "POST /v1/pipelines/{id}/invoke")
    assert whole.parent_id == "b7ad6b7169203331"
    retrieval, chat = one(spans, "retrieval help", whole), one(spans, f"chat {CHAT_MODEL}", whole)
    embeddings = one(spans, f"embeddings {EMBEDDING_MODEL}", retrieval)
    generate = one(spans, f"generate {CHAT_MODEL}", chat)
    steps = {step["type"]: step for step in answer["timing"]}
    for step, field, span in (
        ("retrieval", "total_ms", retrieval),
        ("retrieval", "placement_ms", one(spans, "place", retrieval)),
        ("retrieval", "embed_ms", embeddings),
        ("retrieval", "search_ms", one(spans, "search qdrant", retrieval)),
        ("generation", "total_ms", chat),
        ("generation", "placement_ms", one(spans, "place", chat)),
        ("generation", "queue_ms", one(spans, "queue", generate)),
        ("generation", "prefill_ms", one(spans, "prefill", generate)),
        ("generation", "decode_ms", one(spans, "decode", generate)),
    ):
        assert span.lasted_ms == pytest.approx(steps[step][field], abs=WITHIN_MS), (step, field)


async def test_one_trace_goes_through_gateway_placement_and_units(
    told: tuple[Collector, dict[str, Any]],
) -> None:
    spans = of_request(told[0])
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    ways = set()
    for span in spans:
        parent = by_id.get(span.parent_id)
        if parent is None:
            assert span.name.startswith("POST ")
            continue
        # One clock here, so whatever is under a span lies within it.
        assert parent.start_ns <= span.start_ns <= span.end_ns <= parent.end_ns + 1_000_000, span.name
        ways.add((parent.service, span.service))
    assert {
        ("zerogrid-gateway", "zerogrid-gateway"),
        ("zerogrid-gateway", "zerogrid-placement"),
        ("zerogrid-gateway", "zerogrid-unit"),
        ("zerogrid-unit", "zerogrid-unit"),
    } == ways
    assert len([span for span in spans if span.name.startswith("decide ")]) == 2


async def test_attributes_have_the_names_of_the_genai_conventions(
    told: tuple[Collector, dict[str, Any]],
) -> None:
    collector, answer = told
    chat = one(of_request(collector), "chat ")
    assert (
        chat.attributes.items()
        >= {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "zerogrid",
            "gen_ai.request.model": CHAT_MODEL,
            "gen_ai.request.max_tokens": 8,
            "gen_ai.response.id": answer["request_id"],
            "gen_ai.usage.input_tokens": answer["usage"]["input_tokens"],
            "gen_ai.usage.output_tokens": 8,
            "zerogrid.pipeline": answer["pipeline_id"],
        }.items()
    )
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["length"]


async def test_no_text_leaves_without_being_asked_for(told: tuple[Collector, dict[str, Any]]) -> None:
    collector, answer = told
    written = json.dumps([[span.name, span.attributes] for span in collector.spans])
    assert SECRET_QUESTION not in written
    assert answer["output"] not in written


async def test_text_is_in_the_trace_of_a_cell_that_is_told_so(tmp_path: Path) -> None:
    with collecting() as collector:
        settings = Tracing(endpoint=collector.endpoint, content=True)
        base = cell_config(tmp_path)
        async with local_cell(base.model_copy(update={"tracing": settings})) as cell, cell.client() as client:
            messages = [{"role": "user", "content": SECRET_QUESTION}]
            body = {"model": CHAT_MODEL, "messages": messages, "max_tokens": 4}
            answer = await client.post("/v1/chat/completions", json=body)
        chat = one(collector.spans, "chat ")
    asked = json.loads(chat.attributes["gen_ai.input.messages"])
    assert asked == [{"role": "user", "parts": [{"type": "text", "content": SECRET_QUESTION}]}]
    said = json.loads(chat.attributes["gen_ai.output.messages"])[0]["parts"][0]["content"]
    assert said == answer.json()["choices"][0]["message"]["content"]


async def test_a_caller_that_does_not_trace_is_not_traced(told: tuple[Collector, dict[str, Any]]) -> None:
    assert UNTRACED.split("-")[1] not in {span.trace_id for span in told[0].spans}


async def test_a_refused_request_is_a_trace_of_its_own(told: tuple[Collector, dict[str, Any]]) -> None:
    [refused] = [s for s in told[0].named("POST") if s.attributes.get("http.response.status_code") == 404]
    assert refused.parent_id == ""
    assert refused.error == ""
