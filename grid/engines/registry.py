"""Which engine serves which kind of model: a dictionary in plain sight, each entry imported when used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from grid.config import Model
from grid.engines.base import EmbeddingEngine, Engine
from grid.engines.models import Progress, silent
from grid.hardware import catalogue
from grid.hardware.catalogue import GpuModel


def _vllm(model: Model, cache_dir: Path, progress: Progress, gpu: GpuModel) -> Engine:
    from grid.engines.vllm import VLLMEngine

    return VLLMEngine(model, cache_dir, progress, gpu)


def _simulated(model: Model, cache_dir: Path, progress: Progress, gpu: GpuModel) -> Engine:
    from grid.engines.simulated import SimulatedEngine

    return SimulatedEngine(model)


def _embedding(model: Model, cache_dir: Path, progress: Progress, gpu: GpuModel) -> EmbeddingEngine:
    from grid.engines.embedding import OnnxEmbeddingEngine

    return OnnxEmbeddingEngine(model, cache_dir, progress)


ENGINES: dict[str, Callable[[Model, Path, Progress, GpuModel], Engine | EmbeddingEngine]] = {
    "vllm": _vllm,
    "simulated": _simulated,
    "embedding": _embedding,
}


def build_engine(
    model: Model,
    cache_dir: Path,
    progress: Progress = silent,
    gpu: GpuModel = catalogue.GPUS["CPU"],
) -> Engine | EmbeddingEngine:
    """Return the engine of a configured model on `gpu`, not started yet.

    `cache_dir` holds prepared models; `progress(what, done, total)` hears of long preparation.
    """
    return ENGINES[model.engine](model, cache_dir, progress, gpu)
