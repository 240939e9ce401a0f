"""Policies against each other on one trace and fleet: runs, load 1.0, the load that each sustains.

Load 1.0 is the rate at which least outstanding requests keeps 95 % within the SLO, by bisection to 1 %, over
all seeds together; a policy's sustained load is found likewise. Runs are functions of their arguments, so
they are kept within a bench, and other processes may make them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from placement.simulator.figures import Figures, Slo, figures
from placement.simulator.fleets import plan_units, read_fleet
from placement.simulator.geography import Origins, RoundTrips, read_origins, read_round_trips
from placement.simulator.hardware import read_gpus, read_kernels
from placement.simulator.policies import POLICIES
from placement.simulator.policies.outstanding import LeastOutstanding
from placement.simulator.traces import Trace, least_count, offered, read_trace
from placement.simulator.world import Run, UnitPlan, World

TARGET = 0.95
"""Share of requests within the SLO that a sustained load keeps."""

PRECISION = 0.01
MAX_DOUBLINGS = 24
"""From one request a second and unit, up or down, to a bracket of the target."""

MOST_LOAD = 4.0
"""Sustained loads are looked for up to here."""


class Job(NamedTuple):
    policy: str
    rps: float
    seed: int


@dataclass(frozen=True, slots=True)
class Bench:
    """One trace on one fleet."""

    fleet_name: str
    fleet: tuple[UnitPlan, ...]
    trace: Trace
    trips: RoundTrips
    origins: Origins
    slo: Slo

    def run(self, job: Job) -> Run:
        rows = self.trace.rows(least_count(len(self.fleet), job.rps), random.Random(f"{job.seed} trace"))
        requests = offered(rows, job.rps, self.origins, random.Random(f"{job.seed} origins"))
        return World(self.fleet, self.trips, requests, POLICIES[job.policy], job.seed).run()

    def figures(self, job: Job) -> Figures:
        return figures(self.run(job), self.fleet, self.slo)


def open_bench(data: Path, trace: Path, fleet: Path, slo: Slo) -> Bench:
    """Read what a bench needs. Raises InvalidRequest that names file, line, field and remedy."""
    trips = read_round_trips(data)
    file = read_fleet(fleet)
    units = plan_units(file, fleet, read_gpus(data), read_kernels(data), trips)
    origins = read_origins(data)
    return Bench(file.name, tuple(units), read_trace(trace, origins), trips, origins, slo)


Told = Callable[[Job], None]

_bench: Bench | None = None
"""Of a worker process, which serves one bench for its life."""


def _open_worker(data: Path, trace: Path, fleet: Path, slo: Slo) -> None:
    global _bench
    _bench = open_bench(data, trace, fleet, slo)


def _work(job: Job) -> Figures:
    assert _bench is not None
    return _bench.figures(job)


class Runner:
    """Makes runs, here or in `jobs` processes, each only once."""

    def __init__(self, data: Path, trace: Path, fleet: Path, slo: Slo, jobs: int, told: Told) -> None:
        self.bench = open_bench(data, trace, fleet, slo)
        self._told = told
        self._made: dict[Job, Figures] = {}
        self._pool: ProcessPoolExecutor | None = None
        if jobs > 1:
            self._pool = ProcessPoolExecutor(
                jobs, initializer=_open_worker, initargs=(data, trace, fleet, slo)
            )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def figures(self, jobs: Iterable[Job]) -> list[Figures]:
        wanted = list(jobs)
        missing = [job for job in dict.fromkeys(wanted) if job not in self._made]
        made = self._pool.map(_work, missing) if self._pool else map(self.bench.figures, missing)
        for job, figure in zip(missing, made, strict=True):
            self._made[job] = figure
            self._told(job)
        return [self._made[job] for job in wanted]

    def attainment(self, policy: str, rps: float, seeds: Sequence[int]) -> float:
        return sum(f.attainment for f in self.figures(Job(policy, rps, seed) for seed in seeds)) / len(seeds)

    def rate_at_target(self, seeds: Sequence[int]) -> float:
        """Return the rate of load 1.0."""
        policy, low = LeastOutstanding.name, float(len(self.bench.fleet))
        high = low
        for _ in range(MAX_DOUBLINGS):
            if self.attainment(policy, low, seeds) >= TARGET:
                break
            low, high = low / 2, low
        for _ in range(MAX_DOUBLINGS):
            if high > low and self.attainment(policy, high, seeds) < TARGET:
                break
            low, high = max(high, low), max(high, low) * 2
        return self._bisect(policy, low, high, seeds)

    def sustained_load(
        self, policy: str, unit_rps: float, tried: Sequence[float], seeds: Sequence[int]
    ) -> float:
        """Return the highest load at the target, in shares of `unit_rps`.

        `tried` loads, which have been run anyway, bracket it; 0 where even the least of them is too much.
        """
        low, high = 0.0, 0.0
        for load in sorted(tried):
            if self.attainment(policy, load * unit_rps, seeds) >= TARGET:
                low = load
            else:
                high = load
                break
        if not high:
            high = low or 1.0
            while high <= MOST_LOAD and self.attainment(policy, high * unit_rps, seeds) >= TARGET:
                low, high = high, high * 1.25
        if not low:
            return 0.0
        return self._bisect(policy, low * unit_rps, high * unit_rps, seeds) / unit_rps

    def _bisect(self, policy: str, low: float, high: float, seeds: Sequence[int]) -> float:
        while high > low * (1 + PRECISION):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.attainment(policy, middle, seeds) >= TARGET else (low, middle)
        return low
