"""Tenants' records in Redis: made once, read from memory for a moment, changed only as last seen, deleted.

Each of these is one script, so that a record, its name and what an idempotency key made never disagree.
Which records there are, and what they mean, is the registry's business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import orjson
from redis.asyncio import Redis

from gateway.records import tenant_key
from gateway.remembered import Remembered
from gateway.state import OUTAGE_S, as_bytes, run_script, state_errors
from grid.errors import Conflict, IdempotencyReused, InvalidRequest, NotFound

IDEMPOTENCY_S = 24 * 3600
"""Longer than any client retries one call."""
MAX_IDEMPOTENCY_KEY_CHARS = 255
CACHE_S = 1.0
"""How long another process' change may stay unseen; at 1,500 requests a second one read serves them all."""
CACHED_RECORDS = 4_096
FIRST_REVISION = 1

Record = TypeVar("Record")

# KEYS: records, names (or ""), idempotency (or ""), unsettled (or ""), sources version (or "").
# ARGV: id, record, bound, name, body hash, seconds, created_at, unsettled field, its revision.
_CREATE = """
if KEYS[3] ~= '' then
  local made = redis.call('GET', KEYS[3])
  if made then return {'repeated', made} end
end
if KEYS[2] ~= '' and redis.call('HEXISTS', KEYS[2], ARGV[4]) == 1 then return {'name', ''} end
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[3]) then return {'full', ''} end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if KEYS[2] ~= '' then redis.call('HSET', KEYS[2], ARGV[4], ARGV[1]) end
if KEYS[3] ~= '' then
  redis.call('SET', KEYS[3], ARGV[1] .. ' ' .. ARGV[7] .. ' ' .. ARGV[5], 'EX', ARGV[6])
end
if KEYS[4] ~= '' then redis.call('HSET', KEYS[4], ARGV[8], ARGV[9]) end
if KEYS[5] ~= '' then redis.call('INCR', KEYS[5]) end
return {'made', ''}
"""

# KEYS: records, unsettled (or ""), sources version (or ""), idempotency (or "").
# ARGV: id, old record, new record, unsettled field, its revision ("" if settled), body hash, seconds.
_SWAP = """
if KEYS[4] ~= '' then
  local made = redis.call('GET', KEYS[4])
  if made then return {'repeated', made} end
end
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return {'stale', ''} end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
if KEYS[2] ~= '' then
  if ARGV[5] ~= '' then
    redis.call('HSET', KEYS[2], ARGV[4], ARGV[5])
  else
    redis.call('HDEL', KEYS[2], ARGV[4])
  end
end
if KEYS[3] ~= '' then redis.call('INCR', KEYS[3]) end
if KEYS[4] ~= '' then redis.call('SET', KEYS[4], ARGV[6], 'EX', ARGV[7]) end
return {'swapped', ''}
"""

# KEYS: records, names (or ""), unsettled (or ""), sources version (or ""). ARGV: id, name, unsettled field.
_DELETE = """
if redis.call('HDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
if KEYS[2] ~= '' then redis.call('HDEL', KEYS[2], ARGV[2]) end
if KEYS[3] ~= '' then redis.call('HDEL', KEYS[3], ARGV[3]) end
if KEYS[4] ~= '' then redis.call('INCR', KEYS[4]) end
return 1
"""


@dataclass(frozen=True, slots=True)
class Table:
    """One kind of record. The last three name further keys that change together with the records."""

    kind: str
    noun: str
    id_param: str
    bound: int
    """Records of one tenant."""
    unique_names: bool = False
    unsettled: str = ""
    """Hash "TENANT ID" → revision of the records that are not settled."""
    version: str = ""
    """Counter that every change raises."""


class Swapped(StrEnum):
    """What came of writing over a record."""

    SWAPPED = "swapped"
    STALE = "stale"
    """Others wrote first; nothing was written."""
    REPEATED = "repeated"
    """The idempotency key did it before; nothing was written."""


@dataclass(frozen=True, slots=True)
class Made:
    record_id: str
    created_at: str


