"""Which samples of a batch are believed, and are the newest of their units. Pure; `fleet.py` counts them.

A unit speaks for itself on the link that it announced itself on, its node for it on the node's. A sample is
dropped and counted when it is another's, cannot be, is older than what is known, or goes with a list of
reservations that is not known. Lists are brought up to date here, since they come as changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from grid.samples import Floats, Ints
from grid.wire.messages import HeldReservations
from placement import samples
from placement.columns import Columns, Mask
from placement.gpus import Gpus
from placement.reservations import Ledger
from placement.samples import Batch

if TYPE_CHECKING:
    from placement.fleet import Unit


class Samples(NamedTuple):
    """One column a unit, as in `Batch`."""

    rows: Ints
    counts: Ints
    readings: Floats


class _NodesRows(NamedTuple):
    """Where the units of a node's last batch were found."""

    units: Sequence[str]
    incarnations: Sequence[str]
    rows: Ints


class Newest:
    """Reads the view's own `units` and `rows`, writes its `columns`, `ledger` and `dropped`."""

    def __init__(
        self,
        columns: Columns,
        units: Sequence[Unit],
        rows: Mapping[str, int],
        gpus: Gpus,
        ledger: Ledger,
        dropped: Counter[str],
    ) -> None:
        self.last_flaw = ""
        self._columns, self._units, self._rows = columns, units, rows
        self._gpus, self._ledger, self._dropped = gpus, ledger, dropped
        self._nodes_rows: dict[int, _NodesRows] = {}
        """By link. Bounded by the nodes."""

    def moved(self) -> None:
        """A unit or a node has come, gone or moved: rows are looked up anew."""
        self._nodes_rows.clear()

    def of(self, batches: Sequence[Batch]) -> Iterator[Samples]:
        """Yield what is to be counted, mostly all at once. Count each before the next is asked for."""
        found = [self._rows_of(batch) for batch in batches]
        rows = np.concatenate(found)
        if len(batches) > 1 and self._meets_twice(rows[rows >= 0]):
            # Which of a unit's samples is the newer, each after the other tells.
            for batch in batches:
                yield from self.of([batch])
        elif rows.max(initial=-1) >= 0:
            counts = np.concatenate([batch.counts for batch in batches], axis=1)
            readings = np.concatenate([batch.readings for batch in batches], axis=1)
            newest = self._believed(rows, counts, readings)
            first = 0
            for batch in batches:
                for change in batch.held:
                    place = first + change.place
                    if newest[place]:
                        self._list(rows.item(place), change, counts.item(samples.HELD_SINCE, place))
                first += len(batch.units)
            listed = self._listed(rows, counts, readings, newest)
            if len(listed.rows):
                yield listed

    def _rows_of(self, batch: Batch) -> Ints:
        """Return the rows of a batch's units, -1 for those that its sender may not speak for."""
        known = self._nodes_rows.get(batch.link)
        if known and known.units == batch.units and known.incarnations == batch.incarnations:
            return known.rows
        is_node = bool(batch.node_id) and self._gpus.speaks_for(batch.node_id, batch.link)
        found = []
        for unit_id, incarnation in zip(batch.units, batch.incarnations, strict=True):
            row, reason = self._rows.get(unit_id, -1), ""
            if row < 0:
                reason = "unknown_unit"
            elif self._units[row].link != batch.link and not (
                is_node and self._units[row].card.node_id == batch.node_id
            ):
                reason = "foreign_unit"
            elif self._units[row].card.incarnation != incarnation:
                reason = "wrong_incarnation"
            if reason:
                self._dropped[reason] += 1
            found.append(-1 if reason else row)
        rows = np.array(found, np.int64)
        if batch.node_id and -1 not in found:
            self._nodes_rows[batch.link] = _NodesRows(batch.units, batch.incarnations, rows)
        return rows

    def _meets_twice(self, rows: Ints) -> bool:
        places = np.arange(len(rows))
        self._columns.place[rows] = places
        return bool(np.count_nonzero(self._columns.place[rows] != places))

    def _believed(self, rows: Ints, counts: Ints, readings: Floats) -> Mask:
        """Return which samples can be, and are newer than what is known."""
        is_ours, sequence = rows >= 0, counts[samples.SEQUENCE]
        sound = samples.sound(counts, readings)
        newer = (sequence > self._columns.sequence[rows]) | (sequence == 0)
        newest: Mask = is_ours & sound & newer
        if np.count_nonzero(newest) < len(rows):
            for place in np.flatnonzero(is_ours & ~sound).tolist():
                unit_id = self._units[rows.item(place)].card.unit_id
                self._dropped["bad_sample"] += 1
                self.last_flaw = f"{unit_id}: {samples.flaw(unit_id, counts[:, place], readings[:, place])}"
            self._drop("late_sample", is_ours & sound & ~newer)
        return newest

    def _listed(self, rows: Ints, counts: Ints, readings: Floats, newest: Mask) -> Samples:
        """Return, of the newest samples, those whose list of reservations is known."""
        known = counts[samples.HELD_SINCE] == self._columns.listed_since[rows]
        taken = newest & known
        if np.count_nonzero(taken) == len(rows):
            return Samples(rows, counts, readings)
        self._drop("unknown_list", newest & ~known)
        return Samples(rows[taken], counts[:, taken], readings[:, taken])

    def _drop(self, reason: str, which: Mask) -> None:
        if count := int(np.count_nonzero(which)):
            self._dropped[reason] += count

    def _list(self, row: int, change: HeldReservations, since: int) -> None:
        """Bring a unit's list of reservations up to its newest sample, where that can be done."""
        columns, unit = self._columns, self._units[row]
        if change.since == 0:
            unit.held = set(change.begun)
            columns.relisted[row] = True
        elif change.since == columns.listed_since[row]:
            unit.held.difference_update(change.ended)
            unit.held.update(change.begun)
            for reservation_id in change.ended:
                reservation = self._ledger.get(reservation_id)
                if reservation is not None and reservation.seen and reservation.unit_id == unit.card.unit_id:
                    self._ledger.pop(reservation_id)
        else:
            return
        columns.listed_since[row], columns.listed[row] = since, len(unit.held)
