"""Units of the tiny random model on real vLLM, a process each; placement and a gateway's runner in this one.

What `affinity.py` and `predicted.py` measure on. Run by itself it is one of the units.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
# A script's own folder is searched first, and a neighbour's name would hide the package `placement`.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != HERE]

from gateway.pipeline.contract import GenerationStep  # noqa: E402
from gateway.pipeline.events import Finished  # noqa: E402
from gateway.pipeline.invocation import ChatMessage  # noqa: E402
from gateway.pipeline.plan import plan_chat  # noqa: E402
from gateway.pipeline.runner import Runner  # noqa: E402
from gateway.records import Tenant  # noqa: E402
from grid import heap  # noqa: E402
from grid.config import Cell, Config, Model  # noqa: E402
from grid.engines.environment import engine_environment  # noqa: E402
from grid.engines.models import TINY_RANDOM  # noqa: E402
from grid.units.actor import Site, UnitActor  # noqa: E402
from grid.wire.link import LinkPool  # noqa: E402
from grid.words import Decision, PlacementRequest, UnitState  # noqa: E402
from placement.actor import PlacementActor  # noqa: E402
from placement.client import PlacementClient  # noqa: E402

START_LIMIT_S = 180.0
"""vLLM's import and start, two of them on two cores."""
STOP_LIMIT_S = 10.0
WORDS = """
time people way water day part place work world hand house life night name book story room word side man
country city line point group problem fact week month case child eye woman system program question number
government home mother area money service friend father power hour game end member law car
"""
"""About a token each, with the blank before it."""


def model(units: int, kv_cache_mb: int, context_tokens: int) -> Model:
    return Model(
        name="tiny",
        engine="vllm",
        source=TINY_RANDOM,
        precision="fp32",
        context_tokens=context_tokens,
        kv_cache_mb=kv_cache_mb,
        max_running=16,
        max_waiting=256,
        min_units=units,
        max_units=units,
        cpus=1,
    )


def words(seed: object, count: int) -> str:
    """Text of about so many tokens, always the same for a seed."""
    rng, choice = random.Random(str(seed)), WORDS.split()
    return "".join(f" {rng.choice(choice)}" for _ in range(count))


@dataclass(frozen=True, slots=True)
class Ask:
    at_s: float
    """Since the beginning of the replay."""
    prompt: str
    output_tokens: int


class Row(NamedTuple):
    """One request: what was predicted when it was placed, and what came of it. Times since the placement."""

    unit_id: str
    at_s: float
    predicted_ttft_ms: float
    predicted_total_ms: float
    predicted_output_tokens: int
    predicted_cached_tokens: int
    predicted_parts_ms: tuple[float, ...]
    """Network, queue, prefill, decode, pressure."""
    prompt_tokens: int
    """As the gateway estimated."""
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float
    total_ms: float


@dataclass
class Arm:
    """Stands before placement for one replay: changes what is asked, writes down what is told."""

    client: PlacementClient
    change: Callable[[PlacementRequest], PlacementRequest] = lambda request: request
    rows: list[Row] = field(default_factory=list)
    refused: int = 0
    began_s: float = field(default_factory=time.monotonic)
    _open: dict[str, tuple[PlacementRequest, Decision]] = field(default_factory=dict)

    async def place(self, request: PlacementRequest, timeout_s: float) -> Decision:
        decision = await self.client.place(self.change(request), timeout_s)
        self._open[decision.reservation_id] = request, decision
        return decision

    def settle(self, reservation_id: str, outcome: str, **figures: Any) -> None:
        self.client.settle(reservation_id, outcome, **figures)
        request, decision = self._open.pop(reservation_id)
        if outcome != "done":
            self.refused += 1
            return
        chosen = decision.chosen
        self.rows.append(
            Row(
                chosen.unit_id,
                time.monotonic() - self.began_s,
                chosen.ttft_ms,
                chosen.total_ms,
                decision.expected_output_tokens,
                chosen.cached_tokens,
                (chosen.network_ms, chosen.queue_ms, chosen.prefill_ms, chosen.decode_ms, chosen.pressure_ms),
                request.prompt_tokens,
                figures["input_tokens"],
                figures["cached_tokens"],
                figures["output_tokens"],
                figures["ttft_ms"],
                figures["total_ms"],
            )
        )


