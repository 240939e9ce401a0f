"""Anthropic's and OpenAI's official clients on a whole cell in one process: messages, counts, embeddings."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import anthropic
import numpy as np
import openai
import pytest
import pytest_asyncio
from support.calls import declared
from support.local_cell import CHAT_MODEL, DIMENSION, EMBEDDING_MODEL, LocalCell

from gateway.http.shapes.compatible import Embeddings, MessageAnswer, ModelView
from gateway.http.shapes.errors import AnthropicErrorEnvelope, OpenAIErrorEnvelope

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

HELLO: Any = [{"role": "user", "content": "Hello?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(cell: LocalCell) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic_client(cell, cell.tenant_key) as client:
        yield client


def anthropic_client(cell: LocalCell, key: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=cell.base_url, api_key=key, max_retries=0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gpt(cell: LocalCell) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{cell.base_url}/v1", api_key=cell.tenant_key, max_retries=0
    ) as client:
        yield client


async def pipeline(cell: LocalCell, *before: dict[str, Any], **generation: Any) -> str:
    steps = [*before, {"type": "generation", "model": CHAT_MODEL, **generation}]
    async with cell.client() as client:
        return await declared(client, *steps)


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


# --- messages -----------------------------------------------------------------------------------------


async def test_a_conversation_of_several_turns(cell: LocalCell, claude: anthropic.AsyncAnthropic) -> None:
    turns: list[Any] = []
    for question in ("Hello?", [{"type": "text", "text": "And"}, {"type": "text", "text": " then?"}]):
        turns.append({"role": "user", "content": question})
        answer = await claude.messages.create(
            model=CHAT_MODEL, system="Be brief.", messages=turns, max_tokens=12, metadata={"user_id": "u"}
        )
        assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
        assert answer.usage.output_tokens == 12
        assert answer.usage.input_tokens > 0
        assert answer.id.startswith("msg_")
        assert text_of(answer).startswith("[simulated]")
        turns.append({"role": "assistant", "content": answer.content})
    assert len(turns) == 4


async def test_a_stream_has_the_events_of_that_api_in_order(cell: LocalCell) -> None:
    body = {"model": "gpt-4o-mini", "messages": HELLO, "max_tokens": 9, "stream": True, "temperature": 0.0}
    async with cell.client() as client:
        answer = await client.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
        whole = await client.post("/v1/messages", json={**body, "stream": False})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.headers["x-processing-region"] == "eu-central-1"
    said = [block.split("\n") for block in answer.text.rstrip("\n").split("\n\n")]
    names = [lines[0].removeprefix("event: ") for lines in said]
    data = [json.loads(lines[1].removeprefix("data: ")) for lines in said]
    assert [item["type"] for item in data] == names
    deltas = names.count("content_block_delta")
    assert names == [
        "message_start",
        "content_block_start",
        "ping",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    MessageAnswer.model_validate(whole.json())
    assert data[0]["message"]["usage"]["input_tokens"] == whole.json()["usage"]["input_tokens"] > 0
    assert data[-2]["usage"]["output_tokens"] == 9
    text = "".join(item["delta"]["text"] for item in data if item["type"] == "content_block_delta")
    assert text == whole.json()["content"][0]["text"]


async def test_the_official_client_puts_a_stream_together(claude: anthropic.AsyncAnthropic) -> None:
    async with claude.messages.stream(model=CHAT_MODEL, messages=HELLO, max_tokens=16) as stream:
        streamed = "".join([text async for text in stream.text_stream])
        final = await stream.get_final_message()
    assert text_of(final) == streamed
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 16)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_sequence_is_named(claude: anthropic.AsyncAnthropic, stream: bool) -> None:
    # The client's newest version has no names for these; the API that it speaks had, and this cell has.
    sampling = {"temperature": 0.0, "top_k": 5, "top_p": 0.9}
    asked: dict[str, Any] = {
        "model": CHAT_MODEL,
        "messages": HELLO,
        "max_tokens": 40,
        "extra_body": sampling,
    }
    free = text_of(await claude.messages.create(**asked))
    stop = free.split(" ")[3]
    asked["stop_sequences"] = ["never said", stop]
    if stream:
        async with claude.messages.stream(**asked) as running:
            stopped = await running.get_final_message()
    else:
        stopped = await claude.messages.create(**asked)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text_of(stopped) == free[: free.index(stop)]


async def test_a_pipeline_answers_messages_with_its_prompt_and_documents(
    cell: LocalCell, claude: anthropic.AsyncAnthropic
) -> None:
    async with cell.client() as client:
        source = (await client.post("/v1/data-sources", json={"name": "kb", "type": "qdrant"})).json()
        documents = [{"id": "a", "text": "The door is blue. " * 20}]
        path = f"/v1/data-sources/{source['data_source_id']}/documents"
        assert (await client.post(path, json={"documents": documents})).status_code == 200
    bare = await pipeline(cell, max_output_tokens=5)
    rich = await pipeline(
        cell, {"type": "retrieval", "source": "kb"}, system_prompt="Only doors.", max_output_tokens=5
    )
    ask: Any = [{"role": "user", "content": "Which colour has the door?"}]
    small = await claude.messages.create(model=bare, messages=ask, max_tokens=3)
    large = await claude.messages.create(model=rich, messages=ask, max_tokens=3)
    assert small.usage.output_tokens == large.usage.output_tokens == 3
    assert large.usage.input_tokens > small.usage.input_tokens + 50
    for model, answer in ((bare, small), (rich, large)):
        counted = await claude.messages.count_tokens(model=model, messages=ask)
        assert counted.input_tokens == answer.usage.input_tokens
    assert small.model == bare


async def test_the_last_step_of_a_pipeline_answers(cell: LocalCell, claude: anthropic.AsyncAnthropic) -> None:
    before = {"type": "generation", "id": "draft", "model": CHAT_MODEL, "max_output_tokens": 7}
    chained = await pipeline(cell, before, max_output_tokens=9)
    async with claude.messages.stream(model=chained, messages=HELLO, max_tokens=4) as stream:
        answer = await stream.get_final_message()
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 7 + 4, "what the earlier step wrote was work as well"
    assert text_of(answer).count("[simulated]") == 1


TURN: dict[str, Any] = {"role": "user", "content": "x"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"name": "f", "input_schema": {"type": "object"}}]}, "tools"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "'tool_result'"),
    ({"messages": [TURN, {"role": "assistant", "content": "The answer is ("}]}, "the last message"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"stop_sequences": ["a"] * 9}, "stop_sequences"),
    ({"modle": "x"}, "modle"),
    ({"messages": [{"role": "user", "content": "long " * 30_000}]}, "4096"),
]


@pytest.mark.parametrize(("change", "told"), REFUSED, ids=[told for _, told in REFUSED])
async def test_what_cannot_be_honoured_is_refused_by_name(
    cell: LocalCell, change: dict[str, Any], told: str
) -> None:
    body = {"model": CHAT_MODEL, "messages": [TURN], "max_tokens": 4, **change}
    async with cell.client() as client:
        answer = await client.post("/v1/messages", json=body)
    envelope = AnthropicErrorEnvelope.model_validate(answer.json())
    assert (answer.status_code, envelope.error.type) == (400, "invalid_request_error")
    assert told in envelope.error.message
    assert envelope.request_id == answer.headers["x-request-id"]


async def test_what_asks_for_nothing_is_taken(cell: LocalCell) -> None:
    neutral = {"tools": [], "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}}
    body = {"model": CHAT_MODEL, "messages": [TURN], "max_tokens": 1, "service_tier": "auto", **neutral}
    async with cell.client() as client:
        assert (await client.post("/v1/messages", json=body)).status_code == 200


async def test_the_official_client_raises_its_own_errors(
    cell: LocalCell, claude: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await claude.messages.create(model="claude-99", messages=HELLO, max_tokens=1)
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert unknown.value.request_id is not None
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(model="pl-none", messages=HELLO, max_tokens=1)
    async with anthropic_client(cell, "zg-wrong") as stranger:
        with pytest.raises(anthropic.AuthenticationError):
            await stranger.messages.create(model=CHAT_MODEL, messages=HELLO, max_tokens=1)


async def test_the_official_client_lists_the_models(claude: anthropic.AsyncAnthropic) -> None:
    names = [model.id async for model in claude.models.list()]
    assert {CHAT_MODEL, EMBEDDING_MODEL, "gpt-4o-mini"} == set(names)
    page = await claude.models.list()
    assert (page.has_more, page.first_id, page.last_id) == (False, names[0], names[-1])
    assert {type(model.created_at) for model in page.data} == {datetime}


async def test_the_official_clients_read_one_model(cell: LocalCell, claude: anthropic.AsyncAnthropic) -> None:
    found = await claude.models.retrieve("gpt-4o-mini")
    assert (found.id, found.type, found.display_name) == ("gpt-4o-mini", "model", "gpt-4o-mini")
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await claude.models.retrieve("claude-99")
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    async with cell.client() as client:
        answer = await client.get("/v1/models/no-such/model")
        assert answer.status_code == 404
        assert OpenAIErrorEnvelope.model_validate(answer.json()).error.code == "model_not_found"
        assert ModelView.model_validate((await client.get(f"/v1/models/{CHAT_MODEL}")).json()).units == 1


async def test_neighbours_of_one_role_are_one_turn(claude: anthropic.AsyncAnthropic) -> None:
    apart: Any = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    joined: Any = [{"role": "user", "content": "a\n\nb"}]
    counts = [
        (await claude.messages.count_tokens(model=CHAT_MODEL, messages=turns)).input_tokens
        for turns in (apart, joined)
    ]
    assert counts[0] == counts[1]


# --- counts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through_pipeline", [False, True])
async def test_a_count_is_what_the_answer_says(
    cell: LocalCell, claude: anthropic.AsyncAnthropic, through_pipeline: bool
) -> None:
    model = await pipeline(cell, system_prompt="Be kind.") if through_pipeline else "gpt-4o-mini"
    turns: Any = [
        {"role": "user", "content": "Wie heißt die Straße, 🙂?"},
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": "So?"},
    ]
    counted = await claude.messages.count_tokens(model=model, system="Answer.", messages=turns)
    assert not any((await cell.running()).values()), "nothing was reserved or admitted for the count"
    answer = await claude.messages.create(model=model, system="Answer.", messages=turns, max_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens


async def test_a_count_is_refused_where_nobody_can_know_it(
    cell: LocalCell, claude: anthropic.AsyncAnthropic
) -> None:
    chained = await pipeline(cell, {"type": "generation", "id": "draft", "model": CHAT_MODEL})
    with pytest.raises(anthropic.BadRequestError, match="earlier steps"):
        await claude.messages.count_tokens(model=chained, messages=HELLO)
    too_long: Any = [{"role": "user", "content": "long " * 30_000}]
    with pytest.raises(anthropic.BadRequestError, match="4096"):
        await claude.messages.count_tokens(model=CHAT_MODEL, messages=too_long)
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.count_tokens(model=EMBEDDING_MODEL, messages=HELLO)


# --- embeddings ---------------------------------------------------------------------------------------


async def test_vectors_by_the_official_client(gpt: openai.AsyncOpenAI) -> None:
    texts = [f"text number {index}" for index in range(70)]
    by_default = await gpt.embeddings.create(model=EMBEDDING_MODEL, input=texts)
    as_floats = await gpt.embeddings.create(model=EMBEDDING_MODEL, input=texts[3], encoding_format="float")
    assert [row.index for row in by_default.data] == list(range(70))
    rows = np.array([row.embedding for row in by_default.data], np.float32)
    assert rows.shape == (70, DIMENSION)
    assert np.allclose(np.linalg.norm(rows, axis=1), 1.0, atol=1e-5)
    assert np.array_equal(rows[3], np.array(as_floats.data[0].embedding, np.float32))
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens == 210


async def test_both_encodings_hold_the_same_numbers(cell: LocalCell) -> None:
    body = {"model": EMBEDDING_MODEL, "input": ["one two three"], "dimensions": DIMENSION, "user": "u"}
    async with cell.client() as client:
        encoded = await client.post("/v1/embeddings", json={**body, "encoding_format": "base64"})
        floats = await client.post("/v1/embeddings", json=body)
    Embeddings.model_validate(encoded.json())
    Embeddings.model_validate(floats.json())
    packed = base64.b64decode(encoded.json()["data"][0]["embedding"])
    assert np.array_equal(
        np.frombuffer(packed, "<f4"), np.array(floats.json()["data"][0]["embedding"], np.float32)
    )


NOT_EMBEDDED: list[tuple[dict[str, Any], int, str]] = [
    ({"input": [1, 2, 3]}, 400, "input"),
    ({"input": [[1, 2], [3]]}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": ""}, 400, "input[0]"),
    ({"input": ["x"] * 2_049}, 400, "input"),
    ({"dimensions": DIMENSION - 1}, 400, "dimensions"),
    ({"encoding_format": "int8"}, 400, "encoding_format"),
    ({"model": CHAT_MODEL}, 404, "model"),
    ({"model": "nobody"}, 404, "model"),
]


@pytest.mark.parametrize(("change", "status", "param"), NOT_EMBEDDED)
async def test_what_is_not_embedded(cell: LocalCell, change: dict[str, Any], status: int, param: str) -> None:
    async with cell.client() as client:
        answer = await client.post("/v1/embeddings", json={"model": EMBEDDING_MODEL, "input": "x", **change})
    OpenAIErrorEnvelope.model_validate(answer.json())
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_what_was_embedded_is_in_the_usage(cell: LocalCell) -> None:
    key = await cell.tenant("embeds")
    async with cell.client(key) as client:
        texts = ["one two three"] * 40
        answer = await client.post("/v1/embeddings", json={"model": EMBEDDING_MODEL, "input": texts})
        assert answer.json()["usage"]["total_tokens"] == 120
        async with asyncio.timeout(10):
            while True:
                total = (await client.get("/v1/usage")).json()["total"]
                if total["calls"]:
                    break
    assert (total["calls"], total["input_tokens"], total["output_tokens"]) == (1, 120, 0)


async def test_embedding_leaves_no_reservation_behind(cell: LocalCell, gpt: openai.AsyncOpenAI) -> None:
    asked = [gpt.embeddings.create(model=EMBEDDING_MODEL, input=["a"] * 40) for _ in range(4)]
    await asyncio.gather(*asked)
    await cell.until_idle()
