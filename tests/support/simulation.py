"""A small simulated world without evaluation data: two kinds of GPUs with invented kernels, three regions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from placement.simulator.geography import RoundTrips
from placement.simulator.hardware import HEAD_SHAPE, LAYER_SHAPES, Curve, Gpu, Kernels
from placement.simulator.kv import KvMemory
from placement.simulator.policies.base import Policy, Setting
from placement.simulator.seen import Arrival, Dispatch, Ended, UnitInfo, UnitReport
from placement.simulator.steps import StepTimes
from placement.simulator.unit import Unit
from placement.simulator.world import Request, UnitPlan

REGIONS = ("us-east-1", "eu-central-1", "ap-northeast-1")
TRIPS = RoundTrips(
    {(here, there): 2.0 if here == there else 100.0 for here, there in itertools.product(REGIONS, repeat=2)}
)

FAST = Gpu("H100-SXM", 80, 3350, 989, 6.0)
SLOW = Gpu("L4", 24, 300, 121, 0.8)


def kernels(slowness: float = 1.0) -> Kernels:
    """Return times that are linear in everything: a lone step takes 10 ms on a GPU of slowness 1."""
    weights = sum(n * k for n, k in LAYER_SHAPES) * 32 + HEAD_SHAPE[0] * HEAD_SHAPE[1]
    products = {
        (n, k): Curve(
            [
                (1.0, 10.0 * n * k / weights * slowness),
                (4096.0, 200.0 * n * k / weights * slowness),
            ]
        )
        for n, k in (*LAYER_SHAPES, HEAD_SHAPE)
    }
    generation = {
        batch: Curve([(1.0, 1e-4 * batch * slowness), (65_536.0, 6.5e-3 * batch * slowness)])
        for batch in (1, 256)
    }
    return Kernels(products, Curve([(0.0, 0.0), (16_384.0, 4.0 * slowness)], power=2.0), generation)


def times(slowness: float = 1.0) -> StepTimes:
    return StepTimes(kernels(slowness))


FAST_TIMES, SLOW_TIMES = times(), times(8.0)


def fleet(fast: int = 2, slow: int = 2) -> list[UnitPlan]:
    return [UnitPlan(FAST, REGIONS[at % 2], FAST_TIMES) for at in range(fast)] + [
        UnitPlan(SLOW, REGIONS[2], SLOW_TIMES) for _ in range(slow)
    ]


def requests(count: int, rps: float, seed: int = 0, prompt: int = 1000, output: int = 40) -> list[Request]:
    """Return requests that come at random, with lengths around `prompt` and `output`."""
    rng = random.Random(seed)
    at_s, made = 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rps)
        tokens = max(1, round(prompt * rng.uniform(0.2, 1.8)))
        length = max(1, round(output * rng.uniform(0.1, 1.9)))
        made.append(Request(at_s, f"t{rng.randrange(3)}", rng.choice(REGIONS), tokens, length))
    return made


def lone_unit(kv_tokens: int = 100_000, error: float = 1.0, seed: int = 1) -> Unit:
    return Unit(FAST_TIMES, KvMemory(kv_tokens), kv_tokens - 64, error, random.Random(seed))


def setting(
    units: int = 4,
    regions: Sequence[str] = ("us-east-1",),
    context: int = 100_000,
    gpus: Sequence[str] = ("H100-SXM",),
) -> Setting:
    infos = tuple(
        UnitInfo(unit, gpus[unit % len(gpus)], regions[unit % len(regions)], 400_000, context, 256)
        for unit in range(units)
    )
    return Setting(infos, TRIPS.ms, REGIONS, "us-east-1")


class Driver:
    """Asks one policy by hand and remembers where its requests went."""

    def __init__(self, make: type[Policy], given: Setting | None = None, seed: int = 0) -> None:
        self.policy = make(given or setting(), random.Random(seed))
        self.units: dict[int, int] = {}
        self._next = itertools.count()
        self._arrivals: dict[int, Arrival] = {}

    def ask(self, prompt: int = 1000, blocks: tuple[int, ...] = (), origin: str = "us-east-1") -> int | None:
        """Return the unit that a new request was sent to at once; None where it is kept."""
        number = next(self._next)
        arrival = self._arrivals[number] = Arrival(number, "t", origin, prompt, blocks)
        self._take(self.policy.arrived(arrival, 0.0))
        return self.units.get(number)

    def report(
        self, unit: int, running: int = 0, waiting: int = 0, free: int = 400_000, queued: int = 0
    ) -> None:
        sample = UnitReport(unit, running, waiting, free, 400_000, queued, 1, (), 10.0, 0, 0)
        self._take(self.policy.reported([sample], 0.0))

    def first(self, request: int) -> None:
        self._take(self.policy.first_token(request, self.units[request], 0.0))

    def end(self, request: int, ttft_ms: float = 100.0, total_ms: float = 1000.0, output: int = 10) -> None:
        prompt = self._arrivals[request].prompt_tokens
        ended = Ended(request, self.units[request], prompt, 0, output, ttft_ms, total_ms)
        self._take(self.policy.ended(ended, 0.0))

    def _take(self, sent: Sequence[Dispatch]) -> None:
        for request, unit in sent:
            assert request not in self.units
            self.units[request] = unit
