"""Anthropic's Messages API: `/v1/messages` (hot, raw ASGI) and the exact count of a prompt's tokens."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter

from gateway.http.call import Call, InCall, Json
from gateway.http.conversations import pipeline_named, plan_conversation
from gateway.http.documented import body, errors
from gateway.http.errors import ANTHROPIC
from gateway.http.exchange import unless_client_leaves
from gateway.http.messages import CountRequest, MessagesRequest
from gateway.http.runs import WholeRun, failure, region_header, streamed, whole
from gateway.http.shapes.compatible import TokenCount
from gateway.http.shapes.errors import AnthropicErrorEnvelope
from gateway.http.sse import event
from gateway.pipeline.contract import parse
from gateway.pipeline.events import Chunk, Finished, Retrieved, RunEvent, Started, StepDone
from grid.errors import InvalidRequest
from grid.words import FinishReason

PING = event("ping", {"type": "ping"})
"""Also what keeps a silent stream open, as that API's clients expect it."""
BLOCK_START = event(
    "content_block_start",
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
)
BLOCK_STOP = event("content_block_stop", {"type": "content_block_stop", "index": 0})
MESSAGE_STOP = event("message_stop", {"type": "message_stop"})
DELTA_HEAD = (
    b"event: content_block_delta\n"
    b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
)
DELTA_TAIL = b"}}\n\n"
STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}

router = APIRouter(tags=["anthropic-compatible"])


async def create_message(call: Call) -> None:
    """Answer a conversation. `model` is a model, an alias, or a pipeline's id."""
    request = parse(MessagesRequest, await call.body())
    request.check()
    await unless_client_leaves(call.exchange, _answer(call, request))


async def _answer(call: Call, request: MessagesRequest) -> None:
    plan = await plan_conversation(
        call, request.model, request.turns, request.sampling, stream=request.stream
    )
    run = call.services.runner.run(plan, call.story)
    if request.stream:
        await streamed(call, plan, run, MessageEvents(call.request_id, request.model), keep_alive=PING)
    else:
        result = await whole(run)
        payload = message(call.request_id, request.model, result)
        await call.exchange.respond(200, payload, region_header([*result.ends()]))


@router.post(
    "/v1/messages/count_tokens",
    responses={200: {"model": TokenCount}, **errors(404, 504, told=AnthropicErrorEnvelope)},
    openapi_extra=body(CountRequest),
)
async def count_tokens(call: InCall) -> Json:
    """Count the tokens of a conversation exactly as its model's template makes them. Nothing is generated."""
    request = parse(CountRequest, await call.body())
    request.check()
    record = await pipeline_named(call, request.model)
    if record is not None and len(record.contract.pipeline.generations) > 1:
        raise InvalidRequest(
            f"model: what the earlier steps of {request.model} write becomes part of the prompt, so nobody "
            "can count it before they ran; `usage` of an answer says it",
            param="model",
        )
    plan = await plan_conversation(call, request.model, request.turns, {})
    generation = plan.generation
    assert generation is not None
    tokens = await call.services.counter.count(
        call.request_id,
        plan.model,
        generation.messages,
        plan.allowed_regions,
        documents=await call.services.runner.documents(plan) if plan.earlier else (),
        max_output_tokens=generation.sampling.max_output_tokens if plan.earlier else 0,
    )
    return Json(orjson.dumps({"input_tokens": tokens}))


class MessageEvents:
    """Encodes a run as that API's events."""

    def __init__(self, request_id: str, model: str) -> None:
        self._request_id = request_id
        self._model = model

    def __call__(self, item: RunEvent) -> bytes:
        if isinstance(item, Chunk):
            return DELTA_HEAD + orjson.dumps(item.text) + DELTA_TAIL if item.text else b""
        if isinstance(item, Started):
            empty = envelope(self._request_id, self._model, [], None, "", item.input_tokens, 0)
            return event("message_start", {"type": "message_start", "message": empty}) + BLOCK_START + PING
        if isinstance(item, Retrieved | StepDone):
            return b""
        if isinstance(item, Finished):
            delta = {
                "type": "message_delta",
                "delta": {"stop_reason": stop_reason(item), "stop_sequence": item.stop or None},
                "usage": {
                    "input_tokens": item.usage.input_tokens,
                    "output_tokens": item.usage.output_tokens,
                },
            }
            return BLOCK_STOP + event("message_delta", delta) + MESSAGE_STOP
        return event("error", ANTHROPIC.envelope(failure(item), self._request_id))


def message(request_id: str, model: str, result: WholeRun) -> dict[str, Any]:
    _started, finished = result.ends()
    content = [{"type": "text", "text": result.output}] if result.output else []
    used = finished.usage
    return envelope(
        request_id,
        model,
        content,
        stop_reason(finished),
        finished.stop,
        used.input_tokens,
        used.output_tokens,
    )


def envelope(
    request_id: str,
    model: str,
    content: list[dict[str, str]],
    reason: str | None,
    stop_sequence: str,
    input_tokens: int,
    output_tokens: int,
) -> dict[str, Any]:
    """Return a `message`, finished or (with no `reason`) just begun."""
    return {
        "id": f"msg_{request_id.removeprefix('req_')}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop_sequence or None,
        "usage": {"input_tokens": input_tokens, "output_tokens": output_tokens},
    }


def stop_reason(finished: Finished) -> str:
    if finished.stop:
        return "stop_sequence"
    return STOP_REASONS.get(FinishReason(finished.finish_reason), "end_turn")
