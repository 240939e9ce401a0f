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
class Kernels:
    """What vLLM 0.32 does with each weight precision on one generation of GPUs."""

    serves: Mapping[Precision, str]
    """Precision to the way it is computed, best first. Order: 8 bit with native arithmetic, then smaller
    weights with 16-bit arithmetic, then what is only slower."""
    lacks: Mapping[Precision, str]
    """Every other precision, and why it is not served."""
    fp8_kv: str = ""
    """The attention kernels that read an 8-bit KV cache; "" for none."""


NATIVE = "native"
_NO_BF16 = "compute capability below 8.0 has no bf16 arithmetic"

VOLTA = Kernels(
    # By the kernels' own least capability (exllama 6.0). vLLM's published builds are for CUDA 13, which left
    # Volta out, so a node with one needs a build for CUDA 12.6.
    {INT4: "GPTQ exllama", INT8: "GPTQ exllama", FP16: NATIVE, FP32: NATIVE},
    {FP8: "fp8 kernels need compute capability 7.5", BF16: _NO_BF16},
)
TURING = Kernels(
    {INT8: "W8A8", INT4: "Marlin", FP8: "Marlin, weights only", FP16: NATIVE, FP32: NATIVE},
    {BF16: _NO_BF16},
)
AMPERE = Kernels(
    {INT8: "W8A8", INT4: "Marlin", FP8: "Marlin, weights only", BF16: NATIVE, FP16: NATIVE, FP32: NATIVE},
    {},
    fp8_kv="FlashInfer",
)
ADA = Kernels(
    {FP8: "W8A8", INT8: "W8A8", INT4: "Marlin", BF16: NATIVE, FP16: NATIVE, FP32: NATIVE},
    {},
    fp8_kv="FlashInfer",
)
HOPPER = Kernels(
    {FP8: "W8A8", INT8: "W8A8", INT4: "Machete", BF16: NATIVE, FP16: NATIVE, FP32: NATIVE},
    {},
    fp8_kv="FlashAttention 3",
)
BLACKWELL = Kernels(
    {FP8: "W8A8", INT4: "Marlin", BF16: NATIVE, FP16: NATIVE, FP32: NATIVE},
    {INT8: "W8A8 is broken on compute capability 10.0 in vLLM 0.32"},
    fp8_kv="FlashInfer",
)
CDNA3 = Kernels(
    {FP8: "W8A8", BF16: NATIVE, FP16: NATIVE, FP32: NATIVE},
    # A filter must not promise what nobody has seen working.
    {INT4: "not verified under ROCm", INT8: "not verified under ROCm"},
)
CPU_CORES = Kernels(
    # Without AMX or AVX512-BF16 both int8 and bf16 are slower than fp32.
    {FP32: NATIVE, BF16: NATIVE, INT8: "W8A8"},
    {
        INT4: "vLLM's CPU engine dies at the first token",
        FP8: "vLLM's CPU engine fails to load it",
        FP16: "not verified on CPU cores",
    },
)


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One kind of accelerator. Compute is dense (no sparsity), per whole GPU."""

    name: str
    memory_mb: int
    """MiB that the driver reports, with ECC as it is delivered: less than the name of the product says."""
    bandwidth_gb_per_s: float
    tflops: Mapping[Precision, float]
    """Dense tera-operations a second by the precision of the arithmetic; absent: not in hardware."""
    interconnect: str
    interconnect_gb_per_s: float
    """To the other GPUs of the node, per direction."""
    compute_capability: tuple[int, int]
    """CUDA's; (0, 0) for what isn't NVIDIA's."""
    kernels: Kernels

    @property
    def listed(self) -> bool:
        """Whether the catalogue holds it; else it was made of what its driver tells."""
        return self.name in GPUS

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Weight precisions that vLLM really serves, best first."""
        return tuple(self.kernels.serves)

    @property
    def cu_factor(self) -> float:
        """Worth of one whole GPU against an A100-80: the geometric mean of its ratios of dense 16-bit
        compute (32-bit where there is none) and of memory bandwidth. Prefill is bound by the first and
        decode by the second, so each counts half; 1.0 for an A100-80 by construction."""
        compute = self.tflops.get(FP16, self.tflops[FP32]) / A100_80_TFLOPS_FP16
        bandwidth = self.bandwidth_gb_per_s / A100_80_BANDWIDTH_GB_PER_S
        return math.sqrt(compute * bandwidth)


UNTOLD = Kernels(
    {FP16: NATIVE, FP32: NATIVE},
    {
        **dict.fromkeys((INT4, INT8, FP8), "its compute capability is unknown, and the kernels depend on it"),
        BF16: "its compute capability is unknown, and bf16 needs 8.0",
    },
)
"""Of a GPU whose driver does not tell: what every GPU that vLLM runs on can do."""
TOO_OLD = Kernels({}, dict.fromkeys(Precision, "vLLM needs compute capability 7.0"))
GENERATIONS: Mapping[tuple[int, int], Kernels] = {
    (7, 0): VOLTA,
    (7, 5): TURING,
    (8, 0): AMPERE,
    (8, 9): ADA,
    (9, 0): HOPPER,
    (10, 0): BLACKWELL,
}
"""By the least compute capability; a later one than all counts as the last."""
SLOWEST = "T4"
"""Of a generation that nothing in the catalogue belongs to."""
UNTOLD_MEMORY_MB = 8_192
"""Where the driver can't tell: small enough that nothing is loaded which would not fit."""

