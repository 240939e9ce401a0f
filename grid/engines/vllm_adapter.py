"""Every name of vLLM that the grid uses, in one file: it is pinned to one release, and this is what to check
when that changes. Importing it takes about ten seconds."""

from __future__ import annotations

import platform
import time
from typing import Any

import torch
import vllm
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import TokensInput, tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from grid.engines import vllm_child
from grid.engines.adaptive import Limits
from grid.engines.base import Generation
from grid.engines.meter import Meter
from grid.errors import GridError, InternalError, InvalidRequest, UnitLost


class _StepListener(StatLoggerBase):  # type: ignore[misc]  # vLLM is not followed
    """Tells a Meter of every engine step."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self._meter.stepped(
                time.monotonic(),
                running=scheduler_stats.num_running_reqs,
                kv_usage=scheduler_stats.kv_cache_usage,
                prefilling=iteration_stats is None or iteration_stats.num_prompt_tokens > 0,
            )
            cache = scheduler_stats.prefix_cache_stats
            self._meter.looked_up(cache.queries, cache.hits)
        if iteration_stats is not None:
            self._meter.preempted(iteration_stats.num_preempted_reqs)

    def log_engine_initialized(self) -> None:
        pass


def build(arguments: dict[str, Any], meter: Meter) -> tuple[AsyncLLM, int]:
    """Return the running engine and the tokens that its KV cache holds. Blocks; wants a running loop."""

    def listener(config: VllmConfig, engine_index: int) -> StatLoggerBase:
        return _StepListener(meter)

    # vLLM starts its process by this name, which is looked up when it does.
    original = vars(EngineCoreProc)["run_engine_core"]
    EngineCoreProc.run_engine_core = staticmethod(vllm_child.run_engine_core)
    try:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[listener])
    finally:
        EngineCoreProc.run_engine_core = original
    cache = engine.vllm_config.cache_config
    return engine, int(cache.num_gpu_blocks or 0) * int(cache.block_size)


async def limit(engine: AsyncLLM, limits: Limits) -> tuple[int, int]:
    """Bring the running engine's scheduler to `limits`; return what `vllm_child.limit` answers."""
    step_tokens, admits = await engine.engine_core.call_utility_async(vllm_child.LIMIT, *limits)
    return int(step_tokens), int(admits)


def shut_down(engine: AsyncLLM, timeout_s: float) -> None:
    """End the engine's process and its sockets. Blocks for up to `timeout_s`."""
    context = engine.engine_core.resources.ctx
    engine.shutdown(timeout=timeout_s)
    context.destroy(linger=0)  # vLLM leaves that to the garbage collector


def request(generation: Generation, end_ids: list[int]) -> tuple[TokensInput, SamplingParams]:
    """Return vLLM's own form of a generation. Raises InvalidRequest for parameters out of range."""
    sampling = generation.sampling
    prompt = tokens_input(
        [*generation.prompt.prompt_ids, *generation.emitted_ids], cache_salt=generation.tenant_salt
    )
    try:
        parameters = SamplingParams(
            max_tokens=sampling.max_output_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            stop_token_ids=end_ids,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
    except (VLLMValidationError, ValueError) as error:
        raise InvalidRequest(str(error)) from error
    return prompt, parameters


def translated(error: Exception) -> GridError:
    """Return the grid's error for one that vLLM raised."""
    if isinstance(error, GridError):
        return error
    if isinstance(error, EngineDeadError):
        return UnitLost("the engine process died")
    if isinstance(error, VLLMValidationError):
        return InvalidRequest(str(error))
    return InternalError(f"the engine failed: {type(error).__name__}")


def kernels() -> str:
    """Return what decides the arithmetic besides the weights: vLLM's version and the hardware's kernels."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name().replace(" ", "-")
    else:
        device = f"cpu-{platform.machine()}-{torch.backends.cpu.get_cpu_capability().lower()}"
    return f"vllm-{vllm.__version__}/{device}"
