"""What each GPU model can do: facts, the precisions that vLLM offers on it, and speed priors. Pure data.

Priors are first guesses, in tokens per second and milliseconds, for units that have not been measured
yet; whatever a unit measures replaces them.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from grid.errors import InvalidRequest
from grid.words import Precision

INT4, INT8, FP8 = Precision.INT4, Precision.INT8, Precision.FP8
FP16, BF16, FP32 = Precision.FP16, Precision.BF16, Precision.FP32

COMPUTE_EFFICIENCY = 0.5
"""Share of peak compute that a long prefill reaches. Llama-2-70B, 512 prompt tokens, tensor parallel 2:
0.58 of peak on A100, 0.43 on H100 (Splitwise, ISCA 2024, published measurements)."""

BANDWIDTH_EFFICIENCY = 0.65
"""Share of peak memory bandwidth that decode reaches. 0.63 on A100 and 0.57 on H100 in the same
measurements (with overhead); 0.66 for Llama-3.1-70B in fp8 on one H200 under vLLM."""

STEP_OVERHEAD_MS = 1.5
"""Scheduling, kernel launches and sampling of one engine step, whatever the model's size."""

TENSOR_PARALLEL_STEP_MS = 4.0
"""What the all-reduces of one decode step add as soon as a model spans several GPUs: 3.0, 4.4 and
5.2 ms at 2, 4 and 8 H200 for a 70B model under vLLM."""

TENSOR_PARALLEL_EFFICIENCY = 0.8
"""Share of the summed compute that is left in prefill when a model spans several GPUs."""

BYTES_PER_PARAMETER: Mapping[Precision, float] = {INT4: 0.56, INT8: 1.0, FP8: 1.0, FP16: 2, BF16: 2, FP32: 4}
"""Weights; int4 includes one 16-bit scale for each group of 32."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One kind of accelerator. Compute is dense (no sparsity), per whole GPU."""

    name: str
    memory_mb: int
    bandwidth_gb_per_s: float
    tflops: Mapping[Precision, float]
    """Dense tera-operations a second by the precision of the arithmetic; absent: not in hardware."""
    interconnect: str
    interconnect_gb_per_s: float
    """To the other GPUs of the node, per direction."""
    compute_capability: tuple[int, int]
    """CUDA's; (0, 0) for what isn't NVIDIA's."""
    precisions: tuple[Precision, ...]
    """Weight precisions that vLLM really serves, best first. Order: 8 bit with native arithmetic, then
    smaller weights with 16-bit arithmetic, then what is only slower."""

    @property
    def cu_factor(self) -> float:
        """Worth of one whole GPU against an A100-80: the geometric mean of its ratios of dense 16-bit
        compute (32-bit where there is none) and of memory bandwidth. Prefill is bound by the first and
        decode by the second, so each counts half; 1.0 for an A100-80 by construction."""
        compute = self.tflops.get(FP16, self.tflops[FP32]) / A100_80_TFLOPS_FP16
        bandwidth = self.bandwidth_gb_per_s / A100_80_BANDWIDTH_GB_PER_S
        return math.sqrt(compute * bandwidth)


A100_80_TFLOPS_FP16 = 312.0
A100_80_BANDWIDTH_GB_PER_S = 2039.0


def _gpu(
    name: str,
    memory_gb: float,
    bandwidth: float,
    tflops: dict[Precision, float],
    interconnect: tuple[str, float],
    capability: tuple[int, int],
    precisions: tuple[Precision, ...],
) -> GpuModel:
    return GpuModel(name, int(memory_gb * 1024), bandwidth, tflops, *interconnect, capability, precisions)


_TURING = (INT8, INT4, FP8, FP16, FP32)
"""Compute capability 7.5: int8 W8A8, int4 by Marlin, fp8 weight-only; no bf16 arithmetic."""
_AMPERE = (INT8, INT4, FP8, BF16, FP16, FP32)
"""8.0 and 8.6: int8 W8A8 native, int4 by Marlin, fp8 weight-only."""
_ADA_HOPPER = (FP8, INT8, INT4, BF16, FP16, FP32)
"""8.9 and 9.0: fp8 W8A8 native, int8 W8A8, int4 by Marlin (Machete on Hopper)."""
_BLACKWELL = (FP8, INT4, BF16, FP16, FP32)
"""10.0: as Hopper, but int8 is broken in vLLM 0.32."""

