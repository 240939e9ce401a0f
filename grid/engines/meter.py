"""What an engine's load is and whose time its steps are. Pure: time is an argument.

Owned by the engine: it says when requests come and go and when a step has ended. A step's time is split
evenly over the requests that were there; a running sum of those even shares makes that one addition a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from grid.engines.adaptive import Limits, Sample
from grid.engines.base import EngineLoad
from grid.words import UNKNOWN

SPEED_MEMORY = 0.9
"""Weight of the past in measured speeds: they follow a change within some ten samples."""

MEASURABLE_PREFILL_TOKENS = 64
"""Shorter prefills measure a step's fixed cost rather than a speed."""


@dataclass(slots=True, eq=False)
class Stay:
    """One request's presence in the engine."""

    prompt_tokens: int
    share_s_at: float
    started: bool = False
    """Its first token is out."""


class Meter:
    def __init__(self, *, max_running: int) -> None:
        self._max_running = max_running
        self._stays: set[Stay] = set()
        self._share_s = 0.0
        self._busy_since_s = 0.0
        self._running = 0
        self._kv_usage = 0.0
        self._steps = 0
        self._prefill_tokens_per_s = UNKNOWN
        self._decode_ms = UNKNOWN
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._preemptions = 0
        self.kv_tokens_total = 0
        self.limits: Limits | None = None
        """What the engine may do at once now; None where nothing changes that."""

    def joined(self, prompt_tokens: int, now_s: float) -> Stay:
        if not self._stays:
            self._busy_since_s = now_s
        stay = Stay(prompt_tokens, self._share_s)
        self._stays.add(stay)
        return stay

    def left(self, stay: Stay) -> None:
        self._stays.discard(stay)

    def stepped(self, now_s: float, *, running: int, kv_usage: float, prefilling: bool) -> None:
        """An engine step has ended; `running` requests go on and hold `kv_usage` (0 to 1) of the cache."""
        elapsed_s = max(0.0, now_s - self._busy_since_s)
        self._busy_since_s = now_s
        self._steps += 1
        self._running, self._kv_usage = running, kv_usage
        if not self._stays:
            return
        self._share_s += elapsed_s / min(len(self._stays), self._max_running)
        if not prefilling and all(stay.started for stay in self._stays):
            self._decode_ms = follow(self._decode_ms, elapsed_s * 1e3)

    def prefilled(self, stay: Stay, computed_tokens: int, seconds: float) -> None:
        """A request's first token is out, `seconds` after its prefill of so many tokens was scheduled."""
        stay.started = True
        if computed_tokens >= MEASURABLE_PREFILL_TOKENS and seconds > 0:
            self._prefill_tokens_per_s = follow(self._prefill_tokens_per_s, computed_tokens / seconds)

    def looked_up(self, prompt_tokens: int, cached_tokens: int) -> None:
        """So many more prompt tokens were looked up in the prefix cache, and so many of them found."""
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += cached_tokens

    def preempted(self, requests: int) -> None:
        """The step evicted so many for want of KV memory."""
        self._preemptions += requests

    def sample(self) -> Sample:
        """Return what the limits follow from."""
        load = self.load()
        usage = 1.0 - load.kv_tokens_free / load.kv_tokens_total if load.kv_tokens_total else 0.0
        return Sample(usage, load.running, self._preemptions, self._decode_ms, self._prefill_tokens_per_s)

    def take_seconds(self, stay: Stay) -> float:
        """Return the request's share of step time since this was last asked."""
        seconds = self._share_s - stay.share_s_at
        stay.share_s_at = self._share_s
        return seconds

    def load(self) -> EngineLoad:
        """The engine tells of itself only when it steps; who has come or left since then is known here."""
        here = len(self._stays)
        running = min(self._running, here)
        usage = self._kv_usage if here else 0.0
        return EngineLoad(
            running=running,
            waiting=here - running,
            kv_tokens_free=int(self.kv_tokens_total * (1.0 - usage)),
            kv_tokens_total=self.kv_tokens_total,
            prefill_tokens_queued=sum(stay.prompt_tokens for stay in self._stays if not stay.started),
            steps=self._steps,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            decode_ms_per_token=self._decode_ms,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            admits=self.limits.admits if self.limits else 0,
            chunk_tokens=self.limits.chunk_tokens if self.limits else 0,
            preemptions=self._preemptions,
        )


def follow(measured: float, sample: float) -> float:
    """Return a measured speed after one more sample; the first is taken as it is."""
    return sample if measured == UNKNOWN else SPEED_MEMORY * measured + (1 - SPEED_MEMORY) * sample
