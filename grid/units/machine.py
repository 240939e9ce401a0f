"""What a unit reads of the machine it runs on: memory of process and node, model of its GPU."""

from __future__ import annotations

import os
from pathlib import Path

from grid.errors import InternalError

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MB = 1024 * 1024


def resident_mb() -> float:
    """Return the memory that this process holds in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES / MB


def physical_mb() -> int:
    """Return the node's RAM."""
    return os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES // MB


def gpu_name() -> str:
    """Return NVML's product name of the first GPU that this process may use.

    Raises InternalError when the driver can't be asked.
    """
    import pynvml  # only where there are GPUs

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    try:
        pynvml.nvmlInit()
        if visible.isdigit():
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(visible))
        else:
            handle = pynvml.nvmlDeviceGetHandleByUUID(visible)
        return str(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError as error:
        raise InternalError(
            f"NVML can't name GPU {visible} ({error}): check the driver with nvidia-smi"
        ) from None
