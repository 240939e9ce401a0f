"""What does a cell do with three times what it can do, and with bursts? With its queue, and without.

    python benchmarks/overload.py [--json OUT] [--seconds S]

A whole cell in this process (real sockets, Redis and HTTP, simulated units in real time) and its clients
beside it. What it can do is measured first, by as many clients as it has slots. Then, with the queue and with
`queue_wait_ms: 0` (the baseline, which refuses what finds every unit full):

  overload   three times as many requests a second as it can do, at random moments; one tenant asks for five
             of six of them, the other for one of six: half of what there is
  bursts     four times as many for a second, then none for four: 0.8 of what it can do

Clients don't come back, so what is refused is lost. `refused` is the time that a refusal takes from its
question, less the wait that was granted; memory is of this process, at the end against after a tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# A neighbour's name would hide a package; the tests' folder has the cell in one process.
others = (entry for entry in sys.path if Path(entry).resolve() != ROOT / "benchmarks")
sys.path = [str(ROOT / "tests"), *others]

import httpx  # noqa: E402
import psutil  # noqa: E402
from support.calls import declared, generation  # noqa: E402
from support.local_cell import LocalCell, cell_config, local_cell  # noqa: E402

from grid.config import Config  # noqa: E402

UNITS, SLOTS_A_UNIT, TOKENS = 2, 8, 100
WAIT_MS = 3000.0
TIMES = 3.0
SHARE_OF_MANY = 5 / 6
BURST_TIMES, BURST_S, EVERY_S = 4.0, 1.0, 5.0
CAPACITY_S = 8.0
STEP_S = 0.01
BODY = b'{"input": "Hello", "stream": false}'


class Told(NamedTuple):
    tenant: str
    status: int
    took_s: float
    queued_s: float
    ended_s: float
    """Since the load began."""


def configuration(state_dir: Path, queue_wait_ms: float) -> Config:
    config = cell_config(state_dir)
    chat = config.models[0]
    paced = chat.simulated.model_copy(update={"full_speed": False})
    size = {"max_running": SLOTS_A_UNIT, "min_units": UNITS, "max_units": UNITS, "gpu": "H100"}
    chat = chat.model_copy(update={**size, "simulated": paced})
    placement = config.placement.model_copy(update={"queue_wait_ms": queue_wait_ms})
    return config.model_copy(update={"models": (chat, *config.models[1:]), "placement": placement})


class Clients:
    """Two tenants of one cell, and what they were told. Each question has a connection of its own: a pool of
    hundreds would cost more than the cell does."""

    def __init__(self, cell: LocalCell) -> None:
        self._cell = cell
        url = httpx.URL(cell.base_url)
        self._host, self._port = url.host, url.port
        self._heads: dict[str, str] = {}
        self._began_s = time.monotonic()
        self.told: list[Told] = []

    async def start(self) -> None:
        for tenant in ("many", "few"):
            key = await self._cell.tenant(tenant)
            async with self._cell.client(key) as client:
                pipeline_id = await declared(client, generation(max_output_tokens=TOKENS, temperature=0.0))
            self._heads[tenant] = (
                f"POST /v1/pipelines/{pipeline_id}/invoke HTTP/1.1\r\nhost: cell\r\nx-api-key: {key}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\nconnection: close\r\n\r\n"
            )

    def begin(self) -> None:
        self.told, self._began_s = [], time.monotonic()

    async def ask(self, tenant: str) -> None:
        asked_s = time.monotonic()
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(self._heads[tenant].encode() + BODY)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        ended_s = time.monotonic()
        status, queued_s = int(head.split(b" ", 2)[1]), 0.0
        if status == 200:
            queued_s = json.loads(body)["timing"][-1]["queue_ms"] / 1e3
        self.told.append(Told(tenant, status, ended_s - asked_s, queued_s, ended_s - self._began_s))


async def capacity_per_s(clients: Clients) -> float:
    clients.begin()

    async def one_after_the_other() -> None:
        while time.monotonic() < until_s:
            await clients.ask("many")

    until_s = time.monotonic() + CAPACITY_S
    await asyncio.gather(*(one_after_the_other() for _ in range(UNITS * SLOTS_A_UNIT)))
    warm = [told for told in clients.told if CAPACITY_S / 4 <= told.ended_s < CAPACITY_S]
    return len(warm) / (CAPACITY_S * 3 / 4)


async def offer(clients: Clients, rate_per_s: Callable[[float], float], seconds: float) -> float:
    """Ask in an open loop; return how much memory grew, in MB."""
    rng, tasks, memory = random.Random(0), [], psutil.Process()
    clients.begin()
    began_s = asked_s = time.monotonic()
    early_mb = 0.0
    while (now_s := time.monotonic()) < began_s + seconds:
        while asked_s < now_s:
            rate = rate_per_s(asked_s - began_s)
            if rate:
                tenant = "many" if rng.random() < SHARE_OF_MANY else "few"
                tasks.append(asyncio.create_task(clients.ask(tenant)))
            asked_s += rng.expovariate(rate) if rate else STEP_S
        if not early_mb and now_s > began_s + seconds / 10:
            early_mb = memory.memory_info().rss / 2**20
        await asyncio.sleep(STEP_S)
    grown_mb = memory.memory_info().rss / 2**20 - early_mb
    await asyncio.gather(*tasks)
    return grown_mb


def quantile(values: list[float], share: float) -> float | None:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else None


def figures(
    clients: Clients, per_s: float, offered: float, seconds: float, grown_mb: float
) -> dict[str, Any]:
    served = [told for told in clients.told if told.status == 200]
    in_time = sum(told.ended_s <= seconds for told in served)
    tenants = Counter(told.tenant for told in served)
    wait_s = WAIT_MS / 1e3
    refused_s = [t.took_s - (wait_s if t.took_s >= wait_s else 0.0) for t in clients.told if t.status != 200]
    return {
        "asked": len(clients.told),
        "goodput_of_capacity": in_time / (per_s * seconds),
        "served_share": len(served) / len(clients.told),
        "offered_of_capacity": offered,
        "statuses": dict(Counter(str(told.status) for told in clients.told)),
        "few_of_many": tenants["few"] / max(tenants["many"], 1),
        "queue_s_p50": quantile([told.queued_s for told in served], 0.5),
        "queue_s_p99": quantile([told.queued_s for told in served], 0.99),
        "refused_ms_p50": _ms(quantile(refused_s, 0.5)),
        "refused_ms_p99": _ms(quantile(refused_s, 0.99)),
        "memory_grown_mb": grown_mb,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


async def measured(queue_wait_ms: float, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="zgb-") as folder:
        async with local_cell(configuration(Path(folder), queue_wait_ms)) as cell:
            clients = Clients(cell)
            await clients.start()
            per_s = await capacity_per_s(clients)
            told: dict[str, Any] = {"capacity_per_s": per_s}
            loads: dict[str, tuple[Callable[[float], float], float]] = {
                "overload": (lambda _: TIMES * per_s, TIMES),
                "bursts": (
                    lambda at_s: BURST_TIMES * per_s if at_s % EVERY_S < BURST_S else 0.0,
                    BURST_TIMES * BURST_S / EVERY_S,
                ),
            }
            for name, (rate_per_s, offered) in loads.items():
                grown_mb = await offer(clients, rate_per_s, seconds)
                await cell.until_idle()
                told[name] = figures(clients, per_s, offered, seconds, grown_mb)
            told["bugs"] = (await cell.placement.stats())["counts"].get("bugs", 0)
    return told


def table(told: dict[str, dict[str, Any]]) -> str:
    head = ("goodput", "served", "few/many", "queue p50", "p99", "refused p50", "p99", "memory")
    lines = [f"{'':20}" + "".join(f"{name:>12}" for name in head)]

    def shown(value: float | None, form: str, unit: str) -> str:
        return "-" if value is None else f"{value:{form}}{unit}"

    for load in ("overload", "bursts"):
        for name, each in told.items():
            row = each[load]
            cells = (
                f"{row['goodput_of_capacity']:.0%}",
                f"{row['served_share']:.0%}",
                f"{row['few_of_many']:.2f}",
                shown(row["queue_s_p50"], ".2f", " s"),
                shown(row["queue_s_p99"], ".2f", " s"),
                shown(row["refused_ms_p50"], ".0f", " ms"),
                shown(row["refused_ms_p99"], ".0f", " ms"),
                f"{row['memory_grown_mb']:.0f} MB",
            )
            lines.append(f"{load + ', ' + name:20}" + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    options = parser.parse_args()
    told = {
        name: asyncio.run(measured(wait_ms, options.seconds))
        for name, wait_ms in (("queue", WAIT_MS), ("no queue", 0.0))
    }
    print(table(told))
    if options.json:
        options.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
