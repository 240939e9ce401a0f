"""Which units get no work because they fail, and how much of a model may be put away at once. Pure.

Every unit that something is held against has a breaker (`health.py`). One whose breaker is not closed is
isolated as far as the cap of its model allows, the worst first; at least one unit of a model goes on unless
it is dead, and one that is spared goes on serving while its canaries decide about it. The view (`fleet.py`)
owns this object, says what there is, and writes the verdict into its columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from grid.words import Condemned, UnitCard
from placement.health import CONVICTED, RELAPSE_S, Breaker, Phase


class Serving(NamedTuple):
    """Of one model: the units that are able to serve, and which of them are suspects."""

    units: int
    slots: int
    suspects: Sequence[str]


@dataclass(slots=True)
class _Record:
    card: UnitCard
    touched_s: float
    """When something was last heard of it."""
    breaker: Breaker = field(default_factory=Breaker)


class Isolation:
    """`most` is the largest share of a model's capacity that is isolated at once, dead units apart."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._records: dict[str, _Record] = {}
        """Only of units that something is held against; also of those that lost their link."""
        self.isolated: dict[str, str] = {}
        """Why, by unit."""

    def join(self, card: UnitCard) -> None:
        """A unit registered: a new process starts with a clean record, a mere reconnection does not."""
        record = self._records.get(card.unit_id)
        if record is not None and record.card.incarnation != card.incarnation:
            del self._records[card.unit_id]

    def settled(self, card: UnitCard, outcome: str, reserved_s: float, now_s: float) -> bool:
        """Take the outcome of a request; return whether the verdict on the unit is another one now."""
        record = self._records.get(card.unit_id)
        if record is None:
            if outcome != "failed":
                return False
            record = self._records[card.unit_id] = _Record(card, now_s)
        record.touched_s = now_s
        changed = record.breaker.settled(outcome, reserved_s, now_s)
        if record.breaker.is_clean(now_s):
            del self._records[card.unit_id]
        return changed

    def slow(self, card: UnitCard, reason: str, now_s: float) -> bool:
        """Take that the unit has become far slower than it was; return as `settled`."""
        breaker = self._records.setdefault(card.unit_id, _Record(card, now_s)).breaker
        if breaker.phase is not Phase.CLOSED:
            return False
        breaker.evidence = max(breaker.evidence, CONVICTED)
        breaker.open(reason, now_s)
        return True

    def canaries_due(self, now_s: float) -> list[UnitCard]:
        """Return the units to which a canary is to be sent now."""
        return [record.card for record in self._records.values() if record.breaker.canary_due(now_s)]

    def canary_ended(self, card: UnitCard, flaw: str | None, now_s: float) -> bool:
        """Take how a canary went, as `Breaker.canary_ended`; return as `settled`."""
        record = self._records.get(card.unit_id)
        if record is None or record.card.incarnation != card.incarnation:
            return False
        record.touched_s = now_s
        return record.breaker.canary_ended(flaw, now_s)

    @property
    def suspects(self) -> dict[str, list[str]]:
        """Units whose breaker is not closed, by model."""
        found: dict[str, list[str]] = {}
        for unit_id, record in self._records.items():
            if record.breaker.phase is not Phase.CLOSED:
                found.setdefault(record.card.model, []).append(unit_id)
        return found

    def condemned(self) -> list[Condemned]:
        return [
            Condemned(unit_id, record.card.incarnation, record.breaker.reason, unit_id in self.isolated)
            for unit_id, record in self._records.items()
            if record.breaker.phase is Phase.CONDEMNED
        ]

    def judge(self, models: Iterable[Serving], now_s: float) -> None:
        """Set `isolated` anew. `models` are those of `suspects`."""
        self._forget(now_s)
        isolated: dict[str, str] = {}
        for model in models:
            room, left = self._most * model.slots, model.units
            for record in self._worst_first(model.suspects):
                slots = record.card.max_running
                if record.breaker.is_dead or (slots <= room and left > 1):
                    isolated[record.card.unit_id] = record.breaker.reason
                    room, left = room - slots, left - 1
        self.isolated = isolated

    def _worst_first(self, suspects: Sequence[str]) -> list[_Record]:
        """Return their records. Those that are away stay away, lest two take turns."""
        return sorted(
            (self._records[unit_id] for unit_id in suspects if unit_id in self._records),
            key=lambda record: (
                not record.breaker.is_dead,
                record.card.unit_id not in self.isolated,
                -record.breaker.evidence,
                record.card.unit_id,
            ),
        )

    def _forget(self, now_s: float) -> None:
        """Drop what is held against units of which nothing is heard any more."""
        self._records = {
            name: record for name, record in self._records.items() if record.touched_s > now_s - RELAPSE_S
        }
