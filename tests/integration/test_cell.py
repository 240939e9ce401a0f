"""A real cell as `grid up` starts it: Ray, Redis, HAProxy with TLS, replicas, units. Its units are simulated.

The tests run in the order of the file, because a cell takes half a minute to start.
"""

from __future__ import annotations

import ipaddress
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import httpx
import openai
import psutil
import pytest
from support import prometheus
from support.certificates import self_signed
from support.ports import free_port

from gateway import launch
from gateway.redis_server import EmbeddedRedis
from grid import Grid
from grid.config import Cell, Config, Gateway, Model, Simulated, Tls
from grid.errors import InvalidRequest, NoEligibleUnit
from grid.runs import Retrieved, Started, Token

pytestmark = [pytest.mark.cell, pytest.mark.timeout(420)]

MODEL = "sim-8b"
DASHBOARD_WITHIN_S = 60.0
"""Ray shows what its processes report every ten seconds."""
SOURCE = {"name": "kb", "type": "qdrant", "embedding_model": "all-minilm-l6-v2"}
CONTRACT: dict[str, Any] = {
    "name": "support",
    "pipeline": {
        "steps": [
            {
                "type": "retrieval",
                "source": "kb",
                "query_embedding": {"model": "all-minilm-l6-v2", "dimension": 384},
                "top_k": 2,
                "filter": {"status": "published"},
            },
            {"type": "generation", "model": MODEL, "max_output_tokens": 40, "temperature": 0},
        ]
    },
}
DOCUMENTS = [
    {"id": "reset", "text": "Reset your password on the sign-in page.", "metadata": {"status": "published"}},
    {"id": "reset-old", "text": "Reset your password by telephone.", "metadata": {"status": "draft"}},
    {"id": "sftp", "text": "Upload files over SFTP on port 2222.", "metadata": {"status": "published"}},
]


@pytest.fixture(scope="module")
def config() -> Iterator[Config]:
    folder = Path(mkdtemp(prefix="zgt-"))
    certificate, key = self_signed(folder)
    embedding = next(model for model in Config().models if model.engine == "embedding")
    simulated = Model(
        name=MODEL,
        engine="simulated",
        min_units=2,
        max_units=2,
        max_running=8,
        context_tokens=4096,
        gpu="H100",
        simulated=Simulated(seed=3),
    )
    made = Config(
        cell=Cell(name="test", region="eu-central-1", state_dir=folder),
        gateway=Gateway(port=free_port(), drain_s=30.0, tls=Tls(certificate=certificate, key=key)),
        models=(simulated, embedding),
    )
    with pytest.MonkeyPatch.context() as patch:
        # What every client here trusts, as an operator's own authority is made known on a machine.
        patch.setenv("SSL_CERT_FILE", str(certificate))
        yield made
        launch.down(made)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cell(config: Config) -> launch.CellInfo:
    return launch.up(config)


@pytest.fixture
def grid(cell: launch.CellInfo) -> Iterator[Grid]:
    assert cell.tenant_key is not None
    with Grid(cell.base_url, cell.tenant_key) as client:
        yield client


def marked(config: Config) -> list[psutil.Process]:
    return launch.processes(config)


def test_every_model_has_its_units(cell: launch.CellInfo, grid: Grid) -> None:
    assert len(cell.units) == 3
    assert {unit["unit_id"] for unit in grid.units()} == set(cell.units)
    assert {unit["region"] for unit in grid.units()} == {"eu-central-1"}


def test_the_front_speaks_tls_and_http_2(cell: launch.CellInfo) -> None:
    assert cell.base_url.startswith("https://")
    with httpx.Client(base_url=cell.base_url, http2=True) as client:
        assert client.get("/healthz").http_version == "HTTP/2"


