"""The front of a cell, HAProxy as Serve configures it, before a gateway in this process: TLS and HTTP/2."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio
from support.certificates import self_signed
from support.local_cell import CHAT_MODEL, LocalCell, cell_config, local_cell
from support.ports import free_port

from gateway.proxy import check_tls, serve_environment
from grid import Grid
from grid.calls import Unreachable
from grid.config import Config, Gateway, Simulated, Tls
from grid.errors import InvalidRequest

RENDER = """
import sys
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve._private.constants import RAY_SERVE_HAPROXY_CONFIG_FILE_LOC
from ray.serve.config import HTTPOptions

port, replica = int(sys.argv[1]), int(sys.argv[2])
servers = [ServerConfig("r1", "127.0.0.1", replica)]
api = HAProxyApi(
    cfg=HAProxyConfig(http_options=HTTPOptions(host="127.0.0.1", port=port), is_head=True),
    backend_configs={
        "app": BackendConfig(
            name="app",
            path_prefix="/",
            app_name="gateway",
            servers=servers,
            http_health_check_path="/healthz",
        )
    },
    config_file_path=RAY_SERVE_HAPROXY_CONFIG_FILE_LOC,
)
api._generate_config_file_internal()
"""
LONG = {
    "model": CHAT_MODEL,
    "stream": True,
    "max_tokens": 3000,
    "messages": [{"role": "user", "content": "Hi"}],
}
"""Half a minute of tokens: nobody reads it to the end."""
MARK = 'delta":{"content":"'


@dataclass
class Front:
    cell: LocalCell
    secure: str
    clear: str
    certificate: Path

    def client(self, url: str, *, http1: bool, http2: bool) -> httpx.AsyncClient:
        trusted = ssl.create_default_context(cafile=self.certificate)
        headers = {"x-api-key": self.cell.tenant_key}
        return httpx.AsyncClient(
            base_url=url, headers=headers, timeout=30, verify=trusted, http1=http1, http2=http2
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    folder = Path(tmp_path_factory.mktemp("front"))
    certificate, key = self_signed(folder)
    base = cell_config(folder / "cell")
    chat = base.models[0].model_copy(update={"simulated": Simulated()})
    config = base.model_copy(update={"models": (chat, *base.models[1:])})
    tls = Tls(certificate=certificate, key=key)
    async with local_cell(config) as cell, proxied(cell, tls) as secure, proxied(cell, None) as clear:
        yield Front(cell, secure, clear, certificate)


@asynccontextmanager
async def proxied(cell: LocalCell, tls: Tls | None) -> AsyncIterator[str]:
    """Run HAProxy before the cell's gateway, started as Serve starts it."""
    port = free_port()
    config = Config(gateway=Gateway(port=port, tls=tls))
    # Sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="zg-", dir="/tmp") as name:
        environment = serve_environment(config, Path(name))
        replica = str(urlsplit(cell.base_url).port)
        rendered = await asyncio.create_subprocess_exec(
            sys.executable, "-W", "ignore", "-c", RENDER, str(port), replica,
            env={**os.environ, **environment},
        )  # fmt: skip
        assert await rendered.wait() == 0
        wrapper = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
        path = environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]
        process = await asyncio.create_subprocess_exec(wrapper, "-db", "-f", path)
        try:
            async with asyncio.timeout(20):
                while not await opens(port):
                    assert process.returncode is None
                    await asyncio.sleep(0.01)
            yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
        finally:
            process.terminate()
            await process.wait()


async def opens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


in_one_loop = pytest.mark.asyncio(loop_scope="module")


@in_one_loop
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "http2", "version"),
    [
        ("https", True, "HTTP/2"),
        ("https", False, "HTTP/1.1"),
        ("http", True, "HTTP/2"),
        ("http", False, "HTTP/1.1"),
    ],
)
async def test_tokens_arrive_while_the_unit_still_makes_them(
    front: Front, scheme: str, http2: bool, version: str
) -> None:
    url = front.secure if scheme == "https" else front.clear
    async with (
        # In the clear a client has to know that HTTP/2 is spoken, and then speaks nothing else.
        front.client(url, http1=scheme == "https" or not http2, http2=http2) as client,
        client.stream("POST", "/v1/chat/completions", json=LONG) as answer,
    ):
        assert (answer.status_code, answer.http_version) == (200, version)
        assert answer.headers["x-request-id"].startswith("req_")
        async for line in answer.aiter_lines():
            if MARK in line and json.loads(line.removeprefix("data: "))["choices"][0]["delta"]["content"]:
                break
        # Half a minute of tokens is still to come, so nothing waited for the end of the answer.
        assert (await front.cell.running())[f"{CHAT_MODEL}-0"] == 1
    # Who leaves frees the slot at once, on a connection that others may share.
    await front.cell.until_idle()


@in_one_loop
@pytest.mark.slow
async def test_the_python_client_takes_the_certificate(front: Front) -> None:
    def models(ca_file: Path | None) -> int:
        with Grid(front.secure, front.cell.tenant_key, ca_file=ca_file, max_retries=0) as grid:
            return len(grid.units())

    assert await asyncio.to_thread(models, front.certificate) == 2
    with pytest.raises(Unreachable, match="certificate"):
        await asyncio.to_thread(models, None)


@in_one_loop
@pytest.mark.slow
async def test_a_front_with_tls_speaks_nothing_else(front: Front) -> None:
    async with httpx.AsyncClient(timeout=30) as client:
        with pytest.raises(httpx.TransportError):
            await client.get(front.secure.replace("https", "http") + "/healthz")


# --- what can't serve -----------------------------------------------------------------------


def test_a_good_pair_is_taken(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    check_tls(Tls(certificate=certificate, key=key))


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    key.chmod(0o640)
    with pytest.raises(InvalidRequest, match=r"gateway\.tls\.key: .*chmod 600") as raised:
        check_tls(Tls(certificate=certificate, key=key))
    assert raised.value.param == "gateway.tls.key"


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    certificate, _ = self_signed(tmp_path)
    _, key = self_signed(tmp_path / "other")
    with pytest.raises(InvalidRequest, match=r"gateway\.tls\.certificate: .*don't belong together"):
        check_tls(Tls(certificate=certificate, key=key))


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    with pytest.raises(InvalidRequest, match=r"gateway\.tls\.certificate: .*absent\.pem can't be read"):
        check_tls(Tls(certificate=tmp_path / "absent.pem", key=key))
    with pytest.raises(InvalidRequest, match=r"gateway\.tls\.key: .*absent\.pem can't be read"):
        check_tls(Tls(certificate=certificate, key=tmp_path / "absent.pem"))
