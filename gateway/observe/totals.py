"""What the whole cell has counted, by route, model and code: Prometheus' figures. Pure.

Labels are of the configuration and of this code, never of a caller, so their number is bounded. Fields of the
hash `zg:totals`, which is never reset: `KIND|LABEL…`, and of histograms one for each bucket that has a count
(the number of its upper bound) and `us`, the sum in millionths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from gateway.observe.story import Outcome, Story
from grid.words import Usage

TOTALS = "zg:totals"
MICRO = 1_000_000
"""Whole millionths stay exact over any number of additions."""
DURATIONS_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""OpenTelemetry's buckets of `gen_ai.server.request.duration`, with one below for what is over at once."""
TOKEN_TIMES_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""Its buckets of `gen_ai.server.time_per_output_token`, with one below."""
GAPS_S = (0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 1.0, 2.5, 5.0, 15.0)
"""Finest around what is promised: 0.2 s for a unit that died, 0.35 s for one that froze or was cut off."""
TOKENS = tuple(float(4**power) for power in range(11))
"""Its buckets of `gen_ai.client.token.usage`, up to a million; no model reads more."""

Sums = dict[str, int]
Name = TypeVar("Name", str, int)


@dataclass(slots=True)
class Work:
    input: int = 0
    cached: int = 0
    output: int = 0
    cu: int = 0

    def add(self, usage: Usage) -> None:
        self.input += usage.input_tokens
        self.cached += usage.cached_tokens
        self.output += usage.output_tokens
        self.cu += round(usage.cu_seconds * MICRO)

    def merge(self, other: Work) -> None:
        self.input += other.input
        self.cached += other.cached
        self.output += other.output
        self.cu += other.cu

    def sums(self) -> Sums:
        """Return what is not zero."""
        counts = {"input": self.input, "cached": self.cached, "output": self.output, "cu": self.cu}
        return {name: count for name, count in counts.items() if count}


class _Histogram:
    """Counts by upper bound, the last for what is above them all, and the sum in millionths."""

    __slots__ = ("bounds", "counts", "micro")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.micro = 0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.micro += round(value * MICRO)

    def sums(self, name: str) -> Sums:
        sums = {f"{name}|{index}": count for index, count in enumerate(self.counts) if count}
        return {**sums, f"{name}|us": self.micro} if sums else {}


@dataclass(slots=True)
class _Route:
    """The cell's own figures of one route and model."""

    outcomes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    durations: _Histogram = field(default_factory=lambda: _Histogram(DURATIONS_S))


@dataclass(slots=True)
class _Model:
    work: Work = field(default_factory=Work)
    ttft: _Histogram = field(default_factory=lambda: _Histogram(DURATIONS_S))
    token: _Histogram = field(default_factory=lambda: _Histogram(TOKEN_TIMES_S))
    inputs: _Histogram = field(default_factory=lambda: _Histogram(TOKENS))
    outputs: _Histogram = field(default_factory=lambda: _Histogram(TOKENS))
    gaps: _Histogram = field(default_factory=lambda: _Histogram(GAPS_S))


def add_sums(sums: dict[Name, int], more: Mapping[Name, int]) -> None:
    """Add `more` to `sums`, name by name."""
    for name, count in more.items():
        sums[name] = sums.get(name, 0) + count


class Totals:
    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], _Route] = defaultdict(_Route)
        self.models: dict[str, _Model] = defaultdict(_Model)
        self.errors: dict[tuple[str, str], int] = defaultdict(int)

    def add(self, story: Story, outcome: Outcome) -> None:
        route = self.routes[story.route, story.model]
        route.outcomes[outcome] += 1
        if story.error is not None:
            self.errors[story.route, story.error.code] += 1
        if not story.runs:
            return
        model = self.models[story.model]
        model.work.add(story.usage)
        for run in story.runs:
            if run.usage.input_tokens:
                model.inputs.add(run.usage.input_tokens)
            if run.usage.output_tokens:
                model.outputs.add(run.usage.output_tokens)
            for gap_s in run.gaps_s:
                model.gaps.add(gap_s)
        if outcome is not Outcome.GOOD:
            return
        route.durations.add(story.total_ms / 1000)
        for run in story.runs:
            tokens = run.usage.output_tokens
            if tokens:
                model.ttft.add(run.ttft_ms / 1000)
            if tokens > 1 and run.steps:
                model.token.add(run.steps[-1].timing.decode_ms / (tokens - 1) / 1000)

    def charge(self, model: str, usage: Usage) -> None:
        """Add work of a call that was added before."""
        self.models[model].work.add(usage)

    def sums(self) -> Sums:
        sums = {f"errors|{route}|{code}": count for (route, code), count in self.errors.items()}
        for (path, model), route in self.routes.items():
            sums |= {f"requests|{path}|{model}|{name}": count for name, count in route.outcomes.items()}
            sums |= route.durations.sums(f"duration|{path}|{model}")
        for name, of_model in self.models.items():
            sums |= {f"{what}|{name}": count for what, count in of_model.work.sums().items()}
            sums |= of_model.ttft.sums(f"ttft|{name}") | of_model.token.sums(f"tpot|{name}")
            sums |= of_model.inputs.sums(f"inputs|{name}") | of_model.outputs.sums(f"outputs|{name}")
            sums |= of_model.gaps.sums(f"gaps|{name}")
        return sums
