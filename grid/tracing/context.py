"""W3C trace context: the `traceparent` of a request, read and written. Pure."""

from __future__ import annotations

from typing import NamedTuple

TRACE_ID_BYTES, SPAN_ID_BYTES = 16, 8
SAMPLED = 1
FORM_CHARS = 55
PART_BYTES = [1, TRACE_ID_BYTES, SPAN_ID_BYTES, 1]
"""Version, trace, span, flags; later versions may add to them."""


class TraceContext(NamedTuple):
    """A place in a trace: spans are put under `span_id`."""

    trace_id: bytes
    span_id: bytes
    sampled: bool = True


def parse_traceparent(text: str) -> TraceContext | None:
    """Return the context in a `traceparent`; None where there is none, or it is not one (it is then as if it
    had not been sent, as the standard asks)."""
    head = text[:FORM_CHARS]
    if len(head) < FORM_CHARS or head[2] + head[35] + head[52] != "---" or head != head.lower():
        return None
    more = text[FORM_CHARS:]
    if head[:2] == "ff" or (more and (head[:2] == "00" or more[0] != "-")):
        return None
    try:
        parts = [bytes.fromhex(part) for part in head.split("-")]
        _version, trace_id, span_id, flags = parts
    except ValueError:
        return None
    if [len(part) for part in parts] != PART_BYTES or not any(trace_id) or not any(span_id):
        return None
    return TraceContext(trace_id, span_id, bool(flags[0] & SAMPLED))


def traceparent(trace_id: bytes, span_id: bytes) -> str:
    """Return the `traceparent` of a sampled span."""
    return f"00-{trace_id.hex()}-{span_id.hex()}-01"
