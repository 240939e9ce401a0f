"""One HTTP call of the client: what is sent, what an error answer means, when to try again. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grid.errors import ERRORS, GridError, InternalError, InvalidRequest, revive

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where `grid up` has a cell's gateway listen unless it is told otherwise."""
FIRST_RETRY_S = 0.1
RETRY_GROWTH = 1.5
MAX_RETRIES = 5
"""1.3 s of waiting in all: enough for a replica that restarts, short enough for a person who waits."""
LONGEST_RETRY_S = 60.0
"""A gateway that says to come back later than this is believed, and the error handed to the caller."""
RETRIED_STATUSES = frozenset({429, 502, 503})
"""Refused before any work began. A deadline (504) is not: it would cost the whole wait again."""
DOCUMENTS_PER_BATCH = 16
"""Keeps a batch well under the body cap and its embedding to about a second, so that progress moves."""


class Unreachable(GridError):
    """No gateway answered at the address, or the connection broke before an answer."""

    code = "unreachable"
    transient = True


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request, ready to be sent."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    answers: tuple[int, ...] = ()
    """Statuses besides success that are an answer, not an error."""


def error_of(status: int, body: object, headers: Mapping[str, str] | None = None) -> GridError:
    """Return the error that an envelope names. Its details hold the `status` and the `request_id`."""
    headers = headers or {}
    envelope = body.get("error") if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(envelope, dict):
        return InternalError(
            f"the server answered {status} without an error of the grid's; is this a gateway?", status=status
        )
    code = str(envelope.get("code", ""))
    if code not in ERRORS and 400 <= status < 500:
        code = InvalidRequest.code  # a newer gateway's code: still the caller's to mend
    return revive(
        code,
        str(envelope.get("message", "")),
        param=envelope.get("param") or "",
        retry_after_s=_retry_after_s(headers),
        details={
            **(details if isinstance(details := envelope.get("details"), dict) else {}),
            "status": status,
            "request_id": body.get("request_id") or headers.get("x-request-id", ""),
        },
    )


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return max(0.0, float(headers.get("retry-after", "0")))
    except ValueError:
        return 0.0


def retry_wait_s(retries: int, error: GridError, max_retries: int = MAX_RETRIES) -> float | None:
    """Return how long to wait before the next try, after `retries` of them; None: hand the error on.

    100 ms, growing by 1.5, or longer where the gateway says so. Only for what never began.
    """
    refused = error.details.get("status") in RETRIED_STATUSES and error.retryable
    if not (refused or isinstance(error, Unreachable)) or retries >= max_retries:
        return None
    wait_s = max(FIRST_RETRY_S * RETRY_GROWTH**retries, error.retry_after_s)
    return wait_s if wait_s <= LONGEST_RETRY_S else None


def batches(documents: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Return the documents in batches that fit one request each."""
    for start in range(0, len(documents), DOCUMENTS_PER_BATCH):
        yield list(documents[start : start + DOCUMENTS_PER_BATCH])