def test_nothing_listens_beyond_loopback(cell: launch.CellInfo, config: Config) -> None:
    listening = {
        connection.laddr
        for process in marked(config)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert any(address.port == config.gateway.port for address in listening)
    open_to_others = [a for a in listening if not _is_loopback(a.ip)]
    assert open_to_others == []


def _is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def test_a_declared_pipeline_streams_an_answer_with_its_documents(grid: Grid) -> None:
    source = grid.ensure_source(**SOURCE)
    counts = grid.add_documents(source["data_source_id"], DOCUMENTS)
    assert counts["document_count"] == len(DOCUMENTS)
    assert grid.apply_pipeline(CONTRACT)["status"] == "active"
    with grid.pipeline("support").stream("How do I reset my password?") as run:
        events = list(run)
    assert isinstance(events[0], Started)
    retrieved = next(event for event in events if isinstance(event, Retrieved))
    assert [document.document_id for document in retrieved.documents] == ["reset", "sftp"]
    tokens = [event for event in events if isinstance(event, Token)]
    assert [token.index for token in tokens] == _running_sum(token.tokens for token in tokens)
    answer = run.answer()
    assert answer.usage.output_tokens == 40 == sum(token.tokens for token in tokens)
    assert answer.text == "".join(token.text for token in tokens)
    assert all(step.simulated for step in answer.steps if step.model == MODEL)
    assert grid.pipeline("support").invoke("How do I reset my password?").text == answer.text


def _running_sum(sizes: Iterator[int] | Any) -> list[int]:
    sums, total = [], 0
    for size in sizes:
        sums.append(total)
        total += size
    return sums


def test_the_official_openai_client_streams_a_conversation(cell: launch.CellInfo) -> None:
    with openai.OpenAI(base_url=f"{cell.base_url}/v1", api_key=cell.tenant_key) as client:
        messages: list[Any] = [{"role": "user", "content": "Hello"}]
        first = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
        messages += [first.choices[0].message, {"role": "user", "content": "And then?"}]
        stream = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.prompt_tokens > first.usage.prompt_tokens  # type: ignore[union-attr]


def test_a_contract_that_the_fleet_cannot_run_fails_with_the_reason(grid: Grid) -> None:
    contract = {
        "name": "too-large",
        "pipeline": {"steps": [{"type": "generation", "model": MODEL, "max_output_tokens": 8}]},
        "execution_hints": {"min_gpu_memory_mb": 500_000},
    }
    with pytest.raises(NoEligibleUnit, match=r"500000|500,000"):
        grid.apply_pipeline(contract, timeout_s=30)


def test_a_second_start_finds_the_cell_running(cell: launch.CellInfo, config: Config) -> None:
    again = launch.up(config)
    assert again.already_running
    assert again.base_url == cell.base_url
    assert again.tenant_key is None


def test_a_second_start_brings_back_a_redis_that_died(
    config: Config, cell: launch.CellInfo, grid: Grid
) -> None:
    redis = EmbeddedRedis(config.cell.state_dir)
    died = redis.pid
    assert died is not None
    process = psutil.Process(died)
    process.kill()
    process.wait(5)
    launch.up(config)
    assert redis.pid not in (None, died)
    assert grid.ensure_source(**SOURCE)["data_source_id"], "the key is still known, and writes go on"


def test_a_taken_port_is_named(config: Config, tmp_path: Path) -> None:
    other = config.model_copy(update={"cell": config.cell.model_copy(update={"state_dir": tmp_path})})
    with pytest.raises(InvalidRequest, match=r"set gateway\.port") as raised:
        launch.up(other)
    assert raised.value.param == "gateway.port"


@contextmanager
def calls_of_all_kinds(cell: launch.CellInfo) -> Iterator[None]:
    """Keep the cell busy with answers, mistakes of a caller, and a pipeline that no unit can run."""
    ended = threading.Event()

    def call() -> None:
        with httpx.Client(base_url=cell.base_url, headers={"x-api-key": str(cell.tenant_key)}) as client:
            listed = client.get("/v1/pipelines").json()["pipelines"]
            too_large = next(row["pipeline_id"] for row in listed if row["name"] == "too-large")
            while not ended.is_set():
                chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 8}
                assert client.post("/v1/chat/completions", json=chat).status_code == 200
                assert client.post("/v1/chat/completions", json={}).status_code == 400
                failed = client.post(f"/v1/pipelines/{too_large}/invoke", json={"input": "x"})
                assert failed.status_code == 503

    with ThreadPoolExecutor(1) as other:
        calling = other.submit(call)
        try:
            yield
        finally:
            ended.set()
        calling.result()


