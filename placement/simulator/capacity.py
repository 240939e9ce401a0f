"""The cheapest fleet for a trace and an SLO, and where it should stand: found by simulating our own policy.

First, of each GPU alone, the least count that keeps the SLO, in the region that is nearest to the clients.
Then the cheapest of these fleets is improved greedily: one unit is left out, or changed for a cheaper one, or
moved to another region, as long as the SLO is kept. Every fleet that was tried is told of.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from grid.errors import InvalidRequest
from placement.simulator.figures import Figures, Slo, figures
from placement.simulator.geography import Origins, RoundTrips
from placement.simulator.hardware import Gpu, Kernels
from placement.simulator.policies.grid import Grid
from placement.simulator.steps import StepTimes, step_times
from placement.simulator.traces import Trace, least_count, offered
from placement.simulator.world import UnitPlan, World

MAX_UNITS = 512
"""A larger fleet is planned by its parts."""

MAX_TRIES = 60
"""Fleets that are simulated after the first: each takes seconds."""

Fleet = tuple[tuple[str, str], ...]
"""(GPU, region) of each unit, in order."""


class Tried(NamedTuple):
    fleet: Fleet
    usd_per_hour: float
    figures: Figures
    kept: bool

    def groups(self) -> list[tuple[str, str, int]]:
        """Return GPU, region and count."""
        return [(*where, count) for where, count in sorted(Counter(self.fleet).items())]


@dataclass(frozen=True, slots=True)
class Question:
    trace: Trace
    rps: float
    slo: Slo
    attainment: float
    gpus: tuple[str, ...]
    regions: tuple[str, ...]


class Planner:
    def __init__(
        self,
        question: Question,
        gpus: Mapping[str, Gpu],
        kernels: Mapping[str, Kernels],
        trips: RoundTrips,
        origins: Origins,
        told: Callable[[Tried], None],
    ) -> None:
        self._question = question
        self._gpus = gpus
        self._trips, self._origins, self._told = trips, origins, told
        self._times: dict[str, StepTimes] = {
            name: step_times(gpus[name], gpus, kernels) for name in question.gpus
        }
        self.tried: dict[Fleet, Tried] = {}

    def plan(self) -> Tried:
        """Return the cheapest fleet that keeps the SLO. Raises InvalidRequest if none of MAX_UNITS does."""
        region = self._nearest()
        alone = [found for gpu in self._question.gpus if (found := self._least(gpu, region)) is not None]
        if not alone:
            asked = ", ".join(self._question.gpus)
            raise InvalidRequest(
                f"no fleet of up to {MAX_UNITS} of {asked} keeps the SLO: allow another GPU or a looser SLO",
                param="gpus",
            )
        best = min(alone, key=_price)
        limit = len(self.tried) + MAX_TRIES
        while len(self.tried) < limit:
            better = next((tried for tried in self._cheaper(best.fleet) if tried.kept), None)
            if better is None:
                break
            best = better
        return best

    def _nearest(self) -> str:
        """Return the region with the least mean round trip to the clients."""
        rng = random.Random("clients")
        clients = Counter(self._origins.draw(rng) for _ in range(1000))
        return min(
            self._question.regions,
            key=lambda region: (sum(n * self._trips.ms(o, region) for o, n in clients.items()), region),
        )

    def _least(self, gpu: str, region: str) -> Tried | None:
        low, high = 0, 1
        while not self._try(((gpu, region),) * high).kept:
            low, high = high, high * 2
            if high > MAX_UNITS:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._try(((gpu, region),) * middle).kept else (middle, high)
        return self._try(((gpu, region),) * high)

    def _cheaper(self, fleet: Fleet) -> list[Tried]:
        """Try what costs less than `fleet` or as much elsewhere, the cheapest first, up to one that is
        kept."""
        question, changes = self._question, set()
        for unit in sorted(set(fleet)):
            rest = list(fleet)
            rest.remove(unit)
            if rest:
                changes.add(tuple(rest))
            for gpu in question.gpus:
                if self._gpus[gpu].usd_per_hour < self._gpus[unit[0]].usd_per_hour:
                    changes |= {tuple(sorted([*rest, (gpu, region)])) for region in question.regions}
        untried = sorted((change for change in changes if change not in self.tried), key=self._usd)
        found: list[Tried] = []
        for change in untried:
            found.append(self._try(change))
            if found[-1].kept:
                break
        return found

    def _usd(self, fleet: Fleet) -> tuple[float, Fleet]:
        return sum(self._gpus[gpu].usd_per_hour for gpu, _ in fleet), fleet

    def _try(self, fleet: Fleet) -> Tried:
        known = self.tried.get(fleet)
        if known is not None:
            return known
        question = self._question
        units = [UnitPlan(self._gpus[gpu], region, self._times[gpu]) for gpu, region in fleet]
        rows = question.trace.rows(least_count(len(units), question.rps), random.Random("plan"))
        requests = offered(rows, question.rps, self._origins, random.Random("plan origins"))
        seen = figures(World(units, self._trips, requests, Grid, 0).run(), units, question.slo)
        tried = Tried(fleet, self._usd(fleet)[0], seen, seen.attainment >= question.attainment)
        self.tried[fleet] = tried
        self._told(tried)
        return tried


def _price(tried: Tried) -> tuple[float, Fleet]:
    return tried.usd_per_hour, tried.fleet


def named(asked: Sequence[str], gpus: Mapping[str, Gpu]) -> tuple[str, ...]:
    """Return the data sheets that `asked` names, as `h100` does H100-SXM. Raises InvalidRequest."""
    priced = [name for name, gpu in gpus.items() if gpu.usd_per_hour and gpu.kv_tokens > 0]
    found = []
    for name in asked:
        asked_for = name.strip().lower()
        near = [known for known in priced if known.lower() == asked_for]
        near += [known for known in priced if known.lower().startswith(asked_for)]
        if not asked_for or not near:
            raise InvalidRequest(
                f"--gpus: {name!r} is no GPU with a price and room for the model; known are "
                + ", ".join(priced),
                param="gpus",
            )
        found.append(near[0])
    return tuple(dict.fromkeys(found))
