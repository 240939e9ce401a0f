"""Decides at once or lets wait, and gives each slot that frees to whom it serves best. Pure.

Owns the queue, and is the only one that reserves. After every event nobody waits whom a free slot fits, so
whoever comes later overtakes nobody. A freed slot looks at the first LOOK_AHEAD in the fair order of those
that its unit fits: the one that gains most there is served, unless one before it was passed over too often or
for too long. Every request that came is answered once, be it with a decision, a refusal or because it left.

A preferred region that is full is waited for, if the wait is expected to be within the cell's bound, and no
longer than that bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np

from grid.errors import Cancelled, GridError, InternalError, Rejected, Saturated
from grid.words import Decision, FleetQueue, PlacementRequest, UnitState
from placement.columns import Floats, Ints, Mask
from placement.decide import Among, check, eligible, price, region_tiers
from placement.filters import Question, Sifted, asks, sift, standing
from placement.fleet import View
from placement.lines import Fit, Line, Waiting
from placement.queue import Limits, Queue
from placement.reports import MAX_COUNT, NOTHING_SPENT, Spent

LOOK_AHEAD = 8
"""Requests that one freed slot chooses among: each that may gain there is priced, for about a quarter of what
the decision costs that follows."""

ALIKE_SHARE = 0.05
"""Units whose predicted times differ by less are alike: no prediction is better than that."""

MAX_PASSES = 8
MAX_PASSED_S = 0.5
"""Whoever was passed over so often, or since so long, is next."""

Decide = Callable[[PlacementRequest, float, Among], Decision]
"""As `decide.decide` with view and chance bound. Raises GridError."""


class Answer(NamedTuple):
    """What `holder` is told on `stream`."""

    holder: int
    stream: int
    request: PlacementRequest
    outcome: Decision | GridError


class Dispatch:
    def __init__(self, view: View, limits: Limits, decide: Decide) -> None:
        self.queue = Queue(limits)
        self._view = view
        self._decide = decide
        self.taken_in: list[str] = []
        """Units that serve from now on and have to be told; whoever tells them empties it."""

    # --- events -----------------------------------------------------------------------------

    def place(self, request: PlacementRequest, holder: int, stream: int, now_s: float) -> list[Answer]:
        """Decide and reserve, or let it wait: then it is answered by a later event."""
        if request.dry_run:
            return [Answer(holder, stream, request, self._told(request, holder, now_s))]
        # Asked again, by a gateway that lost its link or its patience: what was before is void.
        answers = self.end(request.reservation_id, now_s)
        pool = self.queue.pools.get(self._view.rules.model(request.model))
        if pool is not None and pool.waiting:
            answers += self._serve_pool(pool.model, now_s)
        try:
            held = self._worth_waiting(request, holder, stream, now_s)
            if held is not None and self._join(held, now_s, None) is None:
                return answers
            outcome: Decision | GridError | None = self._reserve(request, holder, now_s, 0.0)
        except Saturated as full:
            outcome = self._join(self._waiting(request, holder, stream, now_s), now_s, full)
        except GridError as refused:
            outcome = refused
        return answers if outcome is None else [*answers, Answer(holder, stream, request, outcome)]

    def end(self, reservation_id: str, now_s: float) -> list[Answer]:
        """End a reservation without an outcome, or the wait for one."""
        waiting = self.queue.leave(reservation_id)
        if waiting is not None:
            left = Cancelled("the request was withdrawn while it waited for a unit")
            return [Answer(waiting.holder, waiting.stream, waiting.request, left)]
        row = self._view.row_of(reservation_id)
        self._view.withdraw(reservation_id)
        return [] if row is None else self._freed(row, now_s)

    def settle(
        self,
        reservation_id: str,
        outcome: str,
        now_s: float,
        spent: Spent = NOTHING_SPENT,
        answer_prefix: tuple[int, ...] = (),
    ) -> tuple[bool, list[Answer]]:
        """End a reservation, or the wait for one; return whether there was either."""
        if self.queue.knows(reservation_id):
            return True, self.end(reservation_id, now_s)
        row = self._view.row_of(reservation_id)
        held = self._view.settle(reservation_id, outcome, now_s, spent, answer_prefix)
        return held, [] if row is None else self._freed(row, now_s)

    def leave(self, holder: int) -> int:
        """Forget what a lost gateway waits for: nobody is left to be told. Count them."""
        return len(self.queue.leave_holder(holder))

    def serve(self, now_s: float) -> list[Answer]:
        """Give out all slots that are free, whatever freed them, and refuse those whose time is over.

        To be called soon after a unit reported, joined or changed, and regularly, as freshness changes
        with time alone.
        """
        answers: list[Answer] = []
        due = self.queue.due(now_s)
        for waiting in due:
            if waiting.until_s > now_s:
                self.queue.let_go(waiting, self._ask(waiting.request, waiting.model, ()))
        for pool in self.queue.pools.values():
            if pool.waiting:
                answers += self._serve_pool(pool.model, now_s)
        for waiting in due:
            if waiting.until_s <= now_s and waiting in self.queue:
                answers.append(self._expire(waiting, now_s))
        return answers

    def figures(self, now_s: float) -> tuple[FleetQueue, ...]:
        slots = Counter({model: self._slots(model) for model in self.queue.pools})
        return self.queue.figures(now_s, slots)

    # --- deciding ---------------------------------------------------------------------------

    def _told(self, request: PlacementRequest, holder: int, now_s: float) -> Decision | GridError:
        """Return what a call would be told now: of a full unit that it would wait for, that it goes there."""
        try:
            decision = self._decide(request, now_s, eligible)
            held = self._worth_waiting(request, holder, 0, now_s)
            if held is None or not self.queue.has_room(held):
                return decision
            tiers, awaited = region_tiers(self._view, request.prefer_regions), len(held.regions)

            def full(_: Question, sifted: Sifted) -> Ints:
                rows = sifted.rows_of("saturated")
                return rows[tiers[rows] < awaited]

            return decision._replace(
                chosen=self._decide(request, now_s, full).chosen,
                next_best=(decision.chosen, *decision.next_best),
                candidates=decision.candidates + 1,
            )
        except GridError as refused:
            return refused

    def _reserve(self, request: PlacementRequest, holder: int, now_s: float, queued_ms: float) -> Decision:
        try:
            decision = self._decide(request, now_s, eligible)
        except Rejected:
            if not self._take_in(request, now_s):
                raise
            decision = self._decide(request, now_s, eligible)
        self._view.reserve(request, decision.chosen.unit_id, holder, now_s)
        return decision._replace(queued_ms=queued_ms) if queued_ms else decision

    def _take_in(self, request: PlacementRequest, now_s: float) -> bool:
        """Let a unit on standby serve, if one can run it: one that is awake, and of these the quickest."""
        view, columns = self._view, self._view.columns
        if not np.count_nonzero(columns.state >= UnitState.STANDBY):
            return False
        question = Question(request, view, now_s)
        rows = _on_standby(question, sift(question))
        if not len(rows):
            return False
        if request.prefer_regions:
            tiers = region_tiers(view, request.prefer_regions)[rows]
            rows = rows[tiers == tiers.min()]
        awake = rows[columns.state[rows] == UnitState.STANDBY]
        rows = awake if len(awake) else rows
        costs = price(request, view, view.forecast(request), rows)
        self.taken_in.append(view.take_in(rows.item(int(costs.total_ms.argmin()))).unit_id)
        return True

    def _serve_pool(self, model: str, now_s: float) -> list[Answer]:
        answers = self._give_out_free(model, now_s)
        while self._take_in_for_waiting(model, now_s):
            answers += self._give_out_free(model, now_s)
        return answers

    def _take_in_for_waiting(self, model: str, now_s: float) -> bool:
        """Let a unit serve that is on standby only now, or that they did not want while they were held."""
        if not np.count_nonzero(self._view.columns.state >= UnitState.STANDBY):
            return False
        return any(
            self._fit(line, model, now_s).has_spare and self._take_in(line.first, now_s)
            for line in self.queue.pools[model].lines.values()
            if not line.regions
        )

    def _give_out_free(self, model: str, now_s: float) -> list[Answer]:
        answers: list[Answer] = []
        free = self._free(model, now_s)
        if np.count_nonzero(free):
            wanted = np.zeros(len(free), np.bool_)
            for line in self.queue.pools[model].lines.values():
                wanted |= self._fit(line, model, now_s).mask
            for row in np.flatnonzero(free & wanted).tolist():
                answers += self._give_out(model, row, now_s)
        return answers

    def _freed(self, row: int, now_s: float) -> list[Answer]:
        """Give out the slots of one unit."""
        model = self._view.units[row].card.model
        pool = self.queue.pools.get(model)
        if pool is None or not pool.waiting or not self._is_free(row, now_s):
            return []
        return self._give_out(model, row, now_s)

    def _give_out(self, model: str, row: int, now_s: float) -> list[Answer]:
        answers: list[Answer] = []
        columns = self._view.columns
        while columns.load[row] < columns.slots[row]:
            answer = self._pair(model, row, now_s)
            if answer is None:
                break
            answers.append(answer)
        return answers

    def _pair(self, model: str, row: int, now_s: float) -> Answer | None:
        """Serve one of those who wait by the unit at `row`; None if nobody can be."""
        pool = self.queue.pools[model]
        lines = [line for line in pool.lines.values() if self._fit(line, model, now_s).mask[row]]
        order = pool.in_order(lines, LOOK_AHEAD) if lines else []
        left = list(order)
        while left:
            waiting = self._best(left, row, now_s)
            request = waiting.request
            try:
                outcome: Decision | GridError = self._reserve(
                    request, waiting.holder, now_s, 1e3 * (now_s - waiting.joined_s)
                )
            except InternalError as bug:
                self.queue.leave(request.reservation_id)
                return Answer(waiting.holder, waiting.stream, request, bug)
            except GridError:
                left.remove(waiting)
                continue
            self.queue.serve(waiting, order[: order.index(waiting)], now_s)
            return Answer(waiting.holder, waiting.stream, request, outcome)
        return None

    def _best(self, order: list[Waiting], row: int, now_s: float) -> Waiting:
        if len(order) == 1 or order[0].urgent:
            return order[0]
        for waiting in order:
            if waiting.passes >= MAX_PASSES or now_s >= waiting.passed_s + MAX_PASSED_S:
                return waiting
        return max(order, key=lambda waiting: self._gain_ms(waiting, row))

    def _gain_ms(self, waiting: Waiting, row: int) -> float:
        """Return how much sooner it is done there than on the usual unit, less what its best would save."""
        view, request = self._view, waiting.request
        gain_ms = 0.0
        if waiting.is_choosy:
            here_ms = self._work_ms(request, np.array([row])).item(0)
            gain_ms = waiting.cost_ms + waiting.best_ms - 2.0 * here_ms
        if request.prefer_regions and view.units[row].card.region == request.prefer_regions[0]:
            gain_ms += view.rules.prefer_region_wait_ms
        return gain_ms

    # --- waiting ----------------------------------------------------------------------------

    def _waiting(
        self,
        request: PlacementRequest,
        holder: int,
        stream: int,
        now_s: float,
        regions: tuple[str, ...] = (),
    ) -> Waiting:
        model = self._view.rules.model(request.model)
        ask = self._ask(request, model, regions)
        waiting = Waiting(request, holder, stream, model, ask, 0.0, now_s, regions=regions)
        if regions:
            waiting.held_until_s = now_s + self._view.rules.prefer_region_wait_ms / 1e3
        return waiting

    def _join(self, waiting: Waiting, now_s: float, full: Saturated | None) -> Saturated | None:
        """Let it wait, or return why not; `full` is the reason why it has to."""
        if full is not None and not self.queue.limits.wait_ms:
            return full
        fit = self._fit_of(waiting, now_s)
        rows = np.flatnonzero(fit.mask)
        if not len(rows):
            return full
        self._weigh(waiting, rows)
        try:
            self.queue.join(waiting, self._slots(waiting.model), fit.slots, now_s)
        except Saturated as refused:
            if full is not None:
                refused.details.update(full.details)
            return refused
        return None

    def _weigh(self, waiting: Waiting, rows: Ints) -> None:
        work_ms = self._work_ms(waiting.request, rows)
        waiting.cost_ms, waiting.best_ms = float(work_ms.mean()), float(work_ms.min())
        # What costs about the same on all of its units gains nowhere; a cache may come to hold its prompt.
        spread_ms = float(work_ms.max()) - waiting.best_ms
        waiting.is_choosy = bool(waiting.request.prefix) or spread_ms > ALIKE_SHARE * waiting.cost_ms

    def _work_ms(self, request: PlacementRequest, rows: Ints) -> Floats:
        """Return for how long it would hold a slot of each unit at `rows`."""
        costs = price(request, self._view, self._view.forecast(request), rows)
        return costs.prefill_ms + costs.decode_ms

    def _expire(self, waiting: Waiting, now_s: float) -> Answer:
        request, holder = waiting.request, waiting.holder
        fit = self._fit_of(waiting, now_s)
        refusal = self.queue.expire(waiting, self._slots(waiting.model), fit.slots, now_s)
        outcome: Decision | GridError = refusal
        try:
            outcome = self._reserve(request, holder, now_s, 1e3 * (now_s - waiting.joined_s))
        except GridError as full:
            refusal.details.update(full.details)
        return Answer(holder, waiting.stream, request, outcome)

    def _worth_waiting(
        self, request: PlacementRequest, holder: int, stream: int, now_s: float
    ) -> Waiting | None:
        """Return it as it waits for a full unit of an earlier region than any that has room, if it should.

        Raises InvalidRequest, because it comes before any decision.
        """
        view, preferred = self._view, request.prefer_regions
        if not preferred or not self.queue.limits.wait_ms:
            return None
        check(request)
        question = Question(request, view, now_s)
        sifted = sift(question)
        full = sifted.rows_of("saturated")
        if not len(full):
            return None
        tiers, longest_ms = region_tiers(view, preferred), self.queue.longest_ms(request)
        # Where nobody has room, one on standby is taken in: no reason to wait for a full one beside it.
        free = sifted.rows if len(sifted.rows) else _on_standby(question, sifted)
        free_tier = tiers[free].min(initial=len(preferred))
        for tier in np.unique(tiers[full]).astype(int).tolist():
            if tier >= free_tier:
                return None
            waiting = self._waiting(request, holder, stream, now_s, preferred[: tier + 1])
            fit = self._fit_of(waiting, now_s)
            self._weigh(waiting, np.flatnonzero(fit.mask))
            wait_ms = self.queue.wait_ms(waiting, self._slots(waiting.model), fit.slots, now_s)
            if wait_ms <= min(view.rules.prefer_region_wait_ms, longest_ms):
                return waiting
        return None

    # --- what fits --------------------------------------------------------------------------

    def _ask(self, request: PlacementRequest, model: str, regions: tuple[str, ...]) -> Hashable:
        """Return what is equal for requests that fit the same units."""
        least = self._view.remembered(("context", model), lambda: self._least_context(model))
        # An answer that fits the context of every unit asks for no particular one.
        tokens = request.max_output_tokens if request.max_output_tokens >= least else 0
        return asks(request._replace(model=model, max_output_tokens=tokens)), regions

    def _least_context(self, model: str) -> int:
        return int(self._view.columns.context_tokens[self._rows(model)].min(initial=MAX_COUNT))

    def _rows(self, model: str) -> Ints:
        view = self._view
        return np.flatnonzero(view.columns.model == view.models.number(model))

    def _slots(self, model: str) -> int:
        """Return how many of the model's requests run at once."""
        columns = self._view.columns
        return self._view.remembered(
            ("slots", model), lambda: int(columns.max_running[self._rows(model)].sum())
        )

    def _fit_of(self, waiting: Waiting, now_s: float) -> Fit:
        pool = self.queue.pools.get(waiting.model)
        line = None if pool is None else pool.lines.get(waiting.ask)
        return self._fit(Line(waiting) if line is None else line, waiting.model, now_s)

    def _fit(self, line: Line, model: str, now_s: float) -> Fit:
        view = self._view
        if line.fit is None or line.fit.fleet_version != view.version:
            sifted = standing(Question(line.first, view, now_s))
            mask: Mask = sifted.broken < 0
            if line.regions:
                mask &= view.regions.where(lambda region: region in line.regions)[view.columns.region]
            has_spare = bool(len(sifted.rows_of("standby")))
            line.fit = Fit(view.version, mask, int(view.columns.max_running[mask].sum()), has_spare)
        return line.fit

    def _free(self, model: str, now_s: float) -> Mask:
        view, columns = self._view, self._view.columns
        free: Mask = (columns.model == view.models.number(model)) & (columns.load < columns.slots)
        fresh = view.fresh(now_s)[0]
        return free if fresh is None else free & fresh

    def _is_free(self, row: int, now_s: float) -> bool:
        view, columns = self._view, self._view.columns
        if columns.load[row] >= columns.slots[row]:
            return False
        fresh = view.fresh(now_s)[0]
        return fresh is None or bool(fresh[row])


def _on_standby(question: Question, sifted: Sifted) -> Ints:
    """Return the units on standby that could run it."""
    rows = sifted.rows_of("standby")
    return rows if question.fresh is None else rows[question.fresh[rows]]
