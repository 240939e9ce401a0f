"""Who calls: keys and tenants. The only place that makes, checks or revokes a key.

A key is shown once, when it is made; Redis holds only its HMAC-SHA256 under the cell's pepper file, so that
neither Redis nor the file alone allows a guess to be checked. A revoked key stops working everywhere within
`REVOCATION_S`: that is how long a process may trust its own memory of a key. While Redis does not answer,
keys that were good when it last did are trusted for `OUTAGE_S`.

    zg:keys     hash  HMAC of the key (hex) → key record
    zg:key-ids  hash  key id → HMAC of the key
    zg:tenants  hash  tenant id → tenant record with its salt
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson
from redis.asyncio import Redis

from gateway.records import Tenant
from gateway.remembered import Remembered
from gateway.state import OUTAGE_S, run_script, state_errors
from gateway.trust.keyfiles import read_or_make_secret, secret_path
from grid.config import Config
from grid.errors import Conflict, InvalidRequest, NotFound, Unauthorised
from grid.words import new_id

OPERATOR_PREFIX = "zg-op-"
TENANT_PREFIX = "zg-"
KEY_RANDOM_BYTES = 32
REVOCATION_S = 1.0
CACHED_KEYS = 10_000
"""Keys that one process remembers at a time; at 1 KB each, 10 MB."""
MAX_KEYS = 100_000
"""Keys of a cell; at about 400 bytes each they stay far below Redis' own bound."""
MAX_PRESENTED_CHARS = 128
"""No key of ours is longer, so nothing longer is worth hashing."""
MAX_LABEL_CHARS = 128
OPERATOR_TENANT = "operator"
FIRST_TENANT = "default"
TENANT_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
PEPPER_FILE = "pepper.key"

