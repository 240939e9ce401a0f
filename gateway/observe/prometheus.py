"""The cell's figures in Prometheus' text format. Pure: what was counted and the view of the fleet → bytes.

Every replica answers for the whole cell: counters are the sums in Redis, gauges the placement actor's view.
So a scrape may reach any replica, and counters don't fall when one restarts or another one answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from gateway.observe.totals import DURATIONS_S, MICRO, TOKEN_TIMES_S, Sums
from grid.words import UNKNOWN, FleetGpu, FleetUnit, UnitState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
UNIT_LABELS = ("unit_id", "model_name", "region", "gpu_type")
TOKEN_KINDS = ("input", "cached", "output")


GPU_LABELS = ("node_id", "gpu", "uuid", "product")
MB = 1 << 20
GPU_GAUGES = (
    ("memory_used_bytes", "Memory in use, whoever uses it.", "memory_used_mb", MB),
    ("memory_free_bytes", "Memory that a unit could still take.", "memory_free_mb", MB),
    ("memory_foreign_bytes", "Memory that others than the cell use.", "memory_foreign_mb", MB),
    ("utilisation_ratio", "Share of time with a kernel running, 0 to 1.", "compute_utilisation", 1),
    ("sm_utilisation_ratio", "Share of the multiprocessors that are busy, 0 to 1.", "sm_utilisation", 1),
    ("bandwidth_utilisation_ratio", "Share of peak memory bandwidth, 0 to 1.", "bandwidth_utilisation", 1),
    ("pcie_sent_bytes_per_second", "Over PCIe, from the GPU.", "pcie_sent_mb_per_s", MB),
    ("pcie_received_bytes_per_second", "Over PCIe, to the GPU.", "pcie_received_mb_per_s", MB),
    ("nvlink_sent_bytes_per_second", "Over all NVLinks.", "nvlink_sent_mb_per_s", MB),
    ("nvlink_received_bytes_per_second", "Over all NVLinks.", "nvlink_received_mb_per_s", MB),
    ("sm_clock_hertz", "Clock of the multiprocessors.", "sm_clock_mhz", 1e6),
    ("temperature_celsius", "Temperature.", "temperature_c", 1),
    ("power_watts", "Power.", "power_w", 1),
    ("ecc_uncorrected_errors", "Uncorrectable since the driver was loaded.", "ecc_uncorrected", 1),
)
"""Of a GPU: name, text, the sample's field, and its unit in the metric's. What it can't tell is left out."""