@pytest.mark.skipif(prometheus.SERVER is None, reason="no Prometheus here: install the package `prometheus`")
def test_every_query_of_the_dashboard_has_data(cell: launch.CellInfo, config: Config, tmp_path: Path) -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "examples/grafana/cell.json").read_text())
    written = {target["expr"] for panel in dashboard["panels"] for target in panel["targets"]}
    waiting = {expression.replace("$__rate_interval", "15s") for expression in written}
    assert len(waiting) > 15
    gateway = cell.base_url.removeprefix("https://")
    assert config.gateway.tls is not None
    targets = launch.ray_targets(config)
    with (
        prometheus.scraping(
            tmp_path / "prometheus",
            free_port(),
            gateway,
            str(cell.operator_key),
            targets,
            config.gateway.tls.certificate,
        ) as asked,
        calls_of_all_kinds(cell),
    ):
        deadline = time.monotonic() + DASHBOARD_WITHIN_S
        while waiting and time.monotonic() < deadline:
            waiting = {expression for expression in waiting if not asked.query(expression)}
            time.sleep(0.5)
        assert not waiting
        for name in ("zerogrid_unit_utilisation_ratio", "ray_zerogrid_unit_utilisation_ratio"):
            shown = {series["metric"]["unit_id"]: series["metric"]["region"] for series in asked.query(name)}
            assert shown == dict.fromkeys(cell.units, "eu-central-1"), name


def test_the_command_line_tells_of_the_cell(cell: launch.CellInfo, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.json"
    file.write_text(json.dumps({**CONTRACT, "name": "from-cli"}))
    connection = ["--url", cell.base_url, "--key", str(cell.tenant_key), "--json"]
    applied = grid_command("apply", str(file), *connection)
    assert applied["pipeline"]["status"] == "active"
    assert grid_command("invoke", "from-cli", "Which port?", *connection)["usage"]["output_tokens"] == 40


def grid_command(*arguments: str) -> Any:
    finished = subprocess.run(
        [Path(sys.executable).with_name("grid"), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return json.loads(finished.stdout)


@contextmanager
def long_answer(cell: launch.CellInfo) -> Iterator[Iterator[bytes]]:
    """Yield the pieces of a streamed answer of about ten seconds, longer than a stop takes to begin."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1500,
        "stream": True,
    }
    headers = {"x-api-key": str(cell.tenant_key)}
    with httpx.stream(
        "POST", f"{cell.base_url}/v1/chat/completions", json=body, headers=headers, timeout=60
    ) as answer:
        assert answer.status_code == 200
        yield answer.iter_bytes()


def test_everything_survives_a_stop_and_a_start(cell: launch.CellInfo, config: Config) -> None:
    assert cell.tenant_key is not None
    with Grid(cell.base_url, cell.tenant_key) as grid:
        before = grid.pipeline("support").invoke("How do I reset my password?")
        pipeline_id = grid.pipeline("support").read()["pipeline_id"]
    with long_answer(cell) as pieces:
        assert b"data: " in next(pieces)
        with ThreadPoolExecutor(1) as other:
            stopping = other.submit(launch.down, config)
            *_, last = pieces
            assert last.endswith(b"data: [DONE]\n\n"), "a stream finishes while its cell stops"
            assert stopping.result()
    assert marked(config) == []
    assert not launch.status(config)["running"]
    again = launch.up(config)
    assert again.tenant_key is None, "keys are shown once"
    with Grid(again.base_url, cell.tenant_key) as grid:
        assert grid.source("kb")["document_count"] == len(DOCUMENTS)
        grid.pipeline(pipeline_id).wait_active()
        after = grid.pipeline(pipeline_id).invoke("How do I reset my password?")
    assert after.text == before.text
    assert [d.document_id for d in after.documents] == [d.document_id for d in before.documents]


def test_a_stopped_cell_leaves_nothing(cell: launch.CellInfo, config: Config) -> None:
    assert launch.down(config)
    assert marked(config) == []
    assert not launch.down(config), "nothing was left to stop"
