"""The OpenAPI document: what FastAPI knows of the cold routes, and the hot ones beside it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.http import shapes
from gateway.http.chat import ChatRequest
from gateway.http.data_sources import NewDataSource, NewDocuments
from gateway.http.documented import REF, STATUSES, body, ref
from gateway.http.operations import NewKey
from gateway.pipeline.contract import Contract, Invocation, OneShot

DESCRIPTION = """\
Declare an AI pipeline as data and call it. Send your key as `x-api-key` or `Authorization: Bearer`.

Every response carries `x-request-id`. Errors are `{"error": {type, code, message, param, retryable},
"request_id"}`; the OpenAI-compatible routes answer with that ecosystem's envelope.
"""
EVENTS = """\
Server-sent events in order: `start` (StartEvent), `retrieval` (RetrievalView) for each retrieval step, `step`
(StepEvent) for each generation step before the answer, `token` (TokenEvent) as the answer's text comes,
then one `done` (DoneEvent) or `error` (ErrorEnvelope). Comment lines keep idle connections alive.
"""
CHAT_EVENTS = """\
`data:` frames with `chat.completion.chunk` objects, then `data: [DONE]`. With `stream_options.include_usage`
the last chunk has empty `choices` and the `usage`. A failure is a frame with `error`, and no `[DONE]`.
"""
PARSED: tuple[type[BaseModel], ...] = (
    Contract,
    Invocation,
    OneShot,
    ChatRequest,
    NewDataSource,
    NewDocuments,
    NewKey,
)
ANSWERED: tuple[type[BaseModel], ...] = (
    shapes.ErrorEnvelope,
    shapes.OpenAIErrorEnvelope,
    shapes.InvokeAnswer,
    shapes.OneShotAnswer,
    shapes.ChatCompletion,
    shapes.StartEvent,
    shapes.RetrievalView,
    shapes.StepEvent,
    shapes.TokenEvent,
    shapes.DoneEvent,
)
HOT_REFUSALS = (400, 401, 403, 404, 413, 429, 503, 504)


def document(app: FastAPI, version: str) -> dict[str, Any]:
    """Return the whole document: the cold routes of `app`, the hot ones, and every schema they name."""
    found = get_openapi(title="Zerogrid", version=version, description=DESCRIPTION, routes=app.routes)
    found["paths"].update(_hot_paths())
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    inputs = models_json_schema([(model, "validation") for model in PARSED], ref_template=REF)[1]["$defs"]
    answers = models_json_schema([(model, "serialization") for model in ANSWERED], ref_template=REF)[1][
        "$defs"
    ]
    found["components"]["schemas"] = {**answers, **inputs, **schemas}
    found["components"]["securitySchemes"] = {
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        "bearer": {"type": "http", "scheme": "bearer"},
    }
    found["security"] = [{"key": []}, {"bearer": []}]
    return found


def _hot_paths() -> dict[str, Any]:
    return {
        "/v1/pipelines/{pipeline_id}/invoke": {
            "post": _hot(
                "pipelines",
                "Run a pipeline",
                "SSE unless `stream` is false, or the caller accepts only `application/json`.",
                Invocation,
                shapes.InvokeAnswer,
                EVENTS,
                shapes.ErrorEnvelope,
                [{"name": "pipeline_id", "in": "path", "required": True, "schema": {"type": "string"}}],
            )
        },
        "/v1/pipeline": {
            "post": _hot(
                "pipelines",
                "Run a contract once",
                "A contract and its input in one body; nothing is stored. Without input: what it would do "
                "(PlanView), without computing, reserving or charging anything.",
                OneShot,
                shapes.OneShotAnswer,
                EVENTS,
                shapes.ErrorEnvelope,
                [],
            )
        },
        "/v1/chat/completions": {
            "post": _hot(
                "openai-compatible",
                "Answer a conversation",
                "`model` is a model of the cell, an alias, or a pipeline's id.",
                ChatRequest,
                shapes.ChatCompletion,
                CHAT_EVENTS,
                shapes.OpenAIErrorEnvelope,
                [],
            )
        },
    }


def _hot(
    tag: str,
    summary: str,
    description: str,
    request: type[BaseModel],
    answer: type[BaseModel],
    events: str,
    refusal: type[BaseModel],
    parameters: list[dict[str, Any]],
) -> dict[str, Any]:
    refusals = {
        str(status): {
            "description": STATUSES[status],
            "content": {"application/json": {"schema": ref(refusal)}},
        }
        for status in HOT_REFUSALS
    }
    residency = {
        "name": "x-data-residency",
        "in": "header",
        "required": False,
        "schema": {"type": "string"},
        "description": "narrows where the request may run",
    }
    return {
        "tags": [tag],
        "summary": summary,
        "description": description,
        "parameters": [*parameters, residency],
        **body(request),
        "responses": {
            "200": {
                "description": events,
                "content": {
                    "application/json": {"schema": ref(answer)},
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            },
            **refusals,
        },
    }
