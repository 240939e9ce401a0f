"""From GPU, model, checkpoint and memory grant to vLLM's engine arguments. Pure, save for reading a folder.

A model comes here with one checkpoint (`variants.fitted`). Everything that the unit's card promises (memory,
precision, context, concurrency) is made true by what is returned here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from grid.config import Model
from grid.engines.variants import ACTIVATIONS_MB, NoVariant, choose, memory_mb
from grid.errors import InternalError
from grid.hardware import catalogue
from grid.hardware.catalogue import GpuModel
from grid.words import Precision

KV_BLOCK_TOKENS_CPU = 32
"""The block size that vLLM's CPU attention does best with."""

GPU_MEMORY_SHARE = 0.9
"""Of whole GPUs without a grant: the rest is for the driver, activations and intruders."""

WHOLE_CONTEXTS_WANTED = 0.25
"""Of `max_running`: an automatic KV cache that would hold fewer whole contexts is kept in 8 bit, where the
GPU reads that. Below it, few requests of some length already evict each other."""

PREFILL_STEP_S = 0.15
MIN_BATCHED_TOKENS = 512
MAX_BATCHED_TOKENS = 8192
"""A step takes at most so many prompt tokens as it computes in PREFILL_STEP_S: running streams wait that
long for their next token. Fewer than the least waste the weights' reading; more than the most bring no more
speed."""

DTYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}
STORED = {name: precision for precision, name in DTYPES.items()}


class Checkpoint(NamedTuple):
    """What a model's folder says of it."""

    folder: Path
    stored_mb: float
    stored: Precision | None
    """Of the weights in the folder; None: they were quantised before, and vLLM finds out how."""
    kv_bytes_per_token: float
    """Of the whole model at 16 bit; 0 if its shape is not told in the usual way."""

    def parameters_b(self, precision: Precision) -> float:
        """Return billions of parameters, as the size tells; `precision` is what a quantised one holds."""
        return self.stored_mb * 2**20 / catalogue.BYTES_PER_PARAMETER[self.stored or precision] / 1e9

    def loaded_mb(self, precision: Precision) -> float:
        """Return the memory of the weights once they are loaded at `precision`."""
        if self.stored is None:
            return self.stored_mb
        return catalogue.weights_mb(self.parameters_b(precision), precision)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return what `config.json` and the sizes of the weights' files say."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    all_heads = config.get("num_attention_heads") or 1
    kv_heads = config.get("num_key_value_heads") or all_heads
    head_size = config.get("head_dim") or config.get("hidden_size", 0) // all_heads
    dtype = config.get("dtype") or config.get("torch_dtype")
    return Checkpoint(
        folder,
        stored_mb=sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20,
        stored=None if "quantization_config" in config else STORED.get(dtype, Precision.BF16),
        kv_bytes_per_token=2 * 2 * config.get("num_hidden_layers", 0) * kv_heads * head_size,
    )


def engine_arguments(model: Model, checkpoint: Checkpoint, gpu: GpuModel) -> dict[str, Any]:
    """Return vLLM's engine arguments for a unit. Raises InternalError for what vLLM can't serve there."""
    precision = Precision.parse(model.precision)
    served = choose(gpu, [precision])
    if isinstance(served, NoVariant):
        others = ", ".join(each.label for each in gpu.precisions)
        raise InternalError(f"{served.reason}; {gpu.name} serves {others}")
    kv_mb = _kv_cache_mb(model, checkpoint, gpu)
    arguments: dict[str, Any] = {
        "model": str(checkpoint.folder),
        "served_model_name": model.name,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_model_len": model.context_tokens,
        "max_num_seqs": model.max_running,
        "max_num_batched_tokens": batched_tokens(model, checkpoint, gpu),
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "enable_log_requests": False,
        **_weights(precision, checkpoint, gpu),
    }
    if not model.gpus:
        arguments |= {"enforce_eager": True, "block_size": KV_BLOCK_TOKENS_CPU}
    if model.gpus and model.standby.asleep:
        # Its allocator takes some speed, so it is there only where it is used.
        arguments["enable_sleep_mode"] = True
    if model.gpus > 1:
        arguments["tensor_parallel_size"] = int(model.gpus)
    if kv_mb is None:
        arguments["gpu_memory_utilization"] = GPU_MEMORY_SHARE
        kv_mb = gpu.memory_mb * model.gpus * GPU_MEMORY_SHARE - checkpoint.loaded_mb(precision)
    else:
        arguments["kv_cache_memory_bytes"] = int(kv_mb * 2**20 / max(model.gpus, 1))
    if keeps_kv_in_fp8(model, checkpoint, gpu, kv_mb):
        arguments["kv_cache_dtype"] = "fp8"
    return arguments


