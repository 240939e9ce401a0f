"""Policies that follow prefixes and leave them when the load is uneven."""

from __future__ import annotations

import bisect
import hashlib
import math
import random
from collections.abc import Sequence
from typing import ClassVar

from placement.simulator.policies.base import Setting
from placement.simulator.policies.outstanding import Counting
from placement.simulator.policies.prefixes import PrefixIndex, matched_tokens
from placement.simulator.seen import Arrival, Dispatch


class BoundedHash(Counting):
    name: ClassVar[str] = "bounded_hash"
    source: ClassVar[str] = (
        "consistent hashing with bounded loads (Mirrokni et al. 2018) on the prompt's first block, "
        "load factor 1.25 and 256 points a unit as KubeAI's"
    )
    LOAD_FACTOR: ClassVar[float] = 1.25
    POINTS: ClassVar[int] = 256

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        super().__init__(setting, rng)
        ring = sorted(
            (_hash(f"unit {info.unit} {point}"), info.unit)
            for info in self.units
            for point in range(self.POINTS)
        )
        self._points = [point for point, _ in ring]
        self._owners = [unit for _, unit in ring]

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        fitting = set(self.fitting(arrival))
        if not fitting:
            return ()
        # A prompt without a known prefix is a text of its own.
        key = f"block {arrival.blocks[0]}" if arrival.blocks else f"request {arrival.request}"
        bound = math.ceil(self.LOAD_FACTOR * (sum(self.outstanding) + 1) / len(self.units))
        begin = bisect.bisect(self._points, _hash(key))
        for step in range(len(self._owners)):
            unit = self._owners[(begin + step) % len(self._owners)]
            if unit in fitting and self.outstanding[unit] + 1 <= bound:
                return self.send(arrival, unit)
        return self.send(arrival, self.least(sorted(fitting)))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class RayPrefix(Counting):
    name: ClassVar[str] = "ray_prefix"
    source: ClassVar[str] = (
        "Ray Serve LLM's PrefixCacheAffinityRouter: imbalanced_threshold 10, "
        "match_rate_threshold 0.1; the smallest "
        "tree below it, power of two choices within the candidates and when unbalanced"
    )
    IMBALANCE: ClassVar[int] = 10
    MATCH_RATE: ClassVar[float] = 0.1

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        super().__init__(setting, rng)
        self._index = PrefixIndex(len(setting.units))

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        fitting = self.fitting(arrival)
        if not fitting:
            return ()
        queues = [self.outstanding[unit] for unit in fitting]
        among = fitting
        if max(queues) - min(queues) <= self.IMBALANCE:
            among = self._affine(arrival, fitting)
        unit = self.better_of_two(among)
        self._index.insert(arrival, unit)
        return self.send(arrival, unit)

    def _affine(self, arrival: Arrival, fitting: list[int]) -> list[int]:
        matches = self._index.matches(arrival.blocks)
        best = max((matches.get(unit, 0) for unit in fitting), default=0)
        if best and matched_tokens(arrival, best) >= self.MATCH_RATE * arrival.prompt_tokens:
            return [unit for unit in fitting if matches.get(unit, 0) == best]
        smallest = min(self._index.tokens[unit] for unit in fitting)
        return [unit for unit in fitting if self._index.tokens[unit] == smallest]


class SglangCacheAware(Counting):
    name: ClassVar[str] = "sglang_cache_aware"
    source: ClassVar[str] = (
        "SGLang's router, policy cache_aware: cache_threshold 0.3, balance_abs_threshold 64, "
        "balance_rel_threshold 1.5; the shortest queue when unbalanced, else the best match, "
        "else the smallest tree"
    )
    CACHE: ClassVar[float] = 0.3
    BALANCE_ABS: ClassVar[int] = 64
    BALANCE_REL: ClassVar[float] = 1.5

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        super().__init__(setting, rng)
        self._index = PrefixIndex(len(setting.units))

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        fitting = self.fitting(arrival)
        if not fitting:
            return ()
        unit = self._pick(arrival, fitting)
        self._index.insert(arrival, unit)
        return self.send(arrival, unit)

    def _pick(self, arrival: Arrival, fitting: list[int]) -> int:
        most, fewest = (edge(self.outstanding[unit] for unit in fitting) for edge in (max, min))
        if most - fewest > self.BALANCE_ABS and most > self.BALANCE_REL * fewest:
            return self.least(fitting)
        matches = self._index.matches(arrival.blocks)
        best = max(fitting, key=lambda unit: matches.get(unit, 0))
        if matched_tokens(arrival, matches.get(best, 0)) > self.CACHE * arrival.prompt_tokens:
            return best
        return min(fitting, key=lambda unit: self._index.tokens[unit])
