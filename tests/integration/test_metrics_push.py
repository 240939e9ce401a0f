"""The cell's figures at an OTLP collector: those of `/metrics`, and once for the cell."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics.export import MetricsData
from prometheus_client.parser import text_string_to_metric_families
from support.collector import Collector, Samples, as_prometheus, collecting, value
from support.local_cell import CHAT_MODEL, LocalCell, cell_config, local_cell

from gateway.observe.otlp import CollectorAway, Sender
from gateway.observe.push import Push
from grid.config import Metrics
from grid.tracing.collector import resource_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MOVING = "zerogrid_unit_sample_age_seconds"
"""Another one at every look."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cell(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> AsyncIterator[LocalCell]:
    folder = Path(tmp_path_factory.mktemp("pushing"))
    headers = folder / "headers"
    headers.write_text("x-collector-key: abc\n")
    # No period ends within the tests, which send by themselves.
    settings = Metrics(endpoint=collector.endpoint, period_s=3600, headers_file=str(headers))
    async with local_cell(
        cell_config(folder).model_copy(update={"metrics": settings}), replicas=2
    ) as running:
        body = {"model": CHAT_MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        for replica in (0, 1, 1):
            async with running.client(replica=replica) as client:
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
        await running.until_idle()
        for _, services in running.replicas:
            await services.recorder.flush()
        yield running


def pushes(cell: LocalCell) -> list[Push]:
    found = [services.push for _, services in cell.replicas]
    assert None not in found
    return [push for push in found if push is not None]


async def scraped(cell: LocalCell) -> Samples:
    async with cell.client(cell.operator_key, replica=1) as client:
        text = (await client.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name != MOVING
    }


def newest(collector: Collector) -> Samples:
    [of_resource] = collector.metrics[-1].resource_metrics
    samples = as_prometheus(of_resource.scope_metrics[0].metrics)
    return {key: number for key, number in samples.items() if key[0] != MOVING}


async def test_one_replica_sends_what_the_scrape_says(cell: LocalCell, collector: Collector) -> None:
    first, second = pushes(cell)
    assert [await first.round(), await second.round(), await first.round()] == [True, False, True]
    assert len(collector.metrics) == 2
    assert newest(collector) == await scraped(cell)
    durations = {
        number for (name, _), number in newest(collector).items() if name.endswith("duration_seconds_count")
    }
    assert durations == {3}
    assert {head["path"] for head in collector.headers} == {"/v1/metrics"}
    assert {head["x-collector-key"] for head in collector.headers} == {"abc"}
    [resource] = collector.metrics[-1].resource_metrics
    about = {pair.key: value(pair.value) for pair in resource.resource.attributes}
    assert (about["service.name"], about["service.instance.id"]) == ("zerogrid-cell", "local")


async def test_a_collector_that_refuses_is_said_with_its_reason(
    cell: LocalCell, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.answers = [400]
    with caplog.at_level(logging.DEBUG, "opentelemetry"), pytest.raises(CollectorAway, match="400"):
        await pushes(cell)[0].round()
    assert not caplog.records, "the exporter's own lines, one for each try, are kept out of the log"
    assert await pushes(cell)[0].round()


async def test_series_go_on_when_the_lease_moves(cell: LocalCell, collector: Collector) -> None:
    first, second = pushes(cell)
    await first.round()
    await first.close()
    assert await second.round()
    before, after = collector.metrics[-2:]
    assert before.resource_metrics[0].resource == after.resource_metrics[0].resource

    def starts(request: ExportMetricsServiceRequest) -> set[int]:
        return {
            point.start_time_unix_nano
            for metric in request.resource_metrics[0].scope_metrics[0].metrics
            if metric.HasField("sum")
            for point in metric.sum.data_points
        }

    assert starts(before) == starts(after)
    assert len(starts(after)) == 1


class Flaky(Sender):
    """Is away for three periods, and back from then on."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", {}, 1.0)
        self.sends = 0
        self.back = threading.Event()

    def send(self, data: MetricsData) -> None:
        self.sends += 1
        if self.sends <= 3:
            raise CollectorAway("nobody listens")
        if self.sends == 5:
            self.back.set()


async def test_an_outage_is_said_once(cell: LocalCell, caplog: pytest.LogCaptureFixture) -> None:
    for push in pushes(cell):
        await push.close()
    services, sender = cell.services, Flaky()
    often = cell.config.metrics.model_copy(update={"period_s": 0.01})
    push = Push(
        cell.config.model_copy(update={"metrics": often}),
        redis=services.redis,
        figures=services.figures,
        fleet=lambda: services.placement.fleet,
        sender=sender,
        resource=resource_of("cell", "c", "eu"),
    )
    push.start()
    assert await asyncio.to_thread(sender.back.wait, 10)
    await push.close()
    said = [record.getMessage() for record in caplog.records if record.name == "gateway.observe.push"]
    assert said == [
        "the cell's figures are not sent: nobody listens (metrics.endpoint)",
        "the cell's figures are sent again",
    ]