class _NoSearch:
    async def search(self, request: object) -> Any:
        raise NotImplementedError("these benchmarks only generate")


class VllmCell:
    def __init__(
        self, config: Config, client: PlacementClient, links: LinkPool, actor: PlacementActor
    ) -> None:
        self.config, self.client, self.links, self.actor = config, client, links, actor

    @property
    def unit_ids(self) -> list[str]:
        return sorted(unit.card.unit_id for unit in self.client.fleet.units)

    async def replay(self, asks: Sequence[Ask], arm: Arm, tenant: str) -> Arm:
        """Ask at the times of the trace, whether or not earlier answers are there."""
        runner = Runner(placement=arm, links=self.links, retrieval=_NoSearch())
        known = Tenant(tenant, "key", False, secrets.token_hex(16))
        loop = asyncio.get_running_loop()
        arm.began_s = time.monotonic()
        began_s = loop.time()
        async with asyncio.TaskGroup() as running:
            for ask in asks:
                await asyncio.sleep(max(0.0, began_s + ask.at_s - loop.time()))
                running.create_task(self._run(runner, ask, known))
        return arm

    async def _run(self, runner: Runner, ask: Ask, tenant: Tenant) -> None:
        plan = plan_chat(
            GenerationStep(model="tiny", max_output_tokens=ask.output_tokens, temperature=0.0),
            (ChatMessage(role="user", content=ask.prompt),),
            request_id=f"req_{secrets.token_hex(8)}",
            tenant=tenant,
            config=self.config,
        )
        async with aclosing(runner.run(plan)) as run:
            async for events in run:
                last = events[-1]
        assert isinstance(last, Finished), last


@asynccontextmanager
async def vllm_cell(
    units: int = 2, *, kv_cache_mb: int = 64, context_tokens: int = 2048
) -> AsyncIterator[VllmCell]:
    with tempfile.TemporaryDirectory() as folder:
        state_dir = Path(folder)
        (state_dir / "secrets").mkdir()
        (state_dir / "secrets" / "link.key").write_bytes(secret := secrets.token_bytes(32))
        served = model(units, kv_cache_mb, context_tokens)
        config = Config(cell=Cell(region="here", state_dir=state_dir), models=(served,))
        actor = PlacementActor(config, secret=secret)
        address = await actor.address()

        async def resolve() -> tuple[str, int]:
            return address

        with _units(units, config, address):
            client = PlacementClient(resolve, peer_id="gateway", secret=secret)
            links = LinkPool(role="gateway", peer_id="gateway", secret=secret)
            await client.start()
            try:
                async with asyncio.timeout(START_LIMIT_S):
                    while _ready(client) < units:  # noqa: ASYNC110  asked, as a probe does
                        await asyncio.sleep(0.1)
                heap.freeze()
                yield VllmCell(config, client, links, actor)
            finally:
                await links.close()
                await client.close()
                await actor.close()


def _ready(client: PlacementClient) -> int:
    return sum(unit.load.state == UnitState.READY for unit in client.fleet.units)


@contextmanager
def _units(count: int, config: Config, address: tuple[str, int]) -> Iterator[None]:
    environment = os.environ | engine_environment(config.models[0]) | {"VLLM_LOGGING_LEVEL": "ERROR"}
    told = json.dumps({"config": config.model_dump(mode="json"), "address": address})
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, f"unit-{number}"], stdin=subprocess.PIPE, env=environment, text=True
        )
        for number in range(count)
    ]
    try:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(told + "\n")
            process.stdin.flush()
        yield
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def be_a_unit(unit_id: str) -> None:
    """Serve until standard input ends."""
    told = json.loads(sys.stdin.readline())
    config = Config.model_validate(told["config"])

    async def resolve() -> tuple[str, int]:
        host, port = told["address"]
        return host, port

    unit = UnitActor(
        config,
        config.models[0],
        unit_id,
        Site("node", "127.0.0.1", "here"),
        resolve_placement=resolve,
        end_process=os._exit,
    )
    await unit.start()
    heap.freeze()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await unit.stop()
    # Not through the interpreter's end, where the libraries beneath vLLM complain of each other.
    os._exit(0)


def quantile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


if __name__ == "__main__":
    import uvloop

    uvloop.run(be_a_unit(sys.argv[1]))