GPUS: Mapping[str, GpuModel] = {
    gpu.name: gpu
    for gpu in (
        _gpu("T4", 16, 320, {FP16: 65, INT8: 130, INT4: 260, FP32: 8.1}, ("PCIe3", 16), (7, 5), _TURING),
        # GPTQ kernels need 6.0; W8A8 and Marlin need 7.5, so int8 and int4 are weight-only here.
        _gpu("V100", 32, 900, {FP16: 125, FP32: 15.7}, ("NVLink2", 150), (7, 0), (INT4, INT8, FP16, FP32)),
        _gpu("A10G", 24, 600, {FP16: 70, INT8: 140, INT4: 280, FP32: 35}, ("PCIe4", 32), (8, 6), _AMPERE),
        _gpu(
            "A100-40",
            40,
            1555,
            {FP16: 312, INT8: 624, INT4: 1248, FP32: 156},
            ("NVLink3", 300),
            (8, 0),
            _AMPERE,
        ),
        _gpu(
            "A100-80",
            80,
            A100_80_BANDWIDTH_GB_PER_S,
            {FP16: A100_80_TFLOPS_FP16, INT8: 624, INT4: 1248, FP32: 156},
            ("NVLink3", 300),
            (8, 0),
            _AMPERE,
        ),
        _gpu("L4", 24, 300, {FP16: 121, FP8: 242, INT8: 242, FP32: 60}, ("PCIe4", 32), (8, 9), _ADA_HOPPER),
        _gpu(
            "L40S",
            48,
            864,
            {FP16: 362, FP8: 733, INT8: 733, INT4: 733, FP32: 183},
            ("PCIe4", 32),
            (8, 9),
            _ADA_HOPPER,
        ),
        _gpu(
            "RTX 4090",
            24,
            1008,
            {FP16: 165, FP8: 330, INT8: 661, INT4: 1321, FP32: 82.6},
            ("PCIe4", 32),
            (8, 9),
            _ADA_HOPPER,
        ),
        _gpu(
            "H100",
            80,
            3350,
            {FP16: 989, FP8: 1978, INT8: 1978, FP32: 494},
            ("NVLink4", 450),
            (9, 0),
            _ADA_HOPPER,
        ),
        _gpu(
            "H200",
            141,
            4800,
            {FP16: 989, FP8: 1978, INT8: 1978, FP32: 494},
            ("NVLink4", 450),
            (9, 0),
            _ADA_HOPPER,
        ),
        _gpu(
            "B200",
            180,
            7700,
            {FP16: 2250, FP8: 4500, INT8: 4500, FP32: 1100},
            ("NVLink5", 900),
            (10, 0),
            _BLACKWELL,
        ),
        # Low-bit kernels under ROCm are left out: not verified, and a filter must not promise them.
        _gpu(
            "MI300X",
            192,
            5300,
            {FP16: 1307, FP8: 2615, INT8: 2615, FP32: 654},
            ("InfinityFabric", 448),
            (0, 0),
            (FP8, BF16, FP16, FP32),
        ),
        # A nominal pair of cloud cores. int4 dies at its first token, fp8 fails at load, and both int8
        # and bf16 are slower than fp32 without AMX or AVX512-BF16, so fp32 comes first.
        _gpu("CPU", 8, 20, {FP32: 0.12}, ("none", 0), (0, 0), (FP32, BF16, INT8)),
    )
}
"""TF32 counts as fp32 where tensor cores have it, which is what vLLM's fp32 matrix products may use."""

