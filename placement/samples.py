"""Batches of samples as they arrive, by either way, and what of them can be believed by itself. Pure.

A unit's own report and its node's batch become the same columns. Whether a sample is the unit's newest, and
whether its sender may speak for it, `fleet.py` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grid.errors import InvalidRequest
from grid.samples import COUNTS, Floats, Ints, columns_of, load_of, unpacked
from grid.wire.messages import HeldReservations, ReportUnits
from grid.words import UNKNOWN, UnitLoad, UnitState
from placement.columns import Mask
from placement.reports import MAX_COUNT, load_flaw

MAX_UNITS_A_NODE = 1024
"""The most of one batch: a node has at most 64 GPUs, each shared by at most a handful."""

STATE = COUNTS.index("state")
STEPS = COUNTS.index("steps")
SEQUENCE = COUNTS.index("sequence")
HELD_SINCE = COUNTS.index("held_since")


class Batch(NamedTuple):
    link: int
    node_id: str
    """Of the node that speaks for its units; "" where a unit speaks for itself."""
    units: Sequence[str]
    incarnations: Sequence[str]
    counts: Ints
    """Shape (len(COUNTS), units)."""
    readings: Floats
    """Shape (len(READINGS), units)."""
    held: Sequence[HeldReservations]
    """Units without one hold what they held."""


def own(loads: Sequence[UnitLoad], link: int) -> Batch:
    """Return what came on a unit's own link."""
    held = [HeldReservations(place, load.reservations) for place, load in enumerate(loads)]
    units, incarnations = [load.unit_id for load in loads], [load.incarnation for load in loads]
    try:
        counts, readings = columns_of(loads)
    except OverflowError:
        # Nor does a column hold what can't be believed.
        counts, readings = columns_of([_cut(load) for load in loads])
    return Batch(link, "", units, incarnations, counts, readings, held)


def of_node(message: ReportUnits, link: int) -> Batch:
    """Return a node's batch. Raises InvalidRequest for what is none."""
    units = len(message.units)
    if not 0 < units == len(message.incarnations) == len(set(message.units)) <= MAX_UNITS_A_NODE:
        raise InvalidRequest(
            f"a batch has 1 to {MAX_UNITS_A_NODE} different units with an incarnation each", param="units"
        )
    try:
        counts, readings = unpacked(message.counts, message.readings, units)
    except ValueError as error:
        raise InvalidRequest(f"a batch of {units} units can't be read: {error}", param="counts") from None
    if not all(0 <= each.place < units for each in message.held):
        raise InvalidRequest(f"a batch of {units} units lists reservations of another", param="held")
    return Batch(link, message.node_id, message.units, message.incarnations, counts, readings, message.held)


def _cut(load: UnitLoad) -> UnitLoad:
    return load._replace(**{name: max(-1, min(getattr(load, name), MAX_COUNT)) for name in COUNTS})


def sound(counts: Ints, readings: Floats) -> Mask:
    """Return whose numbers can be a unit's: `flaw` finds nothing."""
    state = counts[STATE]
    is_sound: Mask = (
        (np.minimum.reduce(counts) >= 0)
        & (np.maximum.reduce(counts) < MAX_COUNT)
        & (state <= max(UnitState))
        & np.logical_and.reduce(((readings >= 0) & (readings < MAX_COUNT)) | (readings == UNKNOWN))
    )
    return is_sound


def flaw(unit_id: str, counts: Ints, readings: Floats) -> str:
    """Return what makes the numbers of one unit's column unusable, in one sentence; "" when nothing does."""
    return load_flaw(load_of(unit_id, "", counts.tolist(), readings.tolist()))
