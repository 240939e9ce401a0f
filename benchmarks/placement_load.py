"""What does a decision take over the link, under telemetry, and how many a second can one cell take?

    python benchmarks/placement_load.py [--json OUT] [--seconds S] [--units N]

Three processes: the placement actor as it runs in a cell; nodes of eight units each that report at 10 Hz, one
batch a node, in which a request of every unit ends and another begins once a second; and this one, which
asks as a gateway does and settles a second later. Open loop: decisions are asked for at a fixed rate whether
or not earlier ones are answered, and the time of each counts from when it was due. Closed loop: as many
askers as keep the actor busy. Baseline: a server on the same link, in the actor's process and beside its
telemetry, that answers at once with a decision made beforehand: it has link, load and machine in common, and
the difference is placement's own. `late` is how long after it was due the 99th percentile of questions left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import platform
import random
import sys
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# A neighbour's name would hide the package `placement`; the tests' folder has cards to build on.
others = (entry for entry in sys.path if Path(entry).resolve() != ROOT / "benchmarks")
sys.path = [str(ROOT / "tests"), *others]

import numpy as np  # noqa: E402
import uvloop  # noqa: E402
from support.fleet import make_card, make_load, make_request  # noqa: E402

from grid import heap  # noqa: E402
from grid.config import Config  # noqa: E402
from grid.samples import COUNTS, Ints, columns_of, packed  # noqa: E402
from grid.wire.link import Link, LinkServer, Peer, dial  # noqa: E402
from grid.wire.messages import (  # noqa: E402
    Announce,
    AnnounceNode,
    Decided,
    HeldReservations,
    Place,
    ReportUnits,
    Settle,
    WireMessage,
)
from grid.words import Candidate, Decision, NodeCard, PlacementRequest, Precision, UnitCard  # noqa: E402
from placement.actor import PlacementActor  # noqa: E402

SECRET = b"a secret of the benchmark only.."
RATE_PER_S = 1_000
ASKERS = 32
UNITS_A_NODE = 8
REPORT_S = 0.1
RUNNING = 24
REPORTS_A_CHANGE = 10
"""A unit's list of reservations is another once a second."""
QUIET_S = 4.0
"""Telemetry alone is measured for so long."""
STATS = ("decide_us_p50", "decide_us_p99", "reservations", "counts", "dropped", "cpu_s")
HELD_S = 1.0
"""How long a request runs."""
REGIONS = ("us-east-1", "eu-central-1", "ap-northeast-1")
STEPS_MS = (6.0, 10.0, 20.0, 55.0)
CANNED = Decision(
    reservation_id="canned",
    chosen=Candidate(
        *("unit-1", "first", "10.0.0.1", 4000, REGIONS[0], "model-a", int(Precision.BF16), "H100", False),
        *(0.3, 10.0, 100.0, 2_000.0, 0.0),
    ),
    next_best=(),
    rejected_by_code=(),
    rejections=(),
    model="model-a",
    lease_ms=30_000.0,
    fleet_version=1,
    decide_us=0.0,
)


def card(number: int) -> UnitCard:
    step_ms = STEPS_MS[number % len(STEPS_MS)]
    return make_card(
        f"unit-{number}",
        incarnation="first",
        node_id=f"node-{number // UNITS_A_NODE}",
        region=REGIONS[number % len(REGIONS)],
        model="model-a",
        precision=int(Precision.BF16),
        context_tokens=8192,
        gpu_type="H100",
        max_running=64,
        max_waiting=64,
        prefill_tokens_per_s=60_000 / step_ms,
        decode_ms_per_token=step_ms,
    )


def request(number: int, rng: random.Random) -> PlacementRequest:
    return make_request(
        f"req_{number}",
        attempt=1,
        tenant_id=f"tenant-{number % 7}",
        model="model-a",
        prompt_tokens=rng.randrange(50, 4_000),
        max_output_tokens=512,
        allowed_regions=REGIONS[:2],
        prefer_regions=(REGIONS[1],),
        pipeline_id=f"pl-{number % 31}",
    )


# --- the servers ----------------------------------------------------------------------------


class Canned:
    """Answers every question at once."""

    def connected(self, peer: Peer) -> None: ...

    def disconnected(self, peer: Peer, reason: str) -> None: ...

    def received(self, peer: Peer, message: WireMessage) -> None:
        if isinstance(message, Place):
            peer.send(Decided(message.stream, CANNED))


