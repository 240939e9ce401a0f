"""What a span is. Times are the process's monotonic seconds; the exporter turns them into wall time."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

Value = str | int | float | tuple[str, ...]
Attribute = tuple[str, Value]
Attributes = tuple[Attribute, ...]


class Kind(IntEnum):
    """OpenTelemetry's numbers."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class Span(NamedTuple):
    """One finished span."""

    trace_id: bytes
    """16 bytes."""
    span_id: bytes
    """8 bytes."""
    parent_id: bytes
    """8 bytes; none for the root of a trace."""
    name: str
    kind: int
    """A `Kind`."""
    start_s: float
    end_s: float
    attributes: Attributes = ()
    """Those that many spans of this name share, in one order: they are encoded once."""
    own: Attributes = ()
    """Those whose values come once: ids, counts, measured times, texts."""
    error: str = ""
    """What failed; empty where nothing did."""
