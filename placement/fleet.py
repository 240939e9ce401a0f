"""The one view of the fleet: what units are, last reported and have learned, and what was decided since.

The placement actor owns it and is its only writer. Nothing here awaits, reads a clock or draws chance.

Load counts every request exactly once:

    load = requests in the newest sample
         - reservations in that sample that were settled since
         + reservations that the sample does not hold

A reservation ends when it is settled, when a sample no longer holds what an earlier one held, when its
gateway is lost before any sample held it, when its unit comes back as a new process, or when its lease
ends. While samples hold it, its lease is renewed. A sample never creates a reservation, so nothing that
ended comes back. Bounded by MAX_UNITS and their slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from grid.errors import InvalidRequest, Saturated
from grid.samples import Floats, Ints, load_of
from grid.words import (
    UNKNOWN,
    Condemned,
    FleetGpu,
    FleetUnit,
    GpuSample,
    NodeCard,
    PlacementRequest,
    UnitCard,
    UnitLoad,
    UnitState,
)
from placement import cost, freshness, samples
from placement.columns import Columns, Mask, Names
from placement.gpus import Gpus
from placement.isolation import Isolation, Serving
from placement.learning import LESSON_GAP_S, PUBLISH_S, STUDY_S, Learning
from placement.lengths import Forecast
from placement.loads import Loads, slots
from placement.newest import Newest
from placement.prefixes import Prefixes, UnitPrefixes
from placement.reports import NOTHING_SPENT, Spent, card_flaw, spent_flaw
from placement.reservations import Ledger, Reservation
from placement.rules import Rules
from placement.samples import Batch
from placement.slowness import Slowness
from placement.speeds import Speeds, UnitSpeed, prompt_work

MAX_UNITS = 100_000
"""Ten times what one cell is built for; beyond it, registration is refused."""

MAX_REMEMBERED = 64
"""Answers kept for readers, two for each of the steps that a cell mostly serves. One takes up to 9 bytes a
unit, so all take 58 MB in the largest fleet."""

LONGEST_PACED_S = 1.0
"""Between two samples: after a longer silence nothing is known of the pace."""

T = TypeVar("T")


@dataclass(slots=True)
class Unit:
    """What the columns don't hold of one unit."""

    card: UnitCard
    link: int
    """The connection it announced itself on; only there, or by its node, may it report."""
    speed: UnitSpeed
    speeds: Speeds
    """As last published."""
    prefixes: UnitPrefixes
    held: set[str] = field(default_factory=set)
    """The reservations of its newest sample."""
    taught_s: float = -np.inf
    """When a request last taught its speed."""


