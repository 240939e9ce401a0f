"""Reads what all replicas have counted: the last minute, bursts, steps, usage. Nothing here writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from redis.asyncio import Redis

from gateway.observe.explain import explanation, explanation_key
from gateway.observe.histogram import quantile_ms
from gateway.observe.ledger import (
    ALL,
    DIRECT,
    HOUR_S,
    LIVE_SLOT_S,
    PACE_BLOCK_S,
    STEP_SLOT_S,
)
from gateway.observe.totals import MICRO, TOTALS, Sums, add_sums
from gateway.records import tenant_key
from gateway.state import as_bytes, state_errors
from grid.errors import NotFound

WINDOW_S = 60
"""Of `/v1/metrics`: a whole number of slots and the begun one, so 60 to 65 seconds."""
STEP_WINDOW_S = HOUR_S
BURST_S = 2 * LIVE_SLOT_S
"""The calls of the begun slot and the one before are held against those before them."""
BASELINE_S = PACE_BLOCK_S
BURST_FACTOR = 4.0
"""A rate this many times its own mean of the last ten minutes; traffic that doubles by itself is growth."""
BURST_LEAST_CALLS = 40
"""Fewer calls in ten seconds are no burst, whatever there was before: a replica does hundreds a second."""


@dataclass(frozen=True, slots=True)
class Window:
    """The calls of the last minute or so."""

    covered_s: float
    calls: int
    good: int
    refused: int
    cancelled: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cu_seconds: float
    p99_ms: float | None
    """Of good calls, within `histogram.RELATIVE_ERROR`; None without any."""

    @property
    def rate_per_s(self) -> float:
        return self.calls / self.covered_s

    @property
    def failed_share(self) -> float:
        return self.failed / self.calls if self.calls else 0.0

    @property
    def cached_share(self) -> float | None:
        return self.cached_tokens / self.input_tokens if self.input_tokens else None

    def busy_share(self, capacity: float) -> float:
        """Return what share of `capacity` (`cu_seconds` a second) the calls used, 1 at most."""
        return min(self.cu_seconds / (capacity * self.covered_s), 1.0) if capacity > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step over the last hour; times are of calls in which it did not fail."""

    calls: int = 0
    errors: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    tokens: int = 0


@dataclass(slots=True)
class UsageSum:
    calls: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cu_micro: int = 0

    def add(self, sums: Sums) -> None:
        self.calls += sums.get("calls", 0)
        self.input_tokens += sums.get("input", 0)
        self.cached_tokens += sums.get("cached", 0)
        self.output_tokens += sums.get("output", 0)
        self.cu_micro += sums.get("cu", 0)

    def merge(self, other: UsageSum) -> None:
        self.calls += other.calls
        self.input_tokens += other.input_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens
        self.cu_micro += other.cu_micro


@dataclass(frozen=True, slots=True)
class UsageHour:
    pipeline_id: str
    """"" for calls of a model itself."""
    hour: datetime
    used: UsageSum = field(default_factory=UsageSum)


