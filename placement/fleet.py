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
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from grid.config import Config
from grid.errors import InvalidRequest, Saturated
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
from placement import cost, freshness
from placement.columns import Columns, Mask, Names
from placement.gpus import Gpus
from placement.isolation import Isolation, Serving
from placement.learning import LESSON_GAP_S, PUBLISH_S, STUDY_S, Learning
from placement.lengths import Forecast
from placement.loads import Loads, slots
from placement.prefixes import Prefixes, UnitPrefixes
from placement.reports import NOTHING_SPENT, Spent, card_flaw, load_flaw, spent_flaw
from placement.reservations import Ledger, Reservation
from placement.speeds import Speeds, UnitSpeed

MAX_UNITS = 100_000
"""Ten times what one cell is built for; beyond it, registration is refused."""

MAX_REMEMBERED = 64
"""Answers kept for readers, two for each of the steps that a cell mostly serves. One takes up to 9 bytes a
unit, so all take 58 MB in the largest fleet."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rules:
    """The cell's settings that a decision depends on."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Alias to model."""
    lease_s: float = 30.0
    stale_after_s: float = 0.5
    prefer_region_wait_ms: float = 2000.0
    isolated_share_max: float = 0.5

    @classmethod
    def of(cls, config: Config) -> Rules:
        return cls(
            aliases={name: alias.model for name, alias in config.aliases.items()},
            lease_s=config.placement.lease_s,
            stale_after_s=config.placement.stale_after_ms / 1e3,
            prefer_region_wait_ms=config.placement.prefer_region_wait_ms,
            isolated_share_max=config.placement.isolated_share_max,
        )

    def model(self, name: str) -> str:
        """Return the model that `name` stands for: an alias' target, else itself."""
        return self.aliases.get(name, name)