class View:
    """`version` rises when a unit joins, leaves, changes state, is drained or isolated, and when a GPU
    becomes faulty; not with every sample."""

    def __init__(self, rules: Rules, now_s: float, first_version: int = 1) -> None:
        self.rules = rules
        self.version = first_version
        self.columns = Columns()
        self._loads = Loads(self.columns)
        self.models = Names()
        self.regions = Names()
        self.gpus = Gpus()
        self.units: list[Unit] = []
        """In row order."""
        self.dropped: Counter[str] = Counter()
        """Samples and calls that were not believed, by reason."""
        self._rows: dict[str, int] = {}
        self._links: dict[int, set[str]] = {}
        self._ledger = Ledger()
        self._newest = Newest(self.columns, self.units, self._rows, self.gpus, self._ledger, self.dropped)
        self._drained: set[str] = set()
        self._clock = freshness.ObservedClock(now_s)
        self._remembered: dict[Hashable, Any] = {}
        self._learning = Learning()
        self.prefixes = Prefixes()
        self._published_s = -np.inf
        # A bound over all units, so that the usual question, whether all are fresh, is one comparison.
        self._sampled_since_s = np.inf
        """No newest sample is older than this."""
        self._isolation = Isolation(rules.isolated_share_max)
        self._slowness = Slowness()

    # --- membership -------------------------------------------------------------------------

    def join(self, card: UnitCard, link: int) -> None:
        """Take a unit in; it gets no work before its first sample.

        A unit that is known already moves to `link`: it reconnected, or a new process took its name.
        Raises InvalidRequest for a card that makes no sense, Saturated beyond MAX_UNITS.
        """
        if flaw := card_flaw(card):
            self.dropped["bad_card"] += 1
            raise InvalidRequest(f"unit {card.unit_id!r} can't register: {flaw}", param="card")
        if card.unit_id in self._rows:
            self._remove(card.unit_id)
        elif len(self.units) >= MAX_UNITS:
            self.dropped["too_many_units"] += 1
            raise Saturated(f"this cell holds {MAX_UNITS} units already; start another cell")
        for reservation in self._ledger.of_unit(card.unit_id):
            if reservation.incarnation != card.incarnation:
                self._ledger.pop(reservation.reservation_id)
        self._isolation.join(card)
        self._append(card, link)
        self._changed()

    def leave(self, link: int) -> tuple[str, ...]:
        """Take out every unit that announced itself on `link`; return their ids.

        Their reservations stay until settled or expired, because the unit may only have lost its link.
        """
        self.gpus.leave(link)
        self._newest.moved()
        gone = tuple(sorted(self._links.get(link, ())))
        for unit_id in gone:
            self._remove(unit_id)
        if gone:
            self._changed()
        return gone

    def drain(self, unit_id: str, draining: bool) -> bool:
        """Stop or resume work for a unit, also across its restarts; return whether it is known."""
        row = self._rows.get(unit_id)
        if row is None and unit_id not in self._drained:
            return False
        (self._drained.add if draining else self._drained.discard)(unit_id)
        if row is not None and bool(self.columns.drained[row]) != draining:
            self.columns.drained[row] = draining
            self._changed()
        return True

    def take_in(self, row: int) -> UnitCard:
        """Let a unit that is on standby serve from now on; its owner must tell it."""
        self.columns.taken_in[row] = True
        self._changed()
        return self.units[row].card

    def join_node(self, card: NodeCard, link: int) -> None:
        """Take in the probe of a node. Raises InvalidRequest or Saturated."""
        self._newest.moved()
        if self.gpus.join(card, link):
            self._changed()

    def report_node(
        self, node_id: str, incarnation: str, samples: Iterable[GpuSample], link: int, now_s: float
    ) -> bool:
        """Take one batch of GPU samples; return whether a GPU became faulty, which takes its units out."""
        is_new = self.gpus.report(node_id, incarnation, samples, link, self._clock.read(now_s))
        if is_new:
            self._changed()
        return is_new

    def _isolate_slow(self, observed_s: float) -> None:
        for slow in self._slowness.found(observed_s):
            card = self.units[self._rows[slow.unit_id]].card
            reason = f"its steps take {slow.factor:.0f} times as long as they did, and others' don't"
            if self._isolation.slow(card, reason, observed_s):
                self._changed()

    def canaries_due(self, now_s: float) -> list[UnitCard]:
        """Return the units to which a canary is to be sent now; `canary_ended` must follow for each."""
        return self._isolation.canaries_due(self._clock.read(now_s))

    def canary_ended(self, card: UnitCard, flaw: str | None, now_s: float) -> None:
        """Take how a canary went: "" well, None nobody knows, else what was wrong."""
        if self._isolation.canary_ended(card, flaw, self._clock.read(now_s)):
            self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._remembered.clear()
        self._judge()

    def _judge(self) -> None:
        """Say anew which units are isolated: what there is, or what is held against it, has changed."""
        suspects = self._isolation.suspects
        if not suspects and not self._isolation.isolated:
            return
        columns = self.columns
        able = (columns.state == UnitState.READY) & ~columns.drained
        if self.gpus.has_faults():
            able &= [not self.gpus.fault(unit.card) for unit in self.units]
        serving = []
        for model, names in suspects.items():
            of_model = able & (columns.model == self.models.number(model))
            there = [name for name in names if name in self._rows and of_model[self._rows[name]]]
            serving.append(Serving(int(of_model.sum()), int(columns.max_running[of_model].sum()), there))
        self._isolation.judge(serving, self._clock.observed_s)
        columns.isolated[:] = False
        columns.isolated[[self._rows[name] for name in self._isolation.isolated]] = True

    def _append(self, card: UnitCard, link: int) -> None:
        columns, row = self.columns, self.columns.append()
        columns.task[row] = card.task
        columns.model[row] = self.models.hold(card.model)
        columns.region[row] = self.regions.hold(card.region)
        columns.precision[row] = card.precision
        columns.memory_grant_mb[row] = card.memory_grant_mb
        columns.context_tokens[row] = card.context_tokens
        columns.max_running[row] = card.max_running
        columns.most_slots[row] = slots(card)
        columns.state[row] = UnitState.STARTING
        columns.drained[row] = card.unit_id in self._drained
        columns.sampled_s[row] = self._sampled_since_s = columns.studied_s[row] = -np.inf
        speed = self._learning.join(card)
        self.units.append(Unit(card, link, speed, speed.speeds, self.prefixes.join()))
        self._rows[card.unit_id] = row
        self._newest.moved()
        self._links.setdefault(link, set()).add(card.unit_id)
        self._set_speeds([speed])
        self._loads.miss(row, self._ledger.of_unit(card.unit_id))
        self._loads.count(np.array([row]))

    def _remove(self, unit_id: str) -> None:
        for reservation in self._ledger.of_unit(unit_id):
            reservation.expires_s = self._renewed_until_s(reservation)
        row = self._rows.pop(unit_id)
        self._newest.moved()
        link = self.units[row].link
        self._links[link].remove(unit_id)
        if not self._links[link]:
            del self._links[link]
        self.units[row].speed.leave()
        self._slowness.leave(unit_id)
        self.prefixes.leave(row, self.units[row].prefixes)
        self.models.drop(int(self.columns.model[row]))
        self.regions.drop(int(self.columns.region[row]))
        self.columns.remove(row)
        last = self.units.pop()
        if last.card.unit_id != unit_id:
            self.units[row] = last
            self._rows[last.card.unit_id] = row

    # --- samples ----------------------------------------------------------------------------

    def report(self, loads: Iterable[UnitLoad], link: int, now_s: float) -> None:
        """Take a unit's own report."""
        self.take([samples.own(tuple(loads), link)], now_s)

    def take(self, batches: Sequence[Batch], now_s: float) -> None:
        """Take samples at once. One that is not believed is counted and dropped: its unit goes stale."""
        observed_s = self._clock.read(now_s)
        for rows, counts, readings in self._newest.of(batches):
            self._take(rows, counts, readings, observed_s)

    def _take(self, rows: Ints, counts: Ints, readings: Floats, observed_s: float) -> None:
        """Each of these is its unit's newest sample from here on."""
        columns = self.columns
        changed = rows[counts[samples.STATE] != columns.state[rows]]
        if np.count_nonzero(columns.sampled_s[rows] == -np.inf):
            # Until its first sample a unit is silent, whatever its state; gateways see no difference.
            self._remembered.clear()
        steps = counts[samples.STEPS] - columns.steps[rows]
        worked = steps != 0
        if np.count_nonzero(worked) or np.count_nonzero(columns.gap_ms[rows]):
            elapsed_ms = 1e3 * np.minimum(observed_s - columns.sampled_s[rows], LONGEST_PACED_S)
            self._loads.pace(rows, elapsed_ms, np.maximum(steps, 0))
        columns.counts[:, rows], columns.readings[:, rows] = counts, readings
        if len(changed):
            columns.taken_in[changed] = False
            self._changed()
        columns.sampled_s[rows] = observed_s
        self._study(rows[worked & (columns.studied_s[rows] <= observed_s - STUDY_S)], observed_s)
        for row in rows[columns.relisted[rows] | (columns.unseen[rows] > 0)].tolist():
            self._see(row)
        self._loads.count(rows)

    def _study(self, rows: Ints, observed_s: float) -> None:
        columns = self.columns
        columns.studied_s[rows] = observed_s
        for row in rows.tolist():
            held = max(columns.kv_tokens_total.item(row) - columns.kv_tokens_free.item(row), 0)
            step_ms = columns.decode_ms_per_token.item(row)
            unit = self.units[row]
            off = self._learning.reported(unit.speed, columns.running.item(row), held, step_ms)
            if off is not None:
                self._slowness.observed(unit.card.unit_id, id(unit.speed.kind), off, observed_s)

    def _see(self, row: int) -> None:
        """Tell which reservations the newest sample holds, which it holds no more, and which not yet."""
        unit, unseen = self.units[row], []
        self.columns.relisted[row] = False
        for reservation in self._ledger.of_unit(unit.card.unit_id):
            if reservation.reservation_id in unit.held:
                reservation.seen = True
            elif reservation.seen:
                self._ledger.pop(reservation.reservation_id)
            else:
                unseen.append(reservation)
        self._loads.miss(row, unseen)

    def _set_speeds(self, changed: Iterable[UnitSpeed]) -> None:
        # By identity: units without a factor of their own share their kind's object.
        alike: dict[int, list[int]] = {}
        for speed in changed:
            row, speeds = self._rows[speed.unit_id], speed.speeds
            self.units[row].speeds = speeds
            alike.setdefault(id(speeds), []).append(row)
        for rows in alike.values():
            self._loads.set_speeds(np.array(rows), self.units[rows[0]].speeds)

    # --- reservations -----------------------------------------------------------------------

    def reserve(self, request: PlacementRequest, unit_id: str, holder: int, now_s: float) -> None:
        """Charge `unit_id` for `request` at once. The reservation must not be held: `withdraw` it first."""
        row = self._rows[unit_id]
        unit, card = self.units[row], self.units[row].card
        observed_s = self._clock.read(now_s)
        kv_tokens_total = self.columns.kv_tokens_total.item(row)
        forecast = self.forecast(request)
        scale, trips_ms = forecast.prompt_scale, self.round_trip_ms(request)
        reuse = self.prefixes.placed(
            unit.prefixes, request.prefix, request.prompt_tokens, kv_tokens_total, scale
        )
        reservation = Reservation(
            reservation_id=request.reservation_id,
            unit_id=unit_id,
            incarnation=card.incarnation,
            holder=holder,
            prompt_tokens=round(prompt_work(request.prompt_tokens * scale, reuse.tokens * scale)),
            network_ms=cost.ROUND_TRIP_MS if trips_ms is None else trips_ms.item(row),
            kv_tokens=cost.kv_tokens(request, forecast),
            made_s=observed_s,
            expires_s=observed_s + self.rules.lease_s,
            lesson=self._learning.lesson(request, card.model, self._loads.here(row)),
            prefix=request.prefix,
            reuse=reuse,
        )
        self._ledger.add(reservation)
        self._charge(row, reservation, +1)

    def withdraw(self, reservation_id: str) -> None:
        """End a reservation without an outcome; unknown ones are ignored."""
        self._end(reservation_id)

    def settle(
        self,
        reservation_id: str,
        outcome: str,
        now_s: float,
        spent: Spent = NOTHING_SPENT,
        answer_prefix: tuple[int, ...] = (),
    ) -> bool:
        """End a reservation; return whether it was held.

        `outcome` counts for the unit's health; what a finished request spent is learned from. `answer_prefix`
        are the hashes that follow the request's own once its answer is part of the conversation.
        """
        reservation = self._ledger.get(reservation_id)
        if reservation is None:
            return False
        row, observed_s = self._row_of(reservation), self._clock.read(now_s)
        if outcome == "done":
            self._learn(reservation, row, spent, answer_prefix, observed_s)
        self._end(reservation_id)
        if row is not None:
            card = self.units[row].card
            if self._isolation.settled(card, outcome, reservation.made_s, observed_s):
                self._changed()
        return True

    def _learn(
        self,
        reservation: Reservation,
        row: int | None,
        spent: Spent,
        answer_prefix: tuple[int, ...],
        observed_s: float,
    ) -> None:
        # Below 0 are the prefixes' own fillers.
        if spent_flaw(spent) or min(answer_prefix, default=0) < 0:
            self.dropped["bad_figures"] += 1
            return
        # What the way takes says nothing of the unit.
        way_ms = reservation.network_ms
        spent = spent._replace(
            ttft_ms=max(spent.ttft_ms - way_ms, 0.0), total_ms=max(spent.total_ms - way_ms, 0.0)
        )
        if row is not None:
            self._cached(reservation, row, spent, answer_prefix)
        speed = here = None
        if row is not None and observed_s >= self.units[row].taught_s + LESSON_GAP_S:
            unit = self.units[row]
            unit.taught_s = observed_s
            speed, here = unit.speed, self._loads.here(row)
        self._learning.done(reservation.lesson, spent, speed, here)

    def _cached(
        self, reservation: Reservation, row: int, spent: Spent, answer_prefix: tuple[int, ...]
    ) -> None:
        """Take in what a finished request found in its unit's prefix cache, and what it left there."""
        unit, reuse = self.units[row].prefixes, reservation.reuse
        self.prefixes.found(unit, reuse, spent.cached_tokens / max(spent.input_tokens, 1))
        tokens = spent.input_tokens + spent.output_tokens
        prefix = reservation.prefix + answer_prefix
        kv_tokens_total = self.columns.kv_tokens_total.item(row)
        self.prefixes.ended(unit, prefix, tokens, kv_tokens_total, reuse.scale)

    def release_holder(self, holder: int) -> int:
        """End a lost gateway's reservations, save those that a unit reports: these run. Count them."""
        lost = [r for r in self._ledger.of_holder(holder) if not r.seen]
        for reservation in lost:
            self._end(reservation.reservation_id)
        return len(lost)

    def tick(self, now_s: float) -> int:
        """Advance the observed clock (every `freshness.TICK_S`) and end expired leases; count them."""
        self._clock.tick(now_s)
        observed_s = self._clock.read(now_s)
        if observed_s >= self._published_s + PUBLISH_S:
            self._published_s = observed_s
            self._set_speeds(self._learning.publish())
            self._isolate_slow(observed_s)
        self._look_at_neighbours()
        expired = 0
        for reservation in self._ledger.expired(observed_s, self._renewed_until_s):
            row = self._row_of(reservation)
            # What the newest sample holds stays in its count: only a sample can tell that it ended.
            if row is not None and not self._in_sample(row, reservation):
                self._charge(row, reservation, -1)
            expired += 1
        return expired

    def _look_at_neighbours(self) -> None:
        """Units that share a GPU are as fast as their neighbours let them be."""
        for gpu in self._learning.neighbours.due():
            rows = {unit_id: self._rows[unit_id] for unit_id in gpu.units}
            changed = gpu.look({unit_id: self.columns.load.item(row) > 0 for unit_id, row in rows.items()})
            if changed:
                self._set_speeds([self.units[rows[slowed.unit_id]].speed for slowed in changed])

    def _end(self, reservation_id: str) -> None:
        reservation = self._ledger.pop(reservation_id)
        if reservation is None:
            return
        row = self._row_of(reservation)
        if row is None:
            return
        if self._in_sample(row, reservation):
            self._loads.release(row, self.units[row].speeds)
            return
        self._charge(row, reservation, -1)
        if not reservation.seen:
            # Nobody saw it there: unless it ended well, its prompt may never have been computed.
            self.prefixes.withdrawn(self.units[row].prefixes, reservation.prefix, reservation.reuse)

    def _in_sample(self, row: int, reservation: Reservation) -> bool:
        """A unit that came back has no sample yet, whatever its earlier ones held."""
        return reservation.seen and bool(self.columns.sampled_s[row] > -np.inf)

    def _charge(self, row: int, reservation: Reservation, sign: int) -> None:
        self._loads.charge(row, self.units[row].speeds, reservation, sign)

    def _renewed_until_s(self, reservation: Reservation) -> float:
        """The newest sample that holds a reservation renews its lease."""
        row = self._row_of(reservation)
        if row is None or not self._in_sample(row, reservation):
            return reservation.expires_s
        return self.columns.sampled_s.item(row) + self.rules.lease_s

    def _row_of(self, reservation: Reservation) -> int | None:
        row = self._rows.get(reservation.unit_id)
        if row is not None and self.units[row].card.incarnation != reservation.incarnation:
            return None
        return row

    # --- reading ----------------------------------------------------------------------------

    @property
    def last_flaw(self) -> str:
        """Of the newest sample that could not be a unit's."""
        return self._newest.last_flaw

    @property
    def reservations(self) -> int:
        return len(self._ledger)

    def loads(self) -> dict[str, int]:
        """Return the load of each unit by its id."""
        load = self.columns.load
        return {unit.card.unit_id: int(load[row]) for row, unit in enumerate(self.units)}

    def loads_of_models(self) -> dict[str, int]:
        """Return how many requests the units of each model have."""
        load = np.bincount(self.columns.model, self.columns.load, minlength=1)
        return {name: int(load[number]) for name, number in self.models.items() if number < len(load)}

    def states_of(self, models: Collection[str]) -> tuple[tuple[str, int], ...]:
        """Return id and state of the units of `models`; one that was taken in is ready."""
        columns, found = self.columns, []
        for model in models:
            for row in np.flatnonzero(columns.model == self.models.number(model)).tolist():
                state = UnitState.READY if columns.taken_in[row] else columns.state.item(row)
                found.append((self.units[row].card.unit_id, int(state)))
        return tuple(found)

    def forecast(self, request: PlacementRequest) -> Forecast:
        """Return how long the answer to `request` is expected to be, were it not cut off."""
        return self._learning.forecast(request, self.rules.model(request.model))

    def round_trip_ms(self, request: PlacementRequest) -> Floats | None:
        """Return the round trips from the request's gateway, one a unit; None where all are near."""
        known = self.rules.round_trip_ms.get(request.origin_region)
        if known is None:
            return None
        return self.remembered(
            ("round trips", request.origin_region),
            lambda: np.array([known.get(unit.card.region, cost.ROUND_TRIP_MS) for unit in self.units]),
        )

    def row(self, unit_id: str) -> int | None:
        return self._rows.get(unit_id)

    def row_of(self, reservation_id: str) -> int | None:
        """Return the unit on which the reservation is held; None too where that process is gone."""
        reservation = self._ledger.get(reservation_id)
        return None if reservation is None else self._row_of(reservation)

    def is_silent(self, unit_id: str) -> bool:
        """Return whether a unit has joined and no sample of it came yet."""
        row = self._rows.get(unit_id)
        return row is not None and bool(self.columns.sampled_s[row] == -np.inf)

    def remembered(self, key: Hashable, work_out: Callable[[], T]) -> T:
        """Return what `work_out` answers, asked anew only when a card, a state, a drain or a fault changed.

        Nothing else may go into the answer, and nobody may write to it.
        """
        if key not in self._remembered:
            if len(self._remembered) >= MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[key] = work_out()
        return cast(T, self._remembered[key])

    def fresh(self, now_s: float) -> tuple[Mask | None, bool]:
        """Return which units' samples can be trusted, None for all, and whether most went stale together."""
        observed_s, sampled_s = self._clock.read(now_s), self.columns.sampled_s
        oldest_s = observed_s - self.rules.stale_after_s
        if self._sampled_since_s < oldest_s:
            self._sampled_since_s = np.minimum.reduce(sampled_s, initial=np.inf)
        if self._sampled_since_s >= oldest_s:
            return None, False
        return freshness.fresh(sampled_s, observed_s, self.rules.stale_after_s)

    def isolated(self, unit_id: str) -> str:
        """Return why a unit gets no work though it could, "" for one that may get some."""
        return self._isolation.isolated.get(unit_id, "")

    def isolated_units(self) -> Mapping[str, str]:
        """Return why, by unit, for all that are isolated."""
        return self._isolation.isolated

    def isolate(self, reasons: Mapping[str, str]) -> None:
        """Take over another view's verdict; it holds until something changes."""
        self._isolation.isolated = dict(reasons)
        for unit_id in reasons:
            self.columns.isolated[self._rows[unit_id]] = True
        self._remembered.clear()

    def condemned(self) -> list[Condemned]:
        """Return the units that are to be replaced."""
        return self._isolation.condemned()

    def sample_age_s(self, row: int, now_s: float) -> float:
        """Age of the newest sample in observed time; inf before the first."""
        return self._clock.read(now_s) - float(self.columns.sampled_s[row])

    def gpu_snapshot(self, now_s: float) -> tuple[FleetGpu, ...]:
        """Return the GPUs of the cell as gateways are pushed them."""
        return self.gpus.snapshot((unit.card for unit in self.units), self._clock.read(now_s))

    def snapshot(self, now_s: float) -> tuple[FleetUnit, ...]:
        """Return the view as gateways are pushed it: an operator's drain and a GPU's fault show as the unit's
        state."""
        rows, columns = [], self.columns
        # Decisions wait for it, once a second: lists first, then a few steps a unit.
        ages_ms = 1e3 * (self._clock.read(now_s) - columns.sampled_s)
        ages_ms[columns.sampled_s == -np.inf] = UNKNOWN
        lists = [
            column.tolist()
            for column in (columns.counts.T, columns.readings.T, columns.taken_in, columns.drained, ages_ms)
        ]
        has_faults = self.gpus.has_faults()
        for unit, counts, readings, taken_in, drained, age_ms in zip(self.units, *lists, strict=True):
            card = unit.card
            load = load_of(card.unit_id, card.incarnation, counts, readings)
            if has_faults and self.gpus.fault(card):
                load = load._replace(state=int(UnitState.FAILED))
            elif taken_in:
                load = load._replace(state=int(UnitState.READY))
            elif drained and load.state == UnitState.READY:
                load = load._replace(state=int(UnitState.DRAINING))
            held = self._ledger.count_of_unit(card.unit_id)
            rows.append(FleetUnit(card, load, held, age_ms, self.isolated(card.unit_id)))
        return tuple(rows)