_KEYS, _KEY_IDS, _TENANTS = "zg:keys", "zg:key-ids", "zg:tenants"


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """What may be listed of a key: never the key, never its hash."""

    key_id: str
    tenant_id: str
    operator: bool
    label: str
    created_at: str
    """RFC 3339, UTC."""


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key at the one moment when it is shown."""

    info: KeyInfo
    key: str


# KEYS: keys, key ids, tenants. ARGV: HMAC, key id, key record, tenant id, tenant record, bound.
_CREATE = """
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[6]) then return 'full' end
redis.call('HSETNX', KEYS[3], ARGV[4], ARGV[5])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('HSET', KEYS[2], ARGV[2], ARGV[1])
return 'made'
"""

_REVOKE = """
local digest = redis.call('HGET', KEYS[2], ARGV[1])
if not digest then return 0 end
redis.call('HDEL', KEYS[1], digest)
redis.call('HDEL', KEYS[2], ARGV[1])
return 1
"""


class Tenants:
    """All keys of the cell. `clock` counts seconds, for the memory of recent keys only."""

    def __init__(self, client: Redis, config: Config, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = client
        self._pepper = read_or_make_secret(secret_path(config.cell.state_dir, PEPPER_FILE))
        self._recent = Remembered[bytes, Tenant](
            keep_s=REVOCATION_S, bound=CACHED_KEYS, clock=clock, away_s=OUTAGE_S
        )

    async def authenticate(self, presented_key: str) -> Tenant:
        """Return who presents the key. Raises Unauthorised, with the same words for every wrong key."""
        if not presented_key:
            raise Unauthorised("no API key: send it as `x-api-key` or as `Authorization: Bearer …`")
        if not presented_key.startswith(TENANT_PREFIX) or len(presented_key) > MAX_PRESENTED_CHARS:
            raise _wrong_key()
        # Look-ups go by the keyed hash, which a caller can't steer: their timing tells nothing of a key.
        digest = self._digest(presented_key)
        return await self._recent.get(digest, partial(self._load, digest))

    async def create_key(self, tenant_id: str, *, operator: bool = False, label: str = "") -> NewKey:
        """Make a key for a tenant, and the tenant with a random salt if it is new.

        Raises InvalidRequest for a name that can't be a tenant's, Conflict at the bound of the cell's keys.
        """
        if TENANT_ID.fullmatch(tenant_id) is None:
            raise InvalidRequest(
                "a tenant's name is 1 to 63 lower-case letters, digits and hyphens, a hyphen not first",
                param="tenant_id",
            )
        if operator != (tenant_id == OPERATOR_TENANT):
            raise InvalidRequest(
                f"operator keys belong to the tenant {OPERATOR_TENANT!r}, and it has no others",
                param="tenant_id",
            )
        if len(label) > MAX_LABEL_CHARS:
            raise InvalidRequest(f"a label has at most {MAX_LABEL_CHARS} characters", param="label")
        prefix = OPERATOR_PREFIX if operator else TENANT_PREFIX
        key = (
            prefix
            + base64.b32encode(secrets.token_bytes(KEY_RANDOM_BYTES)).decode("ascii").rstrip("=").lower()
        )
        info = KeyInfo(
            new_id("key-"), tenant_id, operator, label, datetime.now(UTC).isoformat(timespec="seconds")
        )
        tenant = {"salt": secrets.token_hex(16), "created_at": info.created_at}
        outcome = await run_script(
            self._redis,
            _CREATE,
            [_KEYS, _KEY_IDS, _TENANTS],
            [
                self._digest(key).hex(),
                info.key_id,
                orjson.dumps(asdict(info)),
                tenant_id,
                orjson.dumps(tenant),
                MAX_KEYS,
            ],
        )
        if outcome == b"full":
            raise Conflict(f"the cell holds {MAX_KEYS} keys, its bound; revoke some that are not used")
        return NewKey(info, key)

    async def list_keys(self, tenant_id: str | None = None) -> list[KeyInfo]:
        """Return the keys of one tenant, or of all, oldest first."""
        with state_errors():
            stored = await self._redis.hvals(_KEYS)
        keys = [KeyInfo(**orjson.loads(value)) for value in stored]
        return sorted(
            (info for info in keys if tenant_id is None or info.tenant_id == tenant_id),
            key=lambda info: (info.created_at, info.key_id),
        )

    async def revoke_key(self, key_id: str) -> None:
        """End a key, in every process within REVOCATION_S. Raises NotFound."""
        if not await run_script(self._redis, _REVOKE, [_KEYS, _KEY_IDS], [key_id]):
            raise NotFound(f"there is no key {key_id!r}", param="key_id")
        self._recent.forget(lambda _, tenant: tenant.key_id == key_id)

    async def bootstrap(self) -> dict[str, str]:
        """Make the operator's and the first tenant's key, once in the life of a cell.

        Returns `operator_key` and `tenant_key` the first time, nothing afterwards.
        """
        with state_errors():
            if await self._redis.hexists(_TENANTS, OPERATOR_TENANT):
                return {}
        # The operator comes last: a start that was cut short in between makes both again.
        tenant = await self.create_key(FIRST_TENANT, label="made by grid up")
        operator = await self.create_key(OPERATOR_TENANT, operator=True, label="made by grid up")
        return {"operator_key": operator.key, "tenant_key": tenant.key}

    async def _load(self, digest: bytes) -> Tenant:
        with state_errors():
            stored = await self._redis.hget(_KEYS, digest.hex())
        if stored is None:
            raise _wrong_key()
        info = KeyInfo(**orjson.loads(stored))
        with state_errors():
            tenant: dict[str, Any] = orjson.loads(await self._redis.hget(_TENANTS, info.tenant_id) or b"{}")
        if "salt" not in tenant:
            raise _wrong_key()
        return Tenant(info.tenant_id, info.key_id, info.operator, tenant["salt"])

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._pepper, key.encode("utf-8", "surrogatepass"), hashlib.sha256)


def _wrong_key() -> Unauthorised:
    return Unauthorised("the API key is not valid in this cell; `grid keys` makes one")
