"""One HTTP request and its one response, over raw ASGI. What every response carries is added here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import Any

import orjson

from gateway.http.errors import GRID, Ecosystem, RequestTimeout, error_headers
from grid.errors import Cancelled, GridError, InvalidRequest, TooLarge

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

SERVER_CANCELS = "zerogrid.server_cancels"
"""Scope key: the server cancels a request whose client left, so nobody else has to watch for it."""
MAX_CLIENT_ID_CHARS = 128
"""A caller's own request id is echoed and logged; longer ones are cut."""
BODY_TIME_S = 30.0
"""From the request's head to the end of its body: time for the largest default body over a slow line, and an
end to one that dribbles in."""
JSON: Header = (b"content-type", b"application/json")


class Exchange:
    """Reads one body within its cap and answers once.

    `ecosystem` says how errors look; a compatible route sets its own. `translate` makes the current version's
    body of what a caller of an older one sent.
    """

    __slots__ = (
        "_body",
        "_headers",
        "_send",
        "ecosystem",
        "extra_headers",
        "finished",
        "receive",
        "request_id",
        "scope",
        "started",
        "status",
        "translate",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        # The first of a name counts.
        self._headers: dict[bytes, bytes] = dict(reversed([*scope["headers"]]))
        self._body: bytes | None = None
        self.request_id = request_id
        self.extra_headers: list[Header] = [(b"x-request-id", request_id.encode())]
        self.ecosystem: Ecosystem = GRID
        self.translate: Callable[[bytes], bytes] | None = None
        self.started = False
        self.finished = False
        self.status = 0

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """The path below the mount point."""
        path: str = self.scope["path"]
        root: str = self.scope.get("root_path", "")
        return path[len(root) :] if root and path.startswith(root) else path

    def header(self, name: bytes) -> str:
        """Return the first header named `name` (lower case), or ""."""
        return self._headers.get(name, b"").decode("latin-1")

    def single_header(self, name: bytes) -> str | None:
        """Return the header named `name` (lower case), None where there is none.

        Raises InvalidRequest when it is blank or sent more than once: either way nobody can say what was
        meant.
        """
        if name not in self._headers:
            return None
        value, word = self.header(name).strip(), name.decode()
        if sum(given == name for given, _ in self.scope["headers"]) > 1:
            raise InvalidRequest(f"{word}: send this header once; put a list into one value", param=word)
        if not value:
            raise InvalidRequest(f"{word}: the header is blank; give a value or leave it out", param=word)
        return value

    async def body(self, max_bytes: int) -> bytes:
        """Return the whole body, which is read once and kept.

        Raises TooLarge once it exceeds the cap, RequestTimeout once it takes too long, Cancelled if the
        client left.
        """
        if self._body is None:
            try:
                async with asyncio.timeout(BODY_TIME_S):
                    body = await self._read(max_bytes)
            except TimeoutError:
                raise RequestTimeout(
                    f"the body did not arrive within {BODY_TIME_S:g} s; send the request again",
                    param="body",
                ) from None
            self._body = body if self.translate is None else self.translate(body)
        return self._body

    async def _read(self, max_bytes: int) -> bytes:
        declared = self.header(b"content-length")
        if declared.isdecimal() and int(declared) > max_bytes:
            raise self._too_large(max_bytes, int(declared))
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Cancelled("the client left before its request was complete")
            part = message.get("body", b"")
            size += len(part)
            if size > max_bytes:
                raise self._too_large(max_bytes, size)
            if part:
                parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    @staticmethod
    def _too_large(max_bytes: int, size: int) -> TooLarge:
        return TooLarge(
            f"the body is larger than {max_bytes} bytes (gateway.max_body_bytes); send less in one call",
            param="body",
            max_body_bytes=max_bytes,
            body_bytes=size,
        )

    async def client_left(self) -> None:
        """Return when the client has gone, or the response is complete. Only after the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: Message) -> None:
        """ASGI send for applications behind this one: adds what every response carries."""
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self.extra_headers]
        elif not message.get("more_body", False):
            self.finished = True
        await self._send(message)

    async def start(self, status: int, headers: Iterable[Header]) -> None:
        self.started = True
        self.status = status
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*headers, *self.extra_headers]}
        )

    async def write(self, part: bytes) -> None:
        """Write a piece of a streamed body; waits while the client reads too slowly."""
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def finish(self, part: bytes = b"") -> None:
        self.finished = True
        await self._send({"type": "http.response.body", "body": part, "more_body": False})

    async def respond(self, status: int, payload: Any, headers: Iterable[Header] = ()) -> None:
        """Answer with JSON."""
        body = orjson.dumps(payload)
        await self.start(status, [JSON, (b"content-length", b"%d" % len(body)), *headers])
        await self.finish(body)

    async def refuse(self, error: GridError) -> None:
        """Answer with an error; the status line must not have been sent."""
        told = self.ecosystem
        await self.respond(told.status(error), told.envelope(error, self.request_id), error_headers(error))


def client_request_id(given: str) -> str:
    """Return a caller's own id as it may be echoed: printable ASCII, cut to its bound."""
    return "".join(c for c in given[:MAX_CLIENT_ID_CHARS] if "!" <= c <= "~")


async def unless_client_leaves(exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`, and cancel it when the client goes. Only after the body was read."""
    if exchange.scope.get(SERVER_CANCELS):
        await work
        return
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(exchange.client_left())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        gone = not task.done()
        if gone:
            task.cancel()
            await asyncio.wait((task,))
    if not (gone and task.cancelled()):
        await task
