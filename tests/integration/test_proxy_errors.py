"""What HAProxy itself says, by the real binary: every client finds the grid's envelope, also in front of
nobody."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.ports import free_port

from gateway.http.shapes.errors import ErrorEnvelope
from gateway.proxy import serve_environment
from grid.config import Config

CONFIGURATION = """\
defaults
    mode http
    timeout connect 2s
    timeout client 2s
    timeout server {server_s}s
    timeout http-request 1s
    errorfile 503 /nowhere
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend replicas
frontend prometheus
    bind :9101
backend replicas
    server r1 127.0.0.1:{replica}
"""
COMPLETE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
UNFINISHED = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\nabc"
ANSWER_S = 10.0


@pytest.fixture(scope="module")
def silent() -> Iterator[socket.socket]:
    """A replica that takes connections and says nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        yield listener


@pytest.fixture(scope="module")
def ports(silent: socket.socket) -> Iterator[dict[str, int]]:
    """Ports of a proxy in front of nobody, and of one in front of a silent replica."""
    given = {"nobody": free_port(), "silent": free_port()}
    replicas = {"nobody": free_port(), "silent": silent.getsockname()[1]}
    started = []
    with tempfile.TemporaryDirectory(prefix="zg-", dir="/tmp") as name:
        folder = Path(name)
        state = Config.model_validate({"cell": {"state_dir": str(folder / "state")}})
        wrapper = serve_environment(state, folder)["RAY_SERVE_HAPROXY_BINARY_PATH"]
        for which, port in given.items():
            path = folder / f"{which}.cfg"
            path.write_text(CONFIGURATION.format(port=port, replica=replicas[which], server_s=1))
            started.append(
                subprocess.Popen([wrapper, "-db", "-f", str(path)], stderr=subprocess.PIPE, text=True)
            )
        try:
            for port in given.values():
                answered(port, COMPLETE)
            yield given
        finally:
            for proxy in started:
                proxy.terminate()
                proxy.communicate(timeout=ANSWER_S)


def answered(port: int, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the answer. The proxy may still be starting."""
    for _attempt in range(200):
        try:
            connection = socket.create_connection(("127.0.0.1", port), ANSWER_S)
            break
        except ConnectionRefusedError:
            subprocess.run(["sleep", "0.05"], check=True)
    with closing(connection):
        connection.sendall(request)
        with connection.makefile("rb") as stream:
            status = int(stream.readline().split()[1])
            headers: dict[str, str] = {}
            while line := stream.readline().decode().strip():
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            return status, headers, stream.read(int(headers["content-length"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "request_", "status", "kind"),
    [
        ("nobody", COMPLETE, 503, "unavailable_error"),
        ("silent", COMPLETE, 504, "timeout_error"),
        ("nobody", UNFINISHED, 400, "invalid_request_error"),
    ],
)
def test_the_proxys_own_answers_are_the_grids(
    ports: dict[str, int], which: str, request_: bytes, status: int, kind: str
) -> None:
    seen, headers, body = answered(ports[which], request_)
    assert (seen, headers["content-type"]) == (status, "application/json")
    told = ErrorEnvelope.model_validate(json.loads(body))
    assert told.error.type == kind
    assert re.fullmatch(r"req_[0-9a-f-]{36}", told.request_id)
    assert headers["x-request-id"] == told.request_id
    assert headers.get("retry-after") == ("1" if status == 503 else None)
