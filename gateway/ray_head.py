"""Ray's head on this machine: its command line, its ports, and waiting until it is up. Never imports ray."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.processes import end, tail
from grid.config import Ray
from grid.errors import InternalError

START_TIMEOUT_S = 90.0
"""A head takes 7 to 11 s on two idle cores; a loaded machine needs several times that."""
STARTS = 2
STOP_TIMEOUT_S = 30.0
OBJECT_STORE_BYTES = 100 * 1024 * 1024
"""No payload travels through Ray's object store, so its smallest useful size will do."""

LOOPBACK = "127.0.0.1"
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
ELSEWHERE = ("203.0.113.1", 9)
"""An address of the documentation's range: which of our own would reach it? Nothing is sent."""


@dataclass(frozen=True, slots=True)
class Head:
    pid: int
    address: str
    """HOST:PORT where Ray's other processes, and other nodes, join."""
    dashboard_url: str


def start(
    ray: Ray,
    region: str,
    folder: Path,
    log: Path,
    environment: Mapping[str, str],
    progress: Callable[[str], None],
) -> Head:
    """Start the head with its files under `folder`, a second time if need be.

    Its own limits are short (15 s for its agent's imports), so a machine that is busy for a moment fails it.
    Raises InternalError with the end of `log`.
    """
    host = node_ip(ray)
    for attempt in range(STARTS):
        ports = _ports(ray)
        process = _spawn(command(ray, host, region, folder, ports), log, environment)
        try:
            _await_up(host, ports["port"], log, process)
            process.returncode = 0  # it outlives this object on purpose; from here on its pid is its handle
            return Head(
                process.pid, f"{host}:{ports['port']}", f"http://{LOOPBACK}:{ports['dashboard-port']}"
            )
        except InternalError:
            end([process.pid], STOP_TIMEOUT_S)
            if attempt + 1 == STARTS:
                raise
            progress("Ray did not come up; trying once more")
    raise AssertionError("unreachable: the last attempt returns or raises")


def node_ip(ray: Ray) -> str:
    """Return the head's own address: as configured, or for `auto` the one that other machines see."""
    if ray.node_ip != "auto":
        return ray.node_ip
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
        except OSError as error:
            raise InternalError(
                f"ray.node_ip: no address of this machine was found ({error.strerror}); give it in the "
                "configuration"
            ) from None
        return str(probe.getsockname()[0])


def on_loopback(ray: Ray) -> bool:
    """Tell whether the cell is one machine's own: no other node can join."""
    return ray.node_ip != "auto" and ipaddress.ip_address(ray.node_ip).is_loopback


def command(ray: Ray, host: str, region: str, folder: Path, ports: Mapping[str, int]) -> list[str]:
    """Return the command line that starts the head."""
    arguments = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        f"--node-ip-address={host}",
        f"--dashboard-host={LOOPBACK}",
        f"--temp-dir={folder}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        "--disable-usage-stats",
        *(f"--{name}={port}" for name, port in ports.items()),
        # Zero lets every worker take any free port, so that cells never share a range.
        *("--min-worker-port=0", "--max-worker-port=0"),
    ]
    if ray.autoscaling_config:
        arguments.append(f"--autoscaling-config={Path(ray.autoscaling_config).expanduser()}")
    if not on_loopback(ray):
        # Other nodes carry one too, so units go where their region is. On a machine of its own a cell may
        # pretend any region.
        arguments.append(f"--labels=region={region}")
    return arguments


def _spawn(arguments: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with open(log, "wb") as out:
        return subprocess.Popen(
            arguments,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _await_up(host: str, port: int, log: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise InternalError(f"Ray stopped while starting (exit {process.returncode}):\n{tail(log)}")
        # Ray says so once every one of its processes is up; an open port alone comes too early.
        if b"Ray runtime started" in log.read_bytes() and _is_open(host, port):
            return
        time.sleep(0.1)
    raise InternalError(f"Ray was not ready within {START_TIMEOUT_S:.0f} s:\n{tail(log)}")


def _ports(ray: Ray) -> dict[str, int]:
    """Return a port for each of Ray's services: as configured, or free on loopback; all distinct."""
    with contextlib.ExitStack() as stack:
        ports = {}
        for name in PORTS:
            held = stack.enter_context(socket.socket())
            held.bind((LOOPBACK, 0))
            ports[name] = held.getsockname()[1]
    given = {"port": ray.port, "dashboard-port": ray.dashboard_port}
    return ports | {name: port for name, port in given.items() if port}


def _is_open(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex((host, port)) == 0
