"""What runs first in vLLM's EngineCore process. Imported by its parent for the name only.

vLLM's own engine process outlives a parent that was killed, and keeps its memory, on a GPU the whole grant
of the unit that is to replace it. So the kernel is asked to end it together with its parent. On CPU cores it
computes with less priority than what serves: a step that takes a little longer is not noticed, a gateway or
a unit that answers no beat because arithmetic has all cores is.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1

CPU_NICENESS = 5
"""A third of the weight of a serving process while both want the same core, all of it otherwise."""


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Stand in for `EngineCoreProc.run_engine_core`."""
    die_with_parent()
    if kwargs["vllm_config"].device_config.device_type == "cpu":
        os.nice(CPU_NICENESS)
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc.run_engine_core(*args, **kwargs)


def die_with_parent() -> None:
    """Be killed when the parent ends, however it does. Linux only; elsewhere nothing happens."""
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it ended before the kernel knew
        os._exit(1)
