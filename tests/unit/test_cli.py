"""The command line against a gateway that is a function and a launcher that starts nothing."""

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateway import FINISH, LISTED, RETRIEVAL, START, refusal, sse
from support.stories import explained_story
from typer.testing import CliRunner, Result

from gateway.cli import units
from gateway.cli.app import app
from gateway.cli.cell import told_by
from gateway.cli.console import EXIT_FAILED, EXIT_UNREACHABLE, EXIT_USAGE
from gateway.launch import lines_until
from gateway.observe.explain import explanation
from gateway.observe.explain import told as told_of
from grid import Grid, client
from grid.errors import InternalError

UNIT = {
    "unit_id": "unit-m-0",
    "model": "m",
    "simulated": True,
    "state": "ready",
    "region": "local",
    "gpu_type": "H100",
    "precision": "fp8",
    "running": 1,
    "max_running": 16,
    "waiting": 0,
    "max_waiting": 32,
    "node_id": "node-a",
    "kv_tokens_free": 250,
    "kv_tokens_total": 1000,
    "sample_age_ms": 120.0,
}
QUEUE = {"model": "m", "waiting": 5, "tenants": 1, "oldest_ms": 1234.0, "wait_ms": 2000.0}
METRICS = {
    "request_rate_per_second": 2.5,
    "p99_latency_ms": 840.4,
    "error_rate_5xx": 0.01,
}
GPU = {
    "node_id": "node-1",
    "index": 3,
    "product": "NVIDIA L4",
    "memory_free_mb": None,
    "memory_foreign_mb": 2048.0,
    "compute_utilisation": 0.77,
    "units": ["unit-m-0"],
    "fault": None,
    "throttled_by": ["power cap"],
}
SOURCE = {
    "name": "help",
    "data_source_id": "ds-1",
    "type": "qdrant",
    "embedding_model": "e",
    "document_count": 2,
    "last_updated_at": "2025-01-01T00:00:00Z",
}
Routes = dict[tuple[str, str], httpx.Response | Callable[[httpx.Request], httpx.Response]]


