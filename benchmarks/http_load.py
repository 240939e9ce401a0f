"""A closed-loop HTTP load, one process of its own: N clients, each with one request at a time.

    python benchmarks/http_load.py '{"url": "http://127.0.0.1:8000/v1/…", "clients": 32, "seconds": 5, …}'

Prints one JSON object. Raw sockets and a C parser, because the load shares the machine with what it
measures: a client library would cost more than the gateway.

With `sides` (two or more headers by name) the same clients take turns of `turn_s` between them, in the order
A B B A A B …, so that whatever else the machine does falls on all sides alike. A turn is counted from
`settle_s` after its beginning, when the requests of the side before have ended; `watch` names process ids
whose CPU time is read with it.
"""

from __future__ import annotations

import asyncio
import json
import os
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

    def turn(self, request: bytes, tally: Tally) -> None:
        """Send `request` from now on, and count into `tally`."""
        self._request, self._tally = request, tally

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
    tally = Tally()
    clients = await _clients(order, request_of(order, {}), tally)
    for client in clients:
        client.measure(True)
    started_s = time.perf_counter()
    await _for_seconds(clients, order["seconds"])
    seconds = time.perf_counter() - started_s
    await _stop(clients, order)
    return {"clients": order["clients"], **told(tally, seconds)}


async def turns(order: dict[str, Any]) -> dict[str, Any]:
    """Return what `load` returns for each side, with `turns` (the requests per second of each, in order) and
    `cpu_s`, which the watched processes spent in them."""
    names = list(order["sides"])
    requests = {name: request_of(order, headers) for name, headers in order["sides"].items()}
    tallies = {name: Tally() for name in names}
    seconds = dict.fromkeys(names, 0.0)
    rates: dict[str, list[float]] = {name: [] for name in names}
    cpu_s: dict[str, dict[str, float]] = {name: dict.fromkeys(order.get("watch", {}), 0.0) for name in names}
    clients = await _clients(order, requests[names[0]], tallies[names[0]])
    for number in range(round(order["seconds"] / order["turn_s"] / len(names))):
        for name in names if number % 2 == 0 else reversed(names):
            for client in clients:
                client.turn(requests[name], tallies[name])
            await _for_seconds(clients, order["settle_s"])
            before, before_s = cpu_seconds(order), time.perf_counter()
            count = len(tallies[name].latencies)
            for client in clients:
                client.measure(True)
            await _for_seconds(clients, order["turn_s"] - order["settle_s"])
            for client in clients:
                client.measure(False)
            lasted_s = time.perf_counter() - before_s
            for kind, spent_s in cpu_seconds(order).items():
                cpu_s[name][kind] += spent_s - before[kind]
            seconds[name] += lasted_s
            rates[name].append(round((len(tallies[name].latencies) - count) / lasted_s, 1))
    await _stop(clients, order)
    return {
        name: {**told(tallies[name], seconds[name]), "turns": rates[name], "cpu_s": cpu_s[name]}
        for name in names
    }


def cpu_seconds(order: dict[str, Any]) -> dict[str, float]:
    """Return the CPU time until now of the watched processes, by kind."""
    ticks = os.sysconf("SC_CLK_TCK")
    spent: dict[str, float] = {}
    for kind, pids in order.get("watch", {}).items():
        spent[kind] = 0.0
        for pid in pids:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            spent[kind] += (int(fields[11]) + int(fields[12])) / ticks
    return spent


def request_of(order: dict[str, Any], headers: dict[str, str]) -> bytes:
    url, body = urlsplit(order["url"]), order.get("body", "").encode()
    lines = [
        f"{order.get('method', 'POST')} {url.path} HTTP/1.1",
        f"host: {url.netloc}",
        f"content-length: {len(body)}",
        "content-type: application/json",
        *(f"{name}: {value}" for name, value in {**order.get("headers", {}), **headers}.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def _clients(order: dict[str, Any], request: bytes, tally: Tally) -> list[Client]:
    """Return all clients, warm."""
    url, loop = urlsplit(order["url"]), asyncio.get_running_loop()
    clients = []
    for _ in range(order["clients"]):
        _transport, client = await loop.create_connection(
            lambda: Client(request, order.get("first_mark", "").encode(), tally), url.hostname, url.port
        )
        clients.append(client)
    await _for_seconds(clients, order.get("warmup_s", 1.0))
    return clients


async def _stop(clients: list[Client], order: dict[str, Any]) -> None:
    for client in clients:
        client.measure(False)
        client.stop()
    await asyncio.wait_for(
        asyncio.gather(*(client.stopped for client in clients)), order.get("drain_s", 60.0)
    )


def told(tally: Tally, seconds: float) -> dict[str, Any]:
    return {
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
    order = json.loads(sys.argv[1])
    print(json.dumps(uvloop.run(turns(order) if "sides" in order else load(order))))


if __name__ == "__main__":
    main()
