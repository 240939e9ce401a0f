"""What does the gateway cost? Against a trivial FastAPI deployment on the same Serve, and a direct link.

    python benchmarks/gateway.py [--json OUT] [--seconds S] [--rounds N] [--replicas N]

Starts a cell of simulated units in a temporary folder and, on the same Ray cluster and behind the same
HAProxy, a FastAPI deployment with as many replicas that answers from memory. Alternating rounds; medians.

  requests   one-token answers, 32 clients and 1 client: gateway (authenticated, planned, placed, generated)
             against the trivial deployment
  streams    32 streams of 512 tokens at full speed: tokens per second of both
  added      TTFT through the gateway minus TTFT over a link straight to the unit, at one request at a time
             and with 32 streams at 10 ms a token

The load is a process of its own on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
# A script's own folder is searched first, and this file's name would hide the package.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != HERE]

from gateway.launch import CellInfo, cell_paths, down, up  # noqa: E402
from gateway.trust.keyfiles import LINK_KEY_FILE, secret_path  # noqa: E402
from grid.config import Config  # noqa: E402
from grid.hardware import catalogue  # noqa: E402
from grid.words import Precision  # noqa: E402

FAST, PACED = "sim-fast", "sim-paced"
GPU = "H100"
PARAMETERS_B = 8.0
CLIENTS = 32
STREAM_TOKENS = 512
PACED_TOKENS = 100
PACE_MS = 10.0
QUESTION = "How do I reset my password?"
REQUESTS_TARGET, LONE_P50_TARGET_MS, TOKENS_TARGET = 0.6, 2.5, 40_000

TRIVIAL = """
import json, sys
import ray
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from ray import serve

app = FastAPI()

class Question(BaseModel):
    input: str
    tokens: int = 1

@app.post("/answer")
async def answer(question: Question):
    return {"output": "hello", "usage": {"output_tokens": 1}}

@app.post("/stream")
async def stream(question: Question):
    async def events():
        for index in range(question.tokens):
            yield b'event: token\\ndata: {"index":%d,"text":" token","tokens":1}\\n\\n' % index
        yield b'event: done\\ndata: {"usage":{"output_tokens":%d}}\\n\\n' % question.tokens
    return StreamingResponse(events(), media_type="text/event-stream")