A100_80_TFLOPS_FP16 = 312.0
A100_80_BANDWIDTH_GB_PER_S = 2039.0

_AMPERE_TFLOPS = {FP16: A100_80_TFLOPS_FP16, INT8: 624, INT4: 1248, FP32: 156}
_HOPPER_TFLOPS = {FP16: 989, FP8: 1979, INT8: 1979, FP32: 494}

GPUS: Mapping[str, GpuModel] = {
    gpu.name: gpu
    for gpu in (
        GpuModel("T4", 15_360, 320, {FP16: 65, INT8: 130, INT4: 260, FP32: 8.1}, "PCIe3", 16, (7, 5), TURING),
        GpuModel("V100", 32_768, 900, {FP16: 125, FP32: 15.7}, "NVLink2", 150, (7, 0), VOLTA),
        GpuModel(
            "A10G", 23_028, 600, {FP16: 70, INT8: 140, INT4: 280, FP32: 35}, "PCIe4", 32, (8, 6), AMPERE
        ),
        GpuModel("A100-40", 40_960, 1555, _AMPERE_TFLOPS, "NVLink3", 300, (8, 0), AMPERE),
        GpuModel(
            "A100-80", 81_920, A100_80_BANDWIDTH_GB_PER_S, _AMPERE_TFLOPS, "NVLink3", 300, (8, 0), AMPERE
        ),
        GpuModel("L4", 23_034, 300, {FP16: 121, FP8: 242, INT8: 242, FP32: 60}, "PCIe4", 32, (8, 9), ADA),
        GpuModel(
            "L40S",
            46_068,
            864,
            {FP16: 362, FP8: 733, INT8: 733, INT4: 733, FP32: 183},
            *("PCIe4", 32, (8, 9), ADA),
        ),
        GpuModel(
            "RTX 4090",
            24_564,
            1008,
            {FP16: 165, FP8: 330, INT8: 661, INT4: 1321, FP32: 82.6},
            *("PCIe4", 32, (8, 9), ADA),
        ),
        GpuModel("H100", 81_559, 3350, _HOPPER_TFLOPS, "NVLink4", 450, (9, 0), HOPPER),
        GpuModel(
            "H100-PCIe",
            81_559,
            2000,
            {FP16: 756, FP8: 1513, INT8: 1513, FP32: 378},
            *("PCIe5", 64, (9, 0), HOPPER),
        ),
        GpuModel("H200", 143_771, 4800, _HOPPER_TFLOPS, "NVLink4", 450, (9, 0), HOPPER),
        GpuModel(
            "B200",
            183_359,
            7700,
            {FP16: 2250, FP8: 4500, INT8: 4500, FP32: 1100},
            *("NVLink5", 900, (10, 0), BLACKWELL),
        ),
        GpuModel(
            "MI300X",
            196_288,
            5300,
            {FP16: 1307, FP8: 2615, INT8: 2615, FP32: 654},
            *("InfinityFabric", 448, (0, 0), CDNA3),
        ),
        # A nominal pair of cloud cores.
        GpuModel("CPU", 8_192, 20, {FP32: 0.12}, "none", 0, (0, 0), CPU_CORES),
    )
}
"""Bandwidth, compute and interconnect are the vendors' data sheets' (sparsity halved away; A100 and H100 as
SXM modules unless they say otherwise). TF32 counts as fp32 where tensor cores have it, which is what vLLM's
fp32 matrix products may use."""

_NVML_MARKS: tuple[tuple[str, str], ...] = (
    (r"A100.*80", "A100-80"),
    # A bare `A100`, which is all that Ray's label says, counts as the smaller one.
    (r"\bA100", "A100-40"),
    (r"H100.*PCIe", "H100-PCIe"),
    *((rf"\b{re.escape(name)}\b", name) for name in GPUS if name not in ("H100-PCIe", "CPU")),
)
"""Marks in the product names that NVML gives, such as `NVIDIA A100-SXM4-80GB`, and in Ray's node labels."""


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


