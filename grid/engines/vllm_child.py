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

LIMIT = "zerogrid_limit"
"""The engine core's method that sets what it may do at once."""

CPU_NICENESS = 5
"""A third of the weight of a serving process while both want the same core, all of it otherwise."""


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Stand in for `EngineCoreProc.run_engine_core`."""
    die_with_parent()
    on_cpu = kwargs["vllm_config"].device_config.device_type == "cpu"
    if on_cpu:
        os.nice(CPU_NICENESS)
    from vllm.v1.engine.core import EngineCoreProc

    if on_cpu:
        rewind_on_cpu()
    # What a parent asks for by name is looked up on the engine core.
    setattr(EngineCoreProc, LIMIT, limit)
    EngineCoreProc.run_engine_core(*args, **kwargs)


def rewind_on_cpu() -> None:
    """Let seeded requests have prompts that take several steps.

    vLLM 0.32 draws a token for each piece of a prompt, and takes back what it drew for all but the last by an
    offset that torch's generators have on GPUs alone: on CPU cores such a request would end the engine for
    everybody. Here it begins again with its seed, which is exact before the first token; after an eviction it
    repeats its random numbers, which is a sample as good as any.
    """
    import torch

    class Rewinding(torch.Generator):  # type: ignore[misc]  # torch is not followed
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> None:
            self.manual_seed(self.initial_seed())

    torch.Generator = Rewinding


def limit(core: Any, chunk_tokens: int, admits: int) -> tuple[int, int]:
    """Let each step compute up to `chunk_tokens` of prompts beside the streams that run, and up to `admits`
    requests be in work. Return the step's bound and the requests, as the scheduler has them now."""
    scheduler = core.scheduler
    scheduler.max_num_active_reqs = min(admits, scheduler.max_num_running_reqs)
    # Streams that run take a token each; the rest is for prompts.
    streams = max(admits, len(scheduler.running))
    most = scheduler.scheduler_config.max_num_batched_tokens
    scheduler.max_num_scheduled_tokens = min(chunk_tokens + streams, most)
    return scheduler.max_num_scheduled_tokens, scheduler.max_num_active_reqs


def die_with_parent() -> None:
    """Be killed when the parent ends, however it does. Linux only; elsewhere nothing happens."""
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it ended before the kernel knew
        os._exit(1)
