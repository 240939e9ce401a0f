"""The unit as Ray runs it: `UnitActor` with the node, address and way out that a Ray process has."""

from __future__ import annotations

import os

import ray

from grid import heap
from grid.config import Config, Model
from grid.units import machine
from grid.units.actor import Site, UnitActor
from grid.words import UnitCard

NAMESPACE = "zerogrid"
PLACEMENT = "placement"


async def resolve_placement() -> tuple[str, int]:
    """Return the placement actor's address on the data plane."""
    address: tuple[str, int] = await ray.get_actor(PLACEMENT, namespace=NAMESPACE).address.remote()
    return address


class RayUnit(UnitActor):
    def __init__(self, config: Config, model: Model, unit_id: str, region: str) -> None:
        owns_gpu = model.gpus > 0 and model.engine != "simulated"
        site = Site(
            node_id=ray.get_runtime_context().get_node_id(),
            host=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            region=region,
            gpu=machine.gpu_name() if owns_gpu else "",
        )
        super().__init__(
            config, model, unit_id, site, resolve_placement=resolve_placement, end_process=os._exit
        )

    async def start(self) -> UnitCard:
        ready = await super().start()
        heap.freeze()
        return ready

    async def ping(self) -> None:
        """Answer: the process is up and its loop turns."""
