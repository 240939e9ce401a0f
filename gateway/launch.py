"""Starts and stops a cell on this machine. All processes of a cell are started and ended here.

A cell is three things: a Redis (unless configured elsewhere), a Ray head with everything that runs on
it, and a state folder. This module never imports ray: what has to be said to the cluster is said by
`gateway.compose` in a process of its own, so that a caller can hold several cells at once and stays small.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from gateway.folders import private_folder, short_folder
from gateway.processes import end, is_alive, pss_bytes, tail
from gateway.proxy import check_tls, serve_environment
from gateway.ray_head import Head, on_loopback, start
from gateway.redis_server import EmbeddedRedis
from gateway.trust.keyfiles import LINK_KEY_FILE, read_or_make_secret, secret_path
from grid.config import Config
from grid.errors import Conflict, GridError, InternalError, InvalidRequest

Progress = Callable[[str], None]

CELL_MARK = "ZEROGRID_CELL"
"""Environment variable in every process of a cell; what still carries it after a stop is ended."""
COMPOSE_TIMEOUT_S = 900.0
"""The first start prepares model weights and compiles; a later one takes well under a minute."""
READ_BYTES = 64 * 1024
STOP_TIMEOUT_S = 30.0
RAY_TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class CellInfo:
    """A running cell, as its operator sees it. The keys are present on the first start only."""

    name: str
    region: str
    base_url: str
    dashboard_url: str
    state_dir: str
    operator_key: str | None = None
    tenant_key: str | None = None
    units: list[str] = field(default_factory=list)
    seconds: float = 0.0
    already_running: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a cell keeps things: `root` outlives the cell, `run` does not."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def record(self) -> Path:
        return self.run / "cell.json"

    @property
    def config(self) -> Path:
        return self.run / "config.json"

    @property
    def ray_token(self) -> Path:
        return secret_path(self.root, "ray.token")

    @property
    def sockets(self) -> Path:
        return short_folder(self.root)

    @property
    def mark(self) -> str:
        return self.sockets.name


def cell_paths(config: Config) -> Paths:
    return Paths(config.cell.state_dir.expanduser().absolute())


# --- up -------------------------------------------------------------------------------------


def up(config: Config, *, wait: bool = True, progress: Progress = lambda _line: None) -> CellInfo:
    """Start the cell and return when it is ready to serve; without `wait`, when its gateway is. Of a cell
    that runs, start its embedded Redis if that has died.

    Raises Conflict when another command works on the same cell, InvalidRequest for a taken port,
    InternalError with the end of the log when a part does not start. Whatever was started by a
    failed call is stopped again.
    """
    paths = cell_paths(config)
    started_at = time.monotonic()
    with _exclusive(paths):
        record = _read_record(paths)
        if record is not None and is_alive(record.get("ray")):
            if not config.redis.url:
                # Nothing else brings it back, should it have died.
                EmbeddedRedis(paths.root).start(_environment(config, paths))
            return CellInfo(
                **{**record["info"], "already_running": True, "operator_key": None, "tenant_key": None}
            )
        _sweep(paths)
        _require_free_port(config)
        if config.gateway.tls is not None:
            check_tls(config.gateway.tls)
        _prepare_folders(paths)
        redis: EmbeddedRedis | None = None
        try:
            environment = _environment(config, paths)
            if not config.redis.url:
                progress("starting Redis")
                redis = EmbeddedRedis(paths.root)
                redis.start(environment)
            progress("starting Ray")
            head = _start_ray(config, paths, environment, progress)
            # What was not set stays unset: some defaults depend on whether a key was given.
            paths.config.write_text(config.model_dump_json(exclude_unset=True))
            arguments = ["up", head.address, *([] if wait else ["--no-wait"])]
            outcome = _compose(paths, arguments, environment, progress)
            info = CellInfo(
                name=config.cell.name,
                region=config.cell.region,
                base_url=_base_url(config),
                dashboard_url=head.dashboard_url,
                state_dir=str(paths.root),
                operator_key=outcome.get("operator_key"),
                tenant_key=outcome.get("tenant_key"),
                units=outcome.get("units", []),
                seconds=round(time.monotonic() - started_at, 1),
            )
            _write_record(paths, info, head)
        except BaseException:
            progress("stopping what was started")
            if redis is not None:
                redis.stop()
            _sweep(paths)
            raise
    return info


def _base_url(config: Config) -> str:
    gateway = config.gateway
    scheme = "http" if gateway.tls is None else "https"
    return f"{scheme}://{_url_host(gateway.host)}:{gateway.port}"


def _prepare_folders(paths: Paths) -> None:
    # Sockets and Ray's session of an earlier life; they were kept for whoever wants to read its logs.
    shutil.rmtree(private_folder(paths.sockets))
    for folder in (paths.root, paths.run, paths.logs, paths.sockets):
        private_folder(folder)
    read_or_make_secret(secret_path(paths.root, LINK_KEY_FILE))
    read_or_make_secret(paths.ray_token, secrets.token_hex(RAY_TOKEN_BYTES).encode())


def _environment(config: Config, paths: Paths) -> dict[str, str]:
    """Environment of every process of the cell; Ray's workers inherit the head's."""
    return {
        **os.environ,
        **serve_environment(config, paths.sockets),
        CELL_MARK: paths.mark,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(paths.ray_token),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Streams are drained by Serve before Ray is told to stop; a second wait would only delay.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_enable_open_telemetry": "1",
        # Ray replaces a loopback address by the machine's own, unless clusters are off as on macOS.
        **({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} if on_loopback(config.ray) else {}),
        "PYTHONUNBUFFERED": "1",
    }


def _start_ray(config: Config, paths: Paths, environment: Mapping[str, str], progress: Progress) -> Head:
    log = paths.logs / "ray-head.log"
    return start(config.ray, config.cell.region, paths.sockets / "ray", log, environment, progress)


def _compose(
    paths: Paths, arguments: list[str], environment: Mapping[str, str], progress: Progress
) -> dict[str, Any]:
    """Run gateway.compose; its standard output is JSON lines: progress, then one result or error."""
    log_path = paths.logs / "compose.log"
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.compose", str(paths.config), *arguments],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        for line in lines_until(process.stdout.fileno(), time.monotonic() + COMPOSE_TIMEOUT_S):
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if "progress" in said:
                progress(said["progress"])
            elif "error" in said:
                raise InternalError(said["error"])
            elif "result" in said:
                result: dict[str, Any] = said["result"]
                return result
        raise InternalError(f"the cell's start ended without a result:\n{tail(log_path)}")
    finally:
        end([process.pid], STOP_TIMEOUT_S)
        process.stdout.close()
        process.wait()


def lines_until(pipe: int, deadline_s: float) -> Iterator[bytes]:
    """Yield the lines that come through a pipe until it is closed. Raises InternalError at the deadline
    (monotonic seconds), also when nothing comes at all."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if not selector.select(max(deadline_s - time.monotonic(), 0.0)):
                raise InternalError(f"the cell was not ready within {COMPOSE_TIMEOUT_S:.0f} s")
            read = os.read(pipe, READ_BYTES)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            yield from lines


