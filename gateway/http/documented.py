"""What routes say of themselves for the API document: bodies that the contract parses, and refusals."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from gateway.http.shapes.errors import ErrorEnvelope

STATUSES = {
    400: "the request is wrong; `param` names the field",
    401: "no key, or a wrong one",
    403: "residency or policy forbids it",
    404: "unknown id",
    408: "the body did not arrive in time",
    409: "the state of a resource forbids it",
    413: "the body is larger than the cell takes",
    422: "the idempotency key was used with another body",
    429: "the caller's own requests fill its share of the cell; `retry-after` says when to come back",
    500: "the cell failed on this request; its log names the cause under the request id",
    503: "no eligible unit now, or all are full; the message says what would have to change",
    504: "the deadline passed",
    529: "the cell can't take the work now; `retry-after`, where it is there, says when to come back",
}
REF = "#/components/schemas/{model}"


def body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the `requestBody` of a route whose handler parses `model` itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": ref(model)}}}}


def errors(*statuses: int, told: type[BaseModel] = ErrorEnvelope) -> dict[int | str, dict[str, Any]]:
    """Return the documented refusals of a route. What any route may answer, `api_document` adds."""
    return {status: {"model": told, "description": STATUSES[status]} for status in statuses}


def ref(model: type[BaseModel]) -> dict[str, str]:
    """Return the reference to `model` in the document."""
    return {"$ref": REF.format(model=model.__name__)}
