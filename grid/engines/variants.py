"""Which of a model's checkpoints runs on a GPU, and why not another. Pure; fails closed.

One rule for all who ask: the planner for the GPU of a node, a unit for the GPU that it found itself on, and
whoever explains what a request could get. The order of preference is the catalogue's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from grid.config import Model
from grid.hardware import catalogue
from grid.hardware.catalogue import GpuModel
from grid.model import SIMULATED_GPU, SIMULATED_PARAMETERS_B
from grid.words import Precision

ACTIVATIONS_MB = 1536
"""What a GPU keeps free beside weights and KV cache: activations, graphs and the driver's own."""


class NoVariant(NamedTuple):
    reason: str


def choose(
    gpu: GpuModel,
    offered: Collection[Precision] = tuple(Precision),
    *,
    lowest: int = 0,
    parameters_b: float = 0.0,
    memory_mb: float = 0.0,
) -> Precision | NoVariant:
    """Return the precision that serves best on `gpu` among those `offered` and not below `lowest`.

    `lowest` 0 accepts any. Weights must fit into `memory_mb` (of all GPUs together) where that and the number
    of parameters, in billions, are known (above 0).
    """
    problems = {}
    for precision in sorted(offered, reverse=True):
        if precision < lowest:
            problems[precision] = f"below {Precision(lowest).label}, the lowest accepted"
        elif precision not in gpu.kernels.serves:
            problems[precision] = gpu.kernels.lacks[precision]
        elif parameters_b and memory_mb:
            weights_mb = catalogue.weights_mb(parameters_b, precision)
            if weights_mb + ACTIVATIONS_MB > memory_mb:
                problems[precision] = (
                    f"{weights_mb:.0f} MB of weights and {ACTIVATIONS_MB} MB to compute in are more than "
                    f"{memory_mb:.0f} MB"
                )
    for precision in gpu.precisions:
        if precision in offered and precision not in problems:
            return precision
    return NoVariant(
        f"no variant runs on {gpu.name}: "
        + "; ".join(f"{precision.label}: {problem}" for precision, problem in problems.items())
    )


def fitted(model: Model, gpu: GpuModel) -> Model | NoVariant:
    """Return `model` with the checkpoint that its units on `gpu` run as the only one."""
    if model.engine == "embedding":
        return model  # not vLLM's: one checkpoint, which runs on any core
    precision = choose(
        gpu,
        [Precision.parse(variant.precision) for variant in model.checkpoints],
        parameters_b=parameters_b(model),
        memory_mb=memory_mb(model, gpu),
    )
    return precision if isinstance(precision, NoVariant) else model.at(precision)


def pretended_gpu(model: Model) -> GpuModel:
    """Return what a simulated unit pretends to run on."""
    return catalogue.find(model.gpu or SIMULATED_GPU)


def parameters_b(model: Model) -> float:
    """Return the model's billions of parameters; 0 if nobody said."""
    return model.parameters_b or (SIMULATED_PARAMETERS_B if model.engine == "simulated" else 0.0)


def memory_mb(model: Model, gpu: GpuModel) -> float:
    """Return the memory of a unit on `gpu`: its grant, or its share of the GPUs; 0 if only the node knows."""
    if model.memory_grant_mb:
        return model.memory_grant_mb
    if model.engine != "simulated" and not model.gpus:
        return 0.0  # RAM
    return gpu.memory_mb * (model.gpus or 1.0)
