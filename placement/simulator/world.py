"""The world in which a policy places requests: one heap as the only clock, units, distances, reports. Pure.

A request comes to the policy the moment it arrives; it reaches its unit half a round trip later, and its
tokens come back as much later. Reports leave each region's units every REPORT_S and take one way to the
policy's home. What happens is a function of trace, fleet, policy and seed alone.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from placement.simulator.geography import RoundTrips
from placement.simulator.hardware import CONTEXT_TOKENS, Gpu
from placement.simulator.kv import KvMemory
from placement.simulator.policies.base import Policy, Setting
from placement.simulator.seen import Arrival, Dispatch, Ended, UnitInfo, UnitReport
from placement.simulator.steps import MAX_RUNNING, StepTimes
from placement.simulator.unit import Sequence as Running
from placement.simulator.unit import Unit

REPORT_S = 0.1

HIDDEN_ERROR = 0.20
"""Each unit is slower or faster than the tables by a constant factor within this, and nobody is told."""

PATIENCE_S = 120.0
"""After the last arrival a run goes on for so long; what has not ended then never does."""

CONTEXT_SLACK_TOKENS = 64
"""Of the KV memory that no context may use: pages that are partly filled."""


class Request(NamedTuple):
    """One request of a trace, with what only the world may know."""

    arrival_s: float
    tenant: str
    origin: str
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitPlan:
    gpu: Gpu
    region: str
    times: StepTimes

    @property
    def context_tokens(self) -> int:
        return min(CONTEXT_TOKENS, self.gpu.kv_tokens - CONTEXT_SLACK_TOKENS)


class Outcome(NamedTuple):
    """One request as its client saw it. Times are -1 for what never came."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    unit: int
    """-1: never dispatched."""
    ttft_ms: float
    tpot_ms: float
    cached_tokens: int
    refused: bool
    """The unit could not hold it."""


class Run(NamedTuple):
    outcomes: list[Outcome]
    span_s: float
    """From the first arrival to the last."""
    busy: list[float]
    """Of each unit, the share of the span with a step running."""
    slots: list[float]
    """Of each unit, the share of batch slots filled over the span."""
    decide_us: list[float]
    """Computing time of each arrival's handling, as measured: the one figure that is not a function of the
    seed."""
    preemptions: int


_ARRIVE, _LAND, _STEP, _SAMPLE, _REPORT, _FIRST, _ENDED = range(7)