address, replicas = sys.argv[1], int(sys.argv[2])
ray.init(address=address, namespace="zerogrid", log_to_driver=False, logging_level="ERROR")
trivial = serve.deployment(
    name="trivial",
    num_replicas=replicas,
    max_ongoing_requests=2000,
    ray_actor_options={"num_cpus": 0},
    logging_config={"log_level": "WARNING", "enable_access_log": False},
)(serve.ingress(app)())
serve.run(trivial.bind(), name="trivial", route_prefix="/trivial")
placement = ray.get(ray.get_actor("placement").address.remote())
print(json.dumps({"placement": list(placement)}))
"""


def configuration(state_dir: Path, replicas: int) -> Config:
    """Return a cell with a unit that waits for nothing and one that makes a token each 10 ms."""
    decode_ms = catalogue.decode_ms_per_token(GPU, PARAMETERS_B, Precision.BF16, 0.0)
    shared = {
        "engine": "simulated",
        "precision": "bf16",
        "gpu": GPU,
        "parameters_b": PARAMETERS_B,
        "max_running": 256,
        "max_waiting": 256,
    }
    return Config.model_validate(
        {
            "cell": {"name": "bench", "state_dir": str(state_dir)},
            "gateway": {"port": free_port(), "replicas": replicas},
            "models": [
                {"name": FAST, **shared, "simulated": {"full_speed": True}},
                {"name": PACED, **shared, "simulated": {"speed": decode_ms / PACE_MS}},
            ],
        }
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def deploy_trivial(config: Config, replicas: int) -> tuple[str, int]:
    """Put the baseline beside the gateway; return where placement listens."""
    paths = cell_paths(config)
    address = json.loads(paths.record.read_text())["address"]
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(paths.ray_token),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", TRIVIAL, address, str(replicas)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    host, port = json.loads(done.stdout.splitlines()[-1])["placement"]
    return host, port


class Bench:
    def __init__(self, info: CellInfo, config: Config, seconds: float) -> None:
        self._url = info.base_url
        self._key = info.tenant_key or ""
        self._config = config
        self._seconds = seconds

    def load(self, path: str, body: dict[str, Any], clients: int) -> dict[str, Any]:
        order = {
            "url": self._url + path,
            "body": json.dumps(body),
            "headers": {"x-api-key": self._key},
            "clients": clients,
            "seconds": self._seconds,
            "first_mark": "event: token",
        }
        done = subprocess.run(
            [sys.executable, str(HERE / "http_load.py"), json.dumps(order)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        result: dict[str, Any] = json.loads(done.stdout)
        failed = {status: count for status, count in result["statuses"].items() if status != "200"}
        if failed or not result["requests"]:
            raise RuntimeError(f"{path} with {clients} clients answered {result['statuses']}")
        return result

    def declare(self, model: str, tokens: int) -> str:
        """Declare a pipeline, wait until it is active, and return the path that invokes it."""
        step = {"type": "generation", "model": model, "max_output_tokens": tokens}
        with httpx.Client(base_url=self._url, headers={"x-api-key": self._key}, timeout=30) as client:
            made = client.post("/v1/pipelines", json={"name": "bench", "pipeline": {"steps": [step]}})
            made.raise_for_status()
            path = f"/v1/pipelines/{made.json()['pipeline_id']}"
            deadline_s = time.monotonic() + 30
            while client.get(path).json()["status"] != "active":
                if time.monotonic() > deadline_s:
                    raise RuntimeError("the pipeline did not become active")
                time.sleep(0.1)
        return f"{path}/invoke"

    def requests(self, rounds: int) -> dict[str, Any]:
        invoke = self.declare(FAST, 1)
        whole, streamed = {"input": QUESTION, "stream": False}, {"input": QUESTION}
        trivial = {"input": QUESTION}
        runs: dict[str, list[dict[str, Any]]] = {}
        for _ in range(rounds):
            for name, path, body, clients in (
                ("trivial_32", "/trivial/answer", trivial, CLIENTS),
                ("gateway_32", invoke, whole, CLIENTS),
                ("gateway_sse_32", invoke, streamed, CLIENTS),
                ("trivial_1", "/trivial/answer", trivial, 1),
                ("gateway_1", invoke, whole, 1),
                ("gateway_sse_1", invoke, streamed, 1),
            ):
                runs.setdefault(name, []).append(self.load(path, body, clients))
        ratios = [
            ours["requests_per_s"] / base["requests_per_s"]
            for ours, base in zip(runs["gateway_32"], runs["trivial_32"], strict=True)
        ]
        return {
            **{name: summary(results) for name, results in runs.items()},
            "ratio_32": round(statistics.median(ratios), 3),
        }

    def streams(self, rounds: int) -> dict[str, Any]:
        invoke = self.declare(FAST, STREAM_TOKENS)
        runs: dict[str, list[dict[str, Any]]] = {}
        for _ in range(rounds):
            base = self.load("/trivial/stream", {"input": QUESTION, "tokens": STREAM_TOKENS}, CLIENTS)
            runs.setdefault("trivial", []).append(base)
            runs.setdefault("gateway", []).append(self.load(invoke, {"input": QUESTION}, CLIENTS))
        return {name: summary(results) for name, results in runs.items()}

    def added(self, rounds: int, placement: tuple[str, int]) -> dict[str, Any]:
        one, paced = self.declare(FAST, 1), self.declare(PACED, PACED_TOKENS)
        results: dict[str, Any] = {}
        for name, model, path, clients, tokens in (
            ("one_at_a_time", FAST, one, 1, 1),
            ("streams_32_paced", PACED, paced, CLIENTS, PACED_TOKENS),
        ):
            through: list[float] = []
            direct: list[float] = []
            for _ in range(rounds):
                direct.append(self.direct_ttft_ms(placement, model, clients, tokens))
                through.append(self.load(path, {"input": QUESTION}, clients)["ttft_ms"]["p50"])
            pairs = zip(through, direct, strict=True)
            results[name] = {
                "direct_ttft_ms_p50": round(statistics.median(direct), 3),
                "gateway_ttft_ms_p50": round(statistics.median(through), 3),
                "added_ms_p50": round(statistics.median(ours - bare for ours, bare in pairs), 3),
            }
        return results

    def direct_ttft_ms(self, placement: tuple[str, int], model: str, clients: int, tokens: int) -> float:
        """Return the median TTFT over a link to the unit, from a process of its own."""
        order = json.dumps(
            {
                "placement": placement,
                "secret": str(secret_path(self._config.cell.state_dir, LINK_KEY_FILE)),
                "model": model,
                "clients": clients,
                "question": QUESTION,
                "tokens": tokens,
                "seconds": self._seconds,
            }
        )
        done = subprocess.run(
            [sys.executable, str(HERE / "link_load.py"), order],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return float(done.stdout)


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians over rounds."""

    def median(*keys: str) -> float | None:
        found = []
        for result in results:
            value: Any = result
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                found.append(float(value))
        return round(statistics.median(found), 3) if found else None

    return {
        "requests_per_s": median("requests_per_s"),
        "tokens_per_s": median("tokens_per_s"),
        "latency_ms_p50": median("latency_ms", "p50"),
        "latency_ms_p99": median("latency_ms", "p99"),
        "ttft_ms_p50": median("ttft_ms", "p50"),
        "ttft_ms_p99": median("ttft_ms", "p99"),
    }


