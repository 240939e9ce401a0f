"""The cell's figures as named series, from which `/metrics` and OTLP are both written. Pure.

Names, units and labels are OpenTelemetry's; `prometheus.py` makes its own of them by the rule by which
collectors do (dots to underscores, the unit as a suffix), so a series has one name on both ways.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from gateway.observe.totals import DURATIONS_S, GAPS_S, MICRO, TOKEN_TIMES_S, TOKENS, Sums
from grid.wire.messages import Fleet
from grid.words import UNKNOWN, FleetGpu, FleetQueue, FleetUnit, UnitState

PLAIN, RATIO, SECONDS, BYTES, BYTES_PER_S = "", "1", "s", "By", "By/s"
HERTZ, CELSIUS, WATTS, TOKEN = "Hz", "Cel", "W", "{token}"
UNIT_LABELS = ("unit_id", "model_name", "region", "gpu_type")
GPU_LABELS = ("node_id", "gpu", "uuid", "product")
MB = 1 << 20
GPU_GAUGES = (
    ("memory_used", BYTES, "Memory in use, whoever uses it.", "memory_used_mb", MB),
    ("memory_free", BYTES, "Memory that a unit could still take.", "memory_free_mb", MB),
    ("memory_foreign", BYTES, "Memory that others than the cell use.", "memory_foreign_mb", MB),
    ("utilisation", RATIO, "Share of time with a kernel running, 0 to 1.", "compute_utilisation", 1),
    ("sm_utilisation", RATIO, "Share of the multiprocessors that are busy, 0 to 1.", "sm_utilisation", 1),
    ("bandwidth_utilisation", RATIO, "Share of peak memory bandwidth, 0 to 1.", "bandwidth_utilisation", 1),
    ("pcie_sent", BYTES_PER_S, "Over PCIe, from the GPU.", "pcie_sent_mb_per_s", MB),
    ("pcie_received", BYTES_PER_S, "Over PCIe, to the GPU.", "pcie_received_mb_per_s", MB),
    ("nvlink_sent", BYTES_PER_S, "Over all NVLinks.", "nvlink_sent_mb_per_s", MB),
    ("nvlink_received", BYTES_PER_S, "Over all NVLinks.", "nvlink_received_mb_per_s", MB),
    ("sm_clock", HERTZ, "Clock of the multiprocessors.", "sm_clock_mhz", 1e6),
    ("temperature", CELSIUS, "Temperature.", "temperature_c", 1),
    ("power", WATTS, "Power.", "power_w", 1),
    ("ecc_uncorrected_errors", PLAIN, "Uncorrectable since the driver was loaded.", "ecc_uncorrected", 1),
)
"""Of a GPU: name, unit, text, the sample's field, the factor to the unit. What it can't tell is left out."""
TOKEN_KINDS = ("input", "cached", "output")
RUN_TOKENS = {"inputs": "input", "outputs": "output"}
"""Histograms of tokens by run, and their type in the conventions."""


class Distribution(NamedTuple):
    """Counts by upper bound, which belongs to its bucket; the last one is of what is above them all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


Value = TypeVar("Value", float, Distribution)


@dataclass(frozen=True, slots=True)
class Family(Generic[Value]):
    """All series of one name; a point has a value for each of `labels`."""

    name: str
    unit: str
    text: str
    labels: tuple[str, ...]
    points: list[tuple[tuple[str, ...], Value]] = field(default_factory=list)

    def add(self, labels: tuple[str, ...], value: Value) -> None:
        self.points.append((labels, value))


class CounterFamily(Family[float]):
    """Sums that only grow."""


class GaugeFamily(Family[float]):
    """What is so now."""


class HistogramFamily(Family[Distribution]):
    """Distributions that only grow."""


AnyFamily = CounterFamily | GaugeFamily | HistogramFamily


def all_series(totals: Sums, fleet: Fleet, stale_after_ms: float) -> list[AnyFamily]:
    """Return everything that is known of the cell."""
    return [
        *counted(totals),
        *of_units(fleet.units, stale_after_ms),
        *of_queues(fleet),
        *of_gpus(list(fleet.gpus)),
    ]