# --- down and status ------------------------------------------------------------------------


def down(config: Config, *, progress: Progress = lambda _line: None) -> bool:
    """Stop the cell: drain streams, end every process. Returns False when nothing was running.

    State stays: pipelines, documents, keys and prepared models are there at the next start.
    """
    paths = cell_paths(config)
    if not paths.root.exists():
        return False
    with _exclusive(paths):
        record = _read_record(paths)
        if record is not None and is_alive(record["ray"]):
            progress("draining streams")
            with contextlib.suppress(GridError):
                _compose(paths, ["down", record["address"]], _environment(config, paths), progress)
            progress("stopping Ray")
            end([record["ray"]["pid"]], STOP_TIMEOUT_S)
        progress("stopping Redis")
        if not config.redis.url:
            EmbeddedRedis(paths.root).stop()
        ended = _sweep(paths)
        paths.record.unlink(missing_ok=True)
        shutil.rmtree(paths.sockets, ignore_errors=True)
        return record is not None or ended


@contextlib.contextmanager
def ray_head(config: Config) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the address of a Ray head with a cell's settings and nothing on it, and the environment of
    whoever joins it: to compare a cell with, and for tests."""
    paths = cell_paths(config)
    with _exclusive(paths):
        _prepare_folders(paths)
        try:
            environment = _environment(config, paths)
            yield _start_ray(config, paths, environment, lambda _line: None).address, environment
        finally:
            _sweep(paths)
            shutil.rmtree(paths.sockets, ignore_errors=True)


def status(config: Config) -> dict[str, Any]:
    """What this machine knows of the cell without asking it: processes, addresses, memory in MB."""
    paths = cell_paths(config)
    record = _read_record(paths)
    running = record is not None and is_alive(record["ray"])
    processes = _marked(paths) if paths.root.exists() else []
    return {
        "running": running,
        "state_dir": str(paths.root),
        **(record["info"] if record is not None and running else {}),
        "processes": len(processes),
        "memory_mb": round(sum(pss_bytes(p) for p in processes) / 1e6),
    }


def ray_targets(config: Config) -> Path:
    """Return the file in which Ray lists its metrics ports, as Prometheus' `file_sd_configs` reads it."""
    return cell_paths(config).sockets / "ray" / "prom_metrics_service_discovery.json"


def processes(config: Config) -> list[psutil.Process]:
    """Every process of the cell on this machine, whoever started it."""
    return _marked(cell_paths(config))


# --- processes ------------------------------------------------------------------------------


@contextlib.contextmanager
def _exclusive(paths: Paths) -> Iterator[None]:
    private_folder(paths.run)
    with open(paths.run / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another command is working on the cell in {paths.root}; wait for it") from None
        yield


def _marked(paths: Paths) -> list[psutil.Process]:
    """Every process of the cell, found by the mark in its environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(CELL_MARK) == paths.mark:
                found.append(process)
    return found


def _sweep(paths: Paths) -> bool:
    """End what is left of the cell. Returns True when there was anything."""
    left = [process.pid for process in _marked(paths)]
    if left:
        end(left, timeout_s=5.0)
    return bool(left)


def _read_record(paths: Paths) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(paths.record.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return record


def _write_record(paths: Paths, info: CellInfo, head: Head) -> None:
    record = {
        "info": {**info.as_dict(), "operator_key": None, "tenant_key": None},
        "address": head.address,
        "ray": {"pid": head.pid, "created": psutil.Process(head.pid).create_time()},
    }
    paths.record.write_text(json.dumps(record, indent=1))


# --- ports ----------------------------------------------------------------------------------


def _require_free_port(config: Config) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.gateway.host, config.gateway.port))
        except OSError as error:
            raise InvalidRequest(
                f"can't listen on {config.gateway.host}:{config.gateway.port} ({error.strerror}); "
                "stop what uses it or set gateway.port in the configuration",
                param="gateway.port",
            ) from None


def _url_host(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host
