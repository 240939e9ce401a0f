"""Bad input and clients that leave: each has its status and names its field, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from support.local_cell import CHAT_MODEL, EMBEDDING_MODEL, LocalCell, cell_config, local_cell

from gateway.http.shapes.errors import ErrorEnvelope, OpenAIErrorEnvelope
from gateway.http.shapes.pipelines import PlanView

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MAX_BODY = 1024 * 1024
HELLO = [{"role": "user", "content": "hello"}]
GENERATION = {"type": "generation", "model": CHAT_MODEL, "max_output_tokens": 4000}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCell]:
    config = cell_config(Path(tmp_path_factory.mktemp("cell")), max_body_bytes=MAX_BODY)
    async with local_cell(config) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline_id(cell: LocalCell) -> str:
    async with cell.client() as client:
        answer = await client.post("/v1/pipelines", json={"name": "p", "pipeline": {"steps": [GENERATION]}})
        return str(answer.json()["pipeline_id"])


def steps(*given: dict[str, Any], **contract: Any) -> bytes:
    return json.dumps({"name": "p", "pipeline": {"steps": list(given)}, **contract}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": CHAT_MODEL, "messages": HELLO, **fields}).encode()


RETRIEVAL = {"type": "retrieval", "source": "none"}
PIPELINES, INVOKE, CHAT = "/v1/pipelines", "/v1/pipelines/{id}/invoke", "/v1/chat/completions"
SOURCES = "/v1/data-sources"
LONG = "word " * 100_000
"""100,000 words, far above the model's context."""