def counted(totals: Sums) -> list[AnyFamily]:
    """Return what was counted. `totals` are the fields of `zg:totals`, as `totals.py` names them."""
    requests = CounterFamily(
        "zerogrid.requests",
        PLAIN,
        "Calls by how they ended: good, refused (4xx), cancelled (the client left), failed (5xx).",
        ("http.route", "model_name", "outcome"),
    )
    errors = CounterFamily(
        "zerogrid.request.errors", PLAIN, "Calls that were refused or failed.", ("http.route", "code")
    )
    tokens = CounterFamily(
        "zerogrid.tokens",
        TOKEN,
        "Tokens of prompts and answers; cached ones are input too.",
        ("model_name", "type"),
    )
    compute = CounterFamily(
        "zerogrid.cu", SECONDS, "Compute that was charged; 1 is a second of an A100-80.", ("model_name",)
    )
    durations = HistogramFamily(
        "gen_ai.server.request.duration",
        SECONDS,
        "From a call's arrival to the end of its answer, of good calls.",
        ("gen_ai.request.model", "http.route"),
    )
    first_tokens = HistogramFamily(
        "gen_ai.server.time_to_first_token",
        SECONDS,
        "From the start of a run to its first token, of good calls.",
        ("gen_ai.request.model",),
    )
    token_times = HistogramFamily(
        "gen_ai.server.time_per_output_token",
        SECONDS,
        "Decode time of a token after the first, of good calls.",
        ("gen_ai.request.model",),
    )
    gaps = HistogramFamily(
        "zerogrid.stream.move.gap",
        SECONDS,
        "From the last token of one unit to the first of the next, of answers that outlived a unit.",
        ("model_name",),
    )
    usage = HistogramFamily(
        "gen_ai.client.token.usage",
        TOKEN,
        "Tokens of a run's prompts and of its answer, however it ended.",
        ("gen_ai.request.model", "gen_ai.token.type"),
    )
    histograms: dict[tuple[str, ...], Sums] = {}
    for name, count in totals.items():
        kind, _, rest = name.partition("|")
        if kind == "requests":
            route, model, outcome = _three(rest)
            requests.add((route, model, outcome), count)
        elif kind == "errors":
            route, _, code = rest.partition("|")
            errors.add((route, code), count)
        elif kind in TOKEN_KINDS:
            tokens.add((rest, kind), count)
        elif kind == "cu":
            compute.add((rest,), count / MICRO)
        elif kind == "duration":
            route, model, bucket = _three(rest)
            histograms.setdefault((kind, model, route), {})[bucket] = count
        else:
            model, _, bucket = rest.rpartition("|")
            of_type = (RUN_TOKENS[kind],) if kind in RUN_TOKENS else ()
            histograms.setdefault((kind, model, *of_type), {})[bucket] = count
    of_kind = {
        "duration": (durations, DURATIONS_S),
        "ttft": (first_tokens, DURATIONS_S),
        "tpot": (token_times, TOKEN_TIMES_S),
        "gaps": (gaps, GAPS_S),
        **dict.fromkeys(RUN_TOKENS, (usage, TOKENS)),
    }
    for (kind, *labels), counts in histograms.items():
        family, bounds = of_kind[kind]
        family.add(tuple(labels), _distribution(counts, bounds))
    return [requests, errors, tokens, compute, durations, first_tokens, token_times, gaps, usage]


