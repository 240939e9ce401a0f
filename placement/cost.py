"""What a request would cost on each unit, in predicted milliseconds. Pure; the same figures for every GPU.

    network   one round trip inside the cell
  + queue     prompts ahead of ours, and the wait for a slot when all are taken
  + prefill   what of our own prompt is not in the unit's prefix cache, and the step of the first token
  + decode    the rest of the expected output, at the step time of the batch that we would join
  + pressure  the chance that a full KV cache evicts us, times the work to do again
  + others    what we do to those on the unit, and the price of targets that are missed (`targets.py`)

Speeds and lengths are the learned ones (`speeds.py`, `lengths.py`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grid.words import PlacementRequest
from placement.columns import Columns, Floats, Ints
from placement.lengths import Forecast
from placement.reports import MAX_COUNT
from placement.speeds import Speeds, prompt_work
from placement.targets import MISS_MS, NO_TARGETS, Targets, others_ms

ROUND_TRIP_MS = 0.3
"""Submit and first frame between two processes of one cell, measured on loopback."""

PRESSURE_FROM_FREE_SHARE = 0.10
"""Below this share of free KV, running requests begin to outgrow what is left."""


def output_tokens(request: PlacementRequest, forecast: Forecast) -> int:
    """Return the expected length of the answer, at least 1: an embedding, too, takes one step of its unit."""
    return max(1, min(request.max_output_tokens, round(forecast.mean_tokens)))


def prompt_tokens(request: PlacementRequest, forecast: Forecast) -> int:
    """Return the expected length of the prompt: gateways estimate it from its text."""
    return round(request.prompt_tokens * forecast.prompt_scale)


def kv_tokens(request: PlacementRequest, forecast: Forecast) -> int:
    """Return the KV memory that the request is expected to fill."""
    return prompt_tokens(request, forecast) + output_tokens(request, forecast)


def kv_tokens_kept(kv_tokens_total: Ints) -> Ints:
    """Return how much KV memory units should keep free; an engine that has none is never short of it."""
    kept: Ints = np.where(
        kv_tokens_total > 0, (kv_tokens_total * PRESSURE_FROM_FREE_SHARE).astype(np.int64), -MAX_COUNT
    )
    return kept


class Weight(NamedTuple):
    """What a unit's load means for the next request, whichever that is; of one unit, or of several."""

    next_step_ms: float | npt.NDArray[Any]
    """A step of the batch that it joins, without its own KV."""
    wait_ms: float | npt.NDArray[Any]
    """Until the prompts ahead are computed."""
    crowd: float | npt.NDArray[Any]
    """How many must end before it gets a slot, in shares of all slots."""


class SpeedsOf(NamedTuple):
    """The `Speeds` of several units that a step of them is made of."""

    step_ms: Floats
    step_ms_per_request: Floats
    step_ms_per_kv_token: Floats
    prefill_ms_per_token: Floats


def weigh(
    speeds: Speeds | SpeedsOf,
    max_running: int | Ints,
    load: int | Ints,
    tokens_ahead: int | Ints,
    kv_tokens_held: int | Ints,
) -> Weight:
    """Return it for units of these speeds: counts of one unit, or arrays of shape (units,)."""
    # A product, not a minimum: it is the same for a number and for an array, and quick for both.
    must_end_first = (load + 1 - max_running) * (load >= max_running)
    batch = load + 1 - must_end_first
    step_ms = (
        speeds.step_ms + speeds.step_ms_per_request * batch + speeds.step_ms_per_kv_token * kv_tokens_held
    )
    return Weight(step_ms, speeds.prefill_ms_per_token * tokens_ahead, must_end_first / max_running)


class Costs(NamedTuple):
    """One array a part, one entry a row that was asked for."""

    network_ms: float | Floats
    """One number where it is the same for all."""
    queue_ms: Floats
    prefill_ms: Floats
    decode_ms: Floats
    pressure_ms: Floats | None
    """None while no unit is short of memory."""
    total_ms: Floats
    most_ms: float
    """The largest total."""
    others_ms: Floats | None
    """None where there are no targets."""
    cached_tokens: Floats | None
    """Of the prompt, in the units' prefix caches; None where no unit holds any."""

    def parts_ms(self, index: int) -> tuple[float, float, float, float, float, float]:
        """Return network, queue, prefill, decode, pressure and others of one entry."""
        return (
            self.network_ms if isinstance(self.network_ms, float) else self.network_ms.item(index),
            self.queue_ms.item(index),
            self.prefill_ms.item(index),
            self.decode_ms.item(index),
            0.0 if self.pressure_ms is None else self.pressure_ms.item(index),
            0.0 if self.others_ms is None else self.others_ms.item(index),
        )


