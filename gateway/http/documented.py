"""What routes say of themselves for the API document: bodies that the contract parses, and refusals."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from gateway.http import shapes

STATUSES = {
    400: "the request is wrong; `param` names the field",
    401: "no key, or a wrong one",
    403: "residency or policy forbids it",
    404: "unknown id",
    409: "the state of a resource forbids it",
    413: "the body is larger than the cell takes",
    422: "the idempotency key was used with another body",
    429: "queues are full; `retry-after` says when to come back",
    503: "no eligible unit now; the message says what would have to change",
    504: "the deadline passed",
}
REF = "#/components/schemas/{model}"


def body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the `requestBody` of a route whose handler parses `model` itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": ref(model)}}}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the documented refusals of a route, 401 among them."""
    return {
        status: {"model": shapes.ErrorEnvelope, "description": STATUSES[status]}
        for status in sorted({401, *statuses})
    }


def ref(model: type[BaseModel]) -> dict[str, str]:
    """Return the reference to `model` in the document."""
    return {"$ref": REF.format(model=model.__name__)}
