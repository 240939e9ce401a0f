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

_ONE = np.array(1)
"""Next to a small array, an array of no dimensions costs half of what a plain number does."""


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
    """One array a part, one entry a row that was asked for."""

    network_ms: Floats
    queue_ms: Floats
    prefill_ms: Floats
    decode_ms: Floats
    pressure_ms: Floats
    batch: Ints
    """Requests that share a step once ours has a slot, ours among them."""

    def step_share_ms(self, index: int) -> float:
        """Return the request's share of its unit's step time, which units split evenly over a batch."""
        share: float = (self.prefill_ms.item(index) + self.decode_ms.item(index)) / self.batch.item(index)
        return share

    @property
    def total_ms(self) -> Floats:
        """Asserts that every part is finite and none negative."""
        total: Floats = self.network_ms + self.queue_ms + self.prefill_ms + self.decode_ms + self.pressure_ms
        # Of numbers that are not negative the sum is finite only if all are; a NaN fails both tests.
        assert np.minimum.reduce(total) >= 0.0, "a cost is negative or not a number"
        assert math.isfinite(np.add.reduce(total)), "a cost is not a finite number"
        return total


def predict(request: PlacementRequest, columns: Columns, rows: Ints) -> Costs:
    """Return the predicted costs of `request` on the units at `rows` (ascending, one or more)."""
    output_tokens, kv_tokens = expected_output_tokens(request), expected_kv_tokens(request)
    # All rows are looked at in place; only a part of them must be copied out.
    at = slice(None) if len(rows) == columns.size else rows
    prefill_ms_per_token = columns.prefill_ms_per_token[at]
    load_with_us = columns.load[at] + _ONE
    max_running = columns.max_running[at]

    batch = np.minimum(load_with_us, max_running)
    step_ms = columns.decode_ms_per_token[at] * (_ONE + columns.batch_growth[at] * (batch - _ONE))
    decode_ms = output_tokens * step_ms

    # With all slots taken, one frees each time a request ends: `max_running` of them end per decode_ms.
    must_end_first = load_with_us - batch
    slot_wait_ms = must_end_first * decode_ms / max_running
    tokens_ahead = columns.prefill_tokens_queued[at] + columns.unseen_prompt_tokens[at]
    queue_ms = tokens_ahead * prefill_ms_per_token + slot_wait_ms

    kv_total = columns.kv_tokens_total[at]
    kv_left = columns.kv_tokens_free[at] - columns.unseen_kv_tokens[at] - kv_tokens
    free_share = kv_left / np.maximum(kv_total, _ONE)
    pressure_ms = np.zeros(len(rows))
    if np.minimum.reduce(free_share) < PRESSURE_FROM_FREE_SHARE:
        squeeze = np.minimum(np.maximum(1.0 - free_share / PRESSURE_FROM_FREE_SHARE, 0.0), 1.0)
        eviction = squeeze * (kv_total > 0)
        pressure_ms = eviction * kv_tokens * prefill_ms_per_token

    network_ms = np.empty(len(rows))
    network_ms.fill(ROUND_TRIP_MS)
    prefill_ms = request.prompt_tokens * prefill_ms_per_token
    return Costs(network_ms, queue_ms, prefill_ms, decode_ms, pressure_ms, batch)


def slot_wait_ms(columns: Columns, rows: Ints) -> float:
    """Return after how many milliseconds the first of the full units at `rows` should free a slot."""
    max_running = columns.max_running[rows]
    growth = 1.0 + columns.batch_growth[rows] * (max_running - 1)
    per_request_ms = EXPECTED_OUTPUT_TOKENS * columns.decode_ms_per_token[rows] * growth
    return float((per_request_ms / max_running).min())
