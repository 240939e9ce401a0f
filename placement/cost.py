"""What a request would cost on each unit, in predicted milliseconds. Pure; the same figures for every GPU.

    network   one round trip inside the cell
  + queue     prompts ahead of ours, and the wait for a slot when all are taken
  + prefill   our own prompt, none of it cached, and the step that gives the first token
  + decode    the rest of the expected output, at the step time of the batch that we would join
  + pressure  the chance that a full KV cache evicts us, times the work to do again

Speeds and lengths are the learned ones (`speeds.py`, `lengths.py`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from grid.words import PlacementRequest, UnitLoad
from placement.columns import Columns, Floats, Ints
from placement.lengths import Forecast
from placement.reports import MAX_COUNT

ROUND_TRIP_MS = 0.3
"""Submit and first frame between two processes of one cell, measured on loopback."""

PRESSURE_FROM_FREE_SHARE = 0.10
"""Below this share of free KV, running requests begin to outgrow what is left."""

_ONE = np.array(1)
"""Next to a small array, an array of no dimensions costs half of what a plain number does."""


def output_tokens(request: PlacementRequest, forecast: Forecast) -> int:
    """Return the expected length of the answer, at least 1: an embedding, too, takes one step of its unit."""
    return max(1, min(request.max_output_tokens, round(forecast.mean_tokens)))


def kv_tokens(request: PlacementRequest, forecast: Forecast) -> int:
    """Return the KV memory that the request is expected to fill."""
    return request.prompt_tokens + output_tokens(request, forecast)


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


def predict(request: PlacementRequest, forecast: Forecast, columns: Columns, rows: Ints) -> Costs:
    """Return the predicted costs of `request` on the units at `rows` (ascending, one or more).

    Asserts that every part is finite and none negative. What is rare (no free slot, no free memory) is
    worked out only when some unit has it: on a small fleet a decision's time is the count of its array
    operations.
    """
    tokens, kv_with_us = output_tokens(request, forecast), kv_tokens(request, forecast)
    # All rows are looked at in place; only a part of them must be copied out.
    at = slice(None) if len(rows) == columns.size else rows
    prefill_ms_per_token = columns.prefill_ms_per_token[at]
    load_with_us = columns.load[at] + _ONE
    max_running = columns.max_running[at]

    batch = np.minimum(load_with_us, max_running)
    step_ms = columns.step_ms_per_request[at] * batch
    step_ms += columns.step_ms[at]
    step_ms += columns.step_ms_per_kv_token[at] * (columns.kv_tokens_held[at] + kv_with_us)
    prefill_ms = columns.first_steps[at] * step_ms
    prefill_ms += request.prompt_tokens * prefill_ms_per_token
    decode_ms = step_ms * (tokens - 1)

    queue_ms = columns.tokens_ahead[at] * prefill_ms_per_token
    must_end_first = load_with_us - batch
    if np.count_nonzero(must_end_first):
        # With all slots taken, one frees each time a request ends: `max_running` of them end in the time
        # of one answer.
        queue_ms += must_end_first * tokens * step_ms / max_running

    total_ms = queue_ms + prefill_ms
    total_ms += decode_ms
    total_ms += ROUND_TRIP_MS
    pressure_ms = _pressure_ms(columns, at, kv_with_us)
    if pressure_ms is not None:
        total_ms += pressure_ms
    # Of numbers that are not negative the sum is finite only if all are; a NaN fails both tests.
    assert np.minimum.reduce(total_ms) >= 0.0, "a cost is negative or not a number"
    assert math.isfinite(np.add.reduce(total_ms)), "a cost is not a finite number"
    return Costs(ROUND_TRIP_MS, queue_ms, prefill_ms, decode_ms, pressure_ms, batch, total_ms)


def _pressure_ms(columns: Columns, at: slice | Ints, kv_with_us: int) -> Floats | None:
    """Return what running out of KV memory costs: the chance of an eviction times the work to do again."""
    if np.minimum.reduce(columns.kv_tokens_spare) >= kv_with_us:
        return None
    short_by = kv_with_us - columns.kv_tokens_spare[at]
    kept = np.maximum(columns.kv_tokens_total[at] * PRESSURE_FROM_FREE_SHARE, 1.0)
    pressure_ms: Floats = np.clip(short_by / kept, 0.0, 1.0) * kv_with_us * columns.prefill_ms_per_token[at]
    return pressure_ms


def slot_wait_ms(request: PlacementRequest, forecast: Forecast, columns: Columns, rows: Ints) -> float:
    """Return after how many milliseconds the first of the full units at `rows` should free a slot."""
    max_running = columns.max_running[rows]
    step_ms = columns.step_ms[rows] + columns.step_ms_per_request[rows] * max_running
    step_ms += columns.step_ms_per_kv_token[rows] * columns.kv_tokens_held[rows]
    return float((output_tokens(request, forecast) * step_ms / max_running).min())