def of_units(units: Iterable[FleetUnit], stale_after_ms: float) -> list[AnyFamily]:
    """Return what placement knows of the units now; what a unit can't tell has no point."""

    def gauge(name: str, unit: str, text: str, *more: str) -> GaugeFamily:
        return GaugeFamily(f"zerogrid.unit.{name}", unit, text, (*UNIT_LABELS, *more))

    state = gauge(
        "health", PLAIN, "1 for the health that the unit has; only a healthy one gets work.", "health"
    )
    running = gauge("running", PLAIN, "Requests that the engine works on.")
    slots = gauge("slots", PLAIN, "Requests that the engine can work on at once.")
    busy = gauge("utilisation", RATIO, "Share of the slots that are taken, 0 to 1.")
    waiting = gauge("waiting", PLAIN, "Requests that were admitted and have not begun.")
    reserved = gauge("reserved", PLAIN, "Reservations that the placement actor holds on the unit.")
    kv_usage = gauge("kv_cache_usage", RATIO, "Share of the KV cache that is taken, 0 to 1.")
    age = gauge("sample_age", SECONDS, "Age of the unit's newest sample.")
    for unit in units:
        card, load = unit.card, unit.load
        labels = (card.unit_id, card.model, card.region, card.gpu_type)
        state.add((*labels, health(unit, stale_after_ms)), 1)
        running.add(labels, load.running)
        slots.add(labels, card.max_running)
        busy.add(labels, load.running / card.max_running)
        waiting.add(labels, load.waiting)
        reserved.add(labels, unit.reserved)
        if load.kv_tokens_total > 0:
            kv_usage.add(labels, 1 - load.kv_tokens_free / load.kv_tokens_total)
        if unit.sample_age_ms != UNKNOWN:
            age.add(labels, unit.sample_age_ms / 1000)
    return [state, running, slots, busy, waiting, reserved, kv_usage, age]


def of_queues(fleet: Fleet) -> list[AnyFamily]:
    """Return who waits in placement for which model; 0 for models that nobody waits for."""
    found = {unit.card.model: FleetQueue(unit.card.model, 0, 0, 0.0, 0.0) for unit in fleet.units}
    found |= {queue.model: queue for queue in fleet.queues}
    label = ("model_name",)
    waiting = GaugeFamily("zerogrid.queue.requests", PLAIN, "Requests that wait for a free slot.", label)
    tenants = GaugeFamily("zerogrid.queue.tenants", PLAIN, "Tenants that they are of.", label)
    oldest = GaugeFamily("zerogrid.queue.oldest", SECONDS, "For how long the first of them waits.", label)
    wait = GaugeFamily(
        "zerogrid.queue.wait", SECONDS, "Predicted wait of a tenant that has nothing waiting.", label
    )
    for model, queue in found.items():
        waiting.add((model,), queue.waiting)
        tenants.add((model,), queue.tenants)
        oldest.add((model,), queue.oldest_ms / 1e3)
        wait.add((model,), queue.wait_ms / 1e3)
    return [waiting, tenants, oldest, wait]


def of_gpus(gpus: list[FleetGpu]) -> list[AnyFamily]:
    """Return the newest samples of the GPUs."""
    labelled = [
        ((gpu.node_id, str(gpu.card.number), gpu.card.uuid, gpu.card.product), gpu.sample) for gpu in gpus
    ]
    faulty = GaugeFamily("zerogrid.gpu.faulty", PLAIN, "1 where no work may run on it.", GPU_LABELS)
    for labels, sample in labelled:
        faulty.add(labels, int(bool(sample.fault)))
    families: list[AnyFamily] = [faulty]
    for name, unit, text, source, factor in GPU_GAUGES:
        family = GaugeFamily(f"zerogrid.gpu.{name}", unit, text, GPU_LABELS)
        for labels, sample in labelled:
            if (reading := getattr(sample, source)) != UNKNOWN:
                family.add(labels, reading * factor)
        families.append(family)
    return families


def health(unit: FleetUnit, stale_after_ms: float) -> str:
    """Return in one word whether a unit gets work. A stale one gets none: nobody knows its load."""
    state = UnitState(unit.load.state)
    if state is not UnitState.READY:
        return state.name.lower()
    if unit.isolated:
        return "isolated"
    return "healthy" if 0 <= unit.sample_age_ms <= stale_after_ms else "stale"


def _three(labels: str) -> tuple[str, str, str]:
    """Split at the first and the last bar: the name between is a configured model's and may hold some."""
    first, _, rest = labels.partition("|")
    middle, _, last = rest.rpartition("|")
    return first, middle, last


def _distribution(counts: Sums, bounds: tuple[float, ...]) -> Distribution:
    by_bound = tuple(counts.get(str(index), 0) for index in range(len(bounds) + 1))
    return Distribution(bounds, by_bound, counts.get("us", 0) / MICRO)
