"""The span of a whole HTTP request, under which everything else of its trace comes."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable

from gateway.http.exchange import Exchange
from gateway.tracing import within
from grid.tracing.spans import Attributes, Kind
from grid.tracing.tracer import Branch, Tracer

TRACED_PREFIX = "/v1/"
"""Probes and documents are nobody's request."""
CLIENT_LEFT = "cancelled"
_ID_SEGMENT = re.compile(r"/(?:pl-|ds-|req_|key-|unit-)[^/]+")


async def traced(tracer: Tracer, exchange: Exchange, answer: Callable[[Exchange], Awaitable[None]]) -> None:
    """Answer, under a trace if this request is to have one."""
    is_traced = exchange.path.startswith(TRACED_PREFIX)
    branch = tracer.request(exchange.header(b"traceparent")) if is_traced else None
    if branch is None:
        await answer(exchange)
        return
    started_s = time.monotonic()
    try:
        with within(branch):
            await answer(exchange)
    finally:
        _end(branch, exchange, started_s)


def _end(branch: Branch, exchange: Exchange, started_s: float) -> None:
    route, status = route_of(exchange), exchange.status
    attributes: Attributes = (
        ("http.request.method", exchange.method),
        ("http.response.status_code", status),
        ("zerogrid.request_id", exchange.request_id),
    )
    if route:
        attributes += (("http.route", route),)
    error = str(status) if status >= 500 else "" if exchange.finished else CLIENT_LEFT
    if error:
        attributes += (("error.type", error),)
    name = f"{exchange.method} {route}" if route else exchange.method
    branch.end(name, started_s, time.monotonic(), attributes, kind=Kind.SERVER, error=error)


def route_of(exchange: Exchange) -> str:
    """Return the path with `{id}` for every id, such as `/v1/pipelines/{id}/invoke`.

    "" where nothing was found: names of spans are few, whatever paths people try.
    """
    return "" if exchange.status == 404 else _ID_SEGMENT.sub("/{id}", exchange.path)
