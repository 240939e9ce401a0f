"""Who waits for a unit, how long that may take, and what those are told who can't. Pure; blind to the fleet.

Whoever calls says how many slots a request may use and which lines fit a unit; `lines.py` keeps the order.
A request is let in only where it can be expected to be served within `Limits.wait_ms` and its own deadline:
a refusal is worth most while its sender can still go elsewhere. Bounds: `Limits`, MAX_LINES and
MAX_LINES_PER_TENANT.

Whoever is refused is told when there is room, counting in those who were told so before: each request served
makes room for one of them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from typing import NamedTuple

from grid.errors import Overloaded, Saturated
from grid.words import FleetQueue, PlacementRequest
from placement.lines import Flow, Line, Pool, Waiting

MAX_LINES = 512
"""Kinds of requests that wait. Each keeps a mask of the fleet, 5 MB in all with 10,000 units, and a freed
slot looks at each once."""

MAX_LINES_PER_TENANT = 64
"""So that nobody uses up the lines by asking each time for something else."""

MAX_POOLS = 1024
"""Models that anybody waited for, more than a cell runs; beyond it, those without are forgotten."""

MIN_RETRY_AFTER_S = 0.1
MAX_RETRY_AFTER_S = 60.0
"""A caller told to stay away longer would miss units that come back or start."""


class Limits(NamedTuple):
    """Streams that had begun are counted apart, up to as many again: each had a slot that was lost."""

    most: int
    most_per_tenant: int
    wait_ms: float
    """Nobody waits longer; 0 lets nobody wait."""


class Queue:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pools: dict[str, Pool] = {}
        """By model; those that nobody waits in are kept for what they know of their pace."""
        self._by_id: dict[str, Waiting] = {}
        self._by_holder: dict[int, dict[str, Waiting]] = {}
        self._by_tenant: Counter[str] = Counter()
        self._lines_by_tenant: Counter[str] = Counter()
        """Both without those that are urgent."""
        self._urgent = 0
        self._lines = 0
        self._ends: list[tuple[float, int, str]] = []
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, waiting: Waiting) -> bool:
        return self._by_id.get(waiting.request.reservation_id) is waiting

    def knows(self, reservation_id: str) -> bool:
        return reservation_id in self._by_id

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._by_id.values())

    # --- coming and going -------------------------------------------------------------------

    def join(self, waiting: Waiting, slots: int, slots_here: int, now_s: float) -> None:
        """Let it wait; of the model's `slots`, `slots_here` fit what it asks.

        Sets `until_s`. Raises Saturated where the tenant's own requests fill what may wait, else Overloaded;
        both say when to come back.
        """
        reservation_id = waiting.request.reservation_id
        assert reservation_id not in self._by_id, reservation_id
        self._last_number += 1
        waiting.number = self._last_number
        limit_ms = self.longest_ms(waiting.request)
        self._check(waiting, limit_ms, slots, slots_here, now_s)
        waiting.until_s = waiting.joined_s + limit_ms / 1e3
        pool = self._pool(waiting.model)
        if not pool.waiting:
            pool.drain.begin(now_s)
        flow = pool.flow(waiting)
        pool.tenants += not flow.waiting
        flow.waiting += 1
        flow.cost_ms += waiting.cost_ms
        pool.waiting += 1
        pool.cost_ms += waiting.cost_ms
        self._by_id[reservation_id] = waiting
        self._by_holder.setdefault(waiting.holder, {})[reservation_id] = waiting
        if waiting.urgent:
            self._urgent += 1
        else:
            self._by_tenant[waiting.request.tenant_id] += 1
        self._line_up(pool, waiting, flow)
        self._note_end(waiting)

    def leave(self, reservation_id: str) -> Waiting | None:
        """Take it out without having been served; None if it doesn't wait."""
        waiting = self._by_id.get(reservation_id)
        if waiting is not None:
            self._remove(waiting)
        return waiting

    def leave_holder(self, holder: int) -> list[Waiting]:
        """Take out all that a gateway asked for."""
        gone = list(self._by_holder.get(holder, {}).values())
        for waiting in gone:
            self._remove(waiting)
        return gone

    def serve(self, waiting: Waiting, before: Collection[Waiting], now_s: float) -> None:
        """Take it out, as a unit was found for it; those `before` it in the order were passed over."""
        pool = self.pools[waiting.model]
        flow = pool.flows[waiting.request.tenant_id]
        pool.clock_ms = max(pool.clock_ms, flow.clock_ms)
        flow.clock_ms += waiting.cost_ms
        flow.sent_away = max(flow.sent_away - 1, 0)
        pool.sent_away = max(pool.sent_away - 1, 0)
        pool.drain.served(waiting.cost_ms, now_s)
        self._remove(waiting)
        for passed in before:
            passed.passes += 1
            passed.passed_s = min(passed.passed_s, now_s)

    def let_go(self, waiting: Waiting, ask: Hashable) -> None:
        """End its hold: from now on it asks for `ask`, and is there before its tenant's younger requests."""
        pool = self.pools[waiting.model]
        self._line_out(pool, waiting)
        waiting.ask, waiting.held_until_s, waiting.regions, waiting.was_held = ask, math.inf, (), True
        self._line_up(pool, waiting, pool.flows[waiting.request.tenant_id])
        self._note_end(waiting)

    def due(self, now_s: float) -> list[Waiting]:
        """Return those whose time, or hold, is over. The caller lets each of them leave, or go."""
        found = []
        while self._ends and self._ends[0][0] <= now_s:
            _, number, reservation_id = heapq.heappop(self._ends)
            waiting = self._by_id.get(reservation_id)
            if waiting is not None and waiting.number == number:
                found.append(waiting)
        return found

    # --- what is to be expected -------------------------------------------------------------

    def has_room(self, waiting: Waiting) -> bool:
        """Return whether one more may wait, for however long."""
        return self._full(self.pools.get(waiting.model) or Pool(waiting.model), waiting) is None

    def longest_ms(self, request: PlacementRequest) -> float:
        """Return how long it may wait."""
        deadline_ms = request.deadline_ms or math.inf
        return min(self.limits.wait_ms, deadline_ms)

    def wait_ms(self, waiting: Waiting, slots: int, slots_here: int, now_s: float) -> float:
        """Return how long such a request would wait from now on, behind all that are served before it."""
        pool = self.pools.get(waiting.model) or Pool(waiting.model)
        flow = pool.flows.get(waiting.request.tenant_id)
        return self._expect_ms(pool, waiting, 0.0 if flow is None else flow.cost_ms, slots, slots_here, now_s)

    def figures(self, now_s: float, slots: Counter[str]) -> tuple[FleetQueue, ...]:
        """Return a pool each in which somebody waits; `slots` by model."""
        oldest_ms: dict[str, float] = {}
        for waiting in self:
            # In order of arrival.
            oldest_ms.setdefault(waiting.model, 1e3 * (now_s - waiting.joined_s))
        return tuple(
            FleetQueue(
                pool.model,
                pool.waiting,
                pool.tenants,
                oldest_ms[pool.model],
                min(pool.mean_ms * (pool.tenants + 1), pool.cost_ms + pool.mean_ms)
                / pool.rate(slots[pool.model], now_s),
            )
            for pool in self.pools.values()
            if pool.waiting
        )

    def expire(self, waiting: Waiting, slots: int, slots_here: int, now_s: float) -> Saturated:
        """Take out one whose time is over, and return what it is told."""
        pool = self.pools[waiting.model]
        flow = pool.flows[waiting.request.tenant_id]
        wait_ms = self._expect_ms(pool, waiting, flow.cost_ms, slots, slots_here, now_s)
        own = self._is_own(pool, waiting, slots, slots_here, now_s)
        why = f"no slot for {waiting.model!r} was free within {now_s - waiting.joined_s:.1f} s"
        refusal = self._refuse(pool, flow, own, wait_ms - self.limits.wait_ms, slots, now_s, why)
        self._remove(waiting)
        return refusal

    # --- inside -----------------------------------------------------------------------------

    def _pool(self, model: str) -> Pool:
        if model not in self.pools:
            if len(self.pools) >= MAX_POOLS:
                self.pools = {name: pool for name, pool in self.pools.items() if pool.waiting}
            self.pools[model] = Pool(model)
        return self.pools[model]

    def _check(self, waiting: Waiting, limit_ms: float, slots: int, slots_here: int, now_s: float) -> None:
        pool = self._pool(waiting.model)
        flow = pool.flows.get(waiting.request.tenant_id)

        def refuse(own: bool, why: str, late_ms: float = 0.0) -> Saturated:
            return self._refuse(pool, flow, own, late_ms, slots, now_s, why)

        if (full := self._full(pool, waiting)) is not None:
            raise refuse(*full)
        if waiting.urgent:
            return
        own_ms = flow.cost_ms if flow is not None else 0.0
        wait_ms = self._expect_ms(pool, waiting, own_ms, slots, slots_here, now_s)
        if wait_ms > limit_ms:
            own = self._is_own(pool, waiting, slots, slots_here, now_s)
            raise refuse(
                own,
                f"a slot for {waiting.model!r} is expected in {wait_ms / 1e3:.1f} s, once "
                f"{'your other requests are' if own else 'those before are'} served; "
                f"{limit_ms / 1e3:.1f} s is the longest wait",
                wait_ms - limit_ms,
            )

    def _full(self, pool: Pool, waiting: Waiting) -> tuple[bool, str] | None:
        """Return why so many wait that it can't, and whether by its tenant's own doing; None if it can."""
        limits, tenant = self.limits, waiting.request.tenant_id
        if not waiting.urgent:
            if self._by_tenant[tenant] >= limits.most_per_tenant:
                return True, f"{limits.most_per_tenant} of your requests wait already, which is the limit"
            if self._lines_by_tenant[tenant] >= MAX_LINES_PER_TENANT and not self._stands_in(pool, waiting):
                return (
                    True,
                    f"your requests wait with {MAX_LINES_PER_TENANT} different requirements, the limit",
                )
        alike = self._urgent if waiting.urgent else len(self) - self._urgent
        if alike >= limits.most or (self._lines >= MAX_LINES and waiting.ask not in pool.lines):
            return False, f"{len(self)} requests wait already, as many as the cell lets wait"
        return None

    def _is_own(self, pool: Pool, waiting: Waiting, slots: int, slots_here: int, now_s: float) -> bool:
        """Return whether its tenant's own requests are the cause: another's would be served in time."""
        flow = pool.flows.get(waiting.request.tenant_id)
        if flow is None or not flow.waiting or (flow.waiting == 1 and waiting in self):
            return False
        return self._expect_ms(pool, waiting, 0.0, slots, slots_here, now_s) <= self.longest_ms(
            waiting.request
        )

    def _stands_in(self, pool: Pool, waiting: Waiting) -> bool:
        line = pool.lines.get(waiting.ask)
        return line is not None and waiting.request.tenant_id in line.turns

    def _expect_ms(
        self, pool: Pool, waiting: Waiting, own_ms: float, slots: int, slots_here: int, now_s: float
    ) -> float:
        """Before it, its tenant's own are served, and of each other tenant about as much."""
        rate = pool.rate(slots, now_s)
        mean_ms = pool.mean_ms or waiting.cost_ms
        tenant = waiting.request.tenant_id
        others = pool.tenants - (tenant in pool.flows and pool.flows[tenant].waiting > 0)
        ahead_ms = min(pool.cost_ms, own_ms + (own_ms + waiting.cost_ms) * others)
        wait_ms = (ahead_ms + mean_ms) / rate
        if slots_here < slots:
            # The same within its line, which has a part of the slots.
            ahead_ms = 0.0
            if (line := pool.lines.get(waiting.ask)) is not None:
                is_here = tenant in line.turns
                own_ms = line.turns[tenant].cost_ms if is_here and own_ms else 0.0
                ahead_ms = min(
                    line.cost_ms, own_ms + (own_ms + waiting.cost_ms) * (len(line.turns) - is_here)
                )
            wait_ms = max(wait_ms, (ahead_ms + mean_ms) / rate * slots / max(slots_here, 1))
        return wait_ms

    def _refuse(
        self, pool: Pool, flow: Flow | None, own: bool, late_ms: float, slots: int, now_s: float, why: str
    ) -> Saturated:
        """Return the refusal: room comes with every served request, and first for those told so before."""
        gap_ms = pool.mean_ms / pool.rate(slots, now_s)
        if own and flow is not None:
            flow.sent_away += 1
            gap_ms, before = gap_ms * max(pool.tenants, 1), flow.sent_away
        else:
            # Where nobody waits nobody has to be made room for, and none would ever be taken off.
            pool.sent_away += pool.waiting > 0
            before = pool.sent_away
        after_s = (max(late_ms, 0.0) + before * gap_ms) / 1e3
        kind = Saturated if own else Overloaded
        return kind(why, retry_after_s=min(max(after_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S))

    def _remove(self, waiting: Waiting) -> None:
        reservation_id, tenant = waiting.request.reservation_id, waiting.request.tenant_id
        pool = self.pools[waiting.model]
        self._line_out(pool, waiting)
        del self._by_id[reservation_id]
        held = self._by_holder[waiting.holder]
        del held[reservation_id]
        if not held:
            del self._by_holder[waiting.holder]
        if waiting.urgent:
            self._urgent -= 1
        else:
            self._by_tenant[tenant] -= 1
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]
        flow = pool.flows[tenant]
        flow.waiting -= 1
        flow.cost_ms -= waiting.cost_ms
        pool.tenants -= not flow.waiting
        pool.waiting -= 1
        pool.cost_ms -= waiting.cost_ms
        if not pool.waiting:
            # Whoever comes now finds nobody before it, so what anybody had is history.
            pool.flows.clear()
            pool.clock_ms = pool.cost_ms = 0.0
            pool.sent_away = 0
            pool.drain.end()
        else:
            pool.sweep()

    def _line_up(self, pool: Pool, waiting: Waiting, flow: Flow) -> None:
        line = pool.lines.get(waiting.ask)
        if line is None:
            line = pool.lines[waiting.ask] = Line(waiting)
            self._lines += 1
        if line.add(waiting, flow):
            self._lines_by_tenant[waiting.request.tenant_id] += 1

    def _line_out(self, pool: Pool, waiting: Waiting) -> None:
        line = pool.lines[waiting.ask]
        tenant = waiting.request.tenant_id
        if line.remove(waiting):
            self._lines_by_tenant[tenant] -= 1
            if not self._lines_by_tenant[tenant]:
                del self._lines_by_tenant[tenant]
        if line.is_empty():
            del pool.lines[waiting.ask]
            self._lines -= 1

    def _note_end(self, waiting: Waiting) -> None:
        ends_s = min(waiting.until_s, waiting.held_until_s)
        heapq.heappush(self._ends, (ends_s, waiting.number, waiting.request.reservation_id))
        if len(self._ends) > 2 * len(self._by_id) + MAX_LINES:
            self._ends = [entry for entry in self._ends if self._is_live(entry)]
            heapq.heapify(self._ends)

    def _is_live(self, entry: tuple[float, int, str]) -> bool:
        waiting = self._by_id.get(entry[2])
        return waiting is not None and waiting.number == entry[1]
