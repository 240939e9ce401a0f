"""The supervisor on a real Ray head of its own: units start, are replaced, adopted and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from grid.config import Cell, Config, Model, Simulated

PORTS = (
    "port",
    "ray-client-server-port",
    "node-manager-port",
    "object-manager-port",
    "dashboard-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "metrics-export-port",
    "runtime-env-agent-port",
)
HEAD_LIMIT_S = 90.0
SUPPORT = Path(__file__).parent.parent / "support"


def free_ports() -> dict[str, int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    ports = {name: each.getsockname()[1] for name, each in zip(PORTS, sockets, strict=True)}
    for each in sockets:
        each.close()
    return ports


def start_head(folder: str, log: Path, environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], str]:
    ports = free_ports()
    with open(log, "wb") as out:
        head = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *("--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1", "--num-cpus=2"),
                *(f"--temp-dir={folder}", "--object-store-memory=80000000", "--disable-usage-stats"),
                *("--min-worker-port=0", "--max-worker-port=0"),
                *(f"--{name}={port}" for name, port in ports.items()),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return head, f"127.0.0.1:{ports['port']}"


def is_up(head: subprocess.Popen[bytes], log: Path) -> bool:
    deadline = time.monotonic() + HEAD_LIMIT_S
    while head.poll() is None and time.monotonic() < deadline:
        if "Ray runtime started" in log.read_text():
            return True
        time.sleep(0.1)
    return False


def end(head: subprocess.Popen[bytes]) -> None:
    if head.poll() is None:
        processes = [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(processes, timeout=10)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    head.wait()


@pytest.fixture
def ray_head(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of a Ray head with one node and two cores, and the environment to talk to it."""
    token = tmp_path / "ray.token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_open_telemetry": "0",
        # Ray replaces a loopback address by the machine's own, unless clusters are off as on macOS.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    log = tmp_path / "head.log"
    # A short folder: Ray puts Unix sockets under it.
    with TemporaryDirectory(prefix="zg-ray-", ignore_cleanup_errors=True) as folder:
        head, address = start_head(folder, log, environment)
        if not is_up(head, log):  # Ray gives its own agents 15 s, too little on a busy machine
            end(head)
            head, address = start_head(folder, log, environment)
        try:
            assert is_up(head, log), log.read_text()
            yield address, environment
        finally:
            end(head)


@pytest.mark.cell
@pytest.mark.timeout(300)
def test_units_are_started_replaced_adopted_and_stopped(
    ray_head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    address, environment = ray_head
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "link.key").write_bytes(secrets.token_bytes(32))
    config = Config(
        cell=Cell(state_dir=tmp_path),
        models=(
            Model(
                name="sim",
                engine="simulated",
                precision="fp16",
                min_units=2,
                max_units=2,
                simulated=Simulated(full_speed=True),
            ),
            Model(name="impossible", engine="vllm", source="package:none", gpus=8, cpus=1),
        ),
    )
    file = tmp_path / "config.json"
    file.write_text(config.model_dump_json())
    driver = subprocess.run(
        [sys.executable, str(SUPPORT / "supervisor_driver.py"), address, str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert driver.returncode == 0, driver.stderr
    seen = json.loads(driver.stdout.splitlines()[-1])

    assert sorted(seen["first"]) == ["unit-sim-0", "unit-sim-1"]
    assert seen["libraries"] == [], "a simulated unit loads no model library"
    assert sorted(seen["after_kill"]) == ["unit-sim-0", "unit-sim-1"]
    assert seen["after_kill"]["unit-sim-0"] != seen["first"]["unit-sim-0"]
    assert seen["after_kill"]["unit-sim-1"] == seen["first"]["unit-sim-1"]
    assert seen["failures"][0].startswith("unit-sim-0: ")
    assert seen["after_restart"] == seen["after_kill"], "a new supervisor takes over what runs"
    assert seen["impossible"]["waiting_for"] == ("it needs 1 CPU cores and 8 GPUs; no node has that free")
    assert seen["left"] == []