@dataclass(slots=True)
class Unit:
    """What the columns don't hold of one unit."""

    card: UnitCard
    load: UnitLoad
    link: int
    """The connection it announced itself on; only there may it report."""
    speed: UnitSpeed
    speeds: Speeds
    """As last published."""
    prefixes: UnitPrefixes
    studied_s: float = -np.inf
    """When a sample was last learned from."""
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
        self.last_flaw = ""
        self._rows: dict[str, int] = {}
        self._links: dict[int, set[str]] = {}
        self._ledger = Ledger()
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

    def join_node(self, card: NodeCard, link: int) -> None:
        """Take in the probe of a node. Raises InvalidRequest or Saturated."""
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
        columns.slots[row] = slots(card)
        columns.state[row] = UnitState.STARTING
        columns.drained[row] = card.unit_id in self._drained
        columns.sampled_s[row] = self._sampled_since_s = -np.inf
        no_sample = UnitLoad(card.unit_id, card.incarnation, UnitState.STARTING, 0, 0, 0, 0, 0, 0)
        speed = self._learning.join(card)
        self.units.append(Unit(card, no_sample, link, speed, speed.speeds, self.prefixes.join()))
        self._rows[card.unit_id] = row
        self._set_speeds([speed])
        self._links.setdefault(link, set()).add(card.unit_id)
        self._count(row)

    def _remove(self, unit_id: str) -> None:
        row = self._rows.pop(unit_id)
        link = self.units[row].link
        self._links[link].remove(unit_id)
        if not self._links[link]:
            del self._links[link]
        self.units[row].speed.leave()
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
        """Take a batch of samples. One that can't be believed is counted and dropped: its unit goes stale."""
        observed_s = self._clock.read(now_s)
        for load in loads:
            row = self._rows.get(load.unit_id)
            if row is None:
                self.dropped["unknown_unit"] += 1
            elif self.units[row].link != link:
                self.dropped["foreign_unit"] += 1
            elif self.units[row].card.incarnation != load.incarnation:
                self.dropped["wrong_incarnation"] += 1
            elif flaw := load_flaw(load):
                self.dropped["bad_sample"] += 1
                self.last_flaw = f"{load.unit_id}: {flaw}"
            else:
                self._take(row, load, observed_s)

    def _take(self, row: int, load: UnitLoad, observed_s: float) -> None:
        columns, unit = self.columns, self.units[row]
        if load.state != columns.state[row]:
            columns.state[row] = load.state
            self._changed()
        if columns.sampled_s[row] == -np.inf:
            # Until its first sample a unit is silent, whatever its state; gateways see no difference.
            self._remembered.clear()
        if load.steps != unit.load.steps and observed_s >= unit.studied_s + STUDY_S:
            unit.studied_s = observed_s
            self._learning.reported(unit.speed, load)
        unit.load = load
        columns.sampled_s[row] = observed_s
        held = frozenset(load.reservations)
        for reservation in self._ledger.of_unit(load.unit_id):
            if reservation.reservation_id in held:
                reservation.seen = True
                self._ledger.renew(reservation, observed_s + self.rules.lease_s)
            elif reservation.seen:
                self._ledger.pop(reservation.reservation_id)
        self._count(row)

    def _set_speeds(self, changed: Iterable[UnitSpeed]) -> None:
        # By identity: units without a factor of their own share their kind's object.
        alike: dict[int, list[int]] = {}
        for speed in changed:
            row, speeds = self._rows[speed.unit_id], speed.speeds
            self.units[row].speeds = speeds
            alike.setdefault(id(speeds), []).append(row)
        for rows in alike.values():
            self._loads.set_speeds(np.array(rows), self.units[rows[0]].speeds)

    def _count(self, row: int) -> None:
        unit = self.units[row]
        unseen = [r for r in self._ledger.of_unit(unit.card.unit_id) if not self._in_sample(row, r)]
        self._loads.count(row, unit.speeds, unit.load, unseen)

    # --- reservations -----------------------------------------------------------------------

    def reserve(self, request: PlacementRequest, unit_id: str, holder: int, now_s: float) -> None:
        """Charge `unit_id` for `request` at once. The reservation must not be held: `withdraw` it first."""
        row = self._rows[unit_id]
        unit, card = self.units[row], self.units[row].card
        observed_s = self._clock.read(now_s)
        kv_tokens_total = self.columns.kv_tokens_total.item(row)
        forecast = self.forecast(request)
        scale = forecast.prompt_scale
        reuse = self.prefixes.placed(
            unit.prefixes, request.prefix, request.prompt_tokens, kv_tokens_total, scale
        )
        reservation = Reservation(
            reservation_id=request.reservation_id,
            unit_id=unit_id,
            incarnation=card.incarnation,
            holder=holder,
            prompt_tokens=round((request.prompt_tokens - reuse.tokens) * scale),
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
        if spent_flaw(spent):
            self.dropped["bad_figures"] += 1
            return
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
        expired = 0
        for reservation in self._ledger.expired(observed_s):
            self._ledger.pop(reservation.reservation_id)
            row = self._row_of(reservation)
            # What the newest sample holds stays in its count: only a sample can tell that it ended.
            if row is not None and not self._in_sample(row, reservation):
                self._charge(row, reservation, -1)
            expired += 1
        return expired

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

    def _row_of(self, reservation: Reservation) -> int | None:
        row = self._rows.get(reservation.unit_id)
        if row is not None and self.units[row].card.incarnation != reservation.incarnation:
            return None
        return row

    # --- reading ----------------------------------------------------------------------------

    @property
    def reservations(self) -> int:
        return len(self._ledger)

    def loads(self) -> dict[str, int]:
        """Return the load of each unit by its id."""
        load = self.columns.load
        return {unit.card.unit_id: int(load[row]) for row, unit in enumerate(self.units)}

    def forecast(self, request: PlacementRequest) -> Forecast:
        """Return how long the answer to `request` is expected to be, were it not cut off."""
        return self._learning.forecast(request, self.rules.model(request.model))

    def row(self, unit_id: str) -> int | None:
        return self._rows.get(unit_id)

    def row_of(self, reservation_id: str) -> int | None:
        """Return the unit on which the reservation is held; None too where that process is gone."""
        reservation = self._ledger.get(reservation_id)
        return None if reservation is None else self._row_of(reservation)

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
        rows = []
        for row, unit in enumerate(self.units):
            load = unit.load._replace(reservations=())
            if self.gpus.fault(unit.card):
                load = load._replace(state=int(UnitState.FAILED))
            elif self.columns.drained[row] and load.state == UnitState.READY:
                load = load._replace(state=int(UnitState.DRAINING))
            age_s = self.sample_age_s(row, now_s)
            age_ms = 1e3 * age_s if age_s < np.inf else UNKNOWN
            held = self._ledger.count_of_unit(unit.card.unit_id)
            rows.append(FleetUnit(unit.card, load, held, age_ms, self.isolated(unit.card.unit_id)))
        return tuple(rows)
