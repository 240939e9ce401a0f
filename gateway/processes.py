"""Processes of this machine, by their ids: ended, recognised, measured. And the end of what they wrote."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

LOG_TAIL_LINES = 15


def end(pids: list[int], timeout_s: float) -> None:
    """Ask with SIGTERM, wait, then SIGKILL."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)
    _gone, alive = psutil.wait_procs(processes, timeout=timeout_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=timeout_s)


def is_alive(process: Mapping[str, Any] | None) -> bool:
    """True when the recorded process still runs; its start time tells it from a reused pid."""
    if process is None:
        return False
    try:
        found = psutil.Process(int(process["pid"]))
        return found.status() != psutil.STATUS_ZOMBIE and abs(found.create_time() - process["created"]) < 1.0
    except psutil.NoSuchProcess:
        return False


def pss_bytes(process: psutil.Process) -> int:
    """Proportional set size: shared pages are counted once over all processes."""
    with contextlib.suppress(psutil.Error, AttributeError):
        return int(process.memory_full_info().pss)
    return 0


def tail(path: Path) -> str:
    """Return the last lines of a log and where it is."""
    lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(lines) + f"\n(the whole log is {path})"
