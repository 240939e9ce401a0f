"""How an OTLP request travels: HTTP (protobuf) or gRPC. Blocking; used from the exporter's thread only."""

from __future__ import annotations

import gzip
import ipaddress
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from grid.config import Tracing

TIMEOUT_S = 10.0
"""A collector that takes longer than this for one batch is as good as away."""
COMPRESSION = 1
"""Fivefold smaller already at the fastest level: most of a batch repeats itself. On loopback there is no line
to spare, and the collector would have to undo it on the same cores."""
RETRYABLE_STATUSES = frozenset({429, 502, 503, 504})
RETRYABLE_CODES = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "ABORTED"})
HTTP_PATH = "/v1/traces"
GRPC_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class SendFailed(Exception):
    def __init__(self, reason: str, *, retryable: bool) -> None:
        super().__init__(reason)
        self.retryable = retryable


class Transport(Protocol):
    def send(self, body: bytes) -> None:
        """Send one ExportTraceServiceRequest. Raises SendFailed."""

    def close(self) -> None: ...


def open_transport(settings: Tracing, headers: Mapping[str, str]) -> Transport:
    kind = GrpcTransport if settings.protocol == "grpc" else HttpTransport
    return kind(settings.endpoint, headers)


def is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HttpTransport:
    def __init__(self, endpoint: str, headers: Mapping[str, str]) -> None:
        import httpx

        self._url = endpoint if endpoint.endswith(HTTP_PATH) else endpoint.rstrip("/") + HTTP_PATH
        self._error = httpx.HTTPError
        self._compresses = not is_loopback(endpoint)
        self._client = httpx.Client(
            # Loading the certificates of the usual authorities takes a tenth of a second.
            verify=endpoint.startswith("https://"),
            timeout=TIMEOUT_S,
            headers={
                "content-type": "application/x-protobuf",
                "user-agent": "zerogrid",
                **({"content-encoding": "gzip"} if self._compresses else {}),
                **headers,
            },
        )

    def send(self, body: bytes) -> None:
        content = gzip.compress(body, COMPRESSION) if self._compresses else body
        try:
            status = self._client.post(self._url, content=content).status_code
        except self._error as error:
            raise SendFailed(f"{self._url}: {str(error) or type(error).__name__}", retryable=True) from None
        if status >= 300:
            raise SendFailed(f"{self._url} answered {status}", retryable=status in RETRYABLE_STATUSES)

    def close(self) -> None:
        self._client.close()


class GrpcTransport:
    def __init__(self, endpoint: str, headers: Mapping[str, str]) -> None:
        import grpc

        self._endpoint = endpoint
        self._error: type[Any] = grpc.RpcError
        target, secure = urlsplit(endpoint).netloc, endpoint.startswith("https://")
        self._channel = (
            grpc.secure_channel(target, grpc.ssl_channel_credentials())
            if secure
            else grpc.insecure_channel(target)
        )
        self._export = self._channel.unary_unary(GRPC_METHOD)
        self._metadata = tuple(headers.items())

    def send(self, body: bytes) -> None:
        try:
            self._export(body, timeout=TIMEOUT_S, metadata=self._metadata)
        except self._error as error:
            code = error.code().name
            raise SendFailed(f"{self._endpoint}: {code}", retryable=code in RETRYABLE_CODES) from None

    def close(self) -> None:
        self._channel.close()
