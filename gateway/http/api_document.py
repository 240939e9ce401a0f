"""The OpenAPI document: what FastAPI knows of the cold routes, the hot ones beside it, and what every route
has in common: how a caller names itself, the headers of every response, the refusals that any call may meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.http.chat import ChatRequest
from gateway.http.data_sources import NewDataSource, NewDocuments
from gateway.http.documented import REF, STATUSES, body, ref
from gateway.http.embeddings import EmbeddingsRequest
from gateway.http.errors import ANTHROPIC, GRID, OPENAI, OVERLOADED, Ecosystem, ecosystem_at
from gateway.http.exchange import MAX_CLIENT_ID_CHARS
from gateway.http.messages import CountRequest, MessagesRequest
from gateway.http.operations import DrainOrder, NewKey
from gateway.http.shapes.compatible import ChatCompletion, Embeddings, MessageAnswer
from gateway.http.shapes.errors import AnthropicErrorEnvelope, ErrorEnvelope, OpenAIErrorEnvelope
from gateway.http.shapes.pipelines import OneShotAnswer
from gateway.http.shapes.runs import (
    DoneEvent,
    EndEvent,
    RetrievalView,
    RunAnswer,
    StartEvent,
    StepEvent,
    TokenEvent,
)
from gateway.http.versions import (
    ALIAS,
    CURRENT,
    HEADER,
    MESSAGES_API,
    MESSAGES_CLIENTS,
    MESSAGES_PREFIX,
    VERSIONS,
)
from gateway.pipeline.contract import Contract
from gateway.pipeline.invocation import Invocation, OneShot

DESCRIPTION = """\
Declare an AI pipeline as data and call it. Send your key as `x-api-key` or `Authorization: Bearer`.

Every response carries `x-request-id`. Errors are `{"error": {type, code, message, param, retryable, details},
"request_id"}`; the compatible routes answer with their own ecosystem's envelope. `grid-version` names the
version of this interface that a caller is written for.
"""
EVENTS = """\
Server-sent events in order: `start` (StartEvent), `retrieval` (RetrievalView) for each retrieval step, `step`
(StepEvent) for each generation step before the answer, `token` (TokenEvent) as the answer's text comes,
then one `done` (DoneEvent) or `error` (ErrorEnvelope). Comment lines keep idle connections alive.
With `inputs` every event has an `input` number, each input its own `done` or `error`, and `end` (EndEvent)
comes last.
"""
SSE = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
"""Of one event; what `data` holds as JSON is told in words."""
CHAT_EVENTS = """\
`data:` frames with `chat.completion.chunk` objects, then `data: [DONE]`. With `stream_options.include_usage`
the last chunk has empty `choices` and the `usage`. A failure is a frame with `error`, and no `[DONE]`.
"""
MESSAGE_EVENTS = """\
Server-sent events as Anthropic's clients know them: `message_start` with the prompt's tokens,
`content_block_start`, `ping`, `content_block_delta` as text comes, `content_block_stop`, `message_delta` with
the stop reason and usage, `message_stop`; or `error` (AnthropicErrorEnvelope), which ends the stream.
"""
PARSED: tuple[type[BaseModel], ...] = (
    Contract,
    Invocation,
    OneShot,
    ChatRequest,
    EmbeddingsRequest,
    MessagesRequest,
    CountRequest,
    NewDataSource,
    NewDocuments,
    NewKey,
    DrainOrder,
)
ANSWERED: tuple[type[BaseModel], ...] = (
    ErrorEnvelope,
    OpenAIErrorEnvelope,
    AnthropicErrorEnvelope,
    RunAnswer,
    OneShotAnswer,
    EndEvent,
    ChatCompletion,
    Embeddings,
    MessageAnswer,
    StartEvent,
    RetrievalView,
    StepEvent,
    TokenEvent,
    DoneEvent,
)
TOLD: dict[Ecosystem, type[BaseModel]] = {
    GRID: ErrorEnvelope,
    OPENAI: OpenAIErrorEnvelope,
    ANTHROPIC: AnthropicErrorEnvelope,
}
ANY = (400, 401, 403, 500, 503)
"""A header that can't be taken, the key, residency, a fault of the cell, a store or gateway that is away."""
WITH_BODY = (408, 413)
RUNNING = (404, 429, 504)
"""What routes that run something may answer as well."""
CREATES = (
    ("post", "/v1/pipelines"),
    ("put", "/v1/pipelines/{pipeline_id}"),
    ("post", "/v1/data-sources"),
)
"""They take `idempotency-key`."""