def known(product: str, memory_mb: float, compute_capability: tuple[int, int]) -> GpuModel:
    """Return the entry of a GPU that a driver tells of; for one that the catalogue doesn't hold it is made of
    what its driver says.

    `memory_mb` may be `UNKNOWN` and `compute_capability` (0, 0). The capability decides which precisions vLLM
    serves there; speeds are those of the slowest GPU of that generation in the catalogue, as first guesses,
    until the units have been measured.
    """
    try:
        return find(product)
    except InvalidRequest:
        pass
    kernels = _kernels(compute_capability)
    alike = [gpu for gpu in GPUS.values() if gpu.kernels is kernels] or [GPUS[SLOWEST]]
    slowest = min(alike, key=lambda gpu: gpu.bandwidth_gb_per_s)
    return GpuModel(
        product.removeprefix("NVIDIA "),
        int(memory_mb) if memory_mb > 0 else UNTOLD_MEMORY_MB,
        slowest.bandwidth_gb_per_s,
        slowest.tflops,
        *("PCIe", slowest.interconnect_gb_per_s, compute_capability, kernels),
    )


def _kernels(compute_capability: tuple[int, int]) -> Kernels:
    """Return what vLLM does on GPUs of a compute capability, (0, 0) for unknown."""
    if compute_capability == (0, 0):
        return UNTOLD
    since = [least for least in GENERATIONS if least <= compute_capability]
    return GENERATIONS[max(since)] if since else TOO_OLD


def unlisted_warning(gpu: GpuModel) -> str:
    """Return what an operator should know of a GPU that the catalogue doesn't hold."""
    major, minor = gpu.compute_capability
    capability = f"compute capability {major}.{minor}" if major else "no word of its compute capability"
    serves = ", ".join(precision.label for precision in gpu.precisions) or "no precision"
    return (
        f"{gpu.name} is not in the catalogue of GPUs; by {capability} it serves {serves}, and its speed is "
        "guessed low until its units have been measured"
    )


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


def prefill_tokens_per_s(
    gpu: str | GpuModel, parameters_b: float, precision: Precision, gpus: float = 1.0
) -> float:
    """Return the prior of the prefill speed of a lone long prompt, in tokens per second.

    Roofline, compute side: a forward pass costs 2 operations for each parameter and token (Kaplan et al.
    2020, section 2.1), so tokens/s = peak x COMPUTE_EFFICIENCY / (2 x parameters). Weights that the
    hardware can't multiply in their own precision are widened, so 16-bit (or 32-bit) peak counts.
    `gpus` is 0 (CPU cores, taken as one), a share, or several of one node.
    """
    model = find(gpu) if isinstance(gpu, str) else gpu
    widened = model.tflops.get(FP16, model.tflops[FP32])
    # No kernel for int4 weights multiplies in 4 bit.
    peak = widened if precision is INT4 else model.tflops.get(precision, widened)
    return peak * 1e12 * COMPUTE_EFFICIENCY * _share(gpus or 1.0) / (2 * parameters_b * 1e9)


def decode_ms_per_token(
    gpu: str | GpuModel, parameters_b: float, precision: Precision, gpus: float = 1.0
) -> float:
    """Return the prior of one decode step of a lone request, in milliseconds.

    Roofline, memory side: each step reads all weights once, so ms = weight bytes / (bandwidth x
    BANDWIDTH_EFFICIENCY) + overhead (Pope et al. 2022, "Efficiently Scaling Transformer Inference",
    section 2). Several GPUs divide the reading and add TENSOR_PARALLEL_STEP_MS.
    """
    model = find(gpu) if isinstance(gpu, str) else gpu
    weight_bytes = parameters_b * 1e9 * BYTES_PER_PARAMETER[precision]
    reading_ms = weight_bytes / (model.bandwidth_gb_per_s * 1e9 * BANDWIDTH_EFFICIENCY * (gpus or 1.0)) * 1e3
    return reading_ms + STEP_OVERHEAD_MS + (TENSOR_PARALLEL_STEP_MS if gpus > 1 else 0.0)


def kv_ms_per_token(gpu: str, precision: Precision, gpus: float, decode_ms: float) -> float:
    """Return the prior of what each token in the KV cache adds to a decode step, in milliseconds.

    Roofline, memory side, of the model whose lone step takes `decode_ms` by `decode_ms_per_token`: what a
    step reads in that time are the weights, their number gives the size of a token's KV. 0 where the GPU is
    unknown, or where `decode_ms` is no more than overhead.
    """
    model = GPUS.get(gpu)
    reading_ms = decode_ms - STEP_OVERHEAD_MS - (TENSOR_PARALLEL_STEP_MS if gpus > 1 else 0.0)
    if model is None or reading_ms <= 0:
        return 0.0
    bytes_per_ms = model.bandwidth_gb_per_s * 1e6 * BANDWIDTH_EFFICIENCY * (gpus or 1.0)
    parameters_b = reading_ms * bytes_per_ms / BYTES_PER_PARAMETER[precision] / 1e9
    return kv_bytes_per_token(parameters_b) / bytes_per_ms
