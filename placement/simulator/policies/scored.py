"""Policies that score units by what these report, with or without what was dispatched since."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from placement.simulator.kv import BLOCK_TOKENS
from placement.simulator.policies.base import Policy, Setting
from placement.simulator.policies.outstanding import Counting
from placement.simulator.policies.prefixes import PrefixIndex, matched_tokens
from placement.simulator.seen import Arrival, Dispatch, Ended, UnitReport


class LlmdScores(Policy):
    name: ClassVar[str] = "llmd_scores"
    source: ClassVar[str] = (
        "llm-d's inference scheduler: weighted scores in [0, 1], queue 2, KV 2, prefix 3, the best one picked"
    )
    wants_reports: ClassVar[bool] = True
    QUEUE, KV, PREFIX = 2.0, 2.0, 3.0

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        super().__init__(setting, rng)
        self._waiting = [0] * len(setting.units)
        self._used = [0.0] * len(setting.units)
        self._index = PrefixIndex(len(setting.units))

    def reported(self, reports: Sequence[UnitReport], now_s: float) -> Sequence[Dispatch]:
        for report in reports:
            self._waiting[report.unit] = report.waiting
            self._used[report.unit] = 1.0 - report.kv_tokens_free / report.kv_tokens_total
        return ()

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        fitting = self.fitting(arrival)
        if not fitting:
            return ()
        longest, shortest = (edge(self._waiting[unit] for unit in fitting) for edge in (max, min))
        matches = self._index.matches(arrival.blocks)

        def score(unit: int) -> float:
            spread = longest - shortest
            queue = (longest - self._waiting[unit]) / spread if spread else 1.0
            prefix = matched_tokens(arrival, matches.get(unit, 0)) / arrival.prompt_tokens
            return self.QUEUE * queue + self.KV * (1.0 - self._used[unit]) + self.PREFIX * prefix

        scores = {unit: score(unit) for unit in fitting}
        best = max(scores.values())
        unit = self.rng.choice([unit for unit in fitting if scores[unit] == best])
        self._index.insert(arrival, unit)
        return (Dispatch(arrival.request, unit),)


class Dynamo(Policy):
    name: ClassVar[str] = "dynamo_kv"
    source: ClassVar[str] = (
        "NVIDIA Dynamo's KV router: prefill blocks left x overlap weight 1 + decode blocks, "
        "lowest cost, temperature "
        "0; overlap by the KV events of units, load by its own dispatches"
    )
    wants_reports: ClassVar[bool] = True
    wants_blocks: ClassVar[bool] = True
    wants_first: ClassVar[bool] = True
    wants_ended: ClassVar[bool] = True
    OVERLAP_WEIGHT: ClassVar[float] = 1.0

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        super().__init__(setting, rng)
        self._index = PrefixIndex(len(setting.units))
        self._prefill = [0] * len(setting.units)
        """Tokens dispatched to each unit whose first token has not come."""
        self._blocks = [0.0] * len(setting.units)
        self._mine: dict[int, tuple[int, float]] = {}
        """Request to its prefill tokens and blocks."""

    def reported(self, reports: Sequence[UnitReport], now_s: float) -> Sequence[Dispatch]:
        for report in reports:
            self._index.stored(report.unit, report.stored)
            self._index.removed(report.unit, report.removed)
        return ()

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        fitting = self.fitting(arrival)
        if not fitting:
            return ()
        matches = self._index.matches(arrival.blocks)
        blocks = arrival.prompt_tokens / BLOCK_TOKENS

        def new_tokens(unit: int) -> int:
            return arrival.prompt_tokens - matched_tokens(arrival, matches.get(unit, 0))

        def cost(unit: int) -> float:
            prefill = (self._prefill[unit] + new_tokens(unit)) / BLOCK_TOKENS
            return self.OVERLAP_WEIGHT * prefill + self._blocks[unit] + blocks

        costs = {unit: cost(unit) for unit in fitting}
        least = min(costs.values())
        unit = self.rng.choice([unit for unit in fitting if costs[unit] == least])
        mine = self._mine[arrival.request] = new_tokens(unit), blocks
        self._prefill[unit] += mine[0]
        self._blocks[unit] += mine[1]
        return (Dispatch(arrival.request, unit),)

    def first_token(self, request: int, unit: int, now_s: float) -> Sequence[Dispatch]:
        tokens, blocks = self._mine[request]
        self._prefill[unit] -= tokens
        self._mine[request] = 0, blocks
        return ()

    def ended(self, ended: Ended, now_s: float) -> Sequence[Dispatch]:
        tokens, blocks = self._mine.pop(ended.request)
        self._prefill[ended.unit] -= tokens
        self._blocks[ended.unit] -= blocks
        return ()


class SkyWalker(Counting):
    name: ClassVar[str] = "skywalker"
    source: ClassVar[str] = (
        "SkyWalker: a balancer in each region, first come first served, pushes to units that "
        "report no pending "
        "request (selective pushing), by prefix (half of it or more matched), own region first, then others'"
    )
    wants_reports: ClassVar[bool] = True
    MATCH_RATE: ClassVar[float] = 0.5

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        super().__init__(setting, rng)
        self._pending = [0] * len(setting.units)
        self._index = PrefixIndex(len(setting.units))
        self._queues: dict[str, list[Arrival]] = {}
        self._regions = sorted({info.region for info in setting.units})
        self._nearest: dict[str, str] = {}

    def _balancer(self, origin: str) -> str:
        if origin not in self._nearest:
            trip = self.setting.round_trip_ms
            self._nearest[origin] = min(self._regions, key=lambda region: (trip(origin, region), region))
        return self._nearest[origin]

    def reported(self, reports: Sequence[UnitReport], now_s: float) -> Sequence[Dispatch]:
        for report in reports:
            self._pending[report.unit] = report.waiting
        return self._push()

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        self._queues.setdefault(self._balancer(arrival.origin), []).append(arrival)
        return self._push()

    def _push(self) -> Sequence[Dispatch]:
        sent: list[Dispatch] = []
        for region, queue in self._queues.items():
            while queue:
                unit = self._pick(queue[0], region)
                if unit is None:
                    break
                arrival = queue.pop(0)
                self._index.insert(arrival, unit)
                sent += self.send(arrival, unit)
        return sent

    def _pick(self, arrival: Arrival, region: str) -> int | None:
        open_units = [unit for unit in self.fitting(arrival) if not self._pending[unit]]
        among = [unit for unit in open_units if self.units[unit].region == region] or open_units
        if not among:
            return None
        matches = self._index.matches(arrival.blocks)
        best = max(among, key=lambda unit: matches.get(unit, 0))
        if matched_tokens(arrival, matches.get(best, 0)) >= self.MATCH_RATE * arrival.prompt_tokens:
            return best
        return self.least(among)


class Gorgo(Policy):
    name: ClassVar[str] = "gorgo"
    source: ClassVar[str] = (
        "GORGO: least round trip + prefill of what is not cached + prompts queued there, in ms, "
        "at one rate a token "
        "that is learned for the fleet"
    )
    wants_first: ClassVar[bool] = True
    wants_ended: ClassVar[bool] = True
    FIRST_MS_PER_TOKEN: ClassVar[float] = 0.1
    MEMORY: ClassVar[float] = 0.02

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        super().__init__(setting, rng)
        self._index = PrefixIndex(len(setting.units))
        self._queued = [0] * len(setting.units)
        self._mine: dict[int, int] = {}
        self._ms_per_token = self.FIRST_MS_PER_TOKEN
        self._alone: dict[int, float] = {}
        """Requests that found nothing queued, with their round trip: their first token tells the rate."""

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        fitting = self.fitting(arrival)
        if not fitting:
            return ()
        matches = self._index.matches(arrival.blocks)
        trip = self.setting.round_trip_ms

        def new_tokens(unit: int) -> int:
            return arrival.prompt_tokens - matched_tokens(arrival, matches.get(unit, 0))

        costs = {
            unit: trip(arrival.origin, self.units[unit].region)
            + self._ms_per_token * (self._queued[unit] + new_tokens(unit))
            for unit in fitting
        }
        least = min(costs.values())
        unit = self.rng.choice([unit for unit in fitting if costs[unit] == least])
        if not self._queued[unit]:
            self._alone[arrival.request] = trip(arrival.origin, self.units[unit].region)
        self._mine[arrival.request] = new_tokens(unit)
        self._queued[unit] += self._mine[arrival.request]
        self._index.insert(arrival, unit)
        return (Dispatch(arrival.request, unit),)

    def first_token(self, request: int, unit: int, now_s: float) -> Sequence[Dispatch]:
        self._queued[unit] -= self._mine.pop(request)
        return ()

    def ended(self, ended: Ended, now_s: float) -> Sequence[Dispatch]:
        trip_ms = self._alone.pop(ended.request, None)
        computed = ended.prompt_tokens - ended.cached_tokens
        if trip_ms is not None and computed > BLOCK_TOKENS:
            rate = max(ended.ttft_ms - trip_ms, 0.0) / computed
            self._ms_per_token += self.MEMORY * (rate - self._ms_per_token)
        return ()
