"""What does tracing cost? Requests that are traced against requests that are not, on the same cell.

    python benchmarks/tracing.py [--json OUT] [--seconds S] [--rounds N]

Starts a cell of one simulated unit that waits for nothing, whose tracing exports to a collector on the same
cores that reads and discards. 32 clients; a request says by its `traceparent` whether it is traced, so both
sides share every process, and they alternate, the first of a round changing from round to round. Answers of
one token are the hardest case, answers of 128 an everyday one. Every traced request is exported whole:
sampling would only make it cheaper.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil

HERE = Path(__file__).resolve().parent
# A script's own folder is searched first, and a neighbour's name would hide the package.
sys.path = [entry for entry in sys.path if Path(entry).resolve() != HERE]

from gateway import launch  # noqa: E402
from grid.config import Config  # noqa: E402

MODEL = "sim-fast"
CLIENTS = 32
ANSWER_TOKENS = (1, 128)
TARGET = 0.95
TRACE = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
SIDES = {"traced": f"00-{TRACE}-01", "not traced": f"00-{TRACE}-00"}
PROCESSES = {
    "gateway": "ServeReplica",
    "placement": "RayPlacement",
    "unit": "RayUnit",
    "HAProxy": "haproxy",
}
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


def configuration(state_dir: Path, collector: str) -> Config:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return Config.model_validate(
        {
            "cell": {"name": "bench", "state_dir": str(state_dir)},
            "gateway": {"port": port, "replicas": 1},
            "tracing": {"endpoint": collector},
            "models": [
                {
                    "name": MODEL,
                    "engine": "simulated",
                    "precision": "bf16",
                    "max_running": 256,
                    "max_waiting": 256,
                    "simulated": {"full_speed": True},
                }
            ],
        }
    )


def collect(told: Connection) -> None:
    """Be a collector: say the port, then count the bytes of every body."""
    received = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal received
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length:")[1].split("\r\n")[0])
                await reader.readexactly(length)
                received += length
                writer.write(ANSWER)
        except asyncio.IncompleteReadError:
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        while True:
            await asyncio.to_thread(told.recv)
            told.send(received)

    asyncio.run(run())


def declare(info: launch.CellInfo, tokens: int) -> str:
    """Declare a pipeline, wait until it is active, and return the path that invokes it."""
    step = {"type": "generation", "model": MODEL, "max_output_tokens": tokens}
    with httpx.Client(base_url=info.base_url, headers={"x-api-key": info.tenant_key or ""}) as client:
        made = client.post("/v1/pipelines", json={"name": "bench", "pipeline": {"steps": [step]}})
        path = f"/v1/pipelines/{made.raise_for_status().json()['pipeline_id']}"
        deadline_s = time.monotonic() + 30
        while client.get(path).json()["status"] != "active":
            if time.monotonic() > deadline_s:
                raise RuntimeError("the pipeline did not become active")
            time.sleep(0.1)
    return f"{path}/invoke"


def load(info: launch.CellInfo, path: str, traceparent: str, seconds: float) -> dict[str, Any]:
    order = {
        "url": info.base_url + path,
        "body": json.dumps({"input": "How do I reset my password?", "stream": False}),
        "headers": {"x-api-key": info.tenant_key, "traceparent": traceparent},
        "clients": CLIENTS,
        "seconds": seconds,
    }
    command = [sys.executable, str(HERE / "http_load.py"), json.dumps(order)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    if list(result["statuses"]) != ["200"]:
        raise RuntimeError(f"answered {result['statuses']}")
    return result


def cpu_s(config: Config) -> Counter[str]:
    """Return the CPU seconds until now of the cell's processes, by what they are."""
    spent: Counter[str] = Counter()
    for process in launch.processes(config):
        with contextlib.suppress(psutil.Error):
            times, title = process.cpu_times(), " ".join(process.cmdline())
            kind = next((kind for kind, mark in PROCESSES.items() if mark in title), "others")
            spent[kind] += times.user + times.system
    return spent


def measure(
    info: launch.CellInfo, config: Config, told: Connection, tokens: int, seconds: float, rounds: int
) -> dict[str, Any]:
    path = declare(info, tokens)
    load(info, path, SIDES["not traced"], seconds)  # warms both
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    bytes_before = _received(told)
    for index in range(rounds):
        for side in sorted(SIDES, reverse=bool(index % 2)):
            before_s = cpu_s(config)
            run = load(info, path, SIDES[side], seconds)
            after_s = cpu_s(config)
            # The load's warm-up and drain are in the CPU time as well, on both sides alike.
            run["cpu_ms"] = {
                kind: (after_s[kind] - before_s[kind]) * 1e3 / run["requests"] for kind in PROCESSES
            }
            runs[side].append(run)
    time.sleep(2.0)  # what waits to be exported
    ratios = [
        on["requests_per_s"] / off["requests_per_s"]
        for on, off in zip(runs["traced"], runs["not traced"], strict=True)
    ]
    return {
        "cores": os.cpu_count(),
        "rounds": rounds,
        "seconds": seconds,
        "requests_per_s": {
            side: round(statistics.median(run["requests_per_s"] for run in each), 1)
            for side, each in runs.items()
        },
        "latency_ms_p99": {
            side: round(statistics.median(run["latency_ms"]["p99"] for run in each), 2)
            for side, each in runs.items()
        },
        "cell_cpu_ms_per_request": {
            side: {
                kind: round(statistics.median(run["cpu_ms"][kind] for run in each), 3) for kind in PROCESSES
            }
            for side, each in runs.items()
        },
        "ratio": round(statistics.median(ratios), 3),
        "ratio_of_totals": round(
            sum(run["requests"] for run in runs["traced"])
            / sum(run["requests"] for run in runs["not traced"]),
            3,
        ),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "exported_bytes": _received(told) - bytes_before,
    }


def _received(told: Connection) -> int:
    told.send(None)
    received: int = told.recv()
    return received


def report(figures: dict[str, Any]) -> None:
    for side in SIDES:
        print(
            f"{side:12}{figures['requests_per_s'][side]:>10.0f} requests/s"
            f"{figures['latency_ms_p99'][side]:>10.2f} ms p99"
            f"{sum(figures['cell_cpu_ms_per_request'][side].values()):>10.3f} ms CPU a request"
        )
    print(json.dumps(figures["cell_cpu_ms_per_request"]))
    low, high = min(figures["ratios"]), max(figures["ratios"])
    of_all = figures["ratio_of_totals"]
    print(f"traced / not traced: {figures['ratio']} ({low}-{high}; of all requests {of_all})")
    print(f"target {TARGET}; {figures['exported_bytes'] / 1e6:.1f} MB exported")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    # Ended from outside, the cell is still taken down.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    told, theirs = multiprocessing.Pipe()
    collector = multiprocessing.get_context("spawn").Process(target=collect, args=(theirs,), daemon=True)
    collector.start()
    with tempfile.TemporaryDirectory(prefix="zgb-") as folder:
        config = configuration(Path(folder), f"http://127.0.0.1:{told.recv()}")
        info = launch.up(config, progress=lambda line: print(line, file=sys.stderr))
        try:
            results = {
                tokens: measure(info, config, told, tokens, options.seconds, options.rounds)
                for tokens in ANSWER_TOKENS
            }
        finally:
            launch.down(config, progress=lambda line: print(line, file=sys.stderr))
            collector.terminate()
    for tokens, figures in results.items():
        print(f"answers of {tokens} tokens")
        report(figures)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
