"""An OTLP collector on loopback that keeps what it is sent, decoded by the official classes."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


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
    headers: list[dict[str, str]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    """Statuses of the next answers; 200 once there are none."""

    def take(self, body: bytes) -> None:
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
                collector.take(gzip.decompress(body))
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
