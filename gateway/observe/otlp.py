"""The cell's figures in the data model of OpenTelemetry's SDK, and the SDK's exporter that sends them.

Points are made directly and not by instruments: those begin to count when their process does, while the
cell's sums outlive every replica. A sum's start is therefore the cell's (`push.py`), and stays when the lease
moves to another replica; a new start would tell a collector to add the whole sum once more.

Imported only where `metrics.endpoint` is set, because the SDK takes a quarter of a second to import.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gateway.observe.series import AnyFamily, CounterFamily, HistogramFamily
from gateway.tracing import PROVIDER
from grid.tracing.collector import SCOPE

HTTP_PATH = "/v1/metrics"
EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.http.metric_exporter"
CUMULATIVE = AggregationTemporality.CUMULATIVE
EMBEDDINGS_ROUTE = "/v1/embeddings"


def metrics_data(
    families: Iterable[AnyFamily], resource: Resource, since_ns: int, now_ns: int
) -> MetricsData:
    """Return one export; families without a point are left out. Times are in Unix nanoseconds."""
    metrics = [_metric(family, since_ns, now_ns) for family in families if family.points]
    scope = ScopeMetrics(InstrumentationScope(SCOPE, version(SCOPE)), metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource, [scope], schema_url="")])


def _metric(family: AnyFamily, since_ns: int, now_ns: int) -> Metric:
    data: Histogram | Sum | Gauge
    if isinstance(family, HistogramFamily):
        data = Histogram(
            [
                HistogramDataPoint(
                    attributes=_attributes(family, values),
                    start_time_unix_nano=since_ns,
                    time_unix_nano=now_ns,
                    count=sum(distribution.counts),
                    sum=distribution.sum,
                    bucket_counts=distribution.counts,
                    explicit_bounds=distribution.bounds,
                    # Optional in OTLP, and not among what is counted.
                    min=None,  # type: ignore[arg-type]
                    max=None,  # type: ignore[arg-type]
                )
                for values, distribution in family.points
            ],
            CUMULATIVE,
        )
    elif isinstance(family, CounterFamily):
        data = Sum(
            [
                NumberDataPoint(_attributes(family, values), since_ns, now_ns, value)
                for values, value in family.points
            ],
            CUMULATIVE,
            is_monotonic=True,
        )
    else:
        data = Gauge(
            [
                NumberDataPoint(_attributes(family, values), 0, now_ns, value)
                for values, value in family.points
            ]
        )
    return Metric(family.name, family.text, family.unit, data)


def _attributes(family: AnyFamily, values: tuple[str, ...]) -> dict[str, str]:
    attributes = dict(zip(family.labels, values, strict=True))
    if family.name.startswith("gen_ai."):
        # Required by the conventions.
        vectors = attributes.get("http.route") == EMBEDDINGS_ROUTE
        attributes |= {"gen_ai.operation.name": "embeddings" if vectors else "chat", PROVIDER[0]: PROVIDER[1]}
    return attributes


class CollectorAway(Exception):
    """The collector did not take an export; its text says why."""


class Sender:
    """Blocking; `send` is for one thread at a time. Retries are the SDK's, within `timeout_s`."""

    def __init__(self, endpoint: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self.url = endpoint if endpoint.endswith(HTTP_PATH) else endpoint.rstrip("/") + HTTP_PATH
        self._exporter = OTLPMetricExporter(
            endpoint=self.url, headers=headers, timeout=timeout_s, compression=Compression.Gzip
        )
        self._closed = False
        self._heard = _Heard()
        logging.getLogger(EXPORTER_LOGGER).addFilter(self._heard)

    def send(self, data: MetricsData) -> None:
        """Raises CollectorAway."""
        self._heard.first = ""
        if self._exporter.export(data) is not MetricExportResult.SUCCESS:
            raise CollectorAway(f"{self.url}: {self._heard.first or 'not taken'}")

    def close(self) -> None:
        """Also end a `send` that waits before its next try. Idempotent."""
        if not self._closed:
            self._closed = True
            self._exporter.shutdown()
            logging.getLogger(EXPORTER_LOGGER).removeFilter(self._heard)


class _Heard(logging.Filter):
    """Keeps what the SDK's exporter says of a failure, which it would log at every try."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.first = self.first or record.getMessage()
        return False
