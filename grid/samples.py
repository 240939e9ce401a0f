"""Samples of several units as columns: what a node's batch carries, and what placement computes on. Pure.

The whole numbers of a `UnitLoad` are rows of one array, its readings rows of another, in the order of its
fields; a column is a unit. Fields are only ever appended, so an older peer's rows are the first of a newer's.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from grid.words import UnitLoad

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_TYPES = typing.get_type_hints(UnitLoad)
COUNTS = tuple(name for name in UnitLoad._fields if _TYPES[name] is int)
READINGS = tuple(name for name in UnitLoad._fields if _TYPES[name] is float)

_COUNTS_AT = [UnitLoad._fields.index(name) for name in COUNTS]
_READINGS_AT = [UnitLoad._fields.index(name) for name in READINGS]
_APART = ("unit_id", "incarnation", "reservations", *COUNTS, *READINGS)
_in_order = itemgetter(*(_APART.index(name) for name in UnitLoad._fields))
_counts_of, _readings_of = itemgetter(*_COUNTS_AT), itemgetter(*_READINGS_AT)


def columns_of(loads: Sequence[UnitLoad]) -> tuple[Ints, Floats]:
    """Return counts, shape (len(COUNTS), units), and readings, shape (len(READINGS), units).

    Raises OverflowError for a count that 64 bits don't hold.
    """
    counts = np.array([_counts_of(load) for load in loads], np.int64)
    readings = np.array([_readings_of(load) for load in loads], np.float64)
    return counts.T, readings.T


def load_of(unit_id: str, incarnation: str, counts: Sequence[int], readings: Sequence[float]) -> UnitLoad:
    """Return one unit's column as a sample, without its list of reservations."""
    return UnitLoad._make(_in_order((unit_id, incarnation, (), *counts, *readings)))


def packed(counts: Ints, readings: Floats) -> tuple[bytes, bytes]:
    """Return both as they travel: row by row, little-endian."""
    return counts.astype("<i8").tobytes(), readings.astype("<f8").tobytes()


def unpacked(counts: bytes, readings: bytes, units: int) -> tuple[Ints, Floats]:
    """Return what `packed` was given. What an older peer lacks takes its default; what a newer one appended
    is left out. Raises ValueError for bytes that are no such rows."""
    return _rows(counts, "<i8", COUNTS, units), _rows(readings, "<f8", READINGS, units)


def _rows(data: bytes, dtype: str, names: tuple[str, ...], units: int) -> npt.NDArray[typing.Any]:
    if units < 1 or len(data) % (8 * units):
        raise ValueError(f"{len(data)} bytes are no rows of {units} numbers")
    rows = np.frombuffer(data, dtype).reshape(-1, units)[: len(names)]
    lacking = names[len(rows) :]
    if lacking:
        defaults = UnitLoad._field_defaults
        if not all(name in defaults for name in lacking):
            raise ValueError(f"rows of {', '.join(lacking)} are missing")
        rest = [np.full(units, defaults[name], dtype) for name in lacking]
        rows = np.vstack([rows, *rest])
    return rows
