"""How long answers get, and prompts against their estimates; learned for tenant, pipeline and model. Pure.

A group that has seen little leans on the next wider one: (tenant, pipeline, model), then (tenant, model),
then the model, then everything, and at last a prior. A group's distribution is its own decayed counts plus
LEAN_ON counts spread as its parent's distribution, so that no switch from one to the other is ever seen.
An answer that was cut off at its `max_output_tokens` says only that it is longer: it counts among the longer
ones, spread as those are (Efron's redistribution to the right).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from placement.columns import Floats

EXACT_UP_TO = 16
"""Lengths up to here have a bin each: many answers are a word or a number."""

BIN_GROWTH = 1.08
"""Wider bins grow by this, so that a quantile is off by 8 % at most, about what it is uncertain by anyway."""

MAX_LENGTH = 1 << 20
"""Longer answers count as this long; no engine's context comes near."""

REMEMBERED_ANSWERS = 500
"""Weight of the past: habits of an hour ago fade, and a 90 % quantile rests on 50 answers beyond it."""

LEAN_ON = 10
"""How many answers of its own count as much as all that wider groups know."""

REFRESH_SHARE = 0.2
"""A forecast is worked out anew when its group has grown by this share; a young group's at every answer."""

MAX_REFRESH_ANSWERS = 16
"""Often enough to follow a change of habit within a tenth of what is remembered."""

MAX_GROUPS = 4_096
"""The least recently used make room. A group takes 3 KB, so all take 12 MB."""

MAX_WEIGHT = 1e9
"""Newer answers get larger weights instead of older ones smaller; past this all are scaled down."""

PRIOR_MEDIAN_TOKENS, PRIOR_SPREAD = 160.0, 0.97
"""A log-normal with mean EXPECTED_OUTPUT_TOKENS: chat answers spread over a factor of ten."""

EXPECTED_OUTPUT_TOKENS = 256
"""Of an answer of which nothing is known; `max_output_tokens` is a cap, and few answers reach a large one."""

COVERAGE = 0.9

SHORT = 0.25
"""A quarter of the answers are short: what stops a unit for a while shows most in their gaps between
tokens."""

REDISTRIBUTIONS = 4
"""Rounds of spreading what was cut off; each begins with what the last refresh found."""

LEAST_TAIL = 1e-6
"""Where no more than this is longer, an answer that was cut off counts as it is."""

MAX_SCALE = 8.0
"""Of a prompt's tokens against their estimate, and its inverse: text of any script is within it."""


class Forecast(NamedTuple):
    mean_tokens: float
    """Of an answer, were it not cut off."""
    p90_tokens: int
    """COVERAGE of the answers are expected to be no longer than this."""
    prompt_scale: float = 1.0
    """Tokens of a prompt for each that the gateway estimates."""
    short_tokens: int = 1
    """SHORT of the answers are expected to be no longer than this."""


class Prompt(NamedTuple):
    """Tokens of one prompt."""

    estimate: int
    tokens: int


NO_PROMPT = Prompt(0, 0)


def _edges() -> list[int]:
    edges = list(range(EXACT_UP_TO + 1))
    while edges[-1] < MAX_LENGTH:
        edges.append(max(edges[-1] + 1, int(edges[-1] * BIN_GROWTH)))
    return edges


_EDGES = _edges()
"""The longest length of each bin."""

_LENGTHS: Floats = np.array(
    [(before + 1 + edge) / 2 for before, edge in zip([-1, *_EDGES], _EDGES, strict=False)]
)
"""The middle of each bin."""


def _prior() -> Floats:
    def below(length: int) -> float:
        if length == 0:
            return 0.0
        return 0.5 * (1 + math.erf(math.log(length / PRIOR_MEDIAN_TOKENS) / (PRIOR_SPREAD * math.sqrt(2))))

    return np.diff([0.0, *map(below, _EDGES)])


def _quantile(shares: Floats, coverage: float) -> int:
    """Return the least length that `coverage` of the answers don't exceed, taking a bin for evenly spread."""
    below = np.cumsum(shares)
    at = min(int(np.searchsorted(below, coverage)), len(_EDGES) - 1)
    if at == 0:
        return _EDGES[0]
    shortest, longest = _EDGES[at - 1] + 1, _EDGES[at]
    part = (coverage - float(below[at - 1])) / float(shares[at])
    return min(longest, shortest + int(part * (longest - shortest + 1)))


def _forecast(mean_tokens: float, shares: Floats, scale: float) -> Forecast:
    return Forecast(mean_tokens, _quantile(shares, COVERAGE), scale, _quantile(shares, SHORT))


