"""A closed-loop HTTP load, one process of its own: N clients, each with one request at a time.

    python benchmarks/http_load.py '{"url": "http://127.0.0.1:8000/v1/…", "clients": 32, "seconds": 5, …}'

Prints one JSON object. Raw sockets and a C parser, because the load shares the machine with what it
measures: a client library would cost more than the gateway.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvloop

TAIL_BYTES = 4096
"""Of each body: the end, where usage stands."""
OUTPUT_TOKENS = re.compile(rb'"output_tokens":(\d+)')


@dataclass
class Tally:
    """What the measured window saw. Times in seconds."""

    latencies: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    tokens: int = 0
    statuses: dict[int, int] = field(default_factory=dict)


class Client(asyncio.Protocol):
    """One keep-alive connection. `first_mark`: the body bytes that begin the first token."""

    def __init__(self, request: bytes, first_mark: bytes, tally: Tally) -> None:
        self._request = request
        self._mark = first_mark
        self._tally = tally
        self._transport: asyncio.Transport | None = None
        self._measuring = False
        self._stopping = False
        self.stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def measure(self, on: bool) -> None:
        self._measuring = on

    def stop(self) -> None:
        """End after the request that is under way."""
        self._stopping = True

    def _ask(self) -> None:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._seen = bytearray()
        self._first_s = 0.0
        self._asked_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self._first_s and self._mark:
            self._seen += body
            if self._mark in self._seen:
                self._first_s = time.perf_counter()
                self._seen = self._seen[-TAIL_BYTES:]
        else:
            self._seen += body
            if len(self._seen) > 2 * TAIL_BYTES:
                del self._seen[:-TAIL_BYTES]

    def on_message_complete(self) -> None:
        now_s = time.perf_counter()
        if self._measuring:
            status = self._parser.get_status_code()
            self._tally.statuses[status] = self._tally.statuses.get(status, 0) + 1
            self._tally.latencies.append(now_s - self._asked_s)
            if self._first_s:
                self._tally.first_tokens.append(self._first_s - self._asked_s)
            found = OUTPUT_TOKENS.findall(self._seen)
            self._tally.tokens += int(found[-1]) if found else 0
        if self._stopping:
            assert self._transport is not None
            self._transport.close()
        else:
            # Asking from inside the parser would feed it while it runs.
            asyncio.get_running_loop().call_soon(self._ask)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.stopped.done():
            if self._stopping:
                self.stopped.set_result(None)
            else:
                self.stopped.set_exception(exc or ConnectionError("the server closed the connection"))


async def load(order: dict[str, Any]) -> dict[str, Any]:
    """Return requests and tokens per second, and percentiles in ms, of the requests that ended inside the
    window; at a steady pace as many reach into it at its start as out of it at its end."""
    url = urlsplit(order["url"])
    body = order.get("body", "").encode()
    lines = [
        f"{order.get('method', 'POST')} {url.path} HTTP/1.1",
        f"host: {url.netloc}",
        f"content-length: {len(body)}",
        "content-type: application/json",
        *(f"{name}: {value}" for name, value in order.get("headers", {}).items()),
    ]
    request = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    tally = Tally()
    loop = asyncio.get_running_loop()
    clients = []
    for _ in range(order["clients"]):
        _transport, client = await loop.create_connection(
            lambda: Client(request, order.get("first_mark", "").encode(), tally), url.hostname, url.port
        )
        clients.append(client)
    await _for_seconds(clients, order.get("warmup_s", 1.0))
    for client in clients:
        client.measure(True)
    started_s = time.perf_counter()
    await _for_seconds(clients, order["seconds"])
    seconds = time.perf_counter() - started_s
    for client in clients:
        client.measure(False)
        client.stop()
    await asyncio.wait_for(
        asyncio.gather(*(client.stopped for client in clients)), order.get("drain_s", 60.0)
    )
    return {
        "clients": order["clients"],
        "seconds": round(seconds, 3),
        "requests": len(tally.latencies),
        "requests_per_s": round(len(tally.latencies) / seconds, 1),
        "tokens_per_s": round(tally.tokens / seconds, 1),
        "latency_ms": percentiles(tally.latencies),
        "ttft_ms": percentiles(tally.first_tokens),
        "statuses": {str(status): count for status, count in sorted(tally.statuses.items())},
    }


async def _for_seconds(clients: list[Client], seconds: float) -> None:
    """Wait, and fail at once when a client loses its connection."""
    _done, _pending = await asyncio.wait(
        [client.stopped for client in clients], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
    )
    for stopped in _done:
        stopped.result()


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return p50, p90 and p99 in milliseconds; empty without samples."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {
        f"p{share}": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)] * 1e3, 3)
        for share in (50, 90, 99)
    }


def main() -> None:
    print(json.dumps(uvloop.run(load(json.loads(sys.argv[1])))))


if __name__ == "__main__":
    main()
