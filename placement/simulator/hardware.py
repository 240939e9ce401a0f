"""What the world knows of GPUs: their data sheets, prices and measured kernel times. Read once; then plain
numbers.

Nothing here comes from the catalogue that deciding code has its priors from (`grid.hardware.catalogue`): the
world must not be made of the prediction.
"""

from __future__ import annotations

import csv
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grid.errors import InvalidRequest

ENGINE = "vllm"
"""Of the engines that the tables hold, the one that units run."""

MEASURED = {
    "a100_sxm": "A100-SXM-80",
    "h100_sxm": "H100-SXM",
    "l40s": "L40S",
    "h200_sxm": "H200-SXM",
    "b200_sxm": "B200-SXM",
}
"""Names of the tables to names of the data sheets."""

HEADS, KV_HEADS, LAYERS = 32, 8, 32
HIDDEN, FFN, VOCABULARY, HEAD_DIM = 4096, 14336, 128256, 128
LAYER_SHAPES = (
    ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    (HIDDEN, HIDDEN),
    (2 * FFN, HIDDEN),
    (HIDDEN, FFN),
)
"""Matrices (n, k) of one layer of Llama-3.1-8B: QKV, output, gate with up, down."""
HEAD_SHAPE = (VOCABULARY, HIDDEN)
MODELS = {"llama-3.1-8b": "bf16"}
"""What can be simulated, and in which precision: the model whose shapes stand above."""

WEIGHTS_BYTES = 16.06e9
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
CONTEXT_TOKENS = 131_072
MEMORY_SHARE = 0.9
"""vLLM's default of `gpu_memory_utilization`."""
WORKSPACE_BYTES = 1.5e9
"""Activations of one chunk, CUDA graphs and the driver's own."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_gb: float
    bandwidth_gb_per_s: float
    tflops: float
    usd_per_hour: float

    @property
    def kv_tokens(self) -> int:
        """Room for KV beside the weights."""
        return int(
            (self.memory_gb * 1e9 * MEMORY_SHARE - WEIGHTS_BYTES - WORKSPACE_BYTES) / KV_BYTES_PER_TOKEN
        )


class Curve:
    """Piecewise linear through measured points; beyond the last one with its slope, or by a power."""

    __slots__ = ("_power", "xs", "ys")

    def __init__(self, points: Sequence[tuple[float, float]], power: float = 0.0) -> None:
        ordered = sorted(points)
        self.xs = [x for x, _ in ordered]
        self.ys = [y for _, y in ordered]
        self._power = power

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0]:
            return ys[0]
        if x > xs[-1] and self._power:
            return ys[-1] * float((x / xs[-1]) ** self._power)
        at = min(bisect_left(xs, x), len(xs) - 1)
        slope = (ys[at] - ys[at - 1]) / (xs[at] - xs[at - 1])
        return ys[at] + slope * (x - xs[at])


@dataclass(frozen=True, slots=True)
class Kernels:
    """Measured times on one GPU, in ms."""

    products: dict[tuple[int, int], Curve]
    """Shape (n, k) to time over m rows."""
    context: Curve
    """Attention of one layer over a whole prompt of so many tokens, one sequence."""
    generation: dict[int, Curve]
    """Batch to attention of one layer and step over KV tokens a sequence."""

    def product_ms(self, shape: tuple[int, int], m: int) -> float:
        """Return the time of one matrix product; a shape without rows is scaled from the nearest by n x k."""
        size = shape[0] * shape[1]
        near = min(self.products, key=lambda known: (abs(known[0] * known[1] - size), known))
        return self.products[near](m) * size / (near[0] * near[1])


def _rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        with path.open(newline="") as lines:
            yield from csv.DictReader(lines)
    except OSError as error:
        raise InvalidRequest(
            f"{path} can't be read ({error.strerror}): name the folder with the evaluation data "
            "by --data or GRID_DATA",
            param="data",
        ) from error


def read_gpus(data: Path) -> dict[str, Gpu]:
    """Return the data sheets; a price is the median of what providers ask on demand for that GPU or its
    form."""
    asked: dict[str, list[float]] = defaultdict(list)
    for row in _rows(data / "gpu" / "gpu_prices_usd_per_gpu_hour.csv"):
        asked[row["gpu"]].append(float(row["usd_per_gpu_hr"]))
    gpus = {}
    for row in _rows(data / "gpu" / "gpu_specs.csv"):
        name = row["gpu"]
        prices = asked.get(name, [])
        gpus[name] = Gpu(
            name,
            float(row["mem_gb"]),
            float(row["mem_bw_GBps"].rstrip("*")),
            float(row["fp16_dense_tflops"].rstrip("*")),
            statistics.median(prices) if prices else 0.0,
        )
    return gpus


def read_kernels(data: Path) -> dict[str, Kernels]:
    """Return the measured GPUs by the names of their data sheets."""
    folder = data / "profiles"
    products: dict[str, dict[tuple[int, int], list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in _rows(folder / "gemm_ms.csv"):
        if row["fw"] == ENGINE and row["gemm_dtype"] == "bfloat16" and int(row["m"]) > 0:
            shape = int(row["n"]), int(row["k"])
            products[row["gpu"]][shape].append((float(row["m"]), float(row["latency"])))
    context: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in _rows(folder / "context_attention_ms.csv"):
        if _ours(row) and row["batch_size"] == "1" and row["step"] == "0":
            context[row["gpu"]].append((float(row["isl"]), float(row["latency"])))
    generation: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row in _rows(folder / "generation_attention_ms.csv"):
        if _ours(row):
            kv_tokens = float(row["isl"]) + float(row["step"])
            generation[row["gpu"]][int(row["batch_size"])].append((kv_tokens, float(row["latency"])))
    return {
        name: Kernels(
            {shape: Curve(points) for shape, points in products[table].items()},
            Curve(context[table], power=2.0),
            {batch: Curve(points) for batch, points in generation[table].items()},
        )
        for table, name in MEASURED.items()
    }


def _ours(row: dict[str, str]) -> bool:
    return (
        row["fw"] == ENGINE
        and row["kv_cache_dtype"] == "bfloat16"
        and row["num_heads"] == str(HEADS)
        and row["num_key_value_heads"] == str(KV_HEADS)
    )
