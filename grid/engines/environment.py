"""The environment that an engine's process needs before Python starts. Pure, save for finding packages.

Threads, allocators and vLLM's own switches are read when libraries are loaded, so whoever starts the
process has to set them; `VLLMEngine` itself can't any more.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from grid.config import Model

CPU_THREADS = 2
"""OpenMP threads of a CPU unit that names no number of cores; small models gain little beyond."""

RAYS_OWN_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""A process sees the GPUs that Ray itself sees, whatever Ray counts as the process' own."""


def engine_environment(model: Model) -> dict[str, str]:
    """Return the variables for the process of one unit of `model`; empty where none are needed."""
    if model.engine == "simulated":
        return {}
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if model.engine == "embedding":
        return quiet
    environment = quiet | {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # The engine's process must not inherit threads and sockets of the actor.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if model.gpus:
        return environment
    environment |= {
        # One engine process without a further worker process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Several engines share the cores; vLLM would bind each to the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(int(model.cpus) or CPU_THREADS),
        # Threads that spin while they wait would take the cores from the gateway and from each other.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    libgomp = torch_libgomp()
    if libgomp is not None:
        # With the system's libgomp beside torch's own, only one core would work.
        environment["LD_PRELOAD"] = str(libgomp)
    return environment


def gpu_environment(numbers: Sequence[int]) -> dict[str, str]:
    """Return the variables that give a process the GPUs with these NVML numbers, instead of Ray's choice."""
    if not numbers:
        return {}
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers)),
        # Else CUDA would count from the fastest.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **RAYS_OWN_GPUS,
    }


def torch_libgomp() -> Path | None:
    """Return the OpenMP library that comes with torch, without importing torch; None without one."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(next(iter(spec.submodule_search_locations)))
    for folder in (package.parent / "torch.libs", package / "lib"):
        found = sorted(folder.glob("libgomp*.so*"))
        if found:
            return found[0]
    return None
