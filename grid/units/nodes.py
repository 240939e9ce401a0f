"""What a node of the cluster is, and what a unit would get of it: checkpoint, cores and GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from grid.config import Model
from grid.engines.arguments import GPU_MEMORY_SHARE
from grid.engines.variants import NoVariant, fitted, pretended_gpu
from grid.errors import InvalidRequest
from grid.hardware import catalogue
from grid.hardware.catalogue import GpuModel
from grid.units.gpu_room import SHARE_SLACK, Gpu, NoRoom, choose

REGION_LABEL = "region"
GPU_LABEL = "gpu"
"""Set by operators where Ray's own label says too little: it calls an A100 of 40 and one of 80 GB alike."""
RAY_GPU_LABEL = "ray.io/accelerator-type"


class Node(NamedTuple):
    """A live node of the cluster and all that it has."""

    node_id: str
    labels: dict[str, str]
    cpus: float
    gpus: float
    hardware: tuple[Gpu, ...] | None = ()
    """What its probe saw; empty where no driver tells, None while the probe has not answered yet."""

    @property
    def gpu(self) -> str:
        """The model of its GPUs, as the operator, the driver or else Ray says; "" if none does."""
        by_driver = self.hardware[0].card.product if self.hardware else ""
        return self.labels.get(GPU_LABEL) or by_driver or self.labels.get(RAY_GPU_LABEL, "")

    @property
    def accelerator(self) -> GpuModel:
        """What its GPUs can do. Raises InvalidRequest for a label that names none of the catalogue's: what a
        driver says is enough to run on, what somebody wrote is not."""
        if self.labels.get(GPU_LABEL) or not self.hardware:
            return catalogue.find(self.gpu)
        card = self.hardware[0].card
        return catalogue.known(card.product, card.memory_mb, card.compute_capability)

    def by_gpu(self) -> list[Node]:
        """Return the node once for each kind of GPU that its driver names."""
        products = dict.fromkeys(gpu.card.product for gpu in self.hardware or ())
        if len(products) <= 1 or self.labels.get(GPU_LABEL):
            return [self]
        return [
            self._replace(hardware=tuple(gpu for gpu in self.hardware or () if gpu.card.product == product))
            for product in products
        ]


class Owner(NamedTuple):
    """What a unit of a node owns of its GPUs."""

    unit_id: str
    gpus: float
    gpu_uuids: tuple[str, ...]
    """Empty while only Ray knows."""


def on_node(model: Model, node: Node) -> Model | NoVariant:
    """Return the model with the checkpoint that a unit on `node` would run, or why none can."""
    if model.engine == "simulated":
        return fitted(model, pretended_gpu(model))
    if not model.gpus:
        return fitted(model, catalogue.GPUS["CPU"])
    if not node.gpu:
        if not model.gpu and len(model.checkpoints) == 1:
            return model  # the unit finds out by itself
        return NoVariant(
            f"it depends on the GPU, and no node says which it has: start Ray there with "
            f"--labels={GPU_LABEL}=NAME"
        )
    try:
        gpu = node.accelerator
    except InvalidRequest as unknown:
        return NoVariant(unknown.message)
    if model.gpu and gpu.name != model.gpu:
        return NoVariant(f"it needs {model.gpu}; nodes have {gpu.name}")
    return fitted(model, gpu)


def demands(model: Model) -> tuple[float, float]:
    """Return the CPU cores and GPUs to reserve; a simulated unit only pretends to have any."""
    return (0.0, 0.0) if model.engine == "simulated" else (model.cpus, model.gpus)


def gpus_for(node: Node, model: Model, owners: Iterable[Owner]) -> tuple[Gpu, ...] | NoRoom:
    """Return the GPUs that a unit of `model` gets beside `owners`; none if it needs none or Ray chooses."""
    _, wanted = demands(model)
    if not wanted:
        return ()
    if node.hardware is None:
        return NoRoom("its probe has not told of the GPUs yet")
    owners = [owner for owner in owners if owner.gpus]
    if not node.hardware:
        return () if gpus_fit(node.gpus, [owner.gpus for owner in owners], wanted) else NoRoom("")
    taken: dict[str, float] = {}
    for owner in owners:
        if not owner.gpu_uuids:
            return NoRoom(f"{owner.unit_id} has not told yet which GPUs it has")
        for uuid in owner.gpu_uuids:
            taken[uuid] = taken.get(uuid, 0.0) + min(owner.gpus, 1.0)
    return choose(node.hardware, taken, wanted, _needed_mb(model, node.hardware[0].card.memory_mb))


def _needed_mb(model: Model, gpu_mb: float) -> float:
    """Return how much memory must be free on each GPU that a unit of `model` gets."""
    if model.memory_grant_mb:
        return model.memory_grant_mb / max(model.gpus, 1)
    # Without a grant, the share that vLLM takes, and demands to find.
    return max(gpu_mb, 0.0) * min(model.gpus, 1.0) * GPU_MEMORY_SHARE


def gpus_fit(total: float, used: Iterable[float], wanted: float) -> bool:
    """Tell whether `wanted` fits beside `used`: shares on one GPU each, whole ones on empty GPUs."""
    room = [1.0] * int(total)
    for amount in [*sorted(used, reverse=True), wanted]:
        if amount == 0:
            continue
        need, each = (1, amount) if amount < 1 else (int(amount), 1.0)
        open_gpus = [i for i, left in enumerate(room) if left >= each - SHARE_SLACK]
        if len(open_gpus) < need:
            return False
        # The fullest that still fits, so that whole GPUs stay whole.
        for i in sorted(open_gpus, key=lambda i: room[i])[:need]:
            room[i] -= each
    return True