_NVML_MARKS: tuple[tuple[str, str], ...] = (
    (r"A100[- ]?80|A100.*80GB", "A100-80"),
    (r"A100[- ]?40|A100.*40GB", "A100-40"),
    *((rf"\b{re.escape(name)}\b", name) for name in GPUS if name not in ("A100-80", "A100-40", "CPU")),
)
"""Marks in the product names that NVML gives, such as `NVIDIA A100-SXM4-80GB`."""


def find(name: str) -> GpuModel:
    """Return the catalogue's entry for a catalogue name or an NVML product name.

    Raises InvalidRequest, with the nearest known names, for a GPU that the catalogue doesn't hold.
    """
    if name in GPUS:
        return GPUS[name]
    for mark, known in _NVML_MARKS:
        if re.search(mark, name, re.IGNORECASE):
            return GPUS[known]
    near = difflib.get_close_matches(name.upper(), GPUS, n=3, cutoff=0.4) or list(GPUS)
    raise InvalidRequest(f"unknown GPU model {name!r}; did you mean {' or '.join(near)}?", param="gpu")


def best_precision(gpu: str, lowest: Precision | int) -> Precision | None:
    """Return the precision that serves best on `gpu` among those not below `lowest` (0 accepts any).

    None when vLLM serves nothing that precise there.
    """
    return next((p for p in find(gpu).precisions if p >= lowest), None)


def weights_mb(parameters_b: float, precision: Precision) -> float:
    return parameters_b * 1e9 * BYTES_PER_PARAMETER[precision] / 2**20


def kv_bytes_per_token(parameters_b: float) -> float:
    """Return the KV-cache bytes of one token, 16-bit, of a grouped-query model of that size.

    A power law through the published shapes of Llama-3-8B (128 KiB), Llama-3-70B (320 KiB) and
    SmolLM2-135M (22.5 KiB); within a third for models of those families.
    """
    return 128 * 1024 * float((parameters_b / 8) ** 0.43)


def _share(gpus: float) -> float:
    """How much of a whole GPU's speed `gpus` gives in prefill: a share gives itself (its neighbours may
    be busy), several lose to synchronisation."""
    return gpus if gpus <= 1 else gpus * TENSOR_PARALLEL_EFFICIENCY


def prefill_tokens_per_s(gpu: str, parameters_b: float, precision: Precision, gpus: float = 1.0) -> float:
    """Return the prior of the prefill speed of a lone long prompt, in tokens per second.

    Roofline, compute side: a forward pass costs 2 operations for each parameter and token (Kaplan et al.
    2020, section 2.1), so tokens/s = peak x COMPUTE_EFFICIENCY / (2 x parameters). Weights that the
    hardware can't multiply in their own precision are widened, so 16-bit (or 32-bit) peak counts.
    `gpus` is 0 (CPU cores, taken as one), a share, or several of one node.
    """
    model = find(gpu)
    peak = model.tflops.get(precision, model.tflops.get(FP16, model.tflops[FP32]))
    if precision is INT4 or (precision is FP8 and FP8 not in model.tflops):
        peak = model.tflops.get(FP16, model.tflops[FP32])
    return peak * 1e12 * COMPUTE_EFFICIENCY * _share(gpus or 1.0) / (2 * parameters_b * 1e9)


def decode_ms_per_token(gpu: str, parameters_b: float, precision: Precision, gpus: float = 1.0) -> float:
    """Return the prior of one decode step of a lone request, in milliseconds.

    Roofline, memory side: each step reads all weights once, so ms = weight bytes / (bandwidth x
    BANDWIDTH_EFFICIENCY) + overhead (Pope et al. 2022, "Efficiently Scaling Transformer Inference",
    section 2). Several GPUs divide the reading and add TENSOR_PARALLEL_STEP_MS.
    """
    model = find(gpu)
    weight_bytes = parameters_b * 1e9 * BYTES_PER_PARAMETER[precision]
    reading_ms = weight_bytes / (model.bandwidth_gb_per_s * 1e9 * BANDWIDTH_EFFICIENCY * (gpus or 1.0)) * 1e3
    return reading_ms + STEP_OVERHEAD_MS + (TENSOR_PARALLEL_STEP_MS if gpus > 1 else 0.0)