class Tables:
    """`clock` counts seconds, for the age of remembered reads only."""

    def __init__(self, client: Redis, clock: Callable[[], float]) -> None:
        self._redis = client
        self._recent = Remembered[tuple[str, str, str], Any](
            keep_s=CACHE_S, bound=CACHED_RECORDS, clock=clock, away_s=OUTAGE_S
        )

    async def create(
        self,
        table: Table,
        tenant_id: str,
        new: Made,
        record: bytes,
        *,
        name: str = "",
        body: Any = None,
        idempotency_key: str = "",
    ) -> Made:
        """Store `record`; return `new`, or what the idempotency key made before.

        Raises IdempotencyReused if that had another `body`, Conflict for a taken name and at the bound.
        """
        made_key, body_hash = _made_key(tenant_id, table.kind, idempotency_key), _body_hash(body)
        outcome, detail = await run_script(
            self._redis,
            _CREATE,
            [
                tenant_key(tenant_id, table.kind),
                _names(table, tenant_id),
                made_key,
                table.unsettled,
                table.version,
            ],
            [
                new.record_id,
                record,
                table.bound,
                name,
                body_hash,
                IDEMPOTENCY_S,
                new.created_at,
                _member(tenant_id, new.record_id),
                FIRST_REVISION,
            ],
        )
        if outcome == b"repeated":
            record_id, created_at, made_from = as_bytes(detail).decode().split(" ")
            _check_repeat(made_from, body_hash)
            return Made(record_id, created_at)
        if outcome == b"name":
            raise Conflict(f"there already is a {table.noun} named {name!r}; choose another", param="name")
        if outcome == b"full":
            raise Conflict(
                f"this tenant holds {table.bound} {table.kind}, its bound; delete what is not used"
            )
        self._forget(tenant_id)
        return new

    async def read(self, table: Table, tenant_id: str, record_id: str) -> bytes:
        """Return a record as it is now. Raises NotFound, for a foreign id too."""
        with state_errors():
            stored = await self._redis.hget(tenant_key(tenant_id, table.kind), record_id)
        if stored is None:
            raise _not_found(table, record_id)
        return as_bytes(stored)

    async def read_named(self, table: Table, tenant_id: str, name: str) -> bytes:
        with state_errors():
            found = await self._redis.hget(_names(table, tenant_id), name)
        if found is None:
            raise NotFound(f"there is no {table.noun} named {name!r}", param="source")
        return await self.read(table, tenant_id, as_bytes(found).decode())

    async def read_all(self, table: Table, tenant_id: str) -> list[bytes]:
        with state_errors():
            return [as_bytes(stored) for stored in await self._redis.hvals(tenant_key(tenant_id, table.kind))]

    async def swap(
        self,
        table: Table,
        tenant_id: str,
        record_id: str,
        old: bytes,
        new: bytes,
        *,
        unsettled_revision: int | None = None,
        body: Any = None,
        idempotency_key: str = "",
    ) -> Swapped:
        """Write `new` only if the record still is `old`; `unsettled_revision` None: it is settled.

        A repeated idempotency key writes nothing. Raises IdempotencyReused if that had another `body`.
        """
        made_key = _made_key(tenant_id, f"{table.kind}:{record_id}", idempotency_key)
        body_hash = _body_hash(body)
        outcome, made_from = await run_script(
            self._redis,
            _SWAP,
            [tenant_key(tenant_id, table.kind), table.unsettled, table.version, made_key],
            [
                *(record_id, old, new, _member(tenant_id, record_id)),
                *("" if unsettled_revision is None else unsettled_revision, body_hash, IDEMPOTENCY_S),
            ],
        )
        if outcome == b"repeated":
            _check_repeat(as_bytes(made_from).decode(), body_hash)
        self._forget(tenant_id)
        return Swapped(as_bytes(outcome).decode())

    async def delete(self, table: Table, tenant_id: str, record_id: str, name: str = "") -> None:
        """Raises NotFound."""
        gone = await run_script(
            self._redis,
            _DELETE,
            [tenant_key(tenant_id, table.kind), _names(table, tenant_id), table.unsettled, table.version],
            [record_id, name, _member(tenant_id, record_id)],
        )
        self._forget(tenant_id)
        if not gone:
            raise _not_found(table, record_id)

    async def remembered(
        self, tenant_id: str, what: str, which: str, load: Callable[[], Coroutine[Any, Any, Record]]
    ) -> Record:
        """Return what `load` returns, or returned up to CACHE_S ago; OUTAGE_S while Redis is away."""
        record: Record = await self._recent.get((tenant_id, what, which), load)
        return record

    def _forget(self, tenant_id: str) -> None:
        """After a change of our own nothing of this tenant comes from memory, reads under way included."""
        self._recent.forget(lambda key, _: key[0] == tenant_id)


def _names(table: Table, tenant_id: str) -> str:
    return tenant_key(tenant_id, f"{table.kind}-names") if table.unique_names else ""


def _member(tenant_id: str, record_id: str) -> str:
    return f"{tenant_id} {record_id}"


def _made_key(tenant_id: str, what: str, idempotency_key: str) -> str:
    """Return where it is kept what an idempotency key made, "" for no key. Raises InvalidRequest."""
    if not idempotency_key:
        return ""
    if len(idempotency_key) > MAX_IDEMPOTENCY_KEY_CHARS:
        raise InvalidRequest(
            f"an idempotency key has at most {MAX_IDEMPOTENCY_KEY_CHARS} characters", param="idempotency-key"
        )
    return tenant_key(tenant_id, f"made:{what}:{_hash(idempotency_key)}")


def _body_hash(body: Any) -> str:
    return _hash(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))


def _check_repeat(made_from: str, body_hash: str) -> None:
    if made_from != body_hash:
        raise IdempotencyReused(
            "this idempotency key was used with another body; use a new key for a new request",
            param="idempotency-key",
        )


def _hash(text: str | bytes) -> str:
    content = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()


def _not_found(table: Table, record_id: str) -> NotFound:
    return NotFound(f"there is no {table.noun} {record_id!r}", param=table.id_param)
