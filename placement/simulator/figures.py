"""What a run was worth: attainment of the SLO, percentiles, utilisation, cost. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from placement.simulator.world import Outcome, Run, UnitPlan

SLO_TTFT_MS = 2_000.0
SLO_TTFT_MS_PER_TOKEN = 0.25
SLO_TPOT_MS = 100.0
MISSED_TTFT_MS = 30_000.0
"""What a refused, failed or never finished request counts with among first tokens."""

RESAMPLES = 2_000
"""Of the bootstrap."""


class Slo(NamedTuple):
    """Both as the client sees them."""

    ttft_ms: float = SLO_TTFT_MS
    ttft_ms_per_token: float = SLO_TTFT_MS_PER_TOKEN
    tpot_ms: float = SLO_TPOT_MS

    def kept(self, outcome: Outcome) -> bool:
        return (
            served(outcome)
            and outcome.ttft_ms <= self.ttft_ms + self.ttft_ms_per_token * outcome.prompt_tokens
            and outcome.tpot_ms <= self.tpot_ms
        )


def served(outcome: Outcome) -> bool:
    return outcome.ttft_ms >= 0 and not outcome.refused


class Figures(NamedTuple):
    """Of one run; its names are those of the rows that the command writes."""

    offered_rps: float
    attainment: float
    goodput_rps: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    tpot_ms_p99: float
    refused: int
    """Refused, failed or never finished."""
    utilisation: float
    slots_filled: float
    usd_per_mtok_out: float
    decide_us_p99: float
    cached_share: float
    preemptions: int


def figures(run: Run, fleet: Sequence[UnitPlan], slo: Slo) -> Figures:
    outcomes = run.outcomes
    kept = sum(slo.kept(outcome) for outcome in outcomes)
    done = [outcome for outcome in outcomes if served(outcome)]
    ttft = [outcome.ttft_ms if served(outcome) else MISSED_TTFT_MS for outcome in outcomes]
    tpot = [outcome.tpot_ms for outcome in done] or [0.0]
    usd = sum(plan.gpu.usd_per_hour for plan in fleet) * run.span_s / 3600.0
    tokens = sum(outcome.output_tokens for outcome in done)
    prompts = sum(outcome.prompt_tokens for outcome in done)
    return Figures(
        offered_rps=len(outcomes) / run.span_s,
        attainment=kept / len(outcomes),
        goodput_rps=kept / run.span_s,
        ttft_ms_p50=float(np.percentile(ttft, 50)),
        ttft_ms_p99=float(np.percentile(ttft, 99)),
        tpot_ms_p99=float(np.percentile(tpot, 99)),
        refused=len(outcomes) - len(done),
        utilisation=sum(run.busy) / len(run.busy),
        slots_filled=sum(run.slots) / len(run.slots),
        usd_per_mtok_out=1e6 * usd / tokens if tokens else 0.0,
        decide_us_p99=float(np.percentile(run.decide_us, 99)),
        cached_share=sum(outcome.cached_tokens for outcome in done) / prompts if prompts else 0.0,
        preemptions=run.preemptions,
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean by bootstrap over `values`, one a seed; always the same for the
    same."""
    if len(values) < 2:
        return values[0], values[0]
    rng = random.Random(f"{RESAMPLES} resamples")
    count = len(values)
    means = sorted(sum(rng.choices(values, k=count)) / count for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]
