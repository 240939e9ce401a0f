"""How long an engine step takes on a GPU: measured kernel times, put together for one model. Pure.

    step = layers x (matrix products of all tokens + attention of prompts and of answers) + head + overhead

A chunk of a prompt attends to what was computed before it: its attention is that of the prompt up to its end
less that of the prompt up to its beginning. Attention of a batch is read at its mean length. A GPU without a
table is scaled from the nearest that has one: by bandwidth in steps of answers alone, by compute where
prompts are computed.
"""

from __future__ import annotations

from collections.abc import Mapping

from grid.errors import InvalidRequest
from placement.simulator.hardware import HEAD_SHAPE, LAYER_SHAPES, LAYERS, Gpu, Kernels

TOKEN_BUDGET = 2048
"""Tokens of one step, answers first: vLLM's `max_num_batched_tokens` for a server on most GPUs."""

MAX_RUNNING = 256
"""vLLM's `max_num_seqs`."""

OVERHEAD_MS = 1.5
"""Scheduling, launches, norms and sampling of a step, which the kernel tables leave out."""

LENGTH_BITS = 18
"""Attention of answers is tabulated at lengths of powers of two, up to twice the model's context."""


class StepTimes:
    """Times of one GPU as flat tables, so that a step costs a few look-ups."""

    def __init__(self, kernels: Kernels, decode_scale: float = 1.0, prefill_scale: float = 1.0) -> None:
        self._context = kernels.context
        self._prefill_scale = prefill_scale
        self._decode_scale = decode_scale
        self._dense_ms = [0.0] + [
            LAYERS * sum(kernels.product_ms(shape, m) for shape in LAYER_SHAPES)
            for m in range(1, TOKEN_BUDGET + 1)
        ]
        self._head_ms = [0.0] + [kernels.product_ms(HEAD_SHAPE, m) for m in range(1, MAX_RUNNING + 1)]
        self._attention_ms = [[0.0] * (LENGTH_BITS + 1)]
        batches = sorted(kernels.generation)
        for batch in range(1, MAX_RUNNING + 1):
            below = max(known for known in batches if known <= batch)
            above = min(known for known in batches if known >= batch)
            part = 0.0 if above == below else (batch - below) / (above - below)
            self._attention_ms.append(
                [
                    LAYERS
                    * (
                        (1 - part) * kernels.generation[below](1 << bits)
                        + part * kernels.generation[above](1 << bits)
                    )
                    for bits in range(LENGTH_BITS + 1)
                ]
            )
        self._context_ms: dict[int, float] = {0: 0.0}

    def attention_ms(self, batch: int, kv_tokens: int) -> float:
        """Return the attention of one step of `batch` answers that hold `kv_tokens` together."""
        length = kv_tokens / batch
        bits = min(max(int(length).bit_length() - 1, 0), LENGTH_BITS - 1)
        row = self._attention_ms[batch]
        low = 1 << bits
        return row[bits] + (row[bits + 1] - row[bits]) * (length - low) / low

    def decode_ms(self, batch: int, kv_tokens: int) -> float:
        """Return a step of answers alone."""
        return (
            self._dense_ms[batch] + self._head_ms[batch] + self.attention_ms(batch, kv_tokens)
        ) * self._decode_scale + OVERHEAD_MS

    def prompt_attention_ms(self, begin: int, end: int) -> float:
        return max(0.0, self._whole_ms(end) - self._whole_ms(begin))

    def _whole_ms(self, tokens: int) -> float:
        known = self._context_ms.get(tokens)
        if known is None:
            known = self._context_ms[tokens] = LAYERS * self._context(tokens)
        return known

    def mixed_ms(self, batch: int, kv_tokens: int, chunks: list[tuple[int, int]], first_tokens: int) -> float:
        """Return a step that also computes `chunks` (begin, end) of prompts, `first_tokens` of them to
        their end."""
        tokens = batch
        prompts_ms = 0.0
        for begin, end in chunks:
            tokens += end - begin
            prompts_ms += self.prompt_attention_ms(begin, end)
        step_ms = (self._dense_ms[tokens] + prompts_ms) * self._prefill_scale
        step_ms += self._head_ms[min(batch + first_tokens, MAX_RUNNING)] * self._decode_scale
        if batch:
            step_ms += self.attention_ms(batch, kv_tokens) * self._decode_scale
        return step_ms + OVERHEAD_MS


def step_times(gpu: Gpu, gpus: Mapping[str, Gpu], kernels: Mapping[str, Kernels]) -> StepTimes:
    """Return the step times of `gpu`: its own tables, or those of the nearest GPU by bandwidth and
    compute."""
    if gpu.name in kernels:
        return StepTimes(kernels[gpu.name])
    if not kernels:
        raise InvalidRequest(
            "the kernel tables are empty: name the folder with the evaluation data by --data"
        )

    def distance(name: str) -> tuple[float, str]:
        known = gpus[name]
        ratios = known.bandwidth_gb_per_s / gpu.bandwidth_gb_per_s, known.tflops / gpu.tflops
        return sum(max(ratio, 1 / ratio) for ratio in ratios), name

    near = gpus[min(kernels, key=distance)]
    return StepTimes(
        kernels[near.name],
        decode_scale=near.bandwidth_gb_per_s / gpu.bandwidth_gb_per_s,
        prefill_scale=near.tflops / gpu.tflops,
    )
