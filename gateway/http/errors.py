"""Errors as HTTP: one table from the error tree to statuses, and an envelope for each ecosystem. Nothing here
awaits."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from grid.errors import (
    Cancelled,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    GridError,
    IdempotencyReused,
    InternalError,
    Interrupted,
    InvalidRequest,
    NotFound,
    Overloaded,
    Rejected,
    Saturated,
    TooLarge,
    Unauthorised,
)

logger = logging.getLogger(__name__)

MIN_RETRY_AFTER_S = 1
"""`retry-after` is in whole seconds, and 0 would invite a storm."""
MAX_DRAINED_BYTES = 64 * 1024 * 1024
"""The rest of a refused body is read to nowhere, because many clients only look for an answer once they have
sent it all; of a body declared longer than this, the connection is closed instead."""
INTERNAL_MESSAGE = "the cell failed on this request; its log names the cause under the request id"


class MethodNotAllowed(InvalidRequest):
    """The path exists, for another method; `details["allowed"]` lists those it takes."""

    code = "method_not_allowed"


class RequestTimeout(InvalidRequest):
    """The body did not arrive within its time."""

    code = "request_timeout"
    transient = True


TABLE: dict[type[GridError], tuple[int, str]] = {
    InvalidRequest: (400, "invalid_request_error"),
    Unauthorised: (401, "authentication_error"),
    Forbidden: (403, "permission_error"),
    NotFound: (404, "not_found_error"),
    MethodNotAllowed: (405, "invalid_request_error"),
    RequestTimeout: (408, "timeout_error"),
    Conflict: (409, "conflict_error"),
    TooLarge: (413, "request_too_large"),
    IdempotencyReused: (422, "invalid_request_error"),
    Saturated: (429, "rate_limit_error"),
    Overloaded: (503, "unavailable_error"),
    Cancelled: (499, "cancelled_error"),
    InternalError: (500, "api_error"),
    GridError: (500, "api_error"),
    Rejected: (503, "unavailable_error"),
    Interrupted: (503, "unavailable_error"),
    DeadlineExceeded: (504, "timeout_error"),
}
"""Status and type of each error; a class that isn't listed is its nearest listed base."""


def status_of(error: GridError) -> tuple[int, str]:
    """Return (HTTP status, `error.type`)."""
    for kind in type(error).__mro__:
        if kind in TABLE:
            return TABLE[kind]
    raise AssertionError("every GridError has GridError itself in the table")


def envelope(error: GridError, request_id: str) -> dict[str, Any]:
    """Return the grid's own envelope."""
    return {
        "error": {
            "type": status_of(error)[1],
            "code": error.code,
            "message": error.message,
            "param": error.param or None,
            "retryable": error.retryable,
            "details": error.details,
        },
        "request_id": request_id,
    }


THEIR_LIMIT = "max_tokens"
"""Both compatible ecosystems' name for what the grid calls OUR_LIMIT."""
OUR_LIMIT = "max_output_tokens"


def openai_envelope(error: GridError, request_id: str) -> dict[str, Any]:
    """Return the envelope that OpenAI's clients read; the request id travels in its header."""
    del request_id
    status, kind = status_of(error)
    if status in (404, 409, 413):
        kind = "invalid_request_error"
    return {
        "error": {
            "message": error.message.replace(OUR_LIMIT, THEIR_LIMIT),
            "type": kind,
            "param": THEIR_LIMIT if error.param == OUR_LIMIT else error.param or None,
            "code": "model_not_found" if status == 404 and error.param == "model" else error.code,
        }
    }


ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Type by status; everything else is `invalid_request_error`."""
OVERLOADED = 529


def anthropic_status(error: GridError) -> int:
    """Return the status that Anthropic's clients know: a cell that can't take the work now is overloaded."""
    status, _ = status_of(error)
    return OVERLOADED if status == 503 else status


def anthropic_envelope(error: GridError, request_id: str) -> dict[str, Any]:
    """Return the envelope that Anthropic's clients read."""
    kind = ANTHROPIC_TYPES.get(anthropic_status(error), "invalid_request_error")
    message = error.message.replace(OUR_LIMIT, THEIR_LIMIT)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


class Ecosystem(NamedTuple):
    """How the clients of one family of routes are told of an error: its status, and its body, which is also
    that of an error in the middle of a stream."""

    status: Callable[[GridError], int]
    envelope: Callable[[GridError, str], dict[str, Any]]


def _status(error: GridError) -> int:
    return status_of(error)[0]


GRID = Ecosystem(_status, envelope)
OPENAI = Ecosystem(_status, openai_envelope)
ANTHROPIC = Ecosystem(anthropic_status, anthropic_envelope)
COMPATIBLE = {
    "/v1/chat/": OPENAI,
    "/v1/embeddings": OPENAI,
    "/v1/models": OPENAI,
    "/v1/messages": ANTHROPIC,
}
"""By the beginning of a path; every other route is the grid's own."""


def ecosystem_at(path: str) -> Ecosystem:
    """Return whose clients call `path`."""
    return next((found for prefix, found in COMPATIBLE.items() if path.startswith(prefix)), GRID)


def error_headers(error: GridError) -> list[tuple[bytes, bytes]]:
    """Return the headers that a refusal carries beside its envelope."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s > 0 or isinstance(error, Saturated):
        seconds = max(MIN_RETRY_AFTER_S, math.ceil(error.retry_after_s))
        headers.append((b"retry-after", b"%d" % seconds))
    if isinstance(error, Unauthorised):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, RequestTimeout):
        headers.append((b"connection", b"close"))
    if isinstance(error, TooLarge) and error.details.get("body_bytes", 0) > MAX_DRAINED_BYTES:
        headers.append((b"connection", b"close"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.details["allowed"]).encode()))
    return headers


def unexpected(error: Exception, request_id: str) -> InternalError:
    """Log a bug and return what its caller is told.

    Only the exception's type and code lines are logged: messages of parsers and validators quote their
    input, which may be a prompt.
    """
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("request %s failed with %s\n%s", request_id, type(error).__name__, frames)
    return InternalError(INTERNAL_MESSAGE)
