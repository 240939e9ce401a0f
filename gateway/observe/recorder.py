"""Takes in ended calls and writes their sums and explanations to Redis, about twice a second.

The shell around `ledger.py` and `explain.py`.

A batch is one script, so it is added whole or not at all, and once: it carries a number that the script
remembers, and the same batch with the same number is sent again until Redis says that it has it. While Redis
is away, calls go on being counted in memory, within the ledger's bound.

    zg:{T}:request:ID   the explanation of a call of tenant T
    zg:{T}:requests     list of the keys of the tenant's explanations, oldest first
    zg:requests         the same of the whole cell
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from functools import partial

import orjson
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.observe.explain import explanation_key, told
from gateway.observe.ledger import HOUR_S, Batch, Ledger
from gateway.observe.story import Story
from gateway.records import tenant_key
from gateway.state import run_script
from grid.config import Config
from grid.errors import GridError
from grid.words import new_id

logger = logging.getLogger(__name__)

EXPLAINED = "zg:requests"
FLUSH_PERIOD_S = 0.5
"""Figures are seen everywhere within a second; an idle replica writes nothing."""
BATCH_SERIES = 256
"""Series in one script: up to about 1,000 hashes, which keep Redis busy for some 5 ms."""
WRITTEN_KEPT_S = 3_600
"""How long Redis remembers a replica's newest batch: far longer than a batch is tried before it succeeds."""
DAY_S = 86_400
BATCH_STORIES = 128
"""Explanations in one script: about 10 µs each to make, so a millisecond in which no token leaves."""
MAX_STORIES = 1_024
"""Calls that wait to be explained; a replica that ends more in one period explains the first of them."""
MAX_EXPLAINED_OF_TENANT = 10_000
MAX_EXPLAINED = 30_000
"""Explanations of the cell: about 2 KB each, so 60 MB of the embedded Redis' 512."""

REPLICA_FIGURES = {
    "zerogrid_gateway_calls": "Calls that have ended at this replica since it started.",
    "zerogrid_gateway_calls_failed": "Those of them that failed.",
    "zerogrid_gateway_calls_uncounted": "Calls that found no room while Redis was away.",
}

# KEYS: number of the replica's newest batch, the cell's list of explanations. ARGV: number, seconds to
# remember it, sums, members, seconds to keep explanations, bound of a tenant's, bound of the cell's; then of
# each explanation its key, the key of its tenant's list, and the story.
_ADD = """
if tonumber(redis.call('GET', KEYS[1]) or '0') >= tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
for _, hash in ipairs(cjson.decode(ARGV[3])) do
  for field, more in pairs(hash[3]) do redis.call('HINCRBY', hash[1], field, more) end
  if hash[2] > 0 then redis.call('EXPIRE', hash[1], hash[2]) end
end
for _, set in ipairs(cjson.decode(ARGV[4])) do
  redis.call('SADD', set[1], unpack(set[3]))
  redis.call('EXPIRE', set[1], set[2])
end
for at = 8, #ARGV, 3 do
  local key, list = ARGV[at], ARGV[at + 1]
  redis.call('SET', key, ARGV[at + 2], 'EX', ARGV[5])
  redis.call('RPUSH', list, key)
  redis.call('EXPIRE', list, ARGV[5])
  if redis.call('RPUSH', KEYS[2], key) > tonumber(ARGV[7]) then
    redis.call('DEL', redis.call('LPOP', KEYS[2]))
  end
  if redis.call('LLEN', list) > tonumber(ARGV[6]) then redis.call('DEL', redis.call('LPOP', list)) end
end
return 1
"""


@dataclass(frozen=True, slots=True)
class _Sending:
    """A batch that may have been written already: it never changes and is sent until that is known."""

    number: int
    sums: bytes
    members: bytes
    explanations: tuple[str | bytes, ...]


