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

from grid.words import PlacementRequest, UnitCard, UnitLoad
from placement.columns import Columns, Floats, Ints
from placement.reports import MAX_COUNT

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


def step_ms(card: UnitCard) -> tuple[float, float]:
    """Return what a decode step takes whatever its batch, and what each request of it adds."""
    lone_ms = card.decode_ms_per_token if card.decode_ms_per_token > 0 else DEFAULT_DECODE_MS_PER_TOKEN
    lone_ms = min(lone_ms, MAX_MS_PER_TOKEN)
    growth_ms = lone_ms * (GPU_BATCH_GROWTH if card.gpus > 0 else CPU_BATCH_GROWTH)
    return lone_ms - growth_ms, growth_ms


def expected_output_tokens(request: PlacementRequest) -> int:
    """At least 1: an embedding, too, takes one step of its unit."""
    return max(1, min(request.max_output_tokens, EXPECTED_OUTPUT_TOKENS))


def expected_kv_tokens(request: PlacementRequest) -> int:
    return request.prompt_tokens + expected_output_tokens(request)


def kv_tokens_kept(load: UnitLoad) -> int:
    """Return how much KV memory a unit should keep free; an engine that has none is never short of it."""
    return int(load.kv_tokens_total * PRESSURE_FROM_FREE_SHARE) if load.kv_tokens_total else -MAX_COUNT


class Costs(NamedTuple):
    """One array a part, one entry a row that was asked for."""

    network_ms: float
    """The same for all."""
    queue_ms: Floats
    prefill_ms: Floats
    decode_ms: Floats
    pressure_ms: Floats | None
    """None while no unit is short of memory."""
    batch: Ints
    """Requests that share a step once ours has a slot, ours among them."""
    total_ms: Floats

    def parts_ms(self, index: int) -> tuple[float, float, float, float, float]:
        """Return network, queue, prefill, decode and pressure of one entry."""
        pressure_ms = 0.0 if self.pressure_ms is None else self.pressure_ms.item(index)
        return (
            self.network_ms,
            self.queue_ms.item(index),
            self.prefill_ms.item(index),
            self.decode_ms.item(index),
            pressure_ms,
        )


def predict(request: PlacementRequest, columns: Columns, rows: Ints) -> Costs:
    """Return the predicted costs of `request` on the units at `rows` (ascending, one or more).

    Asserts that every part is finite and none negative. What is rare (no free slot, no free memory) is
    worked out only when some unit has it: on a small fleet a decision's time is the count of its array
    operations.
    """
    output_tokens, kv_tokens = expected_output_tokens(request), expected_kv_tokens(request)
    # All rows are looked at in place; only a part of them must be copied out.
    at = slice(None) if len(rows) == columns.size else rows
    prefill_ms_per_token = columns.prefill_ms_per_token[at]
    load_with_us = columns.load[at] + _ONE
    max_running = columns.max_running[at]

    batch = np.minimum(load_with_us, max_running)
    decode_ms = output_tokens * (columns.step_ms[at] + columns.step_ms_per_request[at] * batch)
    prefill_ms = request.prompt_tokens * prefill_ms_per_token

    queue_ms = columns.tokens_ahead[at] * prefill_ms_per_token
    must_end_first = load_with_us - batch
    if np.count_nonzero(must_end_first):
        # With all slots taken, one frees each time a request ends: `max_running` of them end per decode_ms.
        queue_ms += must_end_first * decode_ms / max_running

    total_ms = queue_ms + prefill_ms
    total_ms += decode_ms
    total_ms += ROUND_TRIP_MS
    pressure_ms = _pressure_ms(columns, at, kv_tokens)
    if pressure_ms is not None:
        total_ms += pressure_ms
    # Of numbers that are not negative the sum is finite only if all are; a NaN fails both tests.
    assert np.minimum.reduce(total_ms) >= 0.0, "a cost is negative or not a number"
    assert math.isfinite(np.add.reduce(total_ms)), "a cost is not a finite number"
    return Costs(ROUND_TRIP_MS, queue_ms, prefill_ms, decode_ms, pressure_ms, batch, total_ms)


def _pressure_ms(columns: Columns, at: slice | Ints, kv_tokens: int) -> Floats | None:
    """Return what running out of KV memory costs: the chance of an eviction times the work to do again."""
    if np.minimum.reduce(columns.kv_tokens_spare) >= kv_tokens:
        return None
    short_by = kv_tokens - columns.kv_tokens_spare[at]
    kept = np.maximum(columns.kv_tokens_total[at] * PRESSURE_FROM_FREE_SHARE, 1.0)
    pressure_ms: Floats = np.clip(short_by / kept, 0.0, 1.0) * kv_tokens * columns.prefill_ms_per_token[at]
    return pressure_ms


def slot_wait_ms(columns: Columns, rows: Ints) -> float:
    """Return after how many milliseconds the first of the full units at `rows` should free a slot."""
    max_running = columns.max_running[rows]
    step_ms = columns.step_ms[rows] + columns.step_ms_per_request[rows] * max_running
    return float((EXPECTED_OUTPUT_TOKENS * step_ms / max_running).min())
