"""What a unit reads of the machine it runs on: memory of process and node, its GPUs, its processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grid.hardware.nvml import Named

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MB = 1024 * 1024

MAX_GENERATIONS = 64
"""From a process to its node's Ray are three or four."""


def resident_mb() -> float:
    """Return the memory that this process holds in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES / MB


def physical_mb() -> int:
    """Return the node's RAM."""
    return os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES // MB


def visible_gpus() -> tuple[Named, ...]:
    """Return what NVML says of each GPU that this process may use, in CUDA's order.

    Raises InternalError when the driver can't be asked.
    """
    from grid.hardware import nvml  # only where there are GPUs

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return tuple(nvml.named(gpu) for gpu in visible.split(",") if gpu) or (nvml.named("0"),)


def may_use(number: int, uuid: str) -> bool:
    """Whether this process was given a GPU, by NVML's index or UUID; without a word, it was given all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible is None or not {str(number), uuid}.isdisjoint(visible.split(","))


def is_descendant(pid: int, ancestor: int) -> bool | None:
    """Return whether `ancestor` started the process `pid`, perhaps through others; None for a process that
    can't be seen from here."""
    for _ in range(MAX_GENERATIONS):
        if pid == ancestor:
            return True
        if pid <= 1:
            return False
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        # The name, in brackets, may hold anything; after it come the state and the parent.
        pid = int(status.rpartition(")")[2].split()[1])
    return False