def serve(pipe: Connection) -> None:
    async def main() -> None:
        actor = PlacementActor(Config(), secret=SECRET, rng=random.Random(0))
        canned = LinkServer(role="placement", peer_id="canned", secret=SECRET, handler=Canned())
        addresses = {"placement": await actor.address(), "link alone": await canned.start("127.0.0.1", 0)}
        heap.freeze()
        pipe.send(addresses)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv):
            stats = await actor.stats() | {"cpu_s": time.process_time()}
            pipe.send({name: stats[name] for name in STATS})

    uvloop.run(main())


# --- the nodes ------------------------------------------------------------------------------


class Deaf:
    def connected(self, peer: Peer) -> None: ...

    def disconnected(self, peer: Peer, reason: str) -> None: ...

    def received(self, peer: Peer, message: WireMessage) -> None: ...


def report(pipe: Connection, address: tuple[str, int], units: int) -> None:
    """Report until the pipe says stop; the batches of one round are spread over its time."""

    async def tell(link: Link, node: Node, wait_s: float) -> None:
        due_s = asyncio.get_running_loop().time() + wait_s
        while True:
            await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
            link.send(node.batch())
            # As a node does it: what it was too late for it skips.
            due_s = max(due_s + REPORT_S, asyncio.get_running_loop().time())

    async def main() -> None:
        cards = [card(number) for number in range(units)]
        nodes = [Node(cards[first : first + UNITS_A_NODE]) for first in range(0, units, UNITS_A_NODE)]
        tasks, links = [], []
        for place, node in enumerate(nodes):
            # One after the other: a listener has only so many strangers at its door.
            for role in ("unit", "node"):
                name = node.node_id
                link = await dial(*address, role=role, peer_id=name, secret=SECRET, handler=Deaf())
                links.append(link)
                if role == "unit":
                    for each in node.cards:
                        link.send(Announce(0, each))
                else:
                    link.send(AnnounceNode(0, NodeCard(name, "first", "575", ())))
            wait_s = REPORT_S * (1 + place / len(nodes))
            tasks.append(asyncio.create_task(tell(link, node, wait_s)))
        await asyncio.sleep(1.0)
        pipe.send(True)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        for task in tasks:
            task.cancel()

    uvloop.run(main())


class Node:
    """Eight busy units, whose batch costs little to make: the load has the same cores as what it measures."""

    def __init__(self, cards: list[UnitCard]) -> None:
        self.cards, self.node_id = cards, cards[0].node_id
        self._ids = tuple(each.unit_id for each in cards)
        self._incarnations = tuple(each.incarnation for each in cards)
        self._rng = np.random.default_rng(len(self._ids))
        loads = [
            make_load(each, kv_tokens_total=400_000, decode_ms_per_token=1.4 * each.decode_ms_per_token)
            for each in cards
        ]
        self._counts, self._readings = columns_of(loads)
        self._held = [[f"req_{each.unit_id}-{place:08}/s/0" for place in range(RUNNING)] for each in cards]
        self._rounds = 0

    def batch(self) -> ReportUnits:
        row = dict(zip(COUNTS, self._counts, strict=True))
        row["sequence"] += 1
        row["steps"] += 7
        row["running"][:] = self._rng.integers(16, RUNNING + 8, len(self.cards))
        row["prefill_tokens_queued"][:] = self._rng.integers(0, 2_000, len(self.cards))
        row["kv_tokens_free"][:] = 400_000 - 4_000 * row["running"]
        changes = tuple(self._change(place, row) for place in range(len(self.cards)) if self._is_due(place))
        self._rounds += 1
        data = packed(self._counts, self._readings)
        return ReportUnits(0, self.node_id, self._ids, self._incarnations, *data, changes)

    def _is_due(self, place: int) -> bool:
        return self._rounds == 0 or (self._rounds + place) % REPORTS_A_CHANGE == 0

    def _change(self, place: int, row: dict[str, Ints]) -> HeldReservations:
        held, since = self._held[place], int(row["held_since"][place])
        row["held_since"][place] = row["sequence"][place]
        if since == 0:
            return HeldReservations(place, tuple(held))
        ended, begun = held.pop(0), f"req_{self._ids[place]}-{self._rounds:08}/s/1"
        held.append(begun)
        return HeldReservations(place, (begun,), (ended,), since)


# --- the gateway ----------------------------------------------------------------------------


class Row(NamedTuple):
    per_s: int
    ms_p50: float
    ms_p99: float
    cpu_share: float
    """Of one core, by the server's process."""
    late_ms_p99: float
    """Until the load had sent what was due."""


