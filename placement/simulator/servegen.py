"""Requests generated as ServeGen describes a service: clients, each with rates over a day and lengths of its
own.

Arrivals of a client are a renewal process whose gaps have the window's coefficient of variation, in a time
that runs with the client's rate. Each client lives in a region, drawn by the countries' shares, and its day
is shifted by that region's hour; the files' day is taken for that of UTC+8. Rates are thinned to the wished
count, which keeps shapes.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from grid.errors import InvalidRequest
from placement.simulator.geography import UTC_OFFSET_H, Origins
from placement.simulator.hardware import CONTEXT_TOKENS
from placement.simulator.traces import Row, Trace, csv_lines

WINDOW_S = 600.0
DAY_S = 86_400.0
FILE_OFFSET_H = 8
MAX_CV = 20.0
"""Of gaps: above it one burst would be most of the trace."""

DISTRIBUTIONS = ("Gamma", "Weibull")


class Window(NamedTuple):
    at_s: float
    rate_rps: float
    cv: float
    dist: str


class Quantiles(NamedTuple):
    p50: float
    p90: float
    p99: float

    def draw(self, rng: random.Random) -> int:
        """Return a length: logarithms are linear between the quantiles, and mirrored below the median."""
        least, most = self.p50 * self.p50 / self.p90, self.p99 * math.pow(self.p99 / self.p90, 0.1)
        u = rng.random()
        for (low, a), (high, b) in zip(
            ((0.0, least), (0.5, self.p50), (0.9, self.p90), (0.99, self.p99)),
            ((0.5, self.p50), (0.9, self.p90), (0.99, self.p99), (1.0, most)),
            strict=True,
        ):
            if u <= high:
                return max(1, round(float(a * (b / a) ** ((u - low) / (high - low)))))
        return max(1, round(most))


class Client(NamedTuple):
    name: str
    windows: list[Window]
    lengths: dict[str, list[tuple[float, Quantiles]]]
    """Field to its quantiles from moments on."""

    def quantiles(self, field: str, at_s: float) -> Quantiles:
        known = self.lengths[field]
        return known[max(bisect_right(known, at_s, key=lambda pair: pair[0]) - 1, 0)][1]


FIELDS = ("input_tokens", "output_tokens")


def read_servegen(path: Path, origins: Origins) -> Trace:
    """Return the service whose rates lie at `path`; its lengths lie beside it as `…_lengths.csv`."""
    lengths_path = path.with_name(path.name.split("_day")[0] + "_lengths.csv")
    lengths: dict[str, dict[str, list[tuple[float, Quantiles]]]] = defaultdict(lambda: defaultdict(list))
    for line in csv_lines(lengths_path, ("client", "t_s", "field", "p50", "p90", "p99")):
        field = line.text("field")
        if field not in FIELDS:
            raise line.wrong("field", " or ".join(FIELDS))
        p50 = max(line.number("p50"), 1.0)
        p90 = max(line.number("p90"), p50)
        quantiles = Quantiles(p50, p90, max(line.number("p99"), p90))
        lengths[line.text("client")][field].append((line.number("t_s"), quantiles))
    windows: dict[str, list[Window]] = defaultdict(list)
    for line in csv_lines(path, ("client", "t_s", "rate_rps", "cv", "dist")):
        dist = line.text("dist")
        if dist not in DISTRIBUTIONS:
            raise line.wrong("dist", " or ".join(DISTRIBUTIONS))
        rate, cv = line.number("rate_rps"), min(max(line.number("cv"), 0.05), MAX_CV)
        windows[line.text("client")].append(Window(line.number("t_s"), rate, cv, dist))
    clients = [
        Client(name, sorted(windows[name]), {field: sorted(lengths[name][field]) for field in FIELDS})
        for name in sorted(windows)
        if all(field in lengths.get(name, {}) for field in FIELDS)
    ]
    if not clients:
        raise InvalidRequest(
            f"{path}: no client has both rates here and lengths in {lengths_path.name}", param="client"
        )
    left_out = len(windows) - len(clients)
    note = f"{left_out} clients without lengths left out" if left_out else ""
    return Trace(path.stem, lambda least, rng: generate(clients, least, rng, origins), note)


def generate(clients: list[Client], count: int, rng: random.Random, origins: Origins) -> list[Row]:
    """Return about `count` requests of one day, in order."""
    total = sum(window.rate_rps * WINDOW_S for client in clients for window in client.windows)
    thin = count / total
    rows: list[Row] = []
    for client in clients:
        region = origins.draw(rng)
        shift_s = (FILE_OFFSET_H - UTC_OFFSET_H[region]) * 3600.0
        for at_s in _arrivals(client.windows, thin, rng):
            prompt = client.quantiles(FIELDS[0], at_s).draw(rng)
            output = client.quantiles(FIELDS[1], at_s).draw(rng)
            if prompt + output < CONTEXT_TOKENS:
                rows.append(Row((at_s + shift_s) % DAY_S, client.name, prompt, output, (), region))
    rows.sort(key=lambda row: row.at_s)
    if len(rows) < 2:
        raise InvalidRequest(
            "the rates give fewer than two requests: nothing can be simulated", param="rate_rps"
        )
    return rows


def _arrivals(windows: list[Window], thin: float, rng: random.Random) -> list[float]:
    """Return moments of a renewal process whose time runs by `thin` x rate."""
    moments: list[float] = []
    # The first gap is drawn as if the process had run for long.
    ahead = rng.expovariate(1.0)
    for window in windows:
        room = thin * window.rate_rps * WINDOW_S
        passed = 0.0
        gap = _gap(window)
        while room - passed >= ahead:
            passed += ahead
            moments.append(window.at_s + WINDOW_S * passed / room)
            ahead = gap(rng)
        ahead -= room - passed
    return moments


def _gap(window: Window) -> Callable[[random.Random], float]:
    """Return a draw of gaps with mean 1 and the window's coefficient of variation."""
    if window.dist == "Gamma":
        shape = 1.0 / (window.cv * window.cv)
        return lambda rng: rng.gammavariate(shape, 1.0 / shape)
    shape = _weibull_shape(window.cv)
    scale = 1.0 / math.gamma(1.0 + 1.0 / shape)
    return lambda rng: rng.weibullvariate(scale, shape)


def _weibull_shape(cv: float) -> float:
    low, high = 0.15, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        mean = math.gamma(1 + 1 / middle)
        wide = math.gamma(1 + 2 / middle) / (mean * mean) - 1 > cv * cv
        low, high = (middle, high) if wide else (low, middle)
    return (low + high) / 2
