"""The order of those who wait for one model: requests in lines, lines in a pool, tenants' clocks. Pure.

A line holds requests that ask the same, so what fits one fits all. In a pool tenants take turns by virtual
time: a tenant's clock runs by the slot time that its served requests are expected to take, and the earliest
clock is next. Whoever waited for nothing starts at the pool's clock, so being away earns nothing, and one
request never waits behind another tenant's thousand. Within a tenant the lowest priority number goes first,
then the older request. URGENT requests go before every tenant's.

Nothing here goes through all that wait: coming, leaving and being next take a logarithm at most.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from grid.words import PlacementRequest
from placement.columns import Mask
from placement.drain import Drain

URGENT = -1
"""Priorities up to this are given by the gateway alone, to streams that had begun on a unit that was lost."""

FLOWS_KEPT = 64
"""Tenants that wait for nothing and may be kept before they are looked through."""


@dataclass(slots=True, eq=False)
class Waiting:
    request: PlacementRequest
    holder: int
    """Link of the gateway that asks."""
    stream: int
    """Of that link: where it is answered."""
    model: str
    """What the requested name stands for."""
    ask: Hashable
    """Equal for requests that fit the same units."""
    cost_ms: float
    """For how long it is expected to hold a slot of the usual unit."""
    joined_s: float
    best_ms: float = 0.0
    """The same of the unit where it would be the shortest."""
    is_choosy: bool = False
    """It matters which unit it gets."""
    until_s: float = math.inf
    """When it is refused."""
    held_until_s: float = math.inf
    """When it no longer waits for `regions` alone."""
    regions: tuple[str, ...] = ()
    """Of those that it prefers, the ones that it waits for; empty: for any."""
    number: int = 0
    """In order of arrival."""
    was_held: bool = False
    """It waited for `regions` alone, and no longer does."""
    passes: int = 0
    """How often a later one was served before it, for the gain."""
    passed_s: float = math.inf
    """When that was first."""

    @property
    def urgent(self) -> bool:
        return self.request.priority <= URGENT

    @property
    def rank(self) -> tuple[int, int]:
        """Within its tenant the least comes first."""
        return self.request.priority, self.number


class Fit(NamedTuple):
    """Which units may run what a line asks, be they full or not."""

    fleet_version: int
    mask: Mask
    slots: int
    has_spare: bool
    """Units on standby could run it, too."""


class Turns:
    """One tenant's requests in one line, by rank. Removal from anywhere takes constant time."""

    __slots__ = ("cost_ms", "count", "rows")

    def __init__(self) -> None:
        self.rows: dict[tuple[int, bool], OrderedDict[int, Waiting]] = {}
        """By priority, and whether they were held before: each is in order of arrival, as holds end in it."""
        self.count = 0
        self.cost_ms = 0.0

    def add(self, waiting: Waiting) -> None:
        self.rows.setdefault(_row_of(waiting), OrderedDict())[waiting.number] = waiting
        self.count += 1
        self.cost_ms += waiting.cost_ms

    def remove(self, waiting: Waiting) -> None:
        row = self.rows[_row_of(waiting)]
        del row[waiting.number]
        if not row:
            del self.rows[_row_of(waiting)]
        self.count -= 1
        self.cost_ms -= waiting.cost_ms

    def __iter__(self) -> Iterator[Waiting]:
        rows = [row.values() for row in self.rows.values()]
        return iter(rows[0]) if len(rows) == 1 else heapq.merge(*rows, key=lambda each: each.rank)


def _row_of(waiting: Waiting) -> tuple[int, bool]:
    return waiting.request.priority, waiting.was_held


@dataclass(slots=True)
class Flow:
    """One tenant in one pool."""

    clock_ms: float
    since: int = 0
    """Number of the request with which it began to wait: among equal clocks, who came first."""
    waiting: int = 0
    cost_ms: float = 0.0
    sent_away: int = 0
    """Told to come back, and not made room for yet."""

    @property
    def turn(self) -> tuple[float, int]:
        """The least is next; it only grows."""
        return self.clock_ms, self.since


