"""A plain learner: the least predicted latency from what units report, without memory of its own
dispatches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from placement.columns import Floats
from placement.simulator.policies.base import Policy, Setting
from placement.simulator.seen import Arrival, Dispatch, Ended, UnitReport

FEATURES = 4


class Fit:
    """Recursive least squares of one figure: a prediction that starts at zero."""

    DOUBT = 1e2

    def __init__(self) -> None:
        self.weights: Floats = np.zeros(FEATURES)
        self._inverse: Floats = np.eye(FEATURES) * self.DOUBT

    def take(self, x: Floats, y: float) -> None:
        reach = self._inverse @ x
        gain = reach / (1.0 + float(x @ reach))
        self.weights += gain * (y - float(self.weights @ x))
        self._inverse = self._inverse - np.outer(gain, reach)


class PlainLearner(Policy):
    name: ClassVar[str] = "plain_learner"
    source: ClassVar[str] = (
        "least predicted latency as in llm-d's predicted-latency scheduling, with a linear model "
        "a unit: TTFT from "
        "prompt, queue and batch, TPOT from batch and KV, of the newest report; explores units "
        "that it knows little of"
    )
    wants_reports: ClassVar[bool] = True
    wants_ended: ClassVar[bool] = True
    LEARN_FROM: ClassVar[int] = 5
    """Requests that each unit gets before predictions count."""

    def __init__(self, setting: Setting, rng: random.Random) -> None:
        super().__init__(setting, rng)
        count = len(setting.units)
        self._state: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)] * count
        """Running, prompt tokens queued (thousands), share of KV in use; of the newest report."""
        kinds = {info.gpu: (Fit(), Fit()) for info in setting.units}
        # Units of one GPU learn together: a model a unit would still be guessing when the trace is over.
        self._ttft = [kinds[info.gpu][0] for info in setting.units]
        self._tpot = [kinds[info.gpu][1] for info in setting.units]
        self._sent = [0] * count
        self._asked: dict[int, tuple[Floats, Floats]] = {}
        self._mean_output = 100.0

    def reported(self, reports: Sequence[UnitReport], now_s: float) -> Sequence[Dispatch]:
        for report in reports:
            used = 1.0 - report.kv_tokens_free / report.kv_tokens_total
            self._state[report.unit] = float(report.running), report.prefill_tokens_queued / 1e3, used
        return ()

    def arrived(self, arrival: Arrival, now_s: float) -> Sequence[Dispatch]:
        fitting = self.fitting(arrival)
        if not fitting:
            return ()
        young = [unit for unit in fitting if self._sent[unit] < self.LEARN_FROM]
        if young:
            unit = self.rng.choice(young)
        else:
            costs = [self._latency_ms(arrival, unit) for unit in fitting]
            least = min(costs)
            unit = self.rng.choice([fitting[at] for at, cost in enumerate(costs) if cost == least])
        self._sent[unit] += 1
        self._asked[arrival.request] = self._features(arrival, unit)
        return (Dispatch(arrival.request, unit),)

    def _features(self, arrival: Arrival, unit: int) -> tuple[Floats, Floats]:
        running, queued, used = self._state[unit]
        return (
            np.array([1.0, arrival.prompt_tokens / 1e3, queued, running]),
            np.array([1.0, running, used, queued]),
        )

    def _latency_ms(self, arrival: Arrival, unit: int) -> float:
        to_first, between = self._features(arrival, unit)
        ttft_ms = max(float(self._ttft[unit].weights @ to_first), 0.0)
        tpot_ms = max(float(self._tpot[unit].weights @ between), 0.0)
        trip_ms = self.setting.round_trip_ms(arrival.origin, self.units[unit].region)
        return ttft_ms + trip_ms + tpot_ms * self._mean_output

    def ended(self, ended: Ended, now_s: float) -> Sequence[Dispatch]:
        to_first, between = self._asked.pop(ended.request)
        self._ttft[ended.unit].take(to_first, ended.ttft_ms)
        if ended.output_tokens > 1:
            token_ms = (ended.total_ms - ended.ttft_ms) / (ended.output_tokens - 1)
            self._tpot[ended.unit].take(between, token_ms)
        self._mean_output += 0.01 * (ended.output_tokens - self._mean_output)
        return ()