def predict(
    request: PlacementRequest,
    forecast: Forecast,
    columns: Columns,
    rows: Ints,
    cached_tokens: Floats | None = None,
    *,
    round_trip_ms: Floats | None = None,
    targets: Targets = NO_TARGETS,
) -> Costs:
    """Return the predicted costs of `request` on the units at `rows` (ascending, one or more).

    `cached_tokens`, one for each row of the fleet, says what they hold of the prompt, by the gateway's
    estimate of tokens; it is used up. `round_trip_ms` says how far each is, None where all are near.

    Asserts that every part is finite and none negative. What is rare (no free slot, no free memory) is
    worked out only when some unit has it: on a small fleet a decision's time is the count of its array
    operations.
    """
    tokens, kv_with_us = output_tokens(request, forecast), kv_tokens(request, forecast)
    # All rows are looked at in place; only a part of them must be copied out.
    if len(rows) == columns.size:
        priced = columns.priced
    else:
        priced = columns.priced.take(rows, axis=1)
        cached_tokens = None if cached_tokens is None else cached_tokens.take(rows)
    next_step_ms, step_ms_per_kv_token, first_steps, prefill_ms_per_token, queue_ms, crowd = priced

    step_ms = step_ms_per_kv_token * kv_with_us
    step_ms += next_step_ms
    prefill_ms = first_steps * step_ms
    if cached_tokens is None:
        prefill_ms += prefill_ms_per_token * prompt_work(prompt_tokens(request, forecast), 0.0)
    else:
        cached_tokens *= forecast.prompt_scale
        scaled_tokens = request.prompt_tokens * forecast.prompt_scale
        prefill_ms += prefill_ms_per_token * prompt_work(scaled_tokens, cached_tokens)
    decode_ms = step_ms * (tokens - 1)
    if np.count_nonzero(crowd):
        # With all slots taken, one frees each time a request ends: all of them in the time of an answer.
        queue_ms = queue_ms + crowd * step_ms * tokens

    total_ms = queue_ms + prefill_ms
    total_ms += decode_ms
    pressure_ms = _pressure_ms(columns, rows, kv_with_us, prefill_ms_per_token)
    if pressure_ms is not None:
        total_ms += pressure_ms
    network_ms: float | Floats = ROUND_TRIP_MS
    if round_trip_ms is not None:
        network_ms = round_trip_ms if len(rows) == columns.size else round_trip_ms[rows]
    total_ms += network_ms
    others = None
    if targets is not NO_TARGETS:
        work_ms = prefill_ms - first_steps * step_ms
        others = others_ms(
            targets,
            request.prompt_tokens,
            forecast.short_tokens,
            network_ms + queue_ms + prefill_ms,
            step_ms,
            queue_ms + work_ms,
            work_ms,
            prefill_ms_per_token,
            *(columns.load, columns.gap_ms)
            if len(rows) == columns.size
            else (columns.load[rows], columns.gap_ms[rows]),
        )
        if kv_with_us > np.minimum.reduce(columns.context_tokens):
            # A prompt's length is an estimate, so this is no filter: the unit may still be the only one.
            others += MISS_MS * (columns.context_tokens[rows] < kv_with_us)
        total_ms += others
    least_ms, most_ms = np.minimum.reduce(total_ms), np.maximum.reduce(total_ms)
    # A part that is not a number makes both of them none.
    assert least_ms >= 0.0, "a cost is negative or not a number"
    assert most_ms < math.inf, "a cost is not a finite number"
    return Costs(
        *(network_ms, queue_ms, prefill_ms, decode_ms, pressure_ms, total_ms, most_ms),
        others,
        cached_tokens,
    )


def _pressure_ms(
    columns: Columns, rows: Ints, kv_with_us: int, prefill_ms_per_token: Floats
) -> Floats | None:
    """Return what running out of KV memory costs: the chance of an eviction times the work to do again."""
    if np.minimum.reduce(columns.kv_tokens_spare) >= kv_with_us:
        return None
    short_by = kv_with_us - columns.kv_tokens_spare[rows]
    kept = np.maximum(columns.kv_tokens_total[rows] * PRESSURE_FROM_FREE_SHARE, 1.0)
    pressure_ms: Floats = np.clip(short_by / kept, 0.0, 1.0) * kv_with_us * prefill_ms_per_token
    return pressure_ms
