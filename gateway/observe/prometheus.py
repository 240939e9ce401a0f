"""The cell's figures in Prometheus' text format. Pure: what was counted and the view of the fleet → bytes.

Every replica answers for the whole cell: counters are the sums in Redis, gauges the placement actor's view.
So a scrape may reach any replica, and counters don't fall when one restarts or another one answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gateway.observe.series import (
    BYTES,
    BYTES_PER_S,
    CELSIUS,
    HERTZ,
    PLAIN,
    RATIO,
    SECONDS,
    TOKEN,
    WATTS,
    AnyFamily,
    CounterFamily,
    Distribution,
    HistogramFamily,
    all_series,
)
from gateway.observe.totals import Sums
from grid.wire.messages import Fleet

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SUFFIXES = {
    PLAIN: "",
    TOKEN: "",
    RATIO: "_ratio",
    SECONDS: "_seconds",
    BYTES: "_bytes",
    BYTES_PER_S: "_bytes_per_second",
    HERTZ: "_hertz",
    CELSIUS: "_celsius",
    WATTS: "_watts",
}


def render(totals: Sums, fleet: Fleet, stale_after_ms: float) -> bytes:
    """Return one scrape. `totals` are the fields of `zg:totals`, as `totals.py` names them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(all_series(totals, fleet, stale_after_ms)))
    return generate_latest(registry)


class _Scrape(Collector):
    def __init__(self, families: list[AnyFamily]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from map(_metric, self._families)


def _metric(family: AnyFamily) -> Metric:
    name = family.name.replace(".", "_") + SUFFIXES[family.unit]
    labels = [label.replace(".", "_") for label in family.labels]
    if isinstance(family, HistogramFamily):
        histogram = HistogramMetricFamily(name, family.text, labels=labels)
        for values, distribution in family.points:
            histogram.add_metric(values, _cumulative(distribution), distribution.sum)
        return histogram
    plain = CounterMetricFamily if isinstance(family, CounterFamily) else GaugeMetricFamily
    numbers = plain(name, family.text, labels=labels)
    for values, value in family.points:
        numbers.add_metric(values, value)
    return numbers


def _cumulative(distribution: Distribution) -> list[tuple[str, float]]:
    bounds = (*map(str, distribution.bounds), "+Inf")
    return [
        (bound, float(count)) for bound, count in zip(bounds, accumulate(distribution.counts), strict=True)
    ]
