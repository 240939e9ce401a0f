"""The cell's Redis, as the gateway uses it: how to connect, which schema is in it, and leases.

What is stored, and under which key, is each owner's business (`registry`, `tenants`, `deployer`); every
key starts with `zg:`. A Redis that does not answer raises Rejected: the call can be repeated.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Iterator
from typing import Any, cast

import redis.exceptions
from redis.asyncio import BlockingConnectionPool, Redis, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from gateway.redis_server import embedded_password, embedded_socket
from gateway.trust.keyfiles import read_secret, secret_path
from grid.config import Config
from grid.errors import InternalError, Rejected

SCHEMA_VERSION = 1
"""Raised when a release stores something that the release before it can't read."""
SCHEMA_KEY = "zg:schema"
MAX_CONNECTIONS = 32
"""Of one process. A command takes under a millisecond, so more would only wait inside Redis."""
CONNECTION_WAIT_S = 2.0
CALL_TIMEOUT_S = 1.0
"""A local Redis answers in a millisecond; a call that takes this long is better refused than kept."""
RETRIES = 1
RETRY_CAP_S = 0.05
"""Bridges a dropped connection; a server that restarts, or hangs, is for the caller to come back to."""
OUTAGE_S = 60.0
"""How long keys, pipelines and data sources that a process has read before are believed while Redis does not
answer. Nothing can be changed there meanwhile, unless others still reach it: then a revoked key works here
for so long at most."""
RETRY_AFTER_S = 1.0
PASSWORD_FILE = "redis.password"
"""For a configured URL without a password in it; optional."""


async def open_redis(config: Config) -> Redis:
    """Return a client of the cell's Redis, after its schema version was checked (and written, if new).

    Raises Rejected when it does not answer, InternalError when a newer release has written to it.
    The caller closes it with `aclose()`.
    """
    client = Redis.from_pool(_pool(config))
    try:
        await _check_schema(client)
    except BaseException:
        await client.aclose()
        raise
    return client


def _pool(config: Config) -> BlockingConnectionPool:
    bounds: dict[str, Any] = {
        "max_connections": MAX_CONNECTIONS,
        "timeout": CONNECTION_WAIT_S,
        "socket_timeout": CALL_TIMEOUT_S,
        "socket_connect_timeout": CALL_TIMEOUT_S,
        "retry": Retry(ExponentialBackoff(cap=RETRY_CAP_S, base=RETRY_CAP_S / 4), RETRIES),
    }
    if not config.redis.url:
        return BlockingConnectionPool(
            connection_class=UnixDomainSocketConnection,
            path=str(embedded_socket(config.cell.state_dir)),
            password=embedded_password(config.cell.state_dir),
            **bounds,
        )
    pool = BlockingConnectionPool.from_url(config.redis.url, **bounds)
    password_file = secret_path(config.cell.state_dir, PASSWORD_FILE)
    if not pool.connection_kwargs.get("password") and password_file.exists():
        pool.connection_kwargs["password"] = read_secret(password_file).decode().strip()
    return pool


async def _check_schema(client: Redis) -> None:
    with state_errors():
        await client.set(SCHEMA_KEY, SCHEMA_VERSION, nx=True)
        stored = await client.get(SCHEMA_KEY)
    try:
        version = int(stored or 0)
    except ValueError:
        raise InternalError(
            f"the key {SCHEMA_KEY} in Redis holds no schema version; is it another program's?"
        ) from None
    if version > SCHEMA_VERSION:
        raise InternalError(
            f"Redis holds state of schema {version}, written by a newer release; this one reads up to "
            f"{SCHEMA_VERSION}. Install the newer release, or use another Redis or state folder"
        )


@contextlib.contextmanager
def state_errors() -> Iterator[None]:
    """Turn a Redis that is away, or full, into Rejected; its own words stay away from clients."""
    try:
        yield
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
        raise Rejected(
            "the cell's state store (Redis) does not answer", retry_after_s=RETRY_AFTER_S
        ) from error
    except redis.exceptions.OutOfMemoryError as error:
        raise Rejected("the cell's state store (Redis) is full", retry_after_s=RETRY_AFTER_S) from error


async def run_script(client: Redis, script: str, keys: list[str], args: list[str | bytes | int]) -> Any:
    """Run a Lua script, atomically; the server keeps it by its hash, so only the first call carries it."""
    with state_errors():
        return await cast(Awaitable[Any], client.register_script(script)(keys=keys, args=args))


def as_bytes(value: bytes | str) -> bytes:
    """Return what Redis answered as bytes; its client's types allow text, too."""
    return value if isinstance(value, bytes) else value.encode()


_RENEW = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) and 1 or 0
"""

_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class Lease:
    """A right that one process at a time holds, until it lets go or has not renewed it for `seconds`.

    A holder that was frozen past the end may still act, so whatever it writes must be safe to write twice.
    """

    def __init__(self, client: Redis, name: str, seconds: float) -> None:
        self._client = client
        self._key = f"zg:lease:{name}"
        self._holder = secrets.token_hex(16)
        self._milliseconds = int(seconds * 1000)

    async def hold(self) -> bool:
        """Take or renew it; True when this object holds it now."""
        return bool(await run_script(self._client, _RENEW, [self._key], [self._holder, self._milliseconds]))

    async def release(self) -> None:
        await run_script(self._client, _RELEASE, [self._key], [self._holder])
