"""Decides what is traced and makes spans. Chance is an argument; times come from whoever measured them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from grid.tracing.context import (
    SPAN_ID_AT,
    SPAN_ID_BYTES,
    TRACE_ID_AT,
    TRACE_ID_BYTES,
    TRACEPARENT_CHARS,
    TraceContext,
    parse_traceparent,
    traceparent,
)
from grid.tracing.spans import Attributes, Kind, Span

SPAN_ID_BITS, TRACE_ID_BITS = 8 * SPAN_ID_BYTES, 8 * TRACE_ID_BYTES

Describe = Callable[..., Iterable[Span]]
"""Facts that a request left behind → its spans."""


class Tracer:
    """The spans of one process, handed to `sink` when they end. `sample` is the share of requests without a
    caller's own context that are traced; `content` tells whether prompts and answers may be written down."""

    def __init__(
        self, sink: Callable[[Span], None], *, sample: float, content: bool, rng: random.Random
    ) -> None:
        self.content = content
        self._sink = sink
        # A tenth of a second to import, which only a cell that traces pays.
        from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

        # Its rule, so that services with the same ratio trace the same requests. Asking its `should_sample`
        # takes 3 µs for one comparison, which takes half of one here.
        self._bound = TraceIdRatioBased(sample).bound
        self._bits = TraceIdRatioBased.TRACE_ID_LIMIT
        self._random_bits = rng.getrandbits

    def request(self, given: str) -> Branch | None:
        """Return the first span of a request that came with `given` as its `traceparent`, or with none ("").

        None if the request is not to be traced: a caller that traces decides that for its own requests.
        """
        caller = parse_traceparent(given) if given else None
        if caller is not None:
            return self._branch(caller) if caller.sampled else None
        trace_bits = self._random_bits(TRACE_ID_BITS)
        if trace_bits & self._bits >= self._bound:
            return None
        return self._branch(TraceContext(trace_bits.to_bytes(TRACE_ID_BYTES, "big"), b""))

    def under(self, given: str) -> Branch | None:
        """Return a span under the context that a peer of the cell sent; None if it sent none."""
        if len(given) != TRACEPARENT_CHARS:
            return None
        # A peer wrote it as `traceparent` does, so it is only taken apart.
        trace_id, parent_id = bytes.fromhex(given[TRACE_ID_AT]), bytes.fromhex(given[SPAN_ID_AT])
        return Branch(self, trace_id, self._span_id(), parent_id)

    def _branch(self, parent: TraceContext) -> Branch:
        return Branch(self, parent.trace_id, self._span_id(), parent.span_id)

    def child_of(self, branch: Branch) -> Branch:
        return Branch(self, branch.trace_id, self._span_id(), branch.span_id)

    def _span_id(self) -> bytes:
        return self._random_bits(SPAN_ID_BITS).to_bytes(SPAN_ID_BYTES, "big")

    def span_ids(self, count: int) -> list[bytes]:
        """Return ids for so many spans."""
        drawn = self._random_bits(SPAN_ID_BITS * count).to_bytes(SPAN_ID_BYTES * count, "big")
        return [drawn[at : at + SPAN_ID_BYTES] for at in range(0, len(drawn), SPAN_ID_BYTES)]

    def record(self, span: Span) -> None:
        self._sink(span)

    def later(self, describe: Describe, *facts: object) -> None:
        """Record the spans that `describe(*facts)` returns: now, or when a tracer that sends finds it cheap.
        It may run on another thread, so the facts are not to change."""
        for span in describe(*facts):
            self._sink(span)


class Branch:
    """A span that has not ended: others come under it, here and (by its `traceparent`) in other processes."""

    __slots__ = ("parent_id", "span_id", "trace_id", "tracer")

    def __init__(self, tracer: Tracer, trace_id: bytes, span_id: bytes, parent_id: bytes) -> None:
        self.tracer = tracer
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent_id = parent_id

    @property
    def traceparent(self) -> str:
        return traceparent(self.trace_id, self.span_id)

    def child(self) -> Branch:
        return self.tracer.child_of(self)

    def span(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes = (),
        *,
        own: Attributes = (),
        kind: Kind = Kind.INTERNAL,
        error: str = "",
    ) -> Span:
        """Return the span as it ended. `error` says in a few words what failed."""
        return Span(
            self.trace_id, self.span_id, self.parent_id, name, kind, start_s, end_s, attributes, own, error
        )

    def end(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes = (),
        *,
        kind: Kind = Kind.INTERNAL,
        error: str = "",
    ) -> None:
        """End the span; call it once."""
        self.tracer.record(self.span(name, start_s, end_s, attributes, kind=kind, error=error))
