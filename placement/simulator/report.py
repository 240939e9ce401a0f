"""From runs to what people and programs read: rows, means with intervals, sustained loads, a plot. Pure
but for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grid.errors import InvalidRequest
from placement.simulator.bench import Job, Runner
from placement.simulator.figures import Figures, interval

SHOWN = (
    "attainment",
    "goodput_rps",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p99",
    "utilisation",
    "usd_per_mtok_out",
)
"""Figures of which means and intervals are given."""


class Row(NamedTuple):
    """One run."""

    policy: str
    load: float
    seed: int
    figures: Figures

    def record(self) -> dict[str, Any]:
        rounded = {name: round(value, 4) for name, value in self.figures._asdict().items()}
        return {"policy": self.policy, "load": self.load, "seed": self.seed, **rounded}


class Mean(NamedTuple):
    """One policy at one load over all seeds."""

    policy: str
    load: float
    means: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    refused: float


class Report(NamedTuple):
    trace: str
    fleet: str
    note: str
    unit_rps: float
    """The rate of load 1.0."""
    seeds: tuple[int, ...]
    rows: list[Row]
    sustained: dict[str, float]
    """Empty where it was not asked for."""

    def means(self) -> list[Mean]:
        groups: dict[tuple[str, float], list[Figures]] = {}
        for row in self.rows:
            groups.setdefault((row.policy, row.load), []).append(row.figures)
        found = []
        for (policy, load), runs in groups.items():
            series = {name: [float(getattr(run, name)) for run in runs] for name in SHOWN}
            means = {name: sum(values) / len(values) for name, values in series.items()}
            intervals = {name: interval(values) for name, values in series.items()}
            found.append(Mean(policy, load, means, intervals, sum(run.refused for run in runs) / len(runs)))
        return found

    def record(self) -> dict[str, Any]:
        return {
            "trace": self.trace,
            "fleet": self.fleet,
            "note": self.note,
            "load_1_rps": round(self.unit_rps, 4),
            "seeds": list(self.seeds),
            "rows": [row.record() for row in self.rows],
            "means": [
                {
                    "policy": mean.policy,
                    "load": mean.load,
                    "refused": mean.refused,
                    **{name: round(value, 4) for name, value in mean.means.items()},
                    "intervals": {
                        name: [round(edge, 4) for edge in edges] for name, edges in mean.intervals.items()
                    },
                }
                for mean in self.means()
            ],
            "sustained_load": {policy: round(load, 4) for policy, load in self.sustained.items()},
        }


def compare(
    runner: Runner, policies: Sequence[str], loads: Sequence[float], seeds: Sequence[int], sustained: bool
) -> Report:
    """Run every policy at every load and seed, and look for the load that each sustains."""
    bench = runner.bench
    unit_rps = runner.rate_at_target(seeds)
    wanted = [(policy, load, seed) for policy in policies for load in loads for seed in seeds]
    figures = runner.figures([Job(policy, load * unit_rps, seed) for policy, load, seed in wanted])
    rows = [Row(*which, figure) for which, figure in zip(wanted, figures, strict=True)]
    found = {}
    if sustained:
        found = {policy: runner.sustained_load(policy, unit_rps, loads, seeds) for policy in policies}
    return Report(bench.trace.name, bench.fleet_name, bench.trace.note, unit_rps, tuple(seeds), rows, found)


def plot(report: Report, path: Path) -> None:
    """Draw attainment and p99 TTFT over load. Raises InvalidRequest where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequest(
            "--plot needs matplotlib, which is not installed here: pip install 'zerogrid[plot]'", param="plot"
        ) from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    attainment, ttft = figure.subplots(1, 2)
    means = report.means()
    for policy in dict.fromkeys(mean.policy for mean in means):
        points = sorted((mean for mean in means if mean.policy == policy), key=lambda mean: mean.load)
        loads = [mean.load for mean in points]
        style = {"linewidth": 2.5, "color": "black"} if policy == "grid" else {"linewidth": 1.0}
        attainment.plot(loads, [m.means["attainment"] for m in points], marker="o", label=policy, **style)
        ttft.plot(loads, [m.means["ttft_ms_p99"] for m in points], marker="o", label=policy, **style)
    attainment.axhline(0.95, color="grey", linestyle=":")
    attainment.set(xlabel="load", ylabel="share of requests within the SLO")
    ttft.set(xlabel="load", ylabel="TTFT p99, ms", yscale="log")
    attainment.legend(fontsize="small")
    figure.suptitle(f"{report.trace} on {report.fleet}; load 1.0 is {report.unit_rps:.1f} requests a second")
    figure.savefig(path, dpi=120)
