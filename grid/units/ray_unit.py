"""The unit as Ray runs it: `UnitActor` with the node, address and way out that a Ray process has."""

from __future__ import annotations

import os

import ray

from grid import heap
from grid.config import Config, Model
from grid.ray_figures import RayFigures
from grid.units import machine
from grid.units.actor import Site, UnitActor
from grid.units.figures import TEXTS, UnitFigures, tags
from grid.units.scaling import Role
from grid.wire.link import Resolve
from grid.words import UNKNOWN, UnitCard

NAMESPACE = "zerogrid"
PLACEMENT = "placement"
PROBE_PREFIX = "probe-"
"""Of the name of a node's probe, before its id."""


async def resolve_placement() -> tuple[str, int]:
    """Return the placement actor's address on the data plane."""
    address: tuple[str, int] = await ray.get_actor(PLACEMENT, namespace=NAMESPACE).address.remote()
    return address


def resolve_probe(node_id: str) -> Resolve:
    """Return what finds the address of a node's probe."""

    async def resolve() -> tuple[str, int]:
        address: tuple[str, int] = await ray.get_actor(
            PROBE_PREFIX + node_id, namespace=NAMESPACE
        ).address.remote()
        return address

    return resolve


class RayUnit(UnitActor):
    def __init__(
        self, config: Config, model: Model, unit_id: str, region: str, role: Role = Role.SERVING
    ) -> None:
        owns_gpu = model.gpus > 0 and model.engine != "simulated"
        gpus = machine.visible_gpus() if owns_gpu else ()
        site = Site(
            node_id=ray.get_runtime_context().get_node_id(),
            host=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            region=region,
            gpu=gpus[0].product if gpus else "",
            gpu_uuids=tuple(gpu.uuid for gpu in gpus),
            gpu_memory_mb=gpus[0].memory_mb if gpus else UNKNOWN,
            gpu_capability=gpus[0].compute_capability if gpus else (0, 0),
        )
        super().__init__(
            config,
            model,
            unit_id,
            site,
            resolve_placement=resolve_placement,
            end_process=os._exit,
            # Only nodes with GPUs have a probe.
            resolve_node=resolve_probe(site.node_id) if gpus else None,
            role=role,
        )

        self._told = UnitFigures()
        self._figures: RayFigures | None = None

    def __repr__(self) -> str:
        """What Ray's dashboard shows of a unit beside its name."""
        model = self._model
        engine = f"simulated {model.gpu}" if model.engine == "simulated" else model.engine
        return f"{model.name} in {self._site.region} ({engine})"

    async def start(self) -> UnitCard:
        ready = await super().start()
        self._figures = RayFigures(TEXTS, tags(ready), self._read)
        self._figures.start()
        heap.freeze()
        return ready

    async def stop(self) -> None:
        if self._figures is not None:
            await self._figures.close()
        await super().stop()

    def _read(self) -> dict[str, float]:
        unit = self._ready.unit
        return self._told.read(unit.card, self._sample(), unit.counters)

    async def ping(self) -> None:
        """Answer: the process is up and its loop turns."""
