"""All that a policy is told: requests as they arrive, unit cards, reports, and the ends of its own
dispatches.

Nothing here carries the length of an answer before it ended, a unit's hidden speed, or the future.
"""

from __future__ import annotations

from typing import NamedTuple


class UnitInfo(NamedTuple):
    """What is known of a unit from its start on."""

    unit: int
    gpu: str
    """Name of its data sheet."""
    region: str
    kv_tokens: int
    context_tokens: int
    """Prompt and answer together; a longer request is refused there."""
    max_running: int


class Arrival(NamedTuple):
    """A request at the moment it arrives."""

    request: int
    tenant: str
    origin: str
    """Region of its client."""
    prompt_tokens: int
    blocks: tuple[int, ...]
    """Ids of its prompt's blocks of 512 tokens, each standing for the prefix up to its end."""


class UnitReport(NamedTuple):
    """A unit's sample, as old as its way here is long."""

    unit: int
    running: int
    waiting: int
    kv_tokens_free: int
    kv_tokens_total: int
    prefill_tokens_queued: int
    steps: int
    held: tuple[int, ...]
    """Requests that this sample counts."""
    decode_step_ms: float
    """Mean of its recent steps that computed no prompt; -1 before the first."""
    prompt_tokens: int
    """Looked up in the prefix cache since the start."""
    cached_tokens: int
    """Of them, found."""
    stored: tuple[int, ...] = ()
    """Prefix blocks that came since the last report; for policies that ask for them."""
    removed: tuple[int, ...] = ()


class Ended(NamedTuple):
    """One of the policy's requests has ended at its client."""

    request: int
    unit: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float
    """Since it was dispatched, both ways included."""
    total_ms: float


class Dispatch(NamedTuple):
    request: int
    unit: int
