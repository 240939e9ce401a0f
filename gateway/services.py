"""What a gateway replica works with, built once in its serving loop. The one place that wires it together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.knowledge.documents import Documents
from gateway.knowledge.embedder import Embedder
from gateway.knowledge.retrieval import Retrieval
from gateway.knowledge.sources import open_stores
from gateway.knowledge.sources.base import VectorStore
from gateway.observe.figures import Figures
from gateway.observe.push import Push, open_push
from gateway.observe.recorder import Recorder
from gateway.pipeline.counting import Counter
from gateway.pipeline.deployer import Deployer
from gateway.pipeline.registry import Registry
from gateway.pipeline.runner import Runner
from gateway.state import open_redis
from gateway.trust.keyfiles import LINK_KEY_FILE, read_secret, secret_path
from gateway.trust.tenants import Tenants
from grid.config import Config
from grid.tracing.exporter import ExportingTracer, open_tracer
from grid.wire.link import LinkPool, Resolve
from grid.words import UnitState, new_id
from placement.client import PlacementClient
from placement.rules import Rules

if TYPE_CHECKING:
    from grid.ray_figures import RayFigures

ROLE = "gateway"


@dataclass(frozen=True, slots=True)
class Services:
    """All parts belong to this object: `close` ends them, in the reverse order of their building."""

    config: Config
    redis: Redis
    tenants: Tenants
    registry: Registry
    placement: PlacementClient
    links: LinkPool
    bulk_links: LinkPool
    """Vectors of whole collections travel here, so that they never delay a token."""
    stores: Mapping[str, VectorStore]
    retrieval: Retrieval
    documents: Documents
    deployer: Deployer
    runner: Runner
    recorder: Recorder
    figures: Figures
    push: Push | None
    """Sends the cell's figures to a collector, while this replica holds the lease; None where that is off."""
    counter: Counter
    embedder: Embedder
    """For texts that callers want the vectors of, on the links for bulk."""
    tracer: ExportingTracer | None
    ray_figures: RayFigures | None = None
    """Where the replica is a process of Ray."""

    async def not_ready(self) -> list[str]:
        """Return why the cell can't serve its models now; nothing when it can."""
        reasons = []
        try:
            await self.redis.ping()
        except (RedisError, OSError):
            reasons.append("the state store (Redis) does not answer")
        if not self.placement.able:
            reasons.append("the placement actor can't be reached")
        ready: dict[str, int] = {}
        for unit in self.placement.fleet.units:
            if unit.load.state == UnitState.READY:
                ready[unit.card.model] = ready.get(unit.card.model, 0) + 1
        return reasons + [
            f"model {model.name} has {ready.get(model.name, 0)} ready units of {model.least_units}"
            for model in self.config.models
            if ready.get(model.name, 0) < model.least_units
        ]

    async def close(self) -> None:
        await self.deployer.close()
        if self.push is not None:
            await self.push.close()
        if self.ray_figures is not None:
            await self.ray_figures.close()
        await self.recorder.close()
        for store in self.stores.values():
            await store.close()
        await self.bulk_links.close()
        await self.links.close()
        await self.placement.close()
        await self.redis.aclose()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)


async def build_services(config: Config, *, resolve_placement: Resolve, resolve_vectors: Resolve) -> Services:
    """Connect to the cell. Raises Rejected or InternalError when its state store can't be used.

    Placement and units may still be away: they are dialled in the background.
    """
    secret = read_secret(secret_path(config.cell.state_dir, LINK_KEY_FILE))
    peer_id = new_id("gateway-")
    redis = await open_redis(config)
    registry = Registry(redis)
    placement = PlacementClient(resolve_placement, peer_id=peer_id, secret=secret, rules=Rules.of(config))
    links = LinkPool(role=ROLE, peer_id=peer_id, secret=secret)
    bulk_links = LinkPool(role=ROLE, peer_id=peer_id, secret=secret)
    stores = open_stores(config, resolve_vectors, peer_id=peer_id, secret=secret)
    retrieval = Retrieval(placement=placement, links=links, stores=stores)
    figures = Figures(redis)
    services = Services(
        config=config,
        redis=redis,
        tenants=Tenants(redis, config),
        registry=registry,
        placement=placement,
        links=links,
        bulk_links=bulk_links,
        stores=stores,
        retrieval=retrieval,
        documents=Documents(
            placement=placement, links=bulk_links, stores=stores, registry=registry, config=config
        ),
        deployer=Deployer(redis=redis, registry=registry, placement=placement, config=config),
        runner=Runner(placement=placement, links=links, retrieval=retrieval),
        recorder=Recorder(redis, config),
        figures=figures,
        push=open_push(config, redis, figures, lambda: placement.fleet),
        counter=Counter(placement=placement, links=links),
        embedder=Embedder(placement=placement, links=bulk_links),
        tracer=open_tracer(config.tracing, "gateway", peer_id, config.cell.region),
    )
    placement.on_fleet(services.runner.watch.fleet_changed)
    try:
        await placement.start()
        for store in stores.values():
            await store.start()
        await services.deployer.start()
        services.recorder.start()
        if services.push is not None:
            services.push.start()
    except BaseException:
        await services.close()
        raise
    return services
