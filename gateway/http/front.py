"""The ASGI middleware outside Serve's own: one request id, made here, and no header that steers Serve.

Serve adds an `x-request-id` to every response, its own refusals included, and takes it from the request.
So the request leaves here with ours in that place, and the one that Serve adds to an answer of the gateway,
which carries it already, is taken off again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gateway.http.app import REQUEST_ID
from gateway.http.exchange import SERVER_CANCELS, Message, Receive, Scope, Send
from grid.words import new_id

STEERING = frozenset({b"x-request-id", b"x-request-timeout-seconds", b"x-request-disconnect-disabled"})
"""A caller's own id is kept under another name; deadlines and leaving clients are the gateway's business."""


class FrontDoor:
    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_id("req_")
        headers, own_id = [], None
        for pair in scope["headers"]:
            if pair[0] not in STEERING:
                headers.append(pair)
            elif pair[0] == b"x-request-id":
                own_id = pair[1]
        headers.append((b"x-request-id", request_id.encode()))
        if own_id is not None:
            headers.append((b"x-client-request-id", own_id))
        scope["headers"] = headers
        scope[REQUEST_ID] = request_id
        scope[SERVER_CANCELS] = True

        async def send_once(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = without_repeat(message["headers"])
            await send(message)

        await self._app(scope, receive, send_once)


def without_repeat(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return `headers` without a last request id that repeats an earlier one."""
    if headers and headers[-1] in headers[:-1] and headers[-1][0] == b"x-request-id":
        return headers[:-1]
    return headers