class Gateway:
    def __init__(self) -> None:
        self.routes: Routes = {}
        self.asked: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self.routes.get((request.method, request.url.path))
        if answer is None:
            return refusal(404, "not_found")
        return answer(request) if callable(answer) else answer


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gateway:
    served = Gateway()

    class Client(httpx.Client):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "transport": httpx.MockTransport(served)})

    monkeypatch.setattr(client.httpx, "Client", Client)
    for name in ("GRID_URL", "GRID_API_KEY", "GRID_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return served


def grid(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_invoke_prints_the_answer_on_stdout_and_where_it_ran_on_stderr(gateway: Gateway) -> None:
    gateway.routes = {
        ("GET", "/v1/pipelines"): httpx.Response(200, json={"pipelines": [LISTED]}),
        ("POST", "/v1/pipelines/pl-1/invoke"): httpx.Response(
            200,
            content=sse(
                ("start", START),
                ("token", {"index": 0, "text": "15 \x1b[31mminutes", "tokens": 1}),
                ("done", FINISH),
            ),
        ),
    }
    result = grid("invoke", "support", "How long?", "--key", "zg-1", "--var", "a=b=c")
    assert (result.exit_code, result.stdout) == (0, "15 [31mminutes\n")
    assert "unit-m-0 in local (simulated)" in result.stderr
    assert "no cache here" in result.stderr
    assert json.loads(gateway.asked[1].content)["variables"] == {"a": "b=c"}
    assert gateway.asked[1].headers["x-api-key"] == "zg-1"


def test_invoke_as_json_is_one_value(gateway: Gateway) -> None:
    body = {**START, **FINISH, "output": "15 minutes", "retrieval": [RETRIEVAL]}
    gateway.routes = {("POST", "/v1/pipelines/pl-1/invoke"): httpx.Response(200, json=body)}
    answer = json.loads(grid("invoke", "pl-1", "How long?", "--json").stdout)
    assert (answer["text"], answer["usage"]["output_tokens"]) == ("15 minutes", 2)
    assert answer["documents"][0]["document_id"] == "d1"


def test_lists_are_tables_or_json(gateway: Gateway) -> None:
    key = {"key_id": "key-1", "tenant_id": "t", "operator": False, "label": "", "created_at": "2025"}
    gateway.routes = {
        ("GET", "/v1/units"): httpx.Response(200, json={"units": [UNIT], "gpus": [GPU]}),
        ("GET", "/v1/keys"): httpx.Response(200, json={"keys": [key]}),
        ("GET", "/v1/data-sources"): httpx.Response(200, json={"data_sources": [SOURCE]}),
    }
    assert "unit-m-0" in grid("units").stdout
    assert json.loads(grid("units", "--json").stdout) == {"units": [UNIT]}
    [header, line] = grid("gpus").stdout.splitlines()
    assert header.split()[-1] == "state"
    assert line.split() == ["node-1", "3", "L4", "?", "2048", "77%", "unit-m-0", "power", "cap"]
    assert json.loads(grid("gpus", "--json").stdout) == {"gpus": [GPU]}
    guessed = {**GPU, "catalogue_name": None, "warning": "L4x is not in the catalogue"}
    gateway.routes["GET", "/v1/units"] = httpx.Response(
        200, json={"units": [], "gpus": [GPU, guessed, guessed]}
    )
    assert grid("gpus").stderr.splitlines() == ["warning: L4x is not in the catalogue"]
    assert "key-1" in grid("keys", "list").stdout
    assert json.loads(grid("keys", "list", "--json").stdout) == {"keys": [key]}
    assert "help" in grid("sources", "list").stdout
    assert json.loads(grid("sources", "show", "help", "--json").stdout) == SOURCE


def test_top_shows_the_busiest_unit_first_and_the_totals(gateway: Gateway) -> None:
    busy = {**UNIT, "unit_id": "unit-m-1", "running": 16, "waiting": 3, "state": "draining"}
    gateway.routes = {
        ("GET", "/v1/units"): httpx.Response(200, json={"units": [UNIT, busy], "queues": [QUEUE]}),
        ("GET", "/v1/metrics"): httpx.Response(200, json={"metrics": METRICS}),
    }
    shown = grid("top", "--once").stdout
    assert "1/2 units ready   17 streams   8 waiting   KV 75%" in shown
    assert "2.5/s   p99 840 ms   5xx 1.0%" in shown
    assert "5 of 1 tenant wait for m: the first for 1.2 s, a new tenant for about 2.0 s" in shown
    assert shown.index("unit-m-1") < shown.index("unit-m-0")
    told = json.loads(grid("top", "--json").stdout)
    assert told["totals"] == {
        "units": 2,
        "ready": 1,
        "streams": 17,
        "waiting": 8,
        "kv_tokens_used": 1500,
        "kv_tokens_total": 2000,
    }
    assert told["metrics"] == METRICS


def test_top_shows_a_cell_without_units(gateway: Gateway) -> None:
    gateway.routes = {
        ("GET", "/v1/units"): httpx.Response(200, json={"units": [], "queues": []}),
        ("GET", "/v1/metrics"): httpx.Response(200, json={"metrics": {**METRICS, "p99_latency_ms": None}}),
    }
    assert "0/0 units ready" in grid("top").stdout, "without a terminal it shows itself once"


@pytest.mark.parametrize("target", ["unit-m-0", "node-a"])
def test_drain_waits_until_nothing_runs(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(units, "POLL_S", 0.0)
    states = iter(["ready", "draining", "drained"])
    gateway.routes = {
        ("GET", "/v1/units"): lambda _: httpx.Response(
            200, json={"units": [{**UNIT, "state": next(states)}]}
        ),
        ("POST", "/v1/units/unit-m-0/drain"): httpx.Response(200, json={**UNIT, "state": "draining"}),
    }
    result = grid("drain", target)
    assert result.stdout == "unit-m-0 is drained\n"
    assert "waiting for 1 streams" in result.stderr
    sent = next(request for request in gateway.asked if request.method == "POST")
    assert json.loads(sent.content) == {"draining": True, "restart": False}


def test_drain_gives_up_waiting_but_not_draining(gateway: Gateway) -> None:
    gateway.routes = {
        ("GET", "/v1/units"): httpx.Response(200, json={"units": [{**UNIT, "state": "draining"}]}),
        ("POST", "/v1/units/unit-m-0/drain"): httpx.Response(200, json={**UNIT, "state": "draining"}),
    }
    result = grid("drain", "unit-m-0", "--timeout", "0")
    assert result.exit_code == EXIT_FAILED
    assert "1 streams still run" in result.stderr
    assert grid("drain", "unit-m-0", "--no-wait").stdout == "unit-m-0 is draining\n"


def test_drain_is_undone_and_restarts(gateway: Gateway) -> None:
    gateway.routes = {
        ("GET", "/v1/units"): httpx.Response(200, json={"units": [UNIT]}),
        ("POST", "/v1/units/unit-m-0/drain"): httpx.Response(200, json=UNIT),
    }
    assert grid("drain", "unit-m-0", "--undo").stdout == "unit-m-0 is ready\n"
    assert "restarts once it is idle" in grid("drain", "unit-m-0", "--restart").stdout
    sent = [json.loads(request.content) for request in gateway.asked if request.method == "POST"]
    assert sent == [{"draining": False, "restart": False}, {"draining": True, "restart": True}]
    assert grid("drain", "unit-m-0", "--undo", "--restart").exit_code == EXIT_USAGE
    assert "no unit and no node is called 'unit-x'" in grid("drain", "unit-x").stderr


def test_the_shell_is_given_its_completions(gateway: Gateway) -> None:
    environment = {"_GRID_COMPLETE": "complete_bash", "COMP_WORDS": "grid dra", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], prog_name="grid", env=environment).stdout.split() == ["drain"]


def test_a_new_key_is_shown(gateway: Gateway) -> None:
    made = {"key_id": "key-1", "tenant_id": "acme", "key": "zg-secret"}
    gateway.routes = {("POST", "/v1/keys"): httpx.Response(201, json=made)}
    assert "zg-secret" in grid("keys", "create", "acme", "--label", "ci").stdout
    assert json.loads(gateway.asked[0].content) == {"tenant_id": "acme", "label": "ci", "operator": False}


def test_apply_makes_source_documents_and_pipeline(gateway: Gateway, tmp_path: Path) -> None:
    contract = {"name": "support", "pipeline": {"steps": []}}
    (tmp_path / "docs.jsonl").write_text(
        '{"id": "a", "title": "T", "text": "x"}\n\n{"id": "b", "text": "y"}\n'
    )
    (tmp_path / "manifest.json").write_text(
        json.dumps(
            {
                "data_source": {"name": "help", "type": "qdrant"},
                "documents": "docs.jsonl",
                "pipeline": contract,
            }
        )
    )
    gateway.routes = {
        ("GET", "/v1/data-sources"): httpx.Response(200, json={"data_sources": []}),
        ("POST", "/v1/data-sources"): httpx.Response(201, json=SOURCE),
        ("GET", "/v1/data-sources/ds-1"): httpx.Response(200, json=SOURCE),
        ("POST", "/v1/data-sources/ds-1/documents"): httpx.Response(
            200, json={"added": 2, "replaced": 0, "document_count": 2}
        ),
        ("GET", "/v1/pipelines"): httpx.Response(200, json={"pipelines": []}),
        ("POST", "/v1/pipelines"): httpx.Response(201, json=LISTED),
        ("GET", "/v1/pipelines/pl-1"): httpx.Response(200, json=LISTED),
    }
    result = grid("apply", str(tmp_path / "manifest.json"), "--json")
    assert result.exit_code == 0, result.output
    done = json.loads(result.stdout)
    assert done["documents"]["added"] == 2
    assert done["pipeline"]["status"] == "active"
    sent = next(r for r in gateway.asked if r.url.path.endswith("/documents"))
    assert json.loads(sent.content)["documents"] == [
        {"id": "a", "text": "T\nx", "metadata": {"title": "T"}},
        {"id": "b", "text": "y"},
    ]


def test_apply_says_so_where_nothing_changes(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps({"name": LISTED["name"], "pipeline": {"steps": []}}))
    gateway.routes = {
        ("GET", "/v1/pipelines"): httpx.Response(200, json={"pipelines": [LISTED]}),
        ("PUT", "/v1/pipelines/pl-1"): httpx.Response(200, json=LISTED),
        ("GET", "/v1/pipelines/pl-1"): httpx.Response(200, json=LISTED),
    }
    assert "unchanged, active as pl-1, revision 1" in grid("apply", str(tmp_path / "p.json")).stdout
    gateway.routes["PUT", "/v1/pipelines/pl-1"] = httpx.Response(200, json={**LISTED, "revision": 2})
    gateway.routes["GET", "/v1/pipelines/pl-1"] = httpx.Response(200, json={**LISTED, "revision": 2})
    said = grid("apply", str(tmp_path / "p.json")).stdout
    assert "revision 2" in said
    assert "unchanged" not in said


def test_sources_are_deleted_by_force_when_asked(gateway: Gateway) -> None:
    gateway.routes = {
        ("GET", "/v1/data-sources/ds-1"): httpx.Response(200, json=SOURCE),
        ("DELETE", "/v1/data-sources/ds-1"): httpx.Response(200, json={"deleted": True, "id": "ds-1"}),
    }
    for options, query in (((), ""), (("--force",), "force=true")):
        assert grid("sources", "delete", "ds-1", *options).exit_code == 0
        assert gateway.asked[-1].url.query.decode() == query


def test_apply_shows_why_a_pipeline_failed(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"name": "support", "pipeline": {"steps": [{}]}}')
    failed = {**LISTED, "status": "failed", "reason": "no unit runs model-x"}
    gateway.routes = {
        ("GET", "/v1/pipelines"): httpx.Response(200, json={"pipelines": []}),
        ("POST", "/v1/pipelines"): httpx.Response(201, json=failed),
        ("GET", "/v1/pipelines/pl-1"): httpx.Response(200, json=failed),
    }
    result = grid("apply", str(tmp_path / "p.json"))
    assert result.exit_code == EXIT_FAILED
    assert "no unit runs model-x" in result.stderr


CANDIDATE = {
    "unit_id": "unit-m-0",
    "gpu_type": "H100",
    "region": "local",
    "simulated": True,
    "queue_ms": 1.0,
    "prefill_ms": 2.0,
    "decode_ms": 30.0,
    "total_ms": 33.3,
    "cu_seconds": 0.0123,
    "cached_tokens": 0,
}
PLAN = {
    "runnable": True,
    "ttft_ms": 3.3,
    "total_ms": 33.3,
    "cu_seconds": 0.0123,
    "warnings": ["no cache here"],
    "steps": [
        {
            "step_id": "generation-1",
            "model": "m",
            "uses": ["find"],
            "refusal": None,
            "candidates": [CANDIDATE] * 12,
            "candidate_count": 40,
            "rejections": [{"unit_id": "unit-e-0", "code": "task", "detail": "does embed"}],
            "rejected_by_code": {"task": 1},
        }
    ],
}


def test_a_dry_run_shows_units_times_and_reasons(gateway: Gateway) -> None:
    gateway.routes = {("POST", "/v1/pipelines/pl-1/dry-run"): httpx.Response(200, json=PLAN)}
    shown = grid("dry-run", "pl-1", "Hi?", "--var", "a=b")
    assert shown.exit_code == 0, shown.output
    for part in ("unit-m-0", "(simulated)", "33.3", "30 more candidates", "not unit-e-0: does embed"):
        assert part in shown.stdout
    assert "first token after 3.3 ms" in shown.stdout
    assert "no cache here" in shown.stderr
    assert json.loads(gateway.asked[0].content) == {"input": "Hi?", "variables": {"a": "b"}}
    assert json.loads(grid("dry-run", "pl-1", "Hi?", "--json").stdout) == PLAN


def test_a_dry_run_of_what_cannot_run_says_so(gateway: Gateway) -> None:
    refusal_ = {"status": 503, "code": "no_eligible_unit", "message": "no unit has the memory"}
    step = {**PLAN["steps"][0], "candidates": [], "candidate_count": 0, "refusal": refusal_}  # type: ignore[index]
    plan = {**PLAN, "runnable": False, "steps": [step]}
    gateway.routes = {("POST", "/v1/pipelines/pl-1/dry-run"): httpx.Response(200, json=plan)}
    shown = grid("dry-run", "pl-1", "Hi?")
    assert shown.exit_code == 0
    assert "no unit has the memory" in shown.stdout
    assert "it can't run now" in shown.stdout


def test_a_contract_is_run_or_planned_once(gateway: Gateway, tmp_path: Path) -> None:
    contract = {"pipeline": {"steps": [{}]}}
    (tmp_path / "c.json").write_text(json.dumps(contract))
    (tmp_path / "asks.json").write_text(json.dumps({**contract, "input": "From the file?"}))
    stream = sse(("start", START), ("token", {"index": 0, "text": "Hello", "tokens": 1}), ("done", FINISH))
    bodies: list[dict[str, Any]] = []

    def one_shot(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        asked = "input" in bodies[-1]
        return httpx.Response(200, content=stream) if asked else httpx.Response(200, json=PLAN)

    gateway.routes = {("POST", "/v1/pipeline"): one_shot}
    assert "Hello" in grid("run", str(tmp_path / "c.json"), "Hi?").stdout
    assert "Hello" in grid("run", str(tmp_path / "asks.json")).stdout
    assert "unit-m-0" in grid("run", str(tmp_path / "c.json")).stdout
    assert [body.get("input") for body in bodies] == ["Hi?", "From the file?", None]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "can't be read"),
        ("{", "is not valid JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "empty"),
        ('{"pipline": {}}', "unknown part 'pipline'"),
        ('{"data_source": {}}', "an object with a `name`"),
        ('{"documents": [{"id": "a", "text": "x"}]}', "need a `data_source`"),
        ('{"data_source": {"name": "h"}, "documents": [{"id": 1}]}', "documents[0]: a document is an object"),
        ('{"data_source": {"name": "h"}, "documents": 3}', "should be a list"),
        ('{"pipeline": "absent.json"}', "absent.json: can't be read"),
        ('{"pipeline": 3}', "should be a contract"),
        ('{"pipeline": {"steps": []}}', "needs a `name`"),
    ],
)
def test_a_mistake_in_a_manifest_is_one_of_usage(
    gateway: Gateway, tmp_path: Path, content: str | None, says: str
) -> None:
    if content is not None:
        (tmp_path / "m.json").write_text(content)
    result = grid("apply", str(tmp_path / "m.json"))
    assert result.exit_code == EXIT_USAGE
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_what_the_gateway_refuses_is_a_failure_with_its_request_id(gateway: Gateway) -> None:
    result = grid("invoke", "pl-9", "Hi", "--key", "zg-1")
    assert result.exit_code == EXIT_FAILED
    assert "it is not_found" in result.stderr
    assert "request req_9" in result.stderr
    error = json.loads(grid("sources", "show", "ds-9", "--json").stdout)["error"]
    assert (error["code"], error["status"]) == ("not_found", 404)


def test_a_missing_key_is_told_where_keys_come_from(gateway: Gateway) -> None:
    gateway.routes = {("GET", "/v1/units"): refusal(401, "unauthorised")}
    assert "set GRID_API_KEY" in grid("units").stderr
    assert "it is unauthorised" in grid("units", "--key", "zg-wrong").stderr


def test_nobody_there_is_its_own_exit_code(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(client, "Grid", partial(client.Grid, sleep=lambda _seconds: None))
    gateway.routes = {("GET", "/v1/units"): refuse}
    result = grid("units", "--url", "http://nowhere:1")
    assert result.exit_code == EXIT_UNREACHABLE
    assert "no answer from the gateway at http://nowhere:1" in result.stderr
    assert "GRID_URL" in result.stderr


def test_a_ca_file_without_certificates_is_named(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    result = grid("units", "--url", "https://127.0.0.1:8000", "--ca", str(tmp_path / "ca.pem"))
    assert result.exit_code == EXIT_USAGE
    assert "ca.pem: holds no certificates to trust" in result.stderr


def test_explain_shows_predicted_and_actual_times_and_what_was_rejected(gateway: Gateway) -> None:
    told = explanation(told_of(explained_story()))
    gateway.routes = {("GET", "/v1/requests/req_1"): httpx.Response(200, json=told)}
    result = grid("explain", "req_1")
    assert result.exit_code == 0, result.stderr
    for part in ("unit-a", "unit-b", "30.0", "40.0", "rejected: 2 by region", "good (200)"):
        assert part in result.stdout
    assert json.loads(grid("explain", "req_1", "--json").stdout) == told
    assert grid("explain", "req_2").exit_code == EXIT_FAILED


@pytest.mark.parametrize(
    "arguments",
    [
        ("invoke",),
        ("nonsense",),
        ("units", "--url", "localhost:8000"),
        ("invoke", "p", "x", "--var", "novalue"),
    ],
)
def test_wrong_usage(gateway: Gateway, arguments: tuple[str, ...]) -> None:
    assert grid(*arguments).exit_code == EXIT_USAGE


def test_a_mistake_in_the_configuration_is_one_of_usage(gateway: Gateway, tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text("gatway: {}")
    result = grid("up")
    assert result.exit_code == EXIT_USAGE
    assert "did you mean 'gateway'?" in result.stderr


# --- a gateway that is silent ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routes", "told"),
    [
        ({}, {"ready": False, "not_ready": ["the gateway does not answer: away"]}),
        (
            {"/readyz": httpx.Response(503, json={"error": {"code": "rejected", "message": "no replica"}})},
            {"ready": False, "not_ready": ["the gateway does not answer: no replica"]},
        ),
        (
            {
                "/readyz": httpx.Response(503, json={"ready": False, "reasons": ["no unit"]}),
                "/v1/units": httpx.Response(401, json={"error": {"message": "wrong key"}}),
            },
            {"ready": False, "not_ready": ["no unit"], "units_unknown": "wrong key"},
        ),
        (
            {
                "/readyz": httpx.Response(200, json={"ready": True, "reasons": []}),
                "/v1/units": httpx.Response(200, json={"units": [UNIT]}),
            },
            {"ready": True, "not_ready": [], "units": [UNIT]},
        ),
    ],
)
def test_status_says_what_it_knows_of_a_gateway_that_may_be_silent(
    routes: dict[str, httpx.Response], told: dict[str, Any]
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path not in routes:
            raise httpx.ConnectError("away")
        return routes[request.url.path]

    with Grid("http://cell", "zg-op-x", max_retries=0, transport=httpx.MockTransport(answer)) as asked:
        said = told_by(asked, with_units=True)
    if not routes:
        assert said["not_ready"][0].startswith("the gateway does not answer: ")
        said["not_ready"] = told["not_ready"]
    assert said == told


def test_the_start_of_a_cell_waits_for_a_silent_child_only_so_long() -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"one\ntwo\nthr")
        lines = lines_until(read, time.monotonic() + 0.05)
        assert [next(lines), next(lines)] == [b"one", b"two"]
        with pytest.raises(InternalError, match="was not ready within"):
            next(lines)
        os.write(write, b"ee\n")
        os.close(write)
        write = -1
        assert list(lines_until(read, time.monotonic() + 10)) == [b"ee"]
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)
