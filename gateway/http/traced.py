"""The span of a whole HTTP request, under which everything else of its trace comes."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import NamedTuple

from gateway.http.exchange import Exchange
from gateway.tracing import enter, leave
from grid.tracing.spans import Attributes, Kind, Span
from grid.tracing.tracer import Branch, Tracer

TRACED_PREFIX = "/v1/"
"""Probes and documents are nobody's request."""
CLIENT_LEFT = "cancelled"
KEPT_OUTCOMES = 1024
"""Paths with their methods and statuses: those of the pipelines in use."""
_ID_SEGMENT = re.compile(r"/(?:pl-|ds-|req_|key-|unit-)[^/]+")


async def traced(tracer: Tracer, exchange: Exchange, answer: Callable[[Exchange], Awaitable[None]]) -> None:
    """Answer, under a trace if this request is to have one."""
    is_traced = exchange.path.startswith(TRACED_PREFIX)
    branch = tracer.request(exchange.header(b"traceparent")) if is_traced else None
    if branch is None:
        await answer(exchange)
        return
    started_s = time.monotonic()
    outside = enter(branch)
    try:
        await answer(exchange)
    finally:
        leave(outside)
        # Not the exchange itself: it holds the body.
        ended = Ended(
            exchange.method,
            exchange.path,
            exchange.request_id,
            exchange.status,
            exchange.finished,
            started_s,
            time.monotonic(),
        )
        tracer.later(spans, branch, ended)


class Ended(NamedTuple):
    """A request whose response has ended, or whose client left before that."""

    method: str
    path: str
    request_id: str
    status: int
    finished: bool
    started_s: float
    ended_s: float


def spans(branch: Branch, ended: Ended) -> list[Span]:
    name, attributes, error = outcome(ended.method, ended.path, ended.status, ended.finished)
    own = (("zerogrid.request_id", ended.request_id),)
    return [
        branch.span(name, ended.started_s, ended.ended_s, attributes, own=own, kind=Kind.SERVER, error=error)
    ]


@lru_cache(maxsize=KEPT_OUTCOMES)
def outcome(method: str, path: str, status: int, finished: bool) -> tuple[str, Attributes, str]:
    """Return name, attributes and error of a request's span."""
    route = route_of(path, status)
    attributes: Attributes = (("http.request.method", method), ("http.response.status_code", status))
    if route:
        attributes += (("http.route", route),)
    error = str(status) if status >= 500 else "" if finished else CLIENT_LEFT
    if error:
        attributes += (("error.type", error),)
    return f"{method} {route}" if route else method, attributes, error


def route_of(path: str, status: int) -> str:
    """Return the path with `{id}` for every id, such as `/v1/pipelines/{id}/invoke`.

    "" where nothing was found: names of spans are few, whatever paths people try.
    """
    return "" if status == 404 else _ID_SEGMENT.sub("/{id}", path)