# --- the report -------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    requests, streams, added = results["requests"], results["streams"], results["added"]
    rows = [f"{'':24}{'req/s':>10}{'p50 ms':>10}{'p99 ms':>10}{'tokens/s':>12}"]
    for name, found in [*((n, f) for n, f in requests.items() if isinstance(f, dict)), *streams.items()]:
        label = f"{name} {'streams' if name in streams else 'clients'}"
        rows.append(
            f"{label:24}{found['requests_per_s']:>10.0f}{found['latency_ms_p50']:>10.2f}"
            f"{found['latency_ms_p99']:>10.2f}{found['tokens_per_s']:>12.0f}"
        )
    rows.append("")
    rows.append(f"gateway / trivial at {CLIENTS} clients: {requests['ratio_32']} (target {REQUESTS_TARGET})")
    lone_ms = requests["gateway_1"]["latency_ms_p50"]
    rows.append(f"one client, p50: {lone_ms} ms (target {LONE_P50_TARGET_MS})")
    tokens_per_s = streams["gateway"]["tokens_per_s"]
    rows.append(f"{CLIENTS} streams at full speed: {tokens_per_s:.0f} tokens/s (target {TOKENS_TARGET})")
    for name, found in added.items():
        rows.append(
            f"added TTFT, {name}: {found['added_ms_p50']} ms "
            f"({found['direct_ttft_ms_p50']} direct, {found['gateway_ttft_ms_p50']} through the gateway)"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1, help="of the gateway and of the baseline")
    options = parser.parse_args()
    # Ended from outside, the cell is still taken down.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="zerogrid-bench-") as folder:
        config = configuration(Path(folder), options.replicas)
        info = up(config, progress=lambda line: print(line, file=sys.stderr))
        try:
            print("starting the baseline", file=sys.stderr)
            placement = deploy_trivial(config, options.replicas)
            bench = Bench(info, config, options.seconds)
            results: dict[str, Any] = {
                "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
                "replicas": options.replicas,
            }
            for name, measure in (
                ("requests", bench.requests),
                ("streams", bench.streams),
                ("added", partial(bench.added, placement=placement)),
            ):
                print(f"measuring {name}", file=sys.stderr)
                results[name] = measure(options.rounds)
                print(json.dumps(results[name], indent=1), file=sys.stderr)
        finally:
            down(config, progress=lambda line: print(line, file=sys.stderr))
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