class _Group:
    """Decayed counts, and the distribution that was made of them and of the wider group's."""

    __slots__ = (
        *("answers", "counts", "cut", "estimated", "forecast", "mass", "prompts", "shares"),
        *("tokens", "until", "weight"),
    )

    def __init__(self) -> None:
        self.counts = np.zeros(len(_EDGES), np.float64)
        self.cut: Floats | None = None
        """Of the counts, answers that were cut off; None while there are none."""
        self.mass = self.tokens = 0.0
        self.prompts = self.estimated = 0.0
        """Tokens of prompts, counted and estimated."""
        self.weight = 1.0
        self.answers = 0
        self.until = 0
        """How many answers the forecast is good for."""
        self.shares = self.counts
        self.forecast = Forecast(0.0, 0)

    def take(self, bin_number: int, length: int, is_cut: bool, prompt: Prompt) -> None:
        self.weight *= 1 + 1 / REMEMBERED_ANSWERS
        self.counts[bin_number] += self.weight
        if is_cut:
            self.cut = np.zeros_like(self.counts) if self.cut is None else self.cut
            self.cut[bin_number] += self.weight
        self.prompts += self.weight * prompt.tokens
        self.estimated += self.weight * prompt.estimate
        self.mass += self.weight
        self.tokens += self.weight * length
        self.answers += 1
        if self.weight > MAX_WEIGHT:
            for name in ("counts", "mass", "tokens", "weight", "prompts", "estimated"):
                setattr(self, name, getattr(self, name) / MAX_WEIGHT)
            self.cut = None if self.cut is None else self.cut / MAX_WEIGHT

    def lean_on(self, shares: Floats, wider: Forecast) -> None:
        lean = LEAN_ON * self.weight
        whole = self.mass + lean
        known = (self.counts + lean * shares) / whole
        mean_tokens = (self.tokens + lean * wider.mean_tokens) / whole
        if self.cut is not None:
            cut = self.cut / whole
            self.shares = _redistributed(known, cut, known if self.shares is self.counts else self.shares)
            mean_tokens += float(((self.shares - known) * _LENGTHS).sum())
        else:
            self.shares = known
        scale = self.prompts / self.estimated if self.estimated else wider.prompt_scale
        # Prompts of a kind have much the same scale: a first one says as much as all others'.
        scale = (self.mass * scale + self.weight * wider.prompt_scale) / (self.mass + self.weight)
        scale = min(max(scale, 1 / MAX_SCALE), MAX_SCALE)
        self.forecast = _forecast(mean_tokens, self.shares, scale)
        self.until = self.answers + 1 + min(int(self.answers * REFRESH_SHARE), MAX_REFRESH_ANSWERS)


def _redistributed(known: Floats, cut: Floats, shares: Floats) -> Floats:
    """Return `known` with what was `cut` off of it spread over longer bins; `shares` is the last guess."""
    for _ in range(REDISTRIBUTIONS):
        longer = np.cumsum(shares[::-1])[::-1] - shares
        spread = np.where(longer > LEAST_TAIL, cut, 0.0)
        each = np.cumsum(spread / np.maximum(longer, LEAST_TAIL))
        gained = shares[1:] * each[:-1]
        shares = known - spread
        shares[1:] += gained
    return shares


Key = tuple[str, ...]


class OutputLengths:
    def __init__(self) -> None:
        self._groups: OrderedDict[Key, _Group] = OrderedDict()
        self._prior = _prior()
        self.unknown = _forecast(float(EXPECTED_OUTPUT_TOKENS), self._prior, 1.0)
        """What is expected before anything was learned."""

    def __len__(self) -> int:
        return len(self._groups)

    def take(
        self,
        tenant_id: str,
        pipeline_id: str,
        model: str,
        output_tokens: int,
        *,
        is_cut: bool = False,
        prompt: Prompt = NO_PROMPT,
    ) -> None:
        """Learn from one finished answer; those of no token are no answers. `is_cut`: it would be longer."""
        if output_tokens < 1:
            return
        length = min(output_tokens, MAX_LENGTH)
        bin_number = bisect_left(_EDGES, length)
        for key in reversed(_chain(tenant_id, pipeline_id, model)):
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = _Group()
            self._groups.move_to_end(key)
            group.take(bin_number, length, is_cut, prompt)
        while len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)

    def forecast(self, tenant_id: str, pipeline_id: str, model: str) -> Forecast:
        chain = _chain(tenant_id, pipeline_id, model)
        for at, key in enumerate(chain):
            group = self._groups.get(key)
            if group is not None:
                return self._refreshed(group, chain[at + 1 :]).forecast
        return self.unknown

    def _refreshed(self, group: _Group, wider: tuple[Key, ...]) -> _Group:
        if group.answers >= group.until:
            shares, forecast = self._prior, self.unknown
            for at, key in enumerate(wider):
                parent = self._groups.get(key)
                if parent is not None:
                    parent = self._refreshed(parent, wider[at + 1 :])
                    shares, forecast = parent.shares, parent.forecast
                    break
            group.lean_on(shares, forecast)
        return group


def _chain(tenant_id: str, pipeline_id: str, model: str) -> tuple[Key, ...]:
    """Return the groups of an answer, the narrowest first."""
    return (tenant_id, pipeline_id, model), (tenant_id, model), (model,), ()
