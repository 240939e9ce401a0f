"""How a run is shown on the grid's own routes: as events, and whole. Handlers choose; nothing here awaits."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.http.errors import Ecosystem
from gateway.http.runs import WholeRun, failure, usage
from gateway.http.sse import event
from gateway.pipeline.events import (
    Chunk,
    Finished,
    Retrieved,
    RunEvent,
    Started,
    StepDone,
    StepPlacement,
    StepTiming,
)
from gateway.records import RetrievedDocument


class GridEvents:
    """Encodes a run as the grid's own events; `number` says which of a call's inputs it answers."""

    def __init__(self, request_id: str, ecosystem: Ecosystem, number: int | None = None) -> None:
        self._request_id = request_id
        self._ecosystem = ecosystem
        self._given: dict[str, Any] = {} if number is None else {"input": number}
        self._token = b"event: token\ndata: {" + (b"" if number is None else b'"input":%d,' % number)

    def __call__(self, item: RunEvent) -> bytes:
        if isinstance(item, Chunk):
            return b'%b"index":%d,"text":%b,"tokens":%d}\n\n' % (
                self._token,
                item.index,
                orjson.dumps(item.text),
                item.tokens,
            )
        if isinstance(item, Started):
            return self._event("start", start_view(item))
        if isinstance(item, Retrieved):
            return self._event("retrieval", retrieval_view(item))
        if isinstance(item, StepDone):
            return self._event("step", step_view(item))
        if isinstance(item, Finished):
            moves = sum(placed.moves for placed in item.placement)
            return self._event("done", {**finished_view(item), "moves": moves})
        return self._event("error", self._ecosystem.envelope(failure(item), self._request_id))

    def _event(self, name: str, payload: dict[str, Any]) -> bytes:
        return event(name, {**self._given, **payload})


def whole_answer(result: WholeRun) -> dict[str, Any]:
    started, finished = result.ends()
    return {
        "request_id": started.request_id,
        "pipeline_id": started.pipeline_id,
        "revision": started.revision,
        "model": started.model,
        "output": result.output,
        "retrieval": [retrieval_view(item) for item in result.retrieved],
        "earlier": [step_view(item) for item in result.earlier],
        **finished_view(finished),
        "warnings": started.warnings,
    }


def start_view(item: Started) -> dict[str, Any]:
    return {
        "request_id": item.request_id,
        "pipeline_id": item.pipeline_id,
        "revision": item.revision,
        "model": item.model,
        "steps": item.steps,
        "input_tokens": item.input_tokens,
        "region": item.region,
        "warnings": item.warnings,
    }


def retrieval_view(item: Retrieved) -> dict[str, Any]:
    return {
        "step_id": item.step_id,
        "documents": [document_view(document) for document in item.documents],
        "dropped": item.dropped,
    }


def step_view(item: StepDone) -> dict[str, Any]:
    return {"step_id": item.step_id, "output": item.output, "finish_reason": item.finish_reason}


def document_view(document: RetrievedDocument) -> dict[str, Any]:
    return {
        "id": document.document_id,
        "text": document.text,
        "score": round(document.score, 6),
        "metadata": document.metadata,
    }


def finished_view(item: Finished) -> dict[str, Any]:
    return {
        "finish_reason": item.finish_reason,
        "usage": usage(item.usage),
        "ttft_ms": round(item.ttft_ms, 3),
        "total_ms": round(item.total_ms, 3),
        "timing": [timing_view(step) for step in item.timing],
        "placement": [placement_view(step) for step in item.placement],
        "exact": item.exact,
    }


def timing_view(step: StepTiming) -> dict[str, Any]:
    return {
        "step_id": step.step_id,
        "type": step.type,
        "total_ms": round(step.total_ms, 3),
        "placement_ms": round(step.placement_ms, 3),
        "embed_ms": round(step.embed_ms, 3),
        "search_ms": round(step.search_ms, 3),
        "queue_ms": round(step.queue_ms, 3),
        "prefill_ms": round(step.prefill_ms, 3),
        "decode_ms": round(step.decode_ms, 3),
        "usage": usage(step.usage),
    }


def placement_view(step: StepPlacement) -> dict[str, Any]:
    return {
        "step_id": step.step_id,
        "unit_id": step.unit_id,
        "model": step.model,
        "region": step.region,
        "gpu_type": step.gpu_type,
        "simulated": step.simulated,
        "predicted_ttft_ms": round(step.predicted_ttft_ms, 3),
        "why": step.why,
        "moves": step.moves,
    }
