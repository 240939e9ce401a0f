"""What a gateway answers, for tests of the client and the command line."""

import json
from typing import Any

import httpx

PLACED = {
    "step_id": "generation-2",
    "unit_id": "unit-m-0",
    "model": "m",
    "region": "local",
    "gpu_type": "CPU",
    "simulated": True,
    "predicted_ttft_ms": 12.5,
    "why": "the only unit",
    "moves": 0,
}
FINISH = {
    "finish_reason": "stop",
    "usage": {"input_tokens": 7, "cached_tokens": 1, "output_tokens": 2, "cu_seconds": 0.5},
    "ttft_ms": 10.0,
    "total_ms": 30.0,
    "timing": [{"step_id": "generation-2", "type": "generation", "total_ms": 30.0, "prefill_ms": 9.0}],
    "placement": [PLACED],
    "exact": True,
}
START = {
    "request_id": "req_1",
    "pipeline_id": "pl-1",
    "revision": 1,
    "model": "m",
    "steps": ["retrieval-1", "generation-2"],
    "input_tokens": 7,
    "warnings": ["no cache here"],
    "a_field_of_tomorrow": 1,
}
RETRIEVAL = {
    "step_id": "retrieval-1",
    "documents": [{"id": "d1", "text": "t", "score": 0.5, "metadata": {"status": "published"}}],
    "dropped": 1,
}
STEP = {"step_id": "draft", "output": "A draft", "finish_reason": "stop"}
LISTED = {
    "pipeline_id": "pl-1",
    "name": "support",
    "revision": 1,
    "serving_revision": 1,
    "status": "active",
    "reason": None,
    "created_at": "2025-01-01T00:00:00Z",
}


def sse(*events: tuple[str, dict[str, Any]]) -> bytes:
    return b"".join(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode() for name, data in events)


def refusal(status: int, code: str, headers: dict[str, str] | None = None, **details: Any) -> httpx.Response:
    envelope = {"type": "x", "code": code, "message": f"it is {code}", "param": None, "retryable": True}
    return httpx.Response(
        status, json={"error": {**envelope, "details": details}, "request_id": "req_9"}, headers=headers
    )
