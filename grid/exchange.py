"""What both clients do alike on one HTTP exchange: settings, requests, answers, driving operations."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx

from grid.calls import Call, Unreachable, error_of
from grid.errors import GridError, InternalError, InvalidRequest
from grid.operations import Json, Open, Operation, Wait

INTERFACE_VERSION = "2026-12-01"
"""That this client is written for; a gateway of a later release still serves it."""
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 330.0
"""Between two pieces of an answer. Above the gateway's own deadline (300 s), so that its error arrives."""

R = TypeVar("R")
Step = Call | Open | Wait

TIMEOUT = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)


class Steps(Generic[R]):
    """Drives an operation: `next` hands out its next step, given what came of the last one."""

    def __init__(self, operation: Operation[R]) -> None:
        self._operation = operation
        self.answer: Any = None
        self.error: GridError | None = None
        self.result: R

    def next(self) -> Step | None:
        """Return the next step; None when `result` is there."""
        answer, self.answer = self.answer, None
        error, self.error = self.error, None
        try:
            return self._operation.send(answer) if error is None else self._operation.throw(error)
        except StopIteration as end:
            self.result = end.value
            return None


def key_headers(key: str) -> dict[str, str]:
    """Return what every call says of its caller: the version that it speaks, and its key."""
    spoken = {"grid-version": INTERFACE_VERSION}
    return {**spoken, "x-api-key": key} if key else spoken


def trusted(ca_file: Path | str | None) -> ssl.SSLContext | bool:
    """Return what httpx should trust for https. Raises InvalidRequest for a file without certificates."""
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or error.args[-1]
        raise InvalidRequest(
            f"{ca_file}: holds no certificates to trust ({reason}); name a PEM file", param="ca_file"
        ) from None


def request_of(http: httpx.Client | httpx.AsyncClient, call: Call) -> httpx.Request:
    return http.build_request(call.method, call.path, json=call.body, headers=dict(call.headers))


@contextmanager
def connection_errors(http: httpx.Client | httpx.AsyncClient) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise Unreachable(f"no answer from the gateway at {http.base_url}: {reason}") from error


def json_of(response: httpx.Response, answers: tuple[int, ...] = ()) -> Json:
    """Return the body of a success or of a status in `answers`; raises the error that any other names."""
    try:
        body = response.json()
    except ValueError:
        body = None
    if not response.is_success and response.status_code not in answers:
        raise error_of(response.status_code, body, response.headers)
    if not isinstance(body, dict):
        raise InternalError(f"the server at {response.url} answered without JSON; is this a gateway?")
    return body
