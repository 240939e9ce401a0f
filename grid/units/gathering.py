"""What the units of a node say of themselves between two batches, and the batch that is made of it. Pure.

A unit numbers its samples, and names its list of reservations by the first sample that had it. What has
changed of a list is told, and now and then all of it, so that what was lost on the way does not stay lost.
"""

from __future__ import annotations

from grid.samples import columns_of, packed
from grid.wire.messages import HeldReservations, ReportUnits
from grid.words import UnitLoad

MAX_UNITS = 1024
"""Of one node: as many as placement takes in one batch."""

WHOLE_EVERY = 50
"""Batches until a list is told whole again, each at another time: five seconds. Placement drops the samples
of a unit whose list it does not know, as when it could not believe the one that told it."""


class Numbering:
    """Of one unit's samples."""

    def __init__(self) -> None:
        self._sequence = 0
        self._held: tuple[str, ...] = ()
        self._held_since = 1

    def next(self, load: UnitLoad) -> UnitLoad:
        self._sequence += 1
        if load.reservations != self._held:
            self._held, self._held_since = load.reservations, self._sequence
        return load._replace(sequence=self._sequence, held_since=self._held_since)


class Gathering:
    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._newest: dict[str, UnitLoad] = {}
        """By unit, since the last batch."""
        self._told: dict[str, tuple[str, int, frozenset[str]]] = {}
        """Of a unit: incarnation, `held_since` and list, as last told."""
        self._batches = 0

    def take(self, load: UnitLoad) -> None:
        """A sample beyond MAX_UNITS is dropped: its unit goes stale, visibly."""
        if load.unit_id in self._newest or len(self._newest) < MAX_UNITS:
            self._newest[load.unit_id] = load

    def forget(self, unit_id: str) -> None:
        """The unit has gone: what it said last is not for placement, which would take it for alive."""
        self._newest.pop(unit_id, None)
        self._told.pop(unit_id, None)

    def anew(self) -> None:
        """Placement is another, or was away: nothing was told."""
        self._told.clear()

    def batch(self) -> ReportUnits | None:
        """Return what has come since the last batch, or None for nothing."""
        loads = list(self._newest.values())
        self._newest.clear()
        if not loads:
            return None
        self._batches += 1
        held = [
            change
            for place, load in enumerate(loads)
            if (change := self._change(place, load, (self._batches + place) % WHOLE_EVERY == 0))
        ]
        return ReportUnits(
            0,
            self._node_id,
            tuple(load.unit_id for load in loads),
            tuple(load.incarnation for load in loads),
            *packed(*columns_of(loads)),
            tuple(held),
        )

    def _change(self, place: int, load: UnitLoad, whole: bool) -> HeldReservations | None:
        incarnation, since, told = self._told.get(load.unit_id, ("", 0, frozenset[str]()))
        if (incarnation, since) == (load.incarnation, load.held_since) and not whole:
            return None
        held = frozenset(load.reservations)
        self._told[load.unit_id] = (load.incarnation, load.held_since, held)
        if whole or incarnation != load.incarnation:
            return HeldReservations(place, load.reservations)
        return HeldReservations(place, tuple(held - told), tuple(told - held), since)
