"""The figures as OTLP: what a collector decodes is what Prometheus reads, by one name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from prometheus_client.parser import text_string_to_metric_families
from support.collector import as_prometheus, value
from support.fleet import make_card, make_load

from gateway.observe.otlp import metrics_data
from gateway.observe.prometheus import render
from gateway.observe.series import all_series
from gateway.observe.totals import DURATIONS_S, TOKEN_TIMES_S, TOKENS, Sums
from grid.tracing.collector import resource_of
from grid.wire.messages import Fleet
from grid.words import FleetGpu, FleetQueue, FleetUnit, GpuCard, GpuSample

SINCE_NS, NOW_NS = 1_700_000_000_000_000_000, 1_700_000_100_000_000_000
NAMES = st.sampled_from(["m", "a|b", "sim-8b"])
ROUTES = st.sampled_from(["/v1/chat/completions", "/v1/embeddings", "/v1/pipelines/{id}/invoke"])
READ = GpuSample(
    "GPU-1",
    memory_used_mb=2.0,
    compute_utilisation=0.5,
    pcie_sent_mb_per_s=3.0,
    sm_clock_mhz=1500.0,
    temperature_c=40.0,
    power_w=70.0,
)
GPUS = (FleetGpu("node-1", GpuCard("GPU-1", 3, "NVIDIA L4", 23_000.0), READ, 20.0),)
QUEUES = (FleetQueue("model-x", waiting=3, tenants=2, oldest_ms=1500.0, wait_ms=2000.0),)
COUNTS = st.integers(1, 2**40)


def sent(totals: Sums, *units: FleetUnit) -> dict[str, Metric]:
    families = all_series(totals, Fleet(0, 1, units, GPUS, QUEUES if units else ()), 500.0)
    request = encode_metrics(metrics_data(families, resource_of("cell", "c1", "eu"), SINCE_NS, NOW_NS))
    [of_resource] = request.resource_metrics
    about = {pair.key: value(pair.value) for pair in of_resource.resource.attributes}
    assert about.items() >= {
        ("service.name", "zerogrid-cell"),
        ("service.instance.id", "c1"),
        ("cloud.region", "eu"),
    }
    [scope] = of_resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


@st.composite
def totals(draw: st.DrawFn) -> Sums:
    sums: Sums = {}
    for route, model in draw(st.lists(st.tuples(ROUTES, NAMES), max_size=3)):
        sums[f"requests|{route}|{model}|good"] = draw(COUNTS)
        sums[f"errors|{route}|overloaded"] = draw(COUNTS)
        sums[f"duration|{route}|{model}|{draw(st.integers(0, len(DURATIONS_S)))}"] = draw(COUNTS)
        sums[f"duration|{route}|{model}|us"] = draw(COUNTS)
        sums[f"tpot|{model}|{draw(st.integers(0, len(TOKEN_TIMES_S)))}"] = draw(COUNTS)
        sums[f"input|{model}"] = draw(COUNTS)
        sums[f"outputs|{model}|{draw(st.integers(0, len(TOKENS)))}"] = draw(COUNTS)
        sums[f"outputs|{model}|us"] = draw(COUNTS)
        sums[f"cu|{model}"] = draw(COUNTS)
    return sums


@given(totals())
def test_a_collector_and_prometheus_get_the_same(sums: Sums) -> None:
    card = make_card("unit-a", max_running=4)
    unit = FleetUnit(card, make_load(card, running=1, kv_tokens_free=25, kv_tokens_total=100), 3, 40.0)
    scraped = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(
            render(sums, Fleet(0, 1, (unit,), GPUS, QUEUES), 500.0).decode()
        )
        for sample in family.samples
    }
    assert as_prometheus(sent(sums, unit).values()) == scraped


def test_sums_begin_when_the_cell_did_and_are_cumulative() -> None:
    metrics = sent({"requests|/v1/x|m|good": 3, "ttft|m|2": 3, "ttft|m|us": 40_000})
    requests, ttft = metrics["zerogrid.requests"].sum, metrics["gen_ai.server.time_to_first_token"].histogram
    for data in (requests, ttft):
        assert data.aggregation_temporality == 2
        assert [(p.start_time_unix_nano, p.time_unix_nano) for p in data.data_points] == [(SINCE_NS, NOW_NS)]
    assert requests.is_monotonic
    assert not ttft.data_points[0].HasField("min")
    assert {name for name in metrics if not name.startswith("zerogrid.gpu.")} == {
        "zerogrid.requests",
        "gen_ai.server.time_to_first_token",
    }


def test_the_conventions_own_histograms_have_the_attributes_that_they_ask_for() -> None:
    metrics = sent({"duration|/v1/embeddings|e|1": 1, "duration|/v1/x|m|1": 1, "tpot|m|0": 1})
    seen = {
        (metric.name, *sorted((pair.key, value(pair.value)) for pair in point.attributes))
        for metric in metrics.values()
        for point in metric.histogram.data_points
    }
    name, provider = "gen_ai.server.request.duration", ("gen_ai.provider.name", "zerogrid")
    chat, model = ("gen_ai.operation.name", "chat"), ("gen_ai.request.model", "m")
    assert seen == {
        (
            name,
            ("gen_ai.operation.name", "embeddings"),
            provider,
            ("gen_ai.request.model", "e"),
            ("http.route", "/v1/embeddings"),
        ),
        (name, chat, provider, model, ("http.route", "/v1/x")),
        ("gen_ai.server.time_per_output_token", chat, provider, model),
    }