def _weights(precision: Precision, checkpoint: Checkpoint, gpu: GpuModel) -> dict[str, Any]:
    if precision in DTYPES:
        return {"dtype": DTYPES[precision]}
    # What isn't multiplied in 8 bit is in 16, as the checkpoint has it where the GPU can.
    sixteen = {"dtype": "auto" if Precision.BF16 in gpu.kernels.serves else "float16"}
    if checkpoint.stored is None:
        return sixteen
    if precision is Precision.FP8:
        return {**sixteen, "quantization": "fp8"}
    raise InternalError(
        f"{precision.label} needs a checkpoint that is already quantised, and {checkpoint.folder.name} is "
        "not; point the source at one, or choose fp8 or a 16-bit precision"
    )


def _kv_cache_mb(model: Model, checkpoint: Checkpoint, gpu: GpuModel) -> float | None:
    """Return the KV cache's size over all GPUs of the unit; None where vLLM may take what it finds free."""
    if not model.gpus or "kv_cache_mb" in model.model_fields_set:
        return model.kv_cache_mb
    if model.gpus >= 1 and not model.memory_grant_mb:
        return None
    granted_mb = memory_mb(model, gpu)
    weights_mb = checkpoint.loaded_mb(Precision.parse(model.precision))
    activations_mb = ACTIVATIONS_MB * max(model.gpus, 1)
    free_mb = granted_mb - weights_mb - activations_mb
    if free_mb <= 0:
        raise InternalError(
            f"{model.name} has {weights_mb:.0f} MB of weights and needs {activations_mb:.0f} MB to "
            f"compute in; its {granted_mb:.0f} MB leave no room for a KV cache: raise memory_grant_mb or "
            "gpus, or add a smaller variant"
        )
    return free_mb


def keeps_kv_in_fp8(model: Model, checkpoint: Checkpoint, gpu: GpuModel, kv_mb: float) -> bool:
    """Tell whether a KV cache of `kv_mb` is kept in 8 bit. Raises InternalError if asked for in vain."""
    if model.kv_cache_precision == "fp8" and not gpu.kernels.fp8_kv:
        raise InternalError(f"{gpu.name} reads no fp8 KV cache; set kv_cache_precision to auto or model")
    if model.kv_cache_precision != "auto" or not gpu.kernels.fp8_kv:
        return model.kv_cache_precision == "fp8"
    context_mb = checkpoint.kv_bytes_per_token * model.context_tokens / 2**20
    return kv_mb < WHOLE_CONTEXTS_WANTED * model.max_running * context_mb


def batched_tokens(model: Model, checkpoint: Checkpoint, gpu: GpuModel) -> int:
    """Return how many tokens one step may compute; a power of two, or one for each sequence if more."""
    precision = Precision.parse(model.precision)
    parameters_b = checkpoint.parameters_b(precision)
    tokens = MIN_BATCHED_TOKENS
    if parameters_b:
        speed = catalogue.prefill_tokens_per_s(gpu, parameters_b, precision, model.gpus)
        while tokens * 2 <= min(PREFILL_STEP_S * speed, MAX_BATCHED_TOKENS):
            tokens *= 2
    return max(tokens, model.max_running)
