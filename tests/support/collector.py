"""An OTLP collector on loopback that keeps what it is sent, decoded by the official classes."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric


@dataclass(frozen=True)
class Seen:
    """One span, as a collector sees it."""

    service: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: str

    @property
    def lasted_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


@dataclass
class Collector:
    endpoint: str = ""
    spans: list[Seen] = field(default_factory=list)
    metrics: list[ExportMetricsServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    """Statuses of the next answers; 200 once there are none."""

    def take(self, path: str, body: bytes) -> None:
        if path == "/v1/metrics":
            self.metrics.append(ExportMetricsServiceRequest.FromString(body))
        else:
            self.spans += decoded(body)

    def named(self, prefix: str) -> list[Seen]:
        return [span for span in self.spans if span.name.startswith(prefix)]


def decoded(body: bytes) -> list[Seen]:
    found = []
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = {pair.key: value(pair.value) for pair in resource.resource.attributes}
        for scope in resource.scope_spans:
            found += [
                Seen(
                    service=about["service.name"],
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    name=span.name,
                    kind=span.kind,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes={pair.key: value(pair.value) for pair in span.attributes},
                    error=span.status.message if span.status.code == 2 else "",
                )
                for span in scope.spans
            ]
    return found


def value(given: AnyValue) -> Any:
    kind = given.WhichOneof("value")
    if kind == "array_value":
        return [value(item) for item in given.array_value.values]
    return getattr(given, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.headers.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
            status = collector.answers.pop(0) if collector.answers else 200
            if status == 200:
                packed = self.headers["content-encoding"] == "gzip"
                collector.take(self.path, gzip.decompress(body) if packed else body)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


CONVENTIONAL = {"gen_ai.operation.name", "gen_ai.provider.name"}
"""Attributes that only OTLP carries."""
SUFFIXES = {
    "": "",
    "{token}": "",
    "1": "_ratio",
    "s": "_seconds",
    "By": "_bytes",
    "By/s": "_bytes_per_second",
    "Hz": "_hertz",
    "Cel": "_celsius",
    "W": "_watts",
}

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def as_prometheus(metrics: Iterable[Metric]) -> Samples:
    """Return metrics as a collector writes them for Prometheus: by sample name and labels."""
    samples: Samples = {}
    for metric in metrics:
        name = metric.name.replace(".", "_") + SUFFIXES[metric.unit]
        kind = metric.WhichOneof("data")
        for point in getattr(metric, kind).data_points:
            labels = {
                (pair.key.replace(".", "_"), value(pair.value))
                for pair in point.attributes
                if pair.key not in CONVENTIONAL
            }
            if kind != "histogram":
                number = getattr(point, point.WhichOneof("value"))
                samples[name + ("_total" if kind == "sum" else ""), frozenset(labels)] = number
                continue
            bounds = [*map(str, point.explicit_bounds), "+Inf"]
            for bound, count in zip(bounds, accumulate(point.bucket_counts), strict=True):
                samples[f"{name}_bucket", frozenset(labels | {("le", bound)})] = count
            samples[f"{name}_count", frozenset(labels)] = point.count
            samples[f"{name}_sum", frozenset(labels)] = point.sum
    return samples
