"""What there is to learn from requests that ended, and from what units say meanwhile. Pure.

A reservation carries its `Lesson`: who asked, and what the request found on its unit. When it is settled,
the lesson and the gateway's figures teach how long answers get (`lengths.py`) and how fast units are
(`speeds.py`). What is learned of speeds shows only after `publish`, so that it never changes within a burst.
"""

from __future__ import annotations

from typing import NamedTuple

from grid.words import PlacementRequest, UnitCard
from placement.lengths import NO_PROMPT, Forecast, OutputLengths, Prompt
from placement.neighbours import Neighbours
from placement.reports import Spent
from placement.speeds import LearnedSpeeds, Ran, UnitSpeed

STUDY_S = 1.0
"""How often a unit's own figures are learned from: they are averages, and ten a second say no more."""

LESSON_GAP_S = 0.02
"""How often at most a unit's speed is learned from its requests: those that end together ran together, and
say one thing, not many."""

PUBLISH_S = 1.0
"""How often learned speeds reach the prices: with 10,000 units that takes milliseconds."""

FIRST_ATTEMPT = 1

MIN_OUTPUT_TOKENS = 8
"""The pace of a shorter answer says more of its first token than of the others."""


class Lesson(NamedTuple):
    tenant_id: str
    pipeline_id: str
    model: str
    is_whole: bool
    """The whole answer comes from this attempt; one that goes on with another's answer sees a part of it."""
    batch: int
    """Requests that share a step, this one among them."""
    kv_tokens: int
    """In the KV cache when it came."""
    prompt_estimate: int
    """The gateway's, in tokens."""
    max_output_tokens: int
    queued: bool
    """Others were to be served first, so that its first token says nothing of a speed."""


class Here(NamedTuple):
    """A unit at one moment."""

    max_running: int
    load: int
    tokens_ahead: int
    kv_tokens: int


class Learning:
    def __init__(self) -> None:
        self._lengths = OutputLengths()
        self._speeds = LearnedSpeeds()

    def forecast(self, request: PlacementRequest, model: str) -> Forecast:
        """Return how long an answer of `model` to `request` is expected to be, were it not cut off."""
        return self._lengths.forecast(request.tenant_id, request.pipeline_id, model)

    def join(self, card: UnitCard) -> UnitSpeed:
        """Return what is known of a unit like that. Whoever keeps it says `leave` in the end."""
        return self._speeds.join(card)

    @property
    def neighbours(self) -> Neighbours:
        return self._speeds.neighbours

    def publish(self) -> list[UnitSpeed]:
        """Return the units whose speeds are others now."""
        return self._speeds.publish()

    def lesson(self, request: PlacementRequest, model: str, found: Here) -> Lesson:
        return Lesson(
            tenant_id=request.tenant_id,
            pipeline_id=request.pipeline_id,
            model=model,
            is_whole=request.attempt <= FIRST_ATTEMPT,
            batch=min(found.load + 1, found.max_running),
            kv_tokens=found.kv_tokens,
            prompt_estimate=request.prompt_tokens,
            max_output_tokens=request.max_output_tokens,
            queued=found.load >= found.max_running or found.tokens_ahead > 0,
        )

    def done(self, lesson: Lesson, spent: Spent, unit: UnitSpeed | None, left: Here | None) -> None:
        """Learn from a finished request; only its length, where `unit` and what it leaves there are None."""
        if not lesson.is_whole:
            return
        self._lengths.take(
            *(lesson.tenant_id, lesson.pipeline_id, lesson.model, spent.output_tokens),
            is_cut=spent.output_tokens >= lesson.max_output_tokens,
            prompt=Prompt(lesson.prompt_estimate, spent.input_tokens) if spent.input_tokens else NO_PROMPT,
        )
        if unit is not None and left is not None:
            unit.ran(_ran(lesson, spent, left))

    def reported(
        self, unit: UnitSpeed, running: int, kv_tokens_held: int, decode_ms_per_token: float
    ) -> float | None:
        """Learn from what a unit that works measured of its steps; return what `stepped` does."""
        if decode_ms_per_token > 0 and running:
            return unit.stepped(running, kv_tokens_held, decode_ms_per_token)
        return None


def _ran(lesson: Lesson, spent: Spent, left: Here) -> Ran:
    tokens = spent.output_tokens
    # Work without a first token, such as an embedding, is one step.
    ttft_ms = spent.ttft_ms or spent.total_ms
    between_ms = max(spent.total_ms - spent.ttft_ms, 0.0)
    return Ran(
        prompt_tokens=spent.input_tokens - spent.cached_tokens,
        output_tokens=tokens,
        ttft_ms=0.0 if lesson.queued else ttft_ms,
        token_ms=between_ms / (tokens - 1) if tokens >= MIN_OUTPUT_TOKENS else 0.0,
        batch=(lesson.batch + min(left.load, left.max_running)) / 2,
        kv_tokens=(lesson.kv_tokens + left.kv_tokens) / 2,
        cached_tokens=spent.cached_tokens,
    )