class Line:
    """Requests of one pool that ask the same, as `first` did."""

    def __init__(self, first: Waiting) -> None:
        self.first = first.request
        self.regions = first.regions
        self.cost_ms = 0.0
        self.turns: dict[str, Turns] = {}
        self.urgent: OrderedDict[int, Waiting] = OrderedDict()
        self.fit: Fit | None = None
        """As the caller last worked it out."""
        self._order: list[tuple[tuple[float, int], str]] = []
        self._ordered: set[str] = set()

    def add(self, waiting: Waiting, flow: Flow) -> bool:
        """Return whether its tenant is new here."""
        self.cost_ms += waiting.cost_ms
        if waiting.urgent:
            self.urgent[waiting.number] = waiting
            return False
        tenant = waiting.request.tenant_id
        is_new = tenant not in self.turns
        if is_new:
            self.turns[tenant] = Turns()
        if tenant not in self._ordered:
            self._ordered.add(tenant)
            heapq.heappush(self._order, (flow.turn, tenant))
        self.turns[tenant].add(waiting)
        return is_new

    def remove(self, waiting: Waiting) -> bool:
        """Return whether its tenant has nothing left here."""
        self.cost_ms -= waiting.cost_ms
        if waiting.urgent:
            del self.urgent[waiting.number]
            return False
        turns = self.turns[waiting.request.tenant_id]
        turns.remove(waiting)
        if turns.count:
            return False
        del self.turns[waiting.request.tenant_id]
        return True

    def is_empty(self) -> bool:
        return not self.turns and not self.urgent

    def next_tenants(self, flows: dict[str, Flow], count: int) -> list[str]:
        """Return up to `count` tenants, the earliest clock first."""
        found: list[tuple[tuple[float, int], str]] = []
        while self._order and len(found) < count:
            turn, tenant = heapq.heappop(self._order)
            if tenant not in self.turns:
                self._ordered.remove(tenant)
            elif flows[tenant].turn > turn:
                # Served meanwhile, from here or from another line.
                heapq.heappush(self._order, (flows[tenant].turn, tenant))
            else:
                found.append((turn, tenant))
        for entry in found:
            heapq.heappush(self._order, entry)
        return [tenant for _, tenant in found]


@dataclass(slots=True)
class Pool:
    """All that wait for one model."""

    model: str
    drain: Drain = field(default_factory=Drain)
    lines: dict[Hashable, Line] = field(default_factory=dict)
    flows: dict[str, Flow] = field(default_factory=dict)
    tenants: int = 0
    """Of `flows`, those that wait. The others have a clock ahead of the pool's."""
    clock_ms: float = 0.0
    waiting: int = 0
    cost_ms: float = 0.0
    sent_away: int = 0

    _sweep_at: int = FLOWS_KEPT

    def flow(self, waiting: Waiting) -> Flow:
        """Return the flow that `waiting` joins; one that waited for nothing is no further than the pool."""
        tenant_id = waiting.request.tenant_id
        flow = self.flows.get(tenant_id)
        if flow is None:
            flow = self.flows[tenant_id] = Flow(self.clock_ms, waiting.number)
        elif not flow.waiting:
            flow.clock_ms, flow.since = max(flow.clock_ms, self.clock_ms), waiting.number
        return flow

    def rate(self, slots: int, now_s: float) -> float:
        """Return the slot milliseconds served a millisecond."""
        return self.drain.rate(slots, self.mean_ms, now_s)

    @property
    def mean_ms(self) -> float:
        return self.cost_ms / self.waiting if self.waiting else 0.0

    def sweep(self) -> None:
        """Forget who waits for nothing and isn't ahead of the pool."""
        if len(self.flows) > self._sweep_at:
            self.flows = {
                tenant: flow
                for tenant, flow in self.flows.items()
                if flow.waiting or flow.clock_ms > self.clock_ms
            }
            self._sweep_at = 2 * len(self.flows) + FLOWS_KEPT

    def in_order(self, lines: Collection[Line], count: int) -> list[Waiting]:
        """Return the first `count` of `lines` in the order in which they would be served one by one."""
        urgent = heapq.merge(*(line.urgent.values() for line in lines), key=lambda each: each.number)
        found = list(islice(urgent, count))
        tenants = {tenant for line in lines for tenant in line.next_tenants(self.flows, count - len(found))}
        turns = [(*self.flows[tenant].turn, tenant, _merged(lines, tenant)) for tenant in tenants]
        heapq.heapify(turns)
        while turns and len(found) < count:
            clock_ms, since, tenant, requests = turns[0]
            waiting = next(requests, None)
            if waiting is None:
                heapq.heappop(turns)
                continue
            found.append(waiting)
            heapq.heapreplace(turns, (clock_ms + waiting.cost_ms, since, tenant, requests))
        return found


def _merged(lines: Collection[Line], tenant: str) -> Iterator[Waiting]:
    here = [line.turns[tenant] for line in lines if tenant in line.turns]
    return iter(here[0]) if len(here) == 1 else heapq.merge(*here, key=lambda each: each.rank)
