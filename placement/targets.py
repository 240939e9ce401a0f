"""What a placement does to others, and what it is worth to keep to the targets of latency. Pure.

A prompt that a unit computes delays all that the unit holds: their next tokens wait for its chunks. And the
gap between tokens of whoever got its first token before a queue of prompts is computed is that of steps full
of prompt. Both are priced in milliseconds, like everything else:

    others = HARM x delay that our prompt means for those on the unit
           + MISS_MS x how likely we miss a target, or make others miss theirs
           + what waiting for the first token weighs beyond its length, TAIL x TTFT^2 / target
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from placement.columns import Floats, Ints

CHUNK_TOKENS = 2_048
"""Of a step that computes prompts: vLLM's default on most GPUs."""

MISS_MS = 5_000.0
"""What a missed target is worth: so much longer would a client rather wait once."""

RAMP_FROM, RAMP_TO = 0.75, 1.15
"""Prediction over target: below the first a miss is out of question, above the second it is sure. Units
differ from what is predicted of them by a fifth."""

OTHERS = 0.3
"""Of those on a unit, the share whose answers are so short that a queue of prompts shows in their mean
gap."""

FELT = 1.5
"""By how much one answer's gaps may be above those of all that ran on its unit lately."""

HARM = 0.25
"""Worth of a millisecond of somebody else's against one of ours: most of them read slower than tokens
come."""

TAIL = 8.0
"""A first token at an eighth of its target counts twice: the longer one has waited, measured by what one
asked for, the worse is a moment more."""


class Targets(NamedTuple):
    """Latencies that users of the cell expect, as clients see them."""

    ttft_ms: float = 2_000.0
    ttft_ms_per_token: float = 0.25
    """Of the prompt: nobody expects a book to be read in no time."""
    tpot_ms: float = 100.0


NO_TARGETS = Targets(0.0, 0.0, 0.0)
"""Nobody expects anything: only predicted times count."""


def others_ms(
    targets: Targets,
    prompt_tokens: int,
    output_tokens: int,
    ttft_ms: Floats,
    step_ms: Floats,
    backlog_ms: Floats,
    work_ms: Floats,
    prefill_ms_per_token: Floats,
    load: Ints,
    felt_ms: Floats,
) -> Floats:
    """Return it for units; arrays of shape (units,).

    `backlog_ms` is the time of all prompts up to ours, `work_ms` that of ours alone, `felt_ms` the gap
    between tokens there lately.
    """
    limit_ms = targets.ttft_ms + targets.ttft_ms_per_token * prompt_tokens
    ours = _chance(ttft_ms / limit_ms) + _chance(np.maximum(step_ms, FELT * felt_ms) / targets.tpot_ms)
    gap_ms = _gap_ms(output_tokens, step_ms, backlog_ms, prefill_ms_per_token)
    theirs = np.minimum(load, 1) * _chance(gap_ms / targets.tpot_ms)
    tail_ms = ttft_ms * ttft_ms * (TAIL / limit_ms)
    return HARM * work_ms * load + MISS_MS * (ours + OTHERS * theirs) + tail_ms


def _gap_ms(output_tokens: int, step_ms: Floats, backlog_ms: Floats, prefill_ms_per_token: Floats) -> Floats:
    """Return the mean gap between tokens of an answer that began before the prompts of `backlog_ms`."""
    gaps = max(output_tokens - 1, 1)
    # While prompts are computed each step gives one token to all that run; the rest of an answer is quicker.
    chunk_ms = np.maximum(step_ms, CHUNK_TOKENS * prefill_ms_per_token)
    stretched = np.minimum(backlog_ms / gaps, chunk_ms - step_ms)
    gap_ms: Floats = step_ms + stretched
    return gap_ms


def _chance(ratio: Floats) -> Floats:
    # Not np.clip, which takes several times as long for few units.
    chance: Floats = np.minimum(np.maximum((ratio - RAMP_FROM) * (1.0 / (RAMP_TO - RAMP_FROM)), 0.0), 1.0)
    return chance
