"""The demo's promises about its cell, with a launcher that starts nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from support.gateway import FINISH, LISTED, RETRIEVAL, START, sse
from typer.testing import CliRunner

from gateway import demo, launch
from grid import client
from grid.config import Config
from grid.errors import InternalError
from grid.runs import Answer

Handler = Callable[[httpx.Request], httpx.Response]


class Launcher:
    def __init__(self, first: bool = True) -> None:
        self.first = first
        self.calls: list[str] = []
        self.left = 0

    def up(self, config: Config, *, progress: Callable[[str], None]) -> launch.CellInfo:
        self.calls.append("up")
        (config.cell.state_dir / "secrets").mkdir(parents=True, exist_ok=True)
        return launch.CellInfo(
            "demo", "local", "http://cell", "http://dash", "", tenant_key="zg-new" if self.first else None
        )

    def down(self, _config: Config, *, progress: Callable[[str], None]) -> bool:
        self.calls.append("down")
        return True

    def status(self, _config: Config) -> dict[str, Any]:
        return {"running": False, "processes": self.left}


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    fake = Launcher()
    for name in ("up", "down", "status"):
        monkeypatch.setattr(launch, name, getattr(fake, name))
    return fake


def serve(monkeypatch: pytest.MonkeyPatch, handler: Handler) -> None:
    class Client(httpx.Client):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "transport": httpx.MockTransport(handler)})

    monkeypatch.setattr(client.httpx, "Client", Client)


def gateway(request: httpx.Request) -> httpx.Response:
    source = {"name": "help-centre", "data_source_id": "ds-1"}
    record = {**LISTED, "name": "customer-support-pipeline"}
    path = request.url.path
    if path == "/v1/data-sources":
        return httpx.Response(200, json={"data_sources": [source]})
    if path == "/v1/data-sources/ds-1":
        return httpx.Response(200, json=source)
    if path.endswith("/documents"):
        return httpx.Response(200, json={"added": 1, "replaced": 0, "document_count": 46})
    if path.endswith("/invoke"):
        token = {"index": 0, "text": "15 minutes.", "tokens": 3}
        return httpx.Response(
            200, content=sse(("start", START), ("retrieval", RETRIEVAL), ("token", token), ("done", FINISH))
        )
    if request.method == "GET" and path == "/v1/pipelines":
        return httpx.Response(200, json={"pipelines": [record]})
    return httpx.Response(200, json=record)


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(demo.demo)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    simulated = demo.demo_config(True, tmp_path)
    monkeypatch.setattr(demo, "demo_config", lambda _simulated: simulated)


def test_the_demo_asks_three_questions_and_stops_its_cell(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, gateway)
    result = run("--simulated")
    assert result.exit_code == 0, result.output
    assert launcher.calls == ["up", "down"]
    assert result.stdout.count("15 minutes.") == 3
    assert "SIMULATED" in result.stdout
    assert "unit-m-0, m on CPU in local" in result.stdout


def test_as_json_it_is_one_value(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, gateway)
    result = json.loads(run("--simulated", "--json").stdout)
    assert (result["simulated"], result["stopped"]) == (True, True)
    assert [answer["text"] for answer in result["answers"]] == ["15 minutes."] * 3
    assert result["answers"][0]["expected"] == ["15 minutes"]


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), InternalError("no")])
def test_the_cell_is_stopped_whatever_happens(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise raised

    serve(monkeypatch, broken)
    result = run("--simulated", "--keep")
    assert result.exit_code == 1
    assert launcher.calls == ["up", "down"]


def test_keep_leaves_it_running_and_says_how_to_stop_it(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(monkeypatch, gateway)
    result = run("--simulated", "--keep")
    assert launcher.calls == ["up"]
    file = tmp_path / "simulated/grid.yaml"
    assert f"grid down --config {file}" in result.stdout
    assert demo.load(file) == demo.demo_config(True)


def test_processes_that_are_left_are_an_error(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, gateway)
    launcher.left = 2
    result = run("--simulated")
    assert result.exit_code == 1
    assert "2 processes of the cell are still running" in result.stderr


def test_the_key_of_an_earlier_run_is_used_again_and_only_its_owner_may_read_it(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = set()

    def noting(request: httpx.Request) -> httpx.Response:
        keys.add(request.headers["x-api-key"])
        return gateway(request)

    serve(monkeypatch, noting)
    run("--simulated")
    launcher.first = False
    run("--simulated")
    assert keys == {"zg-new"}
    key_file = tmp_path / "simulated/secrets" / demo.KEY_FILE
    assert key_file.stat().st_mode & 0o777 == 0o600


def test_a_cell_whose_key_is_lost_is_made_anew_but_keeps_its_models(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(monkeypatch, gateway)
    state = tmp_path / "simulated"
    (state / "models").mkdir(parents=True)
    (state / "redis").mkdir()
    assert run("--simulated").exit_code == 0
    assert (state / "models").exists()
    assert not (state / "redis").exists()


def test_a_missing_vllm_is_said(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, gateway)
    monkeypatch.setattr(demo, "VLLM_PARTS", ("no_such_module",))
    result = run()
    assert result.exit_code == 0
    assert "no_such_module not installed" in result.stdout
    assert "SIMULATED ENGINE" in result.stdout


def test_speed_counts_the_tokens_after_the_first() -> None:
    answer = Answer.of(
        {**FINISH, "usage": {"output_tokens": 11, "input_tokens": 5}, "ttft_ms": 100.0, "total_ms": 600.0}
    )
    assert demo.tokens_per_s(answer) == pytest.approx(20.0)
    assert demo.tokens_per_s(Answer.of({})) == 0.0