class Figures:
    """`clock` gives Unix seconds."""

    def __init__(self, client: Redis, *, clock: Callable[[], float] = time.time) -> None:
        self._redis = client
        self._clock = clock

    async def window(self, tenant_id: str, pipeline_id: str = "") -> Window:
        """Return the last minute of a pipeline, or of all of a tenant's calls."""
        now = self._clock()
        first = int(now - WINDOW_S) // LIVE_SLOT_S
        slots = range(first, int(now) // LIVE_SLOT_S + 1)
        name = tenant_key(tenant_id, f"live:{pipeline_id or ALL}")
        sums = _added(await self._hashes([f"{name}:{slot}" for slot in slots]))
        return Window(
            covered_s=now - first * LIVE_SLOT_S,
            calls=sums.get("calls", 0),
            good=sums.get("good", 0),
            refused=sums.get("refused", 0),
            cancelled=sums.get("cancelled", 0),
            failed=sums.get("failed", 0),
            input_tokens=sums.get("input", 0),
            cached_tokens=sums.get("cached", 0),
            output_tokens=sums.get("output", 0),
            cu_seconds=sums.get("cu", 0) / MICRO,
            p99_ms=quantile_ms(_times(sums, "ms"), 0.99),
        )

    async def burst(self, tenant_id: str, pipeline_id: str = "") -> bool:
        """Say whether calls come much faster than they did over the ten minutes before."""
        now = self._clock()
        name = tenant_key(tenant_id, f"pace:{pipeline_id or ALL}")
        oldest = int(now - BASELINE_S - BURST_S) // PACE_BLOCK_S
        blocks = range(oldest, int(now) // PACE_BLOCK_S + 1)
        calls = _added(await self._hashes([f"{name}:{block}" for block in blocks]))
        return is_burst({int(slot): count for slot, count in calls.items()}, now)

    async def steps(self, tenant_id: str, pipeline_id: str, revision: int) -> dict[str, StepFigures]:
        """Return the figures of a revision's steps over the last hour, by step id."""
        now = int(self._clock())
        slots = range((now - STEP_WINDOW_S) // STEP_SLOT_S, now // STEP_SLOT_S + 1)
        name = tenant_key(tenant_id, f"steps:{pipeline_id}:{revision}")
        sums = _added(await self._hashes([f"{name}:{slot}" for slot in slots]))
        found = {}
        for step_id in {name.rpartition(":")[0] for name in sums}:
            times = _times(sums, f"{step_id}:ms")
            found[step_id] = StepFigures(
                calls=sums.get(f"{step_id}:calls", 0),
                errors=sums.get(f"{step_id}:errors", 0),
                p50_ms=quantile_ms(times, 0.5),
                p99_ms=quantile_ms(times, 0.99),
                tokens=sums.get(f"{step_id}:tokens", 0),
            )
        return found

    async def usage(
        self, tenant_id: str, since: datetime, until: datetime, pipeline_id: str = ""
    ) -> list[UsageHour]:
        """Return what was used in the hours that lie in [since, until), oldest first."""
        days = [f"{since + timedelta(days=n):%Y%m%d}" for n in range((until.date() - since.date()).days + 1)]
        if pipeline_id:
            used: Sequence[Iterable[bytes]] = [[pipeline_id.encode()]] * len(days)
        else:
            used = await self._all("SMEMBERS", [tenant_key(tenant_id, f"used:{day}") for day in days])
        asked = [
            (day, name.decode()) for day, names in zip(days, used, strict=True) for name in sorted(names)
        ]
        hashes = await self._hashes([tenant_key(tenant_id, f"usage:{name}:{day}") for day, name in asked])
        hours: dict[tuple[datetime, str], UsageHour] = {}
        for (day, name), sums in zip(asked, hashes, strict=True):
            for field_name, count in sums.items():
                hour, _, what = field_name.partition(":")
                at = datetime.strptime(f"{day}{hour}", "%Y%m%d%H").replace(tzinfo=UTC)
                if since <= at < until:
                    shown = "" if name == DIRECT else name
                    row = hours.setdefault((at, shown), UsageHour(shown, at))
                    row.used.add({what: count})
        return [hours[key] for key in sorted(hours)]

    async def explained(self, tenant_id: str, request_id: str) -> dict[str, Any]:
        """Return the explanation of a call. Raises NotFound, for another tenant's too."""
        with state_errors():
            found = await self._redis.get(explanation_key(tenant_id, request_id))
        if found is None:
            raise NotFound(
                f"there is no explanation of request {request_id!r}: it is not known, still runs, or was too "
                "long ago",
                param="request_id",
            )
        return explanation(as_bytes(found))

    async def totals(self) -> Sums:
        """Return what the whole cell has counted since it exists."""
        return (await self._hashes([TOTALS]))[0]

    async def _hashes(self, names: Sequence[str]) -> list[Sums]:
        return [
            {name.decode(): int(count) for name, count in found.items()}
            for found in await self._all("HGETALL", names)
        ]

    async def _all(self, command: str, names: Sequence[str]) -> list[Any]:
        """Send one command for each name, in one go."""
        with state_errors():
            pipe = self._redis.pipeline(transaction=False)
            for name in names:
                pipe.execute_command(command, name)
            return await pipe.execute()


def is_burst(calls: dict[int, int], now: float) -> bool:
    """Hold the rate of the newest slots against the mean of the ten minutes before. `calls` are by slot."""
    newest = int(now) // LIVE_SLOT_S
    first = newest - BURST_S // LIVE_SLOT_S + 1
    recent = sum(count for slot, count in calls.items() if slot >= first)
    before = sum(count for slot, count in calls.items() if first - BASELINE_S // LIVE_SLOT_S <= slot < first)
    recent_rate = recent / (now - first * LIVE_SLOT_S)
    return recent >= BURST_LEAST_CALLS and recent_rate > BURST_FACTOR * before / BASELINE_S


def _added(hashes: Iterable[Sums]) -> Sums:
    sums: Sums = {}
    for found in hashes:
        add_sums(sums, found)
    return sums


def _times(sums: Sums, prefix: str) -> dict[int, int]:
    """Return the counts of time buckets, whose fields are `prefix` and the bucket's number."""
    return {
        int(name[len(prefix) :]): count
        for name, count in sums.items()
        if name.startswith(prefix) and name[len(prefix) :].lstrip("-").isdecimal()
    }
