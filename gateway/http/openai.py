"""OpenAI-compatible routes: chat completions (hot, raw ASGI) and the list of models."""

from __future__ import annotations

import time
from typing import Any

import orjson
from fastapi import APIRouter

from gateway.http.call import Call, InCall, Json
from gateway.http.chat import ChatRequest
from gateway.http.conversations import plan_conversation
from gateway.http.documented import errors
from gateway.http.errors import ANTHROPIC, openai_envelope
from gateway.http.exchange import unless_client_leaves
from gateway.http.runs import WholeRun, failure, region_header, streamed, whole
from gateway.http.shapes.compatible import ModelList, ModelView
from gateway.http.sse import data
from gateway.http.versions import ALIAS, MESSAGES_API
from gateway.pipeline.contract import parse
from gateway.pipeline.events import Chunk, Finished, Retrieved, RunEvent, Started, StepDone
from gateway.pipeline.refusals import cut
from grid.errors import NotFound
from grid.words import Task, UnitState, Usage

DONE = b"data: [DONE]\n\n"
NO_DATE = "1970-01-01T00:00:00Z"
"""When a model was released, which nobody tells the grid."""
NO_TEXT: dict[str, Any] = {}

router = APIRouter(tags=["openai-compatible"])


async def chat_completions(call: Call) -> None:
    """Answer a conversation. `model` is a model, an alias, or a pipeline's id."""
    request = parse(ChatRequest, await call.body())
    request.check()
    await unless_client_leaves(call.exchange, _answer(call, request))


async def _answer(call: Call, request: ChatRequest) -> None:
    messages = tuple(turn.message for turn in request.messages)
    plan = await plan_conversation(call, request.model, messages, request.sampling, stream=request.stream)
    run = call.services.runner.run(plan, call.story)
    created = int(time.time())
    if request.stream:
        chunks = ChatChunks(call.request_id, request, created)
        await streamed(call, plan, run, chunks, last=chunks.last)
    else:
        result = await whole(run)
        payload = completion(call.request_id, request, created, result)
        await call.exchange.respond(200, payload, region_header([*result.ends()]))


class ChatChunks:
    """Encodes a run as `chat.completion.chunk`s. What stays the same in a response is encoded once."""

    last = DONE

    def __init__(self, request_id: str, request: ChatRequest, created: int) -> None:
        self._request_id = request_id
        self._usage = request.include_usage
        frame: dict[str, Any] = {
            "id": completion_id(request_id),
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
            "system_fingerprint": None,
        }
        self._frame = frame
        empty = {"usage": None} if self._usage else {}
        whole_frame = orjson.dumps({**frame, **empty, "choices": [_choice({"content": ""}, None)]})
        head, tail = whole_frame.split(b'"content":""')
        self._head = b"data: " + head + b'"content":'
        self._tail = tail + b"\n\n"

    def __call__(self, item: RunEvent) -> bytes:
        if isinstance(item, Chunk):
            return self._head + orjson.dumps(item.text) + self._tail
        if isinstance(item, Started):
            return self._chunk({"role": "assistant", "content": ""}, None)
        if isinstance(item, Retrieved | StepDone):
            return b""
        if isinstance(item, Finished):
            end = self._chunk(NO_TEXT, item.finish_reason)
            if self._usage:
                end += data({**self._frame, "choices": [], "usage": chat_usage(item.usage)})
            return end
        return data(openai_envelope(failure(item), self._request_id))

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None) -> bytes:
        empty = {"usage": None} if self._usage else {}
        return data({**self._frame, **empty, "choices": [_choice(delta, finish_reason)]})


def completion(request_id: str, request: ChatRequest, created: int, result: WholeRun) -> dict[str, Any]:
    _started, finished = result.ends()
    return {
        "id": completion_id(request_id),
        "object": "chat.completion",
        "created": created,
        "model": request.model,
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": result.output, "refusal": None},
                "logprobs": None,
                "finish_reason": finished.finish_reason,
            }
        ],
        "usage": chat_usage(finished.usage),
    }


def completion_id(request_id: str) -> str:
    return f"chatcmpl-{request_id.removeprefix('req_')}"


def chat_usage(used: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": used.input_tokens,
        "completion_tokens": used.output_tokens,
        "total_tokens": used.input_tokens + used.output_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
    }


def _choice(delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


@router.get("/v1/models", responses={200: {"model": ModelList}, **errors()})
async def list_models(call: InCall) -> Json:
    """List the cell's models and aliases, with the units that serve each: all at once, in a shape that
    OpenAI's and Anthropic's clients both read."""
    rows = model_rows(call)
    ends = [rows[0]["id"], rows[-1]["id"]] if rows else [None, None]
    page = {"object": "list", "data": rows, "has_more": False, "first_id": ends[0], "last_id": ends[1]}
    return Json(orjson.dumps(page))


@router.get("/v1/models/{model_id:path}", responses={200: {"model": ModelView}, **errors(404)})
async def read_model(call: InCall, model_id: str) -> Json:
    """Read one model or alias, as both ecosystems' clients expect it."""
    row = next((row for row in model_rows(call) if row["id"] == model_id), None)
    if row is not None:
        return Json(orjson.dumps(row))
    if call.exchange.header(ALIAS.encode()) in MESSAGES_API:
        call.exchange.ecosystem = ANTHROPIC
    raise NotFound(
        f"model {cut(model_id)!r} is not served here; GET /v1/models lists those that are", param="model"
    )


def model_rows(call: Call) -> list[dict[str, Any]]:
    config = call.services.config
    ready: dict[str, int] = {}
    for unit in call.services.placement.fleet.units:
        if unit.load.state == UnitState.READY:
            ready[unit.card.model] = ready.get(unit.card.model, 0) + 1
    rows = {
        model.name: {
            "id": model.name,
            "object": "model",
            "type": "model",
            "display_name": model.name,
            "created": 0,
            "created_at": NO_DATE,
            "owned_by": config.cell.name,
            "task": (Task.EMBED if model.engine == "embedding" else Task.GENERATE).name.lower(),
            "alias_of": None,
            "context_tokens": model.context_tokens,
            "simulated": model.engine == "simulated",
            "units": ready.get(model.name, 0),
        }
        for model in config.models
    }
    aliases = []
    for alias, target in sorted(config.aliases.items()):
        if target.model in rows:
            shown = {"id": alias, "display_name": alias, "alias_of": target.model}
            aliases.append({**rows[target.model], **shown})
    return [*rows.values(), *aliases]