class World:
    def __init__(
        self,
        fleet: Sequence[UnitPlan],
        trips: RoundTrips,
        requests: Sequence[Request],
        make_policy: type[Policy],
        seed: int,
    ) -> None:
        hidden = random.Random(f"{seed} hidden")
        self._requests = requests
        self._trips = trips
        self._regions = [plan.region for plan in fleet]
        self._home = fleet[0].region
        self._units = [
            Unit(
                plan.times,
                KvMemory(plan.gpu.kv_tokens, make_policy.wants_blocks),
                plan.context_tokens,
                1.0 + hidden.uniform(-HIDDEN_ERROR, HIDDEN_ERROR),
                random.Random(f"{seed} noise {number}"),
            )
            for number, plan in enumerate(fleet)
        ]
        infos = tuple(
            UnitInfo(number, plan.gpu.name, plan.region, plan.gpu.kv_tokens, plan.context_tokens, MAX_RUNNING)
            for number, plan in enumerate(fleet)
        )
        origins = tuple(sorted({request.origin for request in requests}))
        self._policy = make_policy(
            Setting(infos, trips.ms, origins, self._home), random.Random(f"{seed} policy")
        )
        self._heap: list[tuple[float, int, int, Any, int]] = []
        self._pushed = 0
        self._dispatched_s: list[float] = [-1.0] * len(requests)
        self._unit_of = [-1] * len(requests)
        self._refused: set[int] = set()
        self._running: dict[int, Running] = {}
        self._done: dict[int, Running] = {}
        self._left = len(requests)
        self.decide_us: list[float] = []
        self._use: list[tuple[float, float]] = []
        """Of each unit, seconds with a step running and slot-seconds filled, up to the last arrival."""

    def run(self) -> Run:
        requests = self._requests
        for number, request in enumerate(requests):
            self._push(request.arrival_s, _ARRIVE, number, 0)
        begin_s = requests[0].arrival_s
        if self._policy.wants_reports:
            by_region: dict[str, list[int]] = defaultdict(list)
            for number, region in enumerate(self._regions):
                by_region[region].append(number)
            for place, region in enumerate(by_region):
                # Regions are not in step with each other.
                self._push(begin_s + REPORT_S * place / len(by_region), _SAMPLE, by_region[region], 0)
        self._loop(requests[-1].arrival_s + PATIENCE_S)
        return self._result(begin_s)

    def _measure_use(self, now_s: float) -> None:
        for unit in self._units:
            running_s = now_s - unit.started_s if unit.jump else 0.0
            batch = len(unit.decoding) + len(unit.prefilling)
            self._use.append((unit.busy_s + running_s, unit.slots_s + running_s * batch))

    def _push(self, at_s: float, kind: int, what: Any, version: int) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at_s, self._pushed, kind, what, version))

    def _loop(self, until_s: float) -> None:
        heap, units, policy = self._heap, self._units, self._policy
        while heap and self._left:
            now_s, _, kind, what, version = heapq.heappop(heap)
            if now_s > until_s:
                return
            if kind == _STEP:
                unit = units[what]
                if unit.version == version:
                    self._step(what, unit, now_s)
            elif kind == _LAND:
                self._land(what, now_s)
            elif kind == _ARRIVE:
                request = self._requests[what]
                if what == len(self._requests) - 1:
                    self._measure_use(now_s)
                arrival = Arrival(what, request.tenant, request.origin, request.prompt_tokens, request.blocks)
                began_ns = time.perf_counter_ns()
                answer = policy.arrived(arrival, now_s)
                self.decide_us.append((time.perf_counter_ns() - began_ns) / 1e3)
                self._dispatch(answer, now_s)
            elif kind == _SAMPLE:
                delay_s = self._trips.ms(self._regions[what[0]], self._home) / 2e3
                self._push(now_s + delay_s, _REPORT, [self._sample(number, now_s) for number in what], 0)
                self._push(now_s + REPORT_S, _SAMPLE, what, 0)
            elif kind == _REPORT:
                self._dispatch(policy.reported(what, now_s), now_s)
            elif kind == _FIRST:
                self._dispatch(policy.first_token(what, self._unit_of[what], now_s), now_s)
            else:
                self._dispatch(policy.ended(what, now_s), now_s)

    def _dispatch(self, dispatches: Sequence[Dispatch], now_s: float) -> None:
        for request, unit in dispatches:
            assert self._unit_of[request] < 0, f"request {request} was dispatched twice"
            self._unit_of[request] = unit
            self._dispatched_s[request] = now_s
            self._push(now_s + self._way_s(request, unit), _LAND, request, 0)

    def _way_s(self, request: int, unit: int) -> float:
        return self._trips.ms(self._requests[request].origin, self._regions[unit]) / 2e3

    def _land(self, number: int, now_s: float) -> None:
        request, at = self._requests[number], self._unit_of[number]
        unit = self._units[at]
        if request.prompt_tokens >= unit.context_tokens:
            self._refused.add(number)
            self._left -= 1
            return
        output = min(request.output_tokens, unit.context_tokens - request.prompt_tokens)
        running = Running(number, request.prompt_tokens, output, request.blocks)
        if output < request.output_tokens:
            # The context ends before the answer does: the client got a part of it.
            self._refused.add(number)
        self._running[number] = running
        if unit.land(running, now_s):
            self._push(unit.ends_s, _STEP, at, unit.version)

    def _step(self, at: int, unit: Unit, now_s: float) -> None:
        first, ended = unit.finish(now_s)
        policy = self._policy
        if first and policy.wants_first:
            for sequence in first:
                self._push(now_s + self._way_s(sequence.request, at), _FIRST, sequence.request, 0)
        for sequence in ended:
            self._done[sequence.request] = self._running.pop(sequence.request)
            self._left -= 1
            if policy.wants_ended:
                way_s = self._way_s(sequence.request, at)
                sent_s = self._dispatched_s[sequence.request]
                told = Ended(
                    sequence.request,
                    at,
                    sequence.prompt,
                    sequence.cached,
                    sequence.output,
                    1e3 * (sequence.first_s + way_s - sent_s),
                    1e3 * (now_s + way_s - sent_s),
                )
                self._push(now_s + way_s, _ENDED, told, 0)
        if unit.start(now_s):
            self._push(unit.ends_s, _STEP, at, unit.version)

    def _sample(self, number: int, now_s: float) -> UnitReport:
        unit = self._units[number]
        kv = unit.kv
        done, batch = unit.done_steps(now_s), len(unit.decoding)
        stored, removed = kv.told() if kv.tells else ((), ())
        return UnitReport(
            number,
            batch + len(unit.prefilling),
            len(unit.waiting),
            max(kv.free - done * batch, 0),
            kv.capacity,
            unit.queued_tokens,
            unit.steps + done,
            tuple(unit.held),
            unit.pace_ms,
            unit.prompt_tokens,
            unit.cached_tokens,
            stored,
            removed,
        )

    def _result(self, begin_s: float) -> Run:
        outcomes = []
        for number, request in enumerate(self._requests):
            sequence, unit = self._done.get(number), self._unit_of[number]
            ttft_ms = tpot_ms = -1.0
            cached = 0
            if sequence is not None:
                way_s = self._way_s(number, unit)
                ttft_ms = 1e3 * (sequence.first_s + way_s - request.arrival_s)
                # The way to the unit is in first_s already.
                if sequence.output > 1:
                    tpot_ms = 1e3 * (sequence.last_s - sequence.first_s) / (sequence.output - 1)
                else:
                    tpot_ms = 0.0
                cached = sequence.cached
            refused = number in self._refused
            outcomes.append(
                Outcome(
                    *(request.arrival_s, request.prompt_tokens, request.output_tokens, unit),
                    *(ttft_ms, tpot_ms, cached, refused),
                )
            )
        span_s = max(self._requests[-1].arrival_s - begin_s, 1e-9)
        return Run(
            outcomes,
            span_s,
            [busy_s / span_s for busy_s, _ in self._use],
            [slots_s / span_s / MAX_RUNNING for _, slots_s in self._use],
            self.decide_us,
            sum(unit.preemptions for unit in self._units),
        )
