"""What a request would cost on each unit, in predicted milliseconds. Pure; the same figures for every GPU.

    network   one round trip inside the cell
  + queue     prompts ahead of ours, and the wait for a slot when all are taken
  + prefill   our own prompt, none of it cached
  + decode    the expected output, at the step time of the batch that we would join
  + pressure  the chance that a full KV cache evicts us, times the work to do again

Speeds are the cards' priors, so equal units cost the same whatever each happened to measure.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from grid.words import PlacementRequest, UnitCard
from placement.columns import Columns, Floats, Ints

ROUND_TRIP_MS = 0.3
"""Submit and first frame between two processes of one cell, measured on loopback."""

DEFAULT_PREFILL_TOKENS_PER_S = 1_000.0
DEFAULT_DECODE_MS_PER_TOKEN = 30.0
"""For a unit that says nothing of its speed: a small GPU's, so that it is neither flooded nor starved."""

GPU_BATCH_GROWTH = 0.02
CPU_BATCH_GROWTH = 0.10
"""Share of a lone request's decode step that each further request adds. Decode reads all weights once a
step and one KV cache a request: on GPUs an 8B model at 2,000 tokens reads 16 GB and 0.26 GB (0.016). On
two CPU cores a step of SmolLM2 took 50, 77 and 125 ms at 1, 4 and 16 streams (0.10 at 16)."""

EXPECTED_OUTPUT_TOKENS = 256
"""Prior of an answer's length; `max_output_tokens` is a cap, and few answers reach a large one."""

PRESSURE_FROM_FREE_SHARE = 0.10
"""Below this share of free KV, running requests begin to outgrow what is left."""

MAX_MS_PER_TOKEN = 60_000.0
"""A minute a token is broken, not slow; the cap keeps every product finite."""


def prefill_ms_per_token(card: UnitCard) -> float:
    rate = card.prefill_tokens_per_s if card.prefill_tokens_per_s > 0 else DEFAULT_PREFILL_TOKENS_PER_S
    return min(1e3 / rate, MAX_MS_PER_TOKEN)


def decode_ms_per_token(card: UnitCard) -> float:
    step_ms = card.decode_ms_per_token if card.decode_ms_per_token > 0 else DEFAULT_DECODE_MS_PER_TOKEN
    return min(step_ms, MAX_MS_PER_TOKEN)


def batch_growth(card: UnitCard) -> float:
    return GPU_BATCH_GROWTH if card.gpus > 0 else CPU_BATCH_GROWTH


def expected_output_tokens(request: PlacementRequest) -> int:
    """At least 1: an embedding, too, takes one step of its unit."""
    return max(1, min(request.max_output_tokens, EXPECTED_OUTPUT_TOKENS))


def expected_kv_tokens(request: PlacementRequest) -> int:
    return request.prompt_tokens + expected_output_tokens(request)


class Costs(NamedTuple):
    """One array a part, one entry a row that was asked for; finite and not negative."""

    network_ms: Floats
    queue_ms: Floats
    prefill_ms: Floats
    decode_ms: Floats
    pressure_ms: Floats

    @property
    def total_ms(self) -> Floats:
        total: Floats = self.network_ms + self.queue_ms + self.prefill_ms + self.decode_ms + self.pressure_ms
        return total


def predict(request: PlacementRequest, columns: Columns, rows: Ints) -> Costs:
    """Return the predicted costs of `request` on the units at `rows`, in that order."""
    output_tokens = expected_output_tokens(request)
    prefill_ms_per_token = columns.prefill_ms_per_token[rows]
    load = columns.load[rows]
    max_running = columns.max_running[rows]

    batch = np.minimum(load + 1, max_running)
    step_ms = columns.decode_ms_per_token[rows] * (1.0 + columns.batch_growth[rows] * (batch - 1))
    decode_ms = output_tokens * step_ms

    # With all slots taken, one frees each time a request ends: `max_running` of them end per decode_ms.
    must_end_first = np.maximum(load + 1 - max_running, 0)
    slot_wait_ms = must_end_first * decode_ms / max_running
    tokens_ahead = columns.prefill_tokens_queued[rows] + columns.unseen_prompt_tokens[rows]
    queue_ms = tokens_ahead * prefill_ms_per_token + slot_wait_ms

    kv_tokens = expected_kv_tokens(request)
    kv_total = columns.kv_tokens_total[rows]
    kv_left = columns.kv_tokens_free[rows] - columns.unseen_kv_tokens[rows] - kv_tokens
    free_share = kv_left / np.maximum(kv_total, 1)
    eviction = np.clip(1.0 - free_share / PRESSURE_FROM_FREE_SHARE, 0.0, 1.0) * (kv_total > 0)

    costs = Costs(
        network_ms=np.full(len(rows), ROUND_TRIP_MS),
        queue_ms=queue_ms,
        prefill_ms=request.prompt_tokens * prefill_ms_per_token,
        decode_ms=decode_ms,
        pressure_ms=eviction * kv_tokens * prefill_ms_per_token,
    )
    # Of numbers that are not negative the sum is finite only if all are; a NaN fails both tests.
    total_ms = costs.total_ms
    assert np.minimum.reduce(total_ms, initial=0.0) >= 0.0, "a cost is negative or not a number"
    assert math.isfinite(np.add.reduce(total_ms)), "a cost is not a finite number"
    return costs


def slot_wait_ms(columns: Columns, rows: Ints) -> float:
    """Return after how many milliseconds the first of the full units at `rows` should free a slot."""
    max_running = columns.max_running[rows]
    growth = 1.0 + columns.batch_growth[rows] * (max_running - 1)
    per_request_ms = EXPECTED_OUTPUT_TOKENS * columns.decode_ms_per_token[rows] * growth
    return float((per_request_ms / max_running).min())
