"""One probe for each node with GPUs, as a detached actor there; the supervisor owns them all.

A node without GPUs has none, so it costs nothing. Ray restarts a probe that dies. What the probes saw goes
with the nodes to the planner: free memory and topology decide on starts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from grid.config import Config
from grid.engines.environment import RAYS_OWN_GPUS
from grid.units import machine
from grid.units.gpu_room import Gpu
from grid.units.node import NodeProbe
from grid.units.nodes import Node
from grid.units.ray_unit import NAMESPACE, PROBE_PREFIX, resolve_placement
from grid.words import GpuSample, NodeCard

log = logging.getLogger(__name__)

NODE_ID_LABEL = "ray.io/node-id"

ASK_LIMIT_S = 2.0
"""For one answer; it comes within a millisecond once the probe runs."""

FIRST_ANSWER_LIMIT_S = 60.0
"""A probe's process starts within seconds. If it never answers, its node's GPUs are left to Ray, as without a
driver. One that answered once and is silent is believed: its process is back within seconds."""


class RayNodeProbe(NodeProbe):
    """Begins by itself, because nobody calls `start` after Ray restarted it."""

    def __init__(self, config: Config) -> None:
        raylet = os.getppid()
        super().__init__(
            config,
            ray.get_runtime_context().get_node_id(),
            resolve_placement=resolve_placement,
            # The cell's processes of a node are those that its Ray started.
            is_ours=lambda pid: machine.is_descendant(pid, raylet),
        )
        self._starting = asyncio.get_running_loop().create_task(self.start())

    async def hardware(self) -> tuple[NodeCard, tuple[GpuSample, ...]]:
        """As ever, but without samples of GPUs that the node's Ray was not given."""
        await self._starting
        card, samples = await super().hardware()
        given = {gpu.uuid for gpu in card.gpus if machine.may_use(gpu.number, gpu.uuid)}
        return card, tuple(sample for sample in samples if sample.uuid in given)


class Probes:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._handles: dict[str, Any] = {}
        """By node."""
        self._since_s: dict[str, float] = {}
        """Since when a node's first answer is awaited."""
        self._seen: dict[str, tuple[Gpu, ...]] = {}

    async def see(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Return `nodes` with what their probes see; start probes on new nodes, end those of lost ones."""
        for node_id in set(self._handles) - {node.node_id for node in nodes}:
            self._end(node_id)
        looks = (self._look(node) if node.gpus else _as_is(node) for node in nodes)
        return tuple(await asyncio.gather(*looks))

    def adopt(self, name: str) -> None:
        """Take over what an earlier supervisor started."""
        node_id = name.removeprefix(PROBE_PREFIX)
        self._handles[node_id] = ray.get_actor(name, namespace=NAMESPACE)
        self._since_s[node_id] = time.monotonic()

    def stop_all(self) -> None:
        for node_id in list(self._handles):
            self._end(node_id)

    async def _look(self, node: Node) -> Node:
        try:
            handle = self._handles.get(node.node_id) or self._start(node.node_id)
            async with asyncio.timeout(ASK_LIMIT_S):
                card, samples = await handle.hardware.remote()
        except (RayError, TimeoutError, ValueError) as error:
            return node._replace(hardware=self._without_answer(node.node_id, error))
        # A node that has told Ray of fewer has told of the first.
        self._seen[node.node_id] = hardware(card, samples)[: int(node.gpus)]
        return node._replace(hardware=self._seen[node.node_id])

    def _without_answer(self, node_id: str, error: Exception) -> tuple[Gpu, ...] | None:
        if node_id in self._seen:
            return self._seen[node_id]
        if time.monotonic() - self._since_s[node_id] < FIRST_ANSWER_LIMIT_S:
            return None
        log.error("the probe of node %s does not answer (%s): Ray chooses its GPUs", node_id, error)
        self._seen[node_id] = ()
        return ()

    def _start(self, node_id: str) -> Any:
        self._since_s[node_id] = time.monotonic()
        handle = (
            ray.remote(RayNodeProbe)
            .options(
                name=f"{PROBE_PREFIX}{node_id}",
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                label_selector={NODE_ID_LABEL: node_id},
                # It owns no GPU; Ray would hide from it which ones the node's Ray was given.
                runtime_env={"env_vars": RAYS_OWN_GPUS},
                max_restarts=-1,
            )
            .remote(self._config)
        )
        self._handles[node_id] = handle
        return handle

    def _end(self, node_id: str) -> None:
        self._since_s.pop(node_id, None)
        self._seen.pop(node_id, None)
        try:
            ray.kill(self._handles.pop(node_id))
        except (RayError, ValueError) as error:
            log.info("the probe of node %s: %s", node_id, type(error).__name__)


async def _as_is(node: Node) -> Node:
    return node


def hardware(card: NodeCard, samples: Sequence[GpuSample]) -> tuple[Gpu, ...]:
    """Return a node's GPUs for the planner; none where no driver tells or nothing was read yet."""
    by_uuid = {sample.uuid: sample for sample in samples}
    return tuple(
        Gpu(place, gpu, by_uuid[gpu.uuid]) for place, gpu in enumerate(card.gpus) if gpu.uuid in by_uuid
    )