@dataclass(frozen=True, slots=True)
class HotRoute:
    path: str
    tag: str
    summary: str
    description: str
    request: type[BaseModel]
    answer: type[BaseModel]
    events: str = ""
    """What its stream holds; "" where it has none."""


HOT = (
    HotRoute(
        "/v1/pipelines/{pipeline_id}/invoke",
        "pipelines",
        "Run a pipeline",
        "SSE unless `stream` is false, or the caller accepts only `application/json`.",
        Invocation,
        RunAnswer,
        EVENTS,
    ),
    HotRoute(
        "/v1/pipeline",
        "pipelines",
        "Run a contract once",
        "A contract and its input in one body; nothing is stored. Without input: what it would do "
        "(PlanView); nothing is computed, reserved or charged.",
        OneShot,
        OneShotAnswer,
        EVENTS,
    ),
    HotRoute(
        "/v1/chat/completions",
        "openai-compatible",
        "Answer a conversation",
        "`model` is a model of the cell, an alias, or a pipeline's id.",
        ChatRequest,
        ChatCompletion,
        CHAT_EVENTS,
    ),
    HotRoute(
        "/v1/embeddings",
        "openai-compatible",
        "Return the vectors of texts",
        "`model` is an embedding model of the cell, or an alias of one.",
        EmbeddingsRequest,
        Embeddings,
    ),
    HotRoute(
        MESSAGES_PREFIX,
        "anthropic-compatible",
        "Answer a conversation",
        "`model` is a model of the cell, an alias, or a pipeline's id.",
        MessagesRequest,
        MessageAnswer,
        MESSAGE_EVENTS,
    ),
)


def document(app: FastAPI, version: str) -> dict[str, Any]:
    """Return the whole document: the cold routes of `app`, the hot ones, and every schema they name."""
    found = get_openapi(title="Zerogrid", version=version, description=DESCRIPTION, routes=app.routes)
    for route in HOT:
        found["paths"][route.path] = {"post": _hot(route)}
    for path, method, operation in _operations(found["paths"]):
        _complete(path, method, operation)
    components = found.setdefault("components", {})
    inputs = models_json_schema([(model, "validation") for model in PARSED], ref_template=REF)[1]["$defs"]
    answers = models_json_schema([(model, "serialization") for model in ANSWERED], ref_template=REF)[1][
        "$defs"
    ]
    components["schemas"] = {**answers, **inputs, **components.get("schemas", {})}
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    components["parameters"] = PARAMETERS
    components["headers"] = HEADERS
    components["securitySchemes"] = {
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        "bearer": {"type": "http", "scheme": "bearer"},
    }
    found["security"] = [{"key": []}, {"bearer": []}]
    return found