class Gateway:
    def __init__(self, link: Link) -> None:
        self._link = link
        self._rng = random.Random(2)
        self._numbers = 0
        self._open: deque[tuple[float, str]] = deque()
        self.waited_ms: list[float] = []
        self.late_ms: list[float] = []

    async def ask(self, due_s: float) -> None:
        self._numbers += 1
        asked = request(self._numbers, self._rng)
        stream = self._link.open(1 << 16)
        stream.send(Place(stream.id, asked))
        self.late_ms.append((time.monotonic() - due_s) * 1e3)
        [answer] = await stream.receive()
        now_s = time.monotonic()
        stream.close()
        assert isinstance(answer, Decided), answer
        self.waited_ms.append((now_s - due_s) * 1e3)
        self._open.append((now_s, asked.reservation_id))
        while self._open and self._open[0][0] < now_s - HELD_S:
            settled = Settle(0, self._open.popleft()[1], "done", 900, 200, 300.0, 3_000.0)
            self._link.send_lazily(settled)

    async def open_loop(self, seconds: float) -> None:
        began_s, tasks = time.monotonic(), set[asyncio.Task[None]]()
        for number in range(int(seconds * RATE_PER_S)):
            due_s = began_s + number / RATE_PER_S
            wait_s = due_s - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            task = asyncio.create_task(self.ask(due_s))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def closed_loop(self, seconds: float) -> None:
        ends_s = time.monotonic() + seconds

        async def asker() -> None:
            while (now_s := time.monotonic()) < ends_s:
                await self.ask(now_s)

        await asyncio.gather(*(asker() for _ in range(ASKERS)))


async def measure(address: tuple[str, int], loop: str, seconds: float, cpu: Callable[[], float]) -> Row:
    gateway = Gateway(await dial(*address, role="gateway", peer_id="gateway", secret=SECRET, handler=Deaf()))
    loops = {"open": gateway.open_loop, "closed": gateway.closed_loop}
    # Until the caches are warm.
    await gateway.closed_loop(1.0)
    gateway.waited_ms, gateway.late_ms = [], []
    began_s, began_cpu_s = time.monotonic(), cpu()
    await loops[loop](seconds)
    spent_s, spent_cpu_s = time.monotonic() - began_s, cpu() - began_cpu_s
    waited = sorted(gateway.waited_ms)
    return Row(
        per_s=round(len(waited) / spent_s),
        ms_p50=round(waited[len(waited) // 2], 2),
        ms_p99=round(waited[len(waited) * 99 // 100], 2),
        cpu_share=round(spent_cpu_s / spent_s, 2),
        late_ms_p99=round(sorted(gateway.late_ms)[len(waited) * 99 // 100], 2),
    )


def child(context: Any, target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    return process, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each loop")
    parser.add_argument("--units", type=int, default=1_000)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    server, ask = child(context, serve)
    addresses = ask.recv()
    nodes, stop = child(context, report, addresses["placement"], options.units)
    stop.recv()

    def cpu() -> float:
        ask.send(True)
        return float(ask.recv()["cpu_s"])

    before_s = cpu()
    time.sleep(QUIET_S)
    telemetry = (cpu() - before_s) / QUIET_S
    print(
        f"{options.units} units at 10 Hz take {telemetry:.2f} of a core; the server's share is of a core, too"
    )
    print(f"{'':<24}{'a second':>10}{'ms p50':>10}{'ms p99':>10}{'share':>10}{'late':>10}")
    rows = {}
    for name, address in addresses.items():
        for loop in ("open", "closed"):
            row = uvloop.run(measure(address, loop, options.seconds, cpu))
            rows[f"{name}, {loop}"] = row._asdict()
            print(f"{f'{name}, {loop} loop':<24}" + "".join(f"{value:>10}" for value in row), flush=True)
            if name == "placement" and loop == "closed":
                each_us = 1e6 * (row.cpu_share - telemetry) / row.per_s
    ask.send(True)
    inside = ask.recv()
    stop.send(True)
    nodes.join(10)
    ask.send(False)
    server.join(10)
    print(f"a decision and its end take {each_us:.0f} us of the server, link included: with this telemetry")
    print(f"one core takes {(1 - telemetry) / each_us * 1e6:.0f} a second. Inside the actor: {inside}")
    if options.json:
        figures = {"python": platform.python_version(), "units": options.units, "rows": rows, "actor": inside}
        figures |= {"telemetry_share": telemetry, "decision_us": each_us}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
