"""A closed-loop load on a link straight to a unit, one process of its own: N clients without a gateway.

    python benchmarks/link_load.py '{"placement": ["127.0.0.1", 7000], "model": "m", "clients": 32, …}'

Prints the median TTFT in ms.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# A script's own folder is searched first, and a neighbour's name would hide the package `placement`.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != HERE]

import uvloop  # noqa: E402

from grid.wire.link import Link, dial  # noqa: E402
from grid.wire.messages import Accepted, Done, Submit, Tokens  # noqa: E402
from grid.words import Message, Sampling, new_id  # noqa: E402
from placement.client import PlacementClient  # noqa: E402

FLEET_WITHIN_S = 30.0
"""Placement tells a newcomer of all units at once; a model that is not there by then never comes."""


async def load(order: dict[str, Any], secret: bytes) -> float:
    """Return the median TTFT in ms of closed-loop clients on one link to the model's unit."""
    host, port = order["placement"]

    async def resolve() -> tuple[str, int]:
        return host, port

    client = PlacementClient(resolve, peer_id=new_id("bench-"), secret=secret)
    await client.start()
    card = None
    async with asyncio.timeout(FLEET_WITHIN_S):
        while card is None:
            await asyncio.sleep(0.05)
            card = next((unit.card for unit in client.fleet.units if unit.card.model == order["model"]), None)
    link = await dial(card.host, card.port, role="gateway", peer_id=new_id("bench-"), secret=secret)
    times: list[float] = []
    ends_s = time.perf_counter() + order["seconds"]

    async def ask_until_the_end() -> None:
        while time.perf_counter() < ends_s:
            times.append(await first_token_s(link, order))

    await asyncio.gather(*(ask_until_the_end() for _ in range(order["clients"])))
    link.close()
    await client.close()
    return statistics.median(times) * 1e3


async def first_token_s(link: Link, order: dict[str, Any]) -> float:
    stream = link.open()
    asked_s = time.perf_counter()
    stream.send(
        Submit(
            stream=stream.id,
            request_id=new_id("req_"),
            attempt=1,
            reservation_id="",
            model=order["model"],
            messages=(Message("user", order["question"]),),
            documents=(),
            sampling=Sampling(max_output_tokens=order["tokens"]),
            tenant_salt="bench",
            deadline_ms=60_000.0,
        )
    )
    first_s = 0.0
    while True:
        for message in await stream.receive():
            if isinstance(message, Tokens) and not first_s:
                first_s = time.perf_counter() - asked_s
            elif isinstance(message, Done):
                stream.close()
                return first_s
            elif not isinstance(message, Tokens | Accepted):
                raise RuntimeError(f"the unit said {type(message).__name__}")


def main() -> None:
    order = json.loads(sys.argv[1])
    print(uvloop.run(load(order, Path(order["secret"]).read_bytes())))


if __name__ == "__main__":
    main()