BAD = [
    ("malformed JSON", PIPELINES, b'{"pipeline": ', 400, None),
    ("malformed JSON", INVOKE, b"{", 400, None),
    ("malformed JSON", CHAT, b"not json", 400, None),
    ("no body", INVOKE, b"", 400, None),
    ("a list for a body", INVOKE, b"[]", 400, None),
    ("unknown field", PIPELINES, steps(GENERATION, nmae="x"), 400, "nmae"),
    ("unknown step field", PIPELINES, steps({**GENERATION, "modle": "x"}), 400, "pipeline.steps[0].modle"),
    ("unknown field", INVOKE, b'{"inptu": "x"}', 400, "inptu"),
    ("unknown field", CHAT, chat(temprature=1), 400, "temprature"),
    ("unknown model", PIPELINES, steps({**GENERATION, "model": "gpt-99"}), 400, "pipeline.steps[0].model"),
    ("unknown model", CHAT, chat(model="gpt-99"), 404, "model"),
    ("an embedding model asked to talk", CHAT, chat(model=EMBEDDING_MODEL), 404, "model"),
    ("unknown pipeline as model", CHAT, chat(model="pl-none"), 404, "model"),
    ("empty steps", PIPELINES, steps(), 400, "pipeline.steps"),
    ("no input", INVOKE, b"{}", 400, None),
    ("prompt too long", INVOKE, json.dumps({"input": LONG}).encode(), 400, None),
    ("prompt too long, whole", INVOKE, json.dumps({"input": LONG, "stream": False}).encode(), 400, None),
    ("prompt too long", CHAT, chat(messages=[{"role": "user", "content": LONG}]), 400, None),
    ("more output than any context holds", CHAT, chat(max_tokens=100_000), 400, "max_tokens"),
    (
        "more output than any context holds",
        "/v1/pipeline",
        steps({**GENERATION, "max_output_tokens": 4096}, input="x"),
        400,
        "max_output_tokens",
    ),
    ("top_k too large", PIPELINES, steps({**RETRIEVAL, "top_k": 101}), 400, "pipeline.steps[0].top_k"),
    ("top_k too small", PIPELINES, steps({**RETRIEVAL, "top_k": 0}), 400, "pipeline.steps[0].top_k"),
    ("temperature", CHAT, chat(temperature=2.5), 400, "temperature"),
    ("unsupported step", PIPELINES, steps({"type": "rerank"}), 400, "pipeline.steps[0].type"),
    ("step without a type", PIPELINES, steps({"model": "x"}), 400, "pipeline.steps[0].type"),
    ("unknown pipeline", "/v1/pipelines/pl-none/invoke", b'{"input": "x"}', 404, "pipeline_id"),
    ("body too large", PIPELINES, b" " * (10 * MAX_BODY), 413, "body"),
    ("body too large", INVOKE, b" " * (10 * MAX_BODY), 413, "body"),
    ("body too large", CHAT, b" " * (10 * MAX_BODY), 413, "body"),
    ("unsupported source", SOURCES, b'{"name": "x", "type": "pinecone", "config": {}}', 400, "type"),
    (
        "a store of the caller's",
        SOURCES,
        b'{"name": "x", "type": "qdrant", "config": {"url": "h"}}',
        400,
        "config",
    ),
    (
        "unknown embedding model",
        SOURCES,
        b'{"name": "x", "type": "qdrant", "embedding_model": "e"}',
        400,
        "embedding_model",
    ),
    (
        "dimension mismatch",
        SOURCES,
        b'{"name": "x", "type": "qdrant", "dimension": 1536}',
        400,
        "dimension",
    ),
    ("region elsewhere", SOURCES, b'{"name": "x", "type": "qdrant", "region": "mars"}', 400, "region"),
    ("more answers than one", CHAT, chat(n=2), 400, "n"),
    ("tools", CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools"),
    (
        "what a tool said",
        CHAT,
        chat(messages=[*HELLO, {"role": "tool", "tool_call_id": "c", "content": "5"}]),
        400,
        "messages[1].role",
    ),
    ("log probabilities", CHAT, chat(logprobs=True), 400, "logprobs"),
    ("a picture", CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, None),
    ("an empty list of inputs", INVOKE, b'{"inputs": []}', 400, "inputs"),
    ("an input that is no text", INVOKE, b'{"inputs": ["a", 5]}', 400, "inputs[1]"),
    ("an input and a list of them", INVOKE, b'{"input": "a", "inputs": ["a"]}', 400, "inputs"),
    ("a list that nobody can run", INVOKE, b'{"inputs": ["a"], "variables": {"x": 1}}', 400, "variables.x"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"), [row[1:] for row in BAD], ids=[f"{row[0]} {row[1]}" for row in BAD]
)
async def test_bad_input_has_its_status_names_its_field_and_leaves_nothing(
    cell: LocalCell, pipeline_id: str, path: str, body: bytes, status: int, param: str | None
) -> None:
    async with cell.client() as client:
        answer = await client.post(path.replace("{id}", pipeline_id), content=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"].startswith("req_")
    error = answer.json()["error"]
    if path == CHAT:
        OpenAIErrorEnvelope.model_validate(answer.json())
    else:
        ErrorEnvelope.model_validate(answer.json())
        assert answer.json()["request_id"] == answer.headers["x-request-id"]
        assert error["retryable"] is False
    if param is not None:
        assert error["param"] == param
        assert status == 404 or param.rsplit(".", 1)[-1].split("[")[0] in error["message"]
    assert len(error["message"]) > 10
    await cell.until_idle()


async def test_a_call_of_nothing_is_told_of_the_dry_run_which_needs_nothing(
    cell: LocalCell, pipeline_id: str
) -> None:
    async with cell.client() as client:
        refused = await client.post(f"/v1/pipelines/{pipeline_id}/invoke", json={})
        assert "`dry-run`" in refused.json()["error"]["message"]
        for body in (b"", b" {} \n"):
            planned = await client.post(f"/v1/pipelines/{pipeline_id}/dry-run", content=body)
            assert planned.status_code == 200, planned.text
            PlanView.model_validate(planned.json())


async def test_a_prompt_that_does_not_fit_is_refused_with_the_counts(
    cell: LocalCell, pipeline_id: str
) -> None:
    async with cell.client() as client:
        answer = await client.post(f"/v1/pipelines/{pipeline_id}/invoke", json={"input": LONG})
    error = answer.json()["error"]
    assert error["code"] == "context_overflow"
    assert error["details"]["context_tokens"] == 4096
    assert error["details"]["max_output_tokens"] == 4000
    assert error["details"]["prompt_tokens"] > 4096


@pytest.mark.parametrize(
    ("method", "path", "param", "says"),
    [
        ("GET", "/v1/pipelines?limt=5", "limt", "did you mean `limit`?"),
        ("GET", "/v1/pipelines?page=5&limit=5", "page", "known parameters: limit, after"),
        ("GET", "/v1/pipelines?limit=0", "limit", "must be at least 1; got '0'"),
        ("GET", "/v1/pipelines?limit=many", "limit", "must be a whole number; got 'many'"),
        ("GET", "/v1/usage?since=yesterday", "since", "must be a moment such as"),
        ("GET", "/v1/metrics?detail=soft", "detail", "must be one of hardware; got 'soft'"),
        ("GET", "/v1/units?region=eu", "region", "takes none"),
        ("HEAD", "/v1/metrics?detail=hardware", "detail", ""),
        ("POST", INVOKE + "?stream=false", "stream", "takes none; fields go into the body"),
        ("POST", "/v1/pipeline?dry_run", "dry_run", "takes none"),
    ],
)
async def test_a_query_parameter_that_nobody_reads_is_refused(
    cell: LocalCell, pipeline_id: str, method: str, path: str, param: str, says: str
) -> None:
    async with cell.client() as client:
        answer = await client.request(method, path.replace("{id}", pipeline_id), json={"input": "x"})
    assert answer.status_code == 400
    if method != "HEAD":
        error = answer.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(f"{param}: ")
        assert says in error["message"]


@pytest.mark.parametrize("path", ["/v1/models?limit=20", "/healthz?from=probe"])
async def test_compatible_routes_and_probes_take_what_their_callers_add(cell: LocalCell, path: str) -> None:
    async with cell.client() as client:
        assert (await client.get(path)).status_code == 200
        asked = {"model": CHAT_MODEL, "messages": HELLO, "max_tokens": 2}
        assert (await client.post(CHAT + "?api-version=2024", json=asked)).status_code == 200
    await cell.until_idle()


async def test_a_source_that_pipelines_read_is_deleted_only_by_force(cell: LocalCell) -> None:
    async with cell.client() as client:
        made = await client.post(SOURCES, json={"name": "read by two", "type": "qdrant"})
        source_id = made.json()["data_source_id"]
        for step in ({"data_source_id": source_id}, {"source": "read by two"}):
            contract = steps({"type": "retrieval", **step}, GENERATION)
            taken = await client.post(PIPELINES, content=contract)
            assert taken.status_code == 201, taken.text
        refused = await client.delete(f"{SOURCES}/{source_id}")
        assert refused.status_code == 409, refused.text
        error = ErrorEnvelope.model_validate(refused.json()).error
        assert taken.json()["pipeline_id"] in error.message
        assert len(error.details["pipelines"]) == 2
        assert "force=true" in error.message
        assert (await client.get(f"{SOURCES}/{source_id}")).status_code == 200
        forced = await client.delete(f"{SOURCES}/{source_id}", params={"force": "true"})
        assert forced.status_code == 200, forced.text
        assert (await client.get(f"{SOURCES}/{source_id}")).status_code == 404
        unused = await client.post(SOURCES, json={"name": "read by none", "type": "qdrant"})
        assert (await client.delete(f"{SOURCES}/{unused.json()['data_source_id']}")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/pipelines", CHAT, "/v1/models", "/v1/units"])
@pytest.mark.parametrize("headers", [{}, {"x-api-key": "zg-wrong"}, {"authorization": "Bearer zg-wrong"}])
async def test_no_key_and_a_wrong_key(cell: LocalCell, path: str, headers: dict[str, str]) -> None:
    async with cell.client("") as client:
        answer = await client.request("POST" if path == CHAT else "GET", path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "unauthorised"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"].startswith("req_")


async def test_bearer_keys_work_everywhere(cell: LocalCell) -> None:
    async with cell.client("") as client:
        headers = {"authorization": f"bearer {cell.tenant_key}"}
        assert (await client.get("/v1/pipelines", headers=headers)).status_code == 200


async def test_a_body_is_capped_while_it_comes(cell: LocalCell) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * (MAX_BODY // 20)

    async with cell.client() as client:
        answer = await client.post(CHAT, content=pieces())
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"
    await cell.until_idle()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/pipelines", "GET, POST"),
        ("GET", CHAT, "POST"),
        ("GET", "/v1/pipelines/pl-1/invoke", "POST"),
        ("POST", "/v1/units", "GET"),
    ],
)
async def test_a_wrong_method_names_the_right_ones(
    cell: LocalCell, method: str, path: str, allowed: str
) -> None:
    async with cell.client() as client:
        answer = await client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
    assert answer.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/pipelines/", "/", "/v1/pipelines//invoke"])
async def test_unknown_paths_have_the_envelope(cell: LocalCell, path: str) -> None:
    async with cell.client() as client:
        answer = await client.get(path)
    assert answer.status_code == 404
    ErrorEnvelope.model_validate(answer.json())


@pytest.mark.parametrize(
    ("rule", "status"),
    [("EU", 200), ("DE", 200), ("eu-central-1", 200), ("US", 403), ("us-east-1", 403), ("??", 400)],
)
async def test_residency_is_checked_at_the_door(
    cell: LocalCell, pipeline_id: str, rule: str, status: int
) -> None:
    async with cell.client() as client:
        answer = await client.post(
            CHAT,
            content=chat(max_tokens=2) if status == 200 else b"this body is never read",
            headers={"x-data-residency": rule},
        )
        marked = await client.post(
            f"/v1/pipelines/{pipeline_id}/invoke",
            json={"input": "region:US x"},
            headers={"x-data-residency": "EU"},
        )
    assert answer.status_code == status, answer.text
    assert marked.status_code == 403
    await cell.until_idle()


@pytest.mark.parametrize(
    ("document", "status"),
    [
        ({"text": "region:US x"}, 403),
        ({"text": "x", "metadata": {"region": "US"}}, 403),
        ({"text": "x", "metadata": {"kept": {"Region": ["DE", "us-east-1"]}}}, 403),
        ({"text": "x", "metadata": {"region": "DE", "note": "north"}}, 200),
    ],
)
async def test_marks_of_documents_are_checked(cell: LocalCell, document: dict[str, Any], status: int) -> None:
    async with cell.client() as client:
        made = await client.post(SOURCES, json={"name": f"marked {document}"[:100], "type": "qdrant"})
        path = f"{SOURCES}/{made.json()['data_source_id']}"
        body = {"documents": [{"id": "a", **document}]}
        answer = await client.post(f"{path}/documents", json=body, headers={"x-data-residency": "EU"})
        assert answer.status_code == status, answer.text
        stored = (await client.get(path)).json()["document_count"]
    assert stored == (1 if status == 200 else 0)


@pytest.mark.parametrize(
    "step", [{**GENERATION, "system_prompt": "of region:US"}, {**RETRIEVAL, "filter": {"region": "US"}}]
)
async def test_marks_of_contracts_are_checked(cell: LocalCell, step: dict[str, Any]) -> None:
    async with cell.client() as client:
        given = steps(*([step] if step["type"] == "generation" else [step, GENERATION]))
        refused = await client.post(PIPELINES, content=given, headers={"x-data-residency": "EU"})
        taken = await client.post(PIPELINES, content=given)
    assert refused.status_code == 403, refused.text
    assert refused.json()["error"]["param"] == "x-data-residency"
    assert taken.status_code == 201


async def test_a_full_cell_is_a_real_503_with_retry_after(tmp_path: Path) -> None:
    config = cell_config(tmp_path)
    paced = config.models[0].model_copy(
        update={
            "max_running": 1,
            "simulated": config.models[0].simulated.model_copy(update={"full_speed": False, "speed": 0.05}),
        }
    )
    no_queue = config.placement.model_copy(update={"queue_wait_ms": 0.0})
    config = config.model_copy(update={"models": (paced, *config.models[1:]), "placement": no_queue})
    async with local_cell(config) as cell, cell.client() as client:
        body = json.loads(chat(max_tokens=2000, stream=True))
        async with client.stream("POST", CHAT, json=body) as first:
            assert first.status_code == 200
            await anext(first.aiter_bytes())
            second = await client.post(CHAT, json=body)
            assert second.status_code == 503, second.text
            assert second.json()["error"]["code"] == "overloaded"
            assert int(second.headers["retry-after"]) >= 1
        await cell.until_idle()


# --- clients that leave -----------------------------------------------------------------------


async def leave_after(cell: LocalCell, path: str, body: dict[str, Any], pieces: int) -> None:
    """Ask, read some pieces of the answer, and hang up."""
    async with cell.client() as client, client.stream("POST", path, json=body) as answer:
        stream = answer.aiter_bytes()
        for _ in range(pieces):
            await anext(stream)


@pytest.mark.parametrize("pieces", [0, 1, 3])
@pytest.mark.parametrize("kind", ["invoke", "chat"])
async def test_a_client_that_leaves_a_stream_frees_its_unit(
    cell: LocalCell, pipeline_id: str, pieces: int, kind: str
) -> None:
    if kind == "invoke":
        await leave_after(cell, f"/v1/pipelines/{pipeline_id}/invoke", {"input": "x"}, pieces)
    else:
        await leave_after(cell, CHAT, json.loads(chat(stream=True, max_tokens=4000)), pieces)
    await cell.until_idle()


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 21, 34, 55])
async def test_a_client_may_leave_at_any_moment(cell: LocalCell, pipeline_id: str, turns: int) -> None:
    """Between request and status line, too: after some turns of the loop the socket is closed."""
    url = httpx.URL(cell.base_url)
    body = b'{"input": "hello", "stream": false}'
    _reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /v1/pipelines/%b/invoke HTTP/1.1\r\nhost: x\r\nx-api-key: %b\r\ncontent-length: %d\r\n\r\n%b"
        % (pipeline_id.encode(), cell.tenant_key.encode(), len(body), body)
    )
    for _ in range(turns):
        await asyncio.sleep(0)
    writer.close()
    await writer.wait_closed()
    await cell.until_idle()


async def test_a_client_may_leave_in_the_middle_of_its_body(cell: LocalCell, pipeline_id: str) -> None:
    url = httpx.URL(cell.base_url)
    _reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(
        b"POST /v1/pipelines/%b/invoke HTTP/1.1\r\nhost: x\r\nx-api-key: %b\r\ncontent-length: 500\r\n\r\n{"
        % (pipeline_id.encode(), cell.tenant_key.encode())
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    async with cell.client() as client:
        assert (await client.get("/healthz")).status_code == 200
    await cell.until_idle()


async def test_twenty_at_once_are_not_mixed_up(cell: LocalCell, pipeline_id: str) -> None:
    async with cell.client() as client:

        async def ask(index: int) -> tuple[int, str, str]:
            body = {"model": CHAT_MODEL, "messages": HELLO, "max_tokens": 50 + index}
            answer = await client.post(CHAT, json=body)
            tokens = answer.json()["usage"]["completion_tokens"]
            return tokens - 50, answer.json()["id"], answer.headers["x-request-id"]

        answers = await asyncio.gather(*(ask(index) for index in range(20)))
    assert [index for index, _, _ in answers] == list(range(20))
    assert len({told for _, told, _ in answers}) == 20
    assert all(told.removeprefix("chatcmpl-") == header.removeprefix("req_") for _, told, header in answers)
    await cell.until_idle()
