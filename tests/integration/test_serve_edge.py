"""What the gateway does to Ray Serve's edge: HAProxy's listeners, the front middleware, the deployment."""

from __future__ import annotations

import json
import os
import pickle
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from gateway.http.app import REQUEST_ID, GatewayApp
from gateway.http.exchange import SERVER_CANCELS
from gateway.http.front import FrontDoor, without_repeat
from gateway.proxy import (
    beside,
    proxy_connections,
    serve_environment,
    wrapper_script,
)
from gateway.replica import build_replica_services, require_uvloop
from grid.config import Config
from grid.errors import InternalError

RENDER = """
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve._private.constants import RAY_SERVE_HAPROXY_CONFIG_FILE_LOC, RAY_SERVE_HAPROXY_MAXCONN
from ray.serve.config import HTTPOptions
import json
api = HAProxyApi(
    cfg=HAProxyConfig(http_options=HTTPOptions(host="127.0.0.1", port=18123), is_head=True),
    backend_configs={
        "app": BackendConfig(
            name="app", path_prefix="/", app_name="gateway", servers=[ServerConfig("r1", "127.0.0.1", 30000)]
        )
    },
    config_file_path=RAY_SERVE_HAPROXY_CONFIG_FILE_LOC,
)
api._generate_config_file_internal()
print(json.dumps({"config": RAY_SERVE_HAPROXY_CONFIG_FILE_LOC, "maxconn": RAY_SERVE_HAPROXY_MAXCONN}))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="zg-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate({"cell": {"state_dir": str(tmp_path)}, "gateway": {"port": 18123}})


@pytest.mark.slow
def test_haproxy_listens_where_the_configuration_says_and_nowhere_else(config: Config, folder: Path) -> None:
    environment = serve_environment(config, folder)
    rendered = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RENDER],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(rendered.stdout.splitlines()[-1])
    path = Path(said["config"])
    assert re.findall(r"^\s*bind (\S+)", path.read_text(), re.M) == [":9101", "127.0.0.1:18123", "*:8404"]
    wrapper = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
    for _start in range(2):
        checked = subprocess.run([wrapper, "-c", "-db", "-f", str(path)], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr
    assert re.findall(r"^\s*bind (\S+)", path.read_text(), re.M) == ["127.0.0.1:18123"]
    assert f"maxconn {said['maxconn']}" in path.read_text()
    assert str(folder) in path.read_text().split("stats socket ")[1].splitlines()[0]


def test_the_admin_socket_lies_in_a_private_folder(config: Config, folder: Path) -> None:
    folder.chmod(0o755)
    environment = serve_environment(config, folder)
    assert Path(environment["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent == folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    paths = [value for name, value in environment.items() if "HAPROXY" in name and value.startswith("/")]
    assert len(paths) == 6
    assert all(Path(path).is_relative_to(folder) for path in paths)
    assert all(isinstance(value, str) for value in environment.values())


def test_a_folder_whose_name_is_too_long_for_sockets_is_refused(config: Config, tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="too long"):
        serve_environment(config, tmp_path / ("x" * 60))


def test_the_wrapper_quotes_what_it_starts() -> None:
    script = wrapper_script("/a b/haproxy", None, Path("/tmp"))
    assert script.rstrip().endswith("exec '/a b/haproxy' \"$@\"")


def test_connections_fit_the_descriptors(config: Config) -> None:
    gateway = config.gateway
    wanted = gateway.replicas * gateway.max_streams_per_replica
    assert proxy_connections(config, 1_000_000) > wanted
    assert proxy_connections(config, -1) > wanted
    assert 2 * proxy_connections(config, 4096) < 4096


@pytest.mark.parametrize("port", [1024, 8000, 55_535, 55_536, 65_535])
def test_serves_own_proxy_has_another_port(port: int) -> None:
    assert beside(port) != port
    assert 0 < beside(port) < 65_536


async def test_outside_uvloop_a_replica_does_not_start() -> None:
    with pytest.raises(RuntimeError, match="uvloop"):
        require_uvloop()


def test_the_application_survives_the_way_to_its_replicas(config: Config) -> None:
    app = GatewayApp(config, partial(build_replica_services, config))
    arrived = pickle.loads(pickle.dumps(app))
    assert isinstance(arrived, GatewayApp)
    assert callable(arrived)


def test_the_launcher_need_not_import_ray() -> None:
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, gateway.proxy; print('ray' in sys.modules, 'fastapi' in sys.modules)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == ["False", "False"]


# --- the front door ---------------------------------------------------------------------------


class Behind:
    """Serve and its application, as the front door sees them: both add a request id."""

    def __init__(self, *, refuses: bool = False) -> None:
        self._refuses = refuses
        self.scope: Scope = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        serves = dict(scope["headers"])[b"x-request-id"]
        own = [] if self._refuses else [(b"x-request-id", scope[REQUEST_ID].encode())]
        await send(
            {
                "type": "http.response.start",
                "status": 503 if self._refuses else 200,
                "headers": [*own, (b"x-request-id", serves)],
            }
        )
        await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("refuses", [False, True])
async def test_one_request_id_leaves_and_it_is_ours(refuses: bool) -> None:
    behind = Behind(refuses=refuses)
    transport = httpx.ASGITransport(FrontDoor(behind))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.get(
            "/",
            headers={
                "x-request-id": "theirs",
                "x-request-timeout-seconds": "1",
                "x-request-disconnect-disabled": "1",
            },
        )
    ids = answer.headers.get_list("x-request-id")
    assert len(ids) == 1
    assert ids[0] == behind.scope[REQUEST_ID]
    assert ids[0].startswith("req_")
    headers = dict(behind.scope["headers"])
    assert headers[b"x-client-request-id"] == b"theirs"
    assert b"x-request-timeout-seconds" not in headers
    assert b"x-request-disconnect-disabled" not in headers
    assert behind.scope[SERVER_CANCELS] is True


def test_only_a_repeated_id_is_taken_off() -> None:
    own, other = (b"x-request-id", b"req_1"), (b"content-type", b"x")
    assert without_repeat([own, other, own]) == [own, other]
    assert without_repeat([other, own]) == [other, own]
    assert without_repeat([other]) == [other]
    assert without_repeat([]) == []
