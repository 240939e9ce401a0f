"""The text that Prometheus reads, by its own parser."""

from __future__ import annotations

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families
from support.fleet import make_card, make_load
from support.stories import story

from gateway.observe.ledger import Ledger
from gateway.observe.prometheus import render
from gateway.observe.totals import TOTALS, Sums, Totals
from grid.wire.messages import Fleet
from grid.words import UNKNOWN, FleetGpu, FleetQueue, FleetUnit, GpuCard, GpuSample, UnitState

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def totals_of(*statuses: int) -> Sums:
    ledger, sums = Ledger(1), Counter[str]()
    for status in statuses:
        ledger.add(story(status, total_ms=100.0))
    while (batch := ledger.take(1)) is not None:
        for to, fields in batch.sums.items():
            if to.name == TOTALS:
                sums.update(fields)
    return dict(sums)


def scraped(totals: Sums, *units: FleetUnit) -> Samples:
    return parsed(render(totals, Fleet(0, 1, units), 500.0))


def parsed(scrape: bytes) -> Samples:
    text = scrape.decode()
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


ROUTE = "/v1/chat/completions"


def test_calls_tokens_and_times_are_there() -> None:
    samples = scraped(totals_of(200, 200, 400, 503))
    requests = {"http_route": ROUTE, "model_name": "m"}
    assert value(samples, "zerogrid_requests_total", outcome="good", **requests) == 2
    assert value(samples, "zerogrid_requests_total", outcome="failed", **requests) == 1
    assert value(samples, "zerogrid_request_errors_total", http_route=ROUTE, code="no_eligible_unit") == 1
    assert value(samples, "zerogrid_tokens_total", model_name="m", type="output") == 4 * 6
    assert value(samples, "zerogrid_cu_seconds_total", model_name="m") == 1.0
    duration, labels = (
        "gen_ai_server_request_duration_seconds",
        {"gen_ai_request_model": "m", "http_route": ROUTE},
    )
    assert value(samples, f"{duration}_bucket", le="0.08", **labels) == 0
    assert value(samples, f"{duration}_bucket", le="0.16", **labels) == 2
    assert value(samples, f"{duration}_bucket", le="+Inf", **labels) == 2
    assert value(samples, f"{duration}_count", **labels) == 2
    assert value(samples, f"{duration}_sum", **labels) == 0.2
    ttft = "gen_ai_server_time_to_first_token_seconds"
    assert value(samples, f"{ttft}_sum", gen_ai_request_model="m") == 0.05
    usage = "gen_ai_client_token_usage"
    of_output = {"gen_ai_request_model": "m", "gen_ai_token_type": "output"}
    assert value(samples, f"{usage}_sum", **of_output) == 4 * 6
    assert value(samples, f"{usage}_bucket", le="4.0", **of_output) == 0
    assert value(samples, f"{usage}_bucket", le="16.0", **of_output) == 4
    token = "gen_ai_server_time_per_output_token_seconds"
    assert value(samples, f"{token}_sum", gen_ai_request_model="m") == 0.02


def test_the_gaps_of_moved_answers_are_there() -> None:
    told = story()
    told.runs[0].gaps_s += [0.12, 0.3]
    totals = Totals()
    totals.add(told, told.outcome)
    samples = scraped(totals.sums())
    gap = "zerogrid_stream_move_gap_seconds"
    assert value(samples, f"{gap}_bucket", le="0.2", model_name="m") == 1
    assert value(samples, f"{gap}_bucket", le="0.35", model_name="m") == 2
    assert value(samples, f"{gap}_sum", model_name="m") == 0.42


def test_a_models_name_may_hold_the_separator() -> None:
    samples = scraped({"requests|/v1/x|a|b|good": 1, "ttft|a|b|0": 1, "ttft|a|b|us": 5})
    assert (
        value(samples, "zerogrid_requests_total", http_route="/v1/x", model_name="a|b", outcome="good") == 1
    )
    assert value(samples, "gen_ai_server_time_to_first_token_seconds_count", gen_ai_request_model="a|b") == 1


def test_units_show_by_name_with_region_and_load() -> None:
    card = make_card("unit-a", max_running=4)
    load = make_load(card, running=1, waiting=2, kv_tokens_free=25, kv_tokens_total=100)
    gone = make_card("unit-b", region="us-east-1")
    samples = scraped(
        {},
        FleetUnit(card, load, 3, 40.0),
        FleetUnit(gone, make_load(gone, state=int(UnitState.DRAINING), kv_tokens_total=0), 0, UNKNOWN),
    )
    labels = {"unit_id": "unit-a", "model_name": "model-x", "region": "eu-central-1", "gpu_type": "A100-80"}
    assert value(samples, "zerogrid_unit_running", **labels) == 1
    assert value(samples, "zerogrid_unit_utilisation_ratio", **labels) == 0.25
    assert value(samples, "zerogrid_unit_waiting", **labels) == 2
    assert value(samples, "zerogrid_unit_kv_cache_usage_ratio", **labels) == 0.75
    assert value(samples, "zerogrid_unit_health", health="healthy", **labels) == 1
    others = {**labels, "unit_id": "unit-b", "region": "us-east-1"}
    assert value(samples, "zerogrid_unit_health", health="draining", **others) == 1
    assert ("zerogrid_unit_kv_cache_usage_ratio", frozenset(others.items())) not in samples


def test_queues_are_there_also_while_nobody_waits() -> None:
    units = tuple(FleetUnit(card, make_load(card), 0, 40.0) for card in (make_card(), make_card(model="y")))
    queue = FleetQueue("y", waiting=3, tenants=2, oldest_ms=1500.0, wait_ms=2000.0)
    samples = parsed(render({}, Fleet(0, 1, units, queues=(queue,)), 500.0))
    assert value(samples, "zerogrid_queue_requests", model_name="model-x") == 0
    assert value(samples, "zerogrid_queue_requests", model_name="y") == 3
    assert value(samples, "zerogrid_queue_oldest_seconds", model_name="y") == 1.5
    assert value(samples, "zerogrid_queue_wait_seconds", model_name="y") == 2


def test_gpus_are_there_and_what_they_can_not_tell_is_not() -> None:
    card = GpuCard("GPU-1", 3, "NVIDIA L4", 23_000.0)
    sample = GpuSample("GPU-1", memory_used_mb=2.0, power_w=0.0, fault="Xid 79: it fell off the bus")
    samples = parsed(render({}, Fleet(0, 1, (), (FleetGpu("node-1", card, sample, 20.0),)), 500.0))
    labels = {"node_id": "node-1", "gpu": "3", "uuid": "GPU-1", "product": "NVIDIA L4"}
    assert value(samples, "zerogrid_gpu_faulty", **labels) == 1
    assert value(samples, "zerogrid_gpu_memory_used_bytes", **labels) == 2 << 20
    assert value(samples, "zerogrid_gpu_power_watts", **labels) == 0
    assert {name for name, of in samples if dict(of).get("uuid")} == {
        "zerogrid_gpu_faulty",
        "zerogrid_gpu_memory_used_bytes",
        "zerogrid_gpu_power_watts",
    }
