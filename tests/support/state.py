"""A real redis-server and a configuration that points to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gateway.redis_server import EmbeddedRedis
from gateway.trust.keyfiles import read_or_make_secret, secret_path
from grid.config import Config


def config_at(state_dir: Path, **sections: object) -> Config:
    """Return the default configuration with its state in `state_dir`, where a link key is made."""
    read_or_make_secret(secret_path(state_dir, "link.key"))
    return Config.model_validate({"cell": {"state_dir": str(state_dir)}, **sections})


@contextmanager
def running_redis(state_dir: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(state_dir)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        with suppress(OSError):  # a cell of the same test may still keep something there
            server.socket.parent.rmdir()
