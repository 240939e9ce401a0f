"""W3C trace context: the `traceparent` of a request, read and written. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8
SAMPLED = 1
TRACEPARENT_CHARS, TRACE_ID_AT, SPAN_ID_AT = 55, slice(3, 35), slice(36, 52)
"""Of the version that is written here."""
NO_TRACE, NO_SPAN = bytes(TRACE_ID_BYTES), bytes(SPAN_ID_BYTES)
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
"""Version, trace, span, flags; later versions may add to them."""


class TraceContext(NamedTuple):
    """A place in a trace: spans are put under `span_id`."""

    trace_id: bytes
    span_id: bytes
    sampled: bool = True


def parse_traceparent(text: str) -> TraceContext | None:
    """Return the context in a `traceparent`; None where there is none, or it is not one (it is then as if it
    had not been sent, as the standard asks)."""
    form = _FORM.fullmatch(text)
    if form is None:
        return None
    version, trace, span, flags, more = form.groups()
    trace_id, span_id = bytes.fromhex(trace), bytes.fromhex(span)
    if version == "ff" or (version == "00" and more) or trace_id == NO_TRACE or span_id == NO_SPAN:
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & SAMPLED))


def traceparent(trace_id: bytes, span_id: bytes) -> str:
    """Return the `traceparent` of a sampled span."""
    return f"00-{trace_id.hex()}-{span_id.hex()}-01"
