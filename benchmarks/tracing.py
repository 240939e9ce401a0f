"""What does tracing cost? Requests that are traced against requests that are not, on the same cell.

    python benchmarks/tracing.py [--json OUT] [--seconds S] [--null]

Starts a cell of one simulated unit that waits for nothing, whose tracing exports to a collector on the same
cores that reads and discards, and whose own CPU time is among the figures. 32 clients; a request says by its
`traceparent` whether it is traced, so both sides share every process and every client, and they take turns
of two seconds. Spans leave at most two seconds late, so half of what it costs to send them (a tenth of the
whole) falls into the other side's turns. Answers of one token are the hardest case, answers of 128 an
everyday one. Every traced request is exported whole: sampling would only make it cheaper. `--null` compares
untraced requests with themselves: what is then away from 1 is the machine's noise.
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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

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
TURN_S = 2.0
SETTLE_S = 0.3
"""Until the requests of the side before have ended."""
TARGET = 0.95
TRACE = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
SIDES = {"traced": f"00-{TRACE}-01", "not traced": f"00-{TRACE}-00"}
NULL = {"untraced": f"00-{TRACE}-00", "again": f"00-{TRACE}-00"}
PROCESSES = {
    "gateway": "ServeReplica",
    "placement": "RayPlacement",
    "unit": "RayUnit",
    "HAProxy": "haproxy",
}
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Options(NamedTuple):
    seconds: float
    sides: dict[str, str]


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


def watched(config: Config) -> dict[str, list[int]]:
    """Return the process ids of the cell, by what they are; what is none of PROCESSES costs nothing here."""
    found: dict[str, list[int]] = {kind: [] for kind in PROCESSES}
    for process in launch.processes(config):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            kind = next((kind for kind, mark in PROCESSES.items() if mark in title), "")
            if kind:
                found[kind].append(process.pid)
    return found


def load(
    info: launch.CellInfo, path: str, seconds: float, watch: dict[str, list[int]], sides: dict[str, str]
) -> dict[str, Any]:
    order = {
        "url": info.base_url + path,
        "body": json.dumps({"input": "How do I reset my password?", "stream": False}),
        "headers": {"x-api-key": info.tenant_key},
        "sides": {side: {"traceparent": traceparent} for side, traceparent in sides.items()},
        "clients": CLIENTS,
        "seconds": seconds,
        "turn_s": TURN_S,
        "settle_s": SETTLE_S,
        "watch": watch,
        "warmup_s": 3.0,
    }
    command = [sys.executable, str(HERE / "http_load.py"), json.dumps(order)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    for side, run in result.items():
        if list(run["statuses"]) != ["200"]:
            raise RuntimeError(f"{side}: answered {run['statuses']}")
    return result


def measure(
    info: launch.CellInfo, config: Config, told: Connection, collector_pid: int, tokens: int, options: Options
) -> dict[str, Any]:
    path = declare(info, tokens)
    watch = {**watched(config), "collector": [collector_pid]}
    bytes_before = _received(told)
    runs = load(info, path, options.seconds, watch, options.sides)
    time.sleep(2.0)  # what waits to be exported
    on, off = runs.values()
    ratios = [
        sum(on["turns"][at : at + 2]) / sum(off["turns"][at : at + 2])
        for at in range(0, len(on["turns"]) - 1, 2)
    ]
    cpu_ms = {
        side: {kind: round(1e3 * spent_s / run["requests"], 3) for kind, spent_s in run["cpu_s"].items()}
        for side, run in runs.items()
    }
    return {
        "cores": os.cpu_count(),
        "seconds": options.seconds,
        "turn_s": TURN_S,
        "requests": {side: run["requests"] for side, run in runs.items()},
        "requests_per_s": {side: run["requests_per_s"] for side, run in runs.items()},
        "latency_ms_p99": {side: run["latency_ms"]["p99"] for side, run in runs.items()},
        "cpu_ms_per_request": cpu_ms,
        "ratio": round(on["requests_per_s"] / off["requests_per_s"], 3),
        "ratio_of_turns": round(statistics.median(ratios), 3),
        "ratio_of_turns_error": round(
            statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0, 3
        ),
        "exported_bytes_per_request": round((_received(told) - bytes_before) / on["requests"]),
    }


def _received(told: Connection) -> int:
    told.send(None)
    received: int = told.recv()
    return received


def report(figures: dict[str, Any]) -> None:
    for side, spent in figures["cpu_ms_per_request"].items():
        print(
            f"{side:12}{figures['requests_per_s'][side]:>10.0f} requests/s"
            f"{figures['latency_ms_p99'][side]:>10.2f} ms p99"
            f"{sum(spent.values()):>10.3f} ms CPU a request"
        )
    print(json.dumps(figures["cpu_ms_per_request"]))
    print(
        f"{' / '.join(figures['requests'])}: {figures['ratio']} of all requests; median of the turns "
        f"{figures['ratio_of_turns']}, standard error {figures['ratio_of_turns_error']}"
    )
    print(f"target {TARGET}; {figures['exported_bytes_per_request']} bytes exported a request")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--seconds", type=float, default=80.0, help="of each length of answers")
    parser.add_argument("--null", action="store_true", help="compare untraced requests with themselves")
    given = parser.parse_args()
    options = Options(given.seconds, NULL if given.null else SIDES)
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
                tokens: measure(info, config, told, collector.pid or 0, tokens, options)
                for tokens in ANSWER_TOKENS
            }
        finally:
            launch.down(config, progress=lambda line: print(line, file=sys.stderr))
            collector.terminate()
    for tokens, figures in results.items():
        print(f"answers of {tokens} tokens")
        report(figures)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
