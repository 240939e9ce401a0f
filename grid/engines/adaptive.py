"""What an engine may do at once, lowered while its KV cache is short and raised again when it is not. Pure.

Two limits: how many prompt tokens one step computes beside the streams that run, which is how long these
wait for their next token, and how many requests are worked on at once, which is whether they evict each
other. Both fall quickly and rise slowly, and between SHORT and AMPLE nothing moves: they don't swing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from grid.words import UNKNOWN

SHORT = 0.85
"""Share of the KV cache in use from which there is pressure: what runs needs the rest to grow."""
AMPLE = 0.70
"""Below it there is none."""

LOWER_GAP_S = 0.3
"""Between two steps down: some engine steps, so that the first one shows."""
RAISE_GAP_S = 1.0
"""Of ample memory before each step up: the time of some tens of tokens of all that run."""

MIN_CHUNK_TOKENS = 32
"""Of prompts in one step: a block of the CPU's KV cache, two of a GPU's. Fewer would cost more steps than
they save."""

UNLIMITED = 1 << 40
"""Of tokens, where no speed is known yet."""

RAISES = 4
"""Steps in which the number of requests comes back."""


class Sample(NamedTuple):
    kv_usage: float
    """In use by what runs, from 0 to 1."""
    running: int
    preemptions: int
    """Since the engine started."""
    decode_ms: float
    """Of a step that computes no prompt, or UNKNOWN."""
    prefill_tokens_per_s: float


class Limits(NamedTuple):
    chunk_tokens: int
    """Of prompts, in one step."""
    admits: int
    """Requests in work at once; those that are there already stay."""


class Adaptive:
    """`full` are the limits without pressure, and the highest."""

    def __init__(self, full: Limits) -> None:
        self.full = self.limits = full
        self._preemptions = 0
        self._lowered_s = -math.inf
        self._calm_since_s = math.inf

    def handle(self, sample: Sample, now_s: float) -> Limits:
        """Return the limits from here on. To be asked about ten times a second, also while nothing runs."""
        evicted = sample.preemptions > self._preemptions
        self._preemptions = sample.preemptions
        if evicted or sample.kv_usage >= SHORT:
            self._calm_since_s = math.inf
            if now_s >= self._lowered_s + LOWER_GAP_S:
                self._lowered_s = now_s
                self.limits = self._lower(sample, evicted)
        elif sample.kv_usage >= AMPLE or self.limits == self.full:
            self._calm_since_s = math.inf
        elif self._calm_since_s == math.inf:
            self._calm_since_s = now_s
        elif now_s >= self._calm_since_s + RAISE_GAP_S:
            self._calm_since_s = now_s
            self.limits = self._raise()
        return self.limits

    def _lower(self, sample: Sample, evicted: bool) -> Limits:
        chunk, bearable = self.limits.chunk_tokens, bearable_chunk(sample)
        # What nobody feels need not be less, or prompts would take long for nothing.
        chunk = chunk // 2 if evicted or bearable == UNLIMITED else min(chunk, bearable)
        # What was evicted wants its place back at once: one fewer, or the two would evict each other in turn.
        admits = sample.running - 1 if evicted else sample.running
        return Limits(
            max(chunk, min(MIN_CHUNK_TOKENS, self.full.chunk_tokens)), max(1, min(admits, self.limits.admits))
        )

    def _raise(self) -> Limits:
        chunk, admits = self.limits
        return Limits(
            min(2 * chunk, self.full.chunk_tokens),
            min(admits + max(1, self.full.admits // RAISES), self.full.admits),
        )


def bearable_chunk(sample: Sample) -> int:
    """Return how many prompt tokens take as long as one step without any: running streams take double."""
    if sample.decode_ms == UNKNOWN or sample.prefill_tokens_per_s == UNKNOWN:
        return UNLIMITED
    tokens = int(sample.decode_ms * sample.prefill_tokens_per_s / 1e3)
    return tokens // MIN_CHUNK_TOKENS * MIN_CHUNK_TOKENS