class Recorder:
    """One per replica. `take` is called once for each call, when it has ended."""

    def __init__(self, client: Redis, config: Config) -> None:
        self._redis = client
        self._ledger = Ledger(config.observe.usage_kept_days * DAY_S)
        self._written = f"zg:written:{new_id('')}"
        self._explained_kept_s = config.observe.explained_kept_hours * HOUR_S
        self._stories: deque[Story] = deque()
        self._number = 0
        self._calls = self._failed = 0
        self._sending: _Sending | None = None
        self._flushing = asyncio.Lock()
        self._loop: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._away = False

    def take(self, story: Story) -> None:
        """Count a call. Never raises: a bug here must not be its caller's."""
        self._calls += 1
        self._failed += story.status >= 500
        try:
            self._ledger.add(story)
            for run in story.runs:
                if not run.finished:
                    run.late = partial(self.charge, story)
            if story.tenant_id and len(self._stories) < MAX_STORIES:
                self._stories.append(story)
        except Exception:
            logger.exception("request %s was not counted", story.request_id)

    def charge(self, story: Story, cu_seconds: float) -> None:
        """Add compute of a call that was taken before its unit had said what it took."""
        self._ledger.charge(story.tenant_id, story.pipeline_id, story.model, cu_seconds, int(story.ended_at))

    def figures(self) -> dict[str, float]:
        """Return this replica's own `REPLICA_FIGURES`."""
        return dict(zip(REPLICA_FIGURES, (self._calls, self._failed, self._ledger.dropped), strict=True))

    def start(self) -> None:
        """Begin to write, in the running loop."""
        self._loop = asyncio.create_task(self._write_on())

    async def close(self) -> None:
        """Write what is left, if Redis answers, and stop."""
        if self._loop is None:
            return
        self._closing.set()
        await self._loop
        self._loop = None
        try:
            await self.flush()
        except (GridError, RedisError) as error:
            logger.error("the last figures of this replica were not written: %s", error)

    async def flush(self) -> None:
        """Write all that waits. Raises Rejected when Redis is away; nothing is lost by that."""
        async with self._flushing:
            while (sending := self._sending or self._next()) is not None:
                self._sending = sending
                await run_script(
                    self._redis,
                    _ADD,
                    [self._written, EXPLAINED],
                    [
                        sending.number,
                        WRITTEN_KEPT_S,
                        sending.sums,
                        sending.members,
                        self._explained_kept_s,
                        MAX_EXPLAINED_OF_TENANT,
                        MAX_EXPLAINED,
                        *sending.explanations,
                    ],
                )
                self._sending = None

    def _next(self) -> _Sending | None:
        batch = self._ledger.take(BATCH_SERIES)
        if batch is None and not self._stories:
            return None
        stories = [self._stories.popleft() for _ in range(min(BATCH_STORIES, len(self._stories)))]
        self._number += 1
        return encoded(self._number, batch, stories)

    async def _write_on(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_PERIOD_S):
                    await self._closing.wait()
            try:
                await self.flush()
            except GridError as error:
                if not self._away:
                    logger.warning("figures wait in memory: %s", error)
                self._away = True
            except Exception:
                # A bug, or a Redis that can't run the script: it costs this batch, and no other one.
                logger.exception("figures were not written")
                self._sending = None
            else:
                if self._away:
                    logger.warning("figures are written again; %d calls found no room", self._ledger.dropped)
                self._away = False


def encoded(number: int, batch: Batch | None, stories: list[Story]) -> _Sending:
    """Return a batch as it is sent."""
    batch = batch or Batch()
    sums = [[to.name, to.kept_s, fields] for to, fields in batch.sums.items()]
    members = [[to.name, to.kept_s, sorted(names)] for to, names in batch.members.items()]
    explanations: list[str | bytes] = []
    for story in stories:
        key = explanation_key(story.tenant_id, story.request_id)
        explanations += (key, tenant_key(story.tenant_id, "requests"), told(story))
    return _Sending(number, orjson.dumps(sums), orjson.dumps(members), tuple(explanations))