PARAMETERS: dict[str, Any] = {
    "version": {
        "name": HEADER,
        "in": "header",
        "schema": {"type": "string", "enum": [CURRENT], "default": CURRENT},
        "description": f"What the caller is written for; `{ALIAS}` is an alias. This document is of "
        f"{CURRENT}; an older one is served as well: {', '.join(VERSIONS[:-1])}.",
    },
    "messagesVersion": {
        "name": ALIAS,
        "in": "header",
        "schema": {"type": "string", "enum": list(MESSAGES_API)},
        "description": "The version of Anthropic's Messages API.",
    },
    "residency": {
        "name": "x-data-residency",
        "in": "header",
        "schema": {"type": "string", "minLength": 1},
        "description": "Narrows where the request may run: `EU`, `EEA`, a country, or a list of regions.",
    },
    "clientRequestId": {
        "name": "x-client-request-id",
        "in": "header",
        "schema": {"type": "string", "maxLength": MAX_CLIENT_ID_CHARS},
        "description": "The caller's own id of the call; it comes back.",
    },
    "idempotencyKey": {
        "name": "idempotency-key",
        "in": "header",
        "schema": {"type": "string"},
        "description": "Repeated with the same body it returns what the first call made, as it is now.",
    },
}
HEADERS: dict[str, Any] = {
    "requestId": {"schema": {"type": "string"}, "description": "The grid's id of the call, `req_…`."},
    "versionServed": {
        "schema": {"type": "string", "enum": [CURRENT]},
        "description": "The version that answered.",
    },
    "deprecation": {
        "schema": {"type": "string"},
        "description": "Since when the version that answered is an older one (RFC 9745).",
    },
    "region": {"schema": {"type": "string"}, "description": "Where the answer was made."},
    "retryAfter": {"schema": {"type": "integer", "minimum": 1}, "description": "Whole seconds."},
}


def _operations(paths: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            yield path, method, operation


def _complete(path: str, method: str, operation: dict[str, Any]) -> None:
    """Add what an operation has because every one has it."""
    responses = operation["responses"]
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]  # FastAPI's own; ours is a 400 in the envelope
    headers = {"x-request-id": {"$ref": "#/components/headers/requestId"}}
    if operation.get("security") != []:
        headers["grid-version-served"] = {"$ref": "#/components/headers/versionServed"}
        headers["deprecation"] = {"$ref": "#/components/headers/deprecation"}
        operation.setdefault("parameters", []).extend(_parameters(path, method))
        ecosystem = ecosystem_at(path)
        for status in (*ANY, *(WITH_BODY if "requestBody" in operation else ())):
            shown = OVERLOADED if ecosystem is ANTHROPIC and status == 503 else status
            responses.setdefault(str(shown), _refusal(shown, TOLD[ecosystem]))
    for status, response in responses.items():
        own = {"retry-after": {"$ref": "#/components/headers/retryAfter"}}
        known = own if status in ("429", "503", "529") else {}
        response["headers"] = {**headers, **known, **response.get("headers", {})}
        if method == "head":
            response.pop("content", None)
    operation["responses"] = dict(sorted(responses.items()))


def _parameters(path: str, method: str) -> list[dict[str, str]]:
    names = ["version", "residency", "clientRequestId"]
    if path.startswith(MESSAGES_CLIENTS):
        names.append("messagesVersion")
    if (method, path) in CREATES:
        names.append("idempotencyKey")
    return [{"$ref": f"#/components/parameters/{name}"} for name in names]


def _refusal(status: int, told: type[BaseModel]) -> dict[str, Any]:
    return {"description": STATUSES[status], "content": {"application/json": {"schema": ref(told)}}}


def _hot(route: HotRoute) -> dict[str, Any]:
    ecosystem = ecosystem_at(route.path)
    content: dict[str, Any] = {"application/json": {"schema": ref(route.answer)}}
    if route.events:
        content["text/event-stream"] = {"schema": SSE}
    statuses = [OVERLOADED if ecosystem is ANTHROPIC and status == 429 else status for status in RUNNING]
    named = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    return {
        "tags": [route.tag],
        "summary": route.summary,
        "description": route.description,
        "operationId": route.summary.lower().replace(" ", "_") + "_" + route.tag.split("-")[0],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named
        ],
        **body(route.request),
        "responses": {
            "200": {"description": route.events or "The answer.", "content": content},
            **{str(status): _refusal(status, TOLD[ecosystem]) for status in statuses},
        },
    }