def render(
    totals: Sums, units: Iterable[FleetUnit], gpus: Iterable[FleetGpu], stale_after_ms: float
) -> bytes:
    """Return one scrape. `totals` are the fields of `zg:totals`, as `totals.py` names them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape([*_counted(totals), *_units(units, stale_after_ms), *_gpus(list(gpus))]))
    return generate_latest(registry)


class _Scrape(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def _counted(totals: Sums) -> list[Metric]:
    requests = CounterMetricFamily(
        "zerogrid_requests",
        "Calls by how they ended: good, refused (4xx), cancelled (the client left), failed (5xx).",
        labels=("http_route", "model_name", "outcome"),
    )
    errors = CounterMetricFamily(
        "zerogrid_request_errors", "Calls that were refused or failed.", labels=("http_route", "code")
    )
    tokens = CounterMetricFamily(
        "zerogrid_tokens",
        "Tokens of prompts and answers; cached ones are input too.",
        labels=("model_name", "type"),
    )
    compute = CounterMetricFamily(
        "zerogrid_cu_seconds",
        "Compute that was charged; 1 is a second of an A100-80.",
        labels=("model_name",),
    )
    durations = HistogramMetricFamily(
        "gen_ai_server_request_duration_seconds",
        "From a call's arrival to the end of its answer, of good calls.",
        labels=("gen_ai_request_model", "http_route"),
    )
    first_tokens = HistogramMetricFamily(
        "gen_ai_server_time_to_first_token_seconds",
        "From the start of a run to its first token, of good calls.",
        labels=("gen_ai_request_model",),
    )
    token_times = HistogramMetricFamily(
        "gen_ai_server_time_per_output_token_seconds",
        "Decode time of a token after the first, of good calls.",
        labels=("gen_ai_request_model",),
    )
    histograms: dict[tuple[str, ...], Sums] = {}
    for field, count in totals.items():
        kind, _, rest = field.partition("|")
        if kind == "requests":
            route, model, outcome = _three(rest)
            requests.add_metric((route, model, outcome), count)
        elif kind == "errors":
            route, _, code = rest.partition("|")
            errors.add_metric((route, code), count)
        elif kind in TOKEN_KINDS:
            tokens.add_metric((rest, kind), count)
        elif kind == "cu":
            compute.add_metric((rest,), count / MICRO)
        elif kind == "duration":
            route, model, bucket = _three(rest)
            histograms.setdefault((kind, model, route), {})[bucket] = count
        else:
            model, _, bucket = rest.rpartition("|")
            histograms.setdefault((kind, model), {})[bucket] = count
    of_kind = {
        "duration": (durations, DURATIONS_S),
        "ttft": (first_tokens, DURATIONS_S),
        "tpot": (token_times, TOKEN_TIMES_S),
    }
    for (kind, *labels), counts in histograms.items():
        family, bounds_s = of_kind[kind]
        family.add_metric(labels, _cumulative(counts, bounds_s), counts.get("us", 0) / 1e6)
    return [requests, errors, tokens, compute, durations, first_tokens, token_times]


def _units(units: Iterable[FleetUnit], stale_after_ms: float) -> list[Metric]:
    def gauge(name: str, text: str, *more: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"zerogrid_unit_{name}", text, labels=(*UNIT_LABELS, *more))

    state = gauge("health", "1 for the health that the unit has; only a healthy one gets work.", "health")
    running = gauge("running", "Requests that the engine works on.")
    slots = gauge("slots", "Requests that the engine can work on at once.")
    busy = gauge("utilisation_ratio", "Share of the slots that are taken, 0 to 1.")
    waiting = gauge("waiting", "Requests that were admitted and have not begun.")
    reserved = gauge("reserved", "Reservations that the placement actor holds on the unit.")
    kv_usage = gauge("kv_cache_usage_ratio", "Share of the KV cache that is taken, 0 to 1.")
    age = gauge("sample_age_seconds", "Age of the unit's newest sample.")
    for unit in units:
        card, load = unit.card, unit.load
        labels = (card.unit_id, card.model, card.region, card.gpu_type)
        state.add_metric((*labels, health(unit, stale_after_ms)), 1)
        running.add_metric(labels, load.running)
        slots.add_metric(labels, card.max_running)
        busy.add_metric(labels, load.running / card.max_running)
        waiting.add_metric(labels, load.waiting)
        reserved.add_metric(labels, unit.reserved)
        if load.kv_tokens_total > 0:
            kv_usage.add_metric(labels, 1 - load.kv_tokens_free / load.kv_tokens_total)
        if unit.sample_age_ms != UNKNOWN:
            age.add_metric(labels, unit.sample_age_ms / 1000)
    return [state, running, slots, busy, waiting, reserved, kv_usage, age]


def _gpus(gpus: list[FleetGpu]) -> list[Metric]:
    labelled = [
        ((gpu.node_id, str(gpu.card.number), gpu.card.uuid, gpu.card.product), gpu.sample) for gpu in gpus
    ]
    faulty = GaugeMetricFamily("zerogrid_gpu_faulty", "1 where no work may run on it.", labels=GPU_LABELS)
    for labels, sample in labelled:
        faulty.add_metric(labels, bool(sample.fault))
    families: list[Metric] = [faulty]
    for name, text, field, factor in GPU_GAUGES:
        family = GaugeMetricFamily(f"zerogrid_gpu_{name}", text, labels=GPU_LABELS)
        for labels, sample in labelled:
            if (reading := getattr(sample, field)) != UNKNOWN:
                family.add_metric(labels, reading * factor)
        families.append(family)
    return families


def health(unit: FleetUnit, stale_after_ms: float) -> str:
    """Return in one word whether a unit gets work. A stale one gets none: nobody knows its load."""
    state = UnitState(unit.load.state)
    if state is not UnitState.READY:
        return state.name.lower()
    return "healthy" if 0 <= unit.sample_age_ms <= stale_after_ms else "stale"


def _three(labels: str) -> tuple[str, str, str]:
    """Split at the first and the last bar: the name between is a configured model's and may hold some."""
    first, _, rest = labels.partition("|")
    middle, _, last = rest.rpartition("|")
    return first, middle, last


def _cumulative(counts: Sums, bounds_s: tuple[float, ...]) -> list[tuple[str, float]]:
    buckets, below = [], 0
    for index, bound in enumerate((*map(str, bounds_s), "+Inf")):
        below += counts.get(str(index), 0)
        buckets.append((bound, float(below)))
    return buckets
