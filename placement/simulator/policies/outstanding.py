"""Policies that count their own dispatches and nothing else: the plain load balancers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from placement.simulator.policies.base import Policy, Setting
from placement.simulator.seen import Arrival, Dispatch, Ended


class Random(Policy):
    name: ClassVar[str] = "random"
    source: ClassVar[str] = "uniform over the units that fit"

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        fitting = self.fitting(arrival)
        return (Dispatch(arrival.request, self.rng.choice(fitting)),) if fitting else ()


class RoundRobin(Policy):
    name: ClassVar[str] = "round_robin"
    source: ClassVar[str] = "the default of NGINX and HAProxy: in turn"

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        super().__init__(setting, rng)
        self._next = 0

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        for step in range(len(self.units)):
            unit = (self._next + step) % len(self.units)
            if self.units[unit].context_tokens > arrival.prompt_tokens:
                self._next = unit + 1
                return (Dispatch(arrival.request, unit),)
        return ()


class Counting(Policy):
    """Base of those that know how many of their requests each unit holds."""

    wants_ended: ClassVar[bool] = True

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        super().__init__(setting, rng)
        self.outstanding = [0] * len(setting.units)

    def send(self, arrival: Arrival, unit: int) -> Sequence[Dispatch]:
        self.outstanding[unit] += 1
        return (Dispatch(arrival.request, unit),)

    def ended(self, ended: Ended, now_s: float) -> Sequence[Dispatch]:
        self.outstanding[ended.unit] -= 1
        return ()

    def least(self, among: Sequence[int]) -> int:
        """Return a unit of the least outstanding, by lot among equals."""
        outstanding = self.outstanding
        fewest = min(outstanding[unit] for unit in among)
        return self.rng.choice([unit for unit in among if outstanding[unit] == fewest])

    def better_of_two(self, among: Sequence[int]) -> int:
        if len(among) == 1:
            return among[0]
        one, other = self.rng.sample(among, 2)
        return one if self.outstanding[one] <= self.outstanding[other] else other


class LeastOutstanding(Counting):
    name: ClassVar[str] = "least_outstanding"
    source: ClassVar[str] = "least outstanding requests: Envoy's and vLLM production-stack's, over all units"

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        fitting = self.fitting(arrival)
        return self.send(arrival, self.least(fitting)) if fitting else ()


class PowerOfTwo(Counting):
    name: ClassVar[str] = "power_of_two"
    source: ClassVar[str] = "Ray Serve's default router: the shorter queue of two replicas drawn by lot"

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        fitting = self.fitting(arrival)
        return self.send(arrival, self.better_of_two(fitting)) if fitting else ()
