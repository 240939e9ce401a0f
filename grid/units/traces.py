"""What a unit tells of a request that was traced: one span for the stream, one for each of its stretches.

The stretches have the times that `Done` reports, so a trace and a response never disagree. What lies before a
generation's queue is the preparation of its prompt.
"""

from __future__ import annotations

from grid.tracing.spans import Attributes, Kind, Span
from grid.tracing.tracer import Tracer
from grid.units.job import Times
from grid.wire.messages import Submit
from grid.words import UnitCard


def spans(tracer: Tracer, times: Times, card: UnitCard, error_code: str) -> list[Span]:
    """Return the spans of one ended request; stretches that it never reached are left out."""
    request = times.request
    whole = tracer.under(request.traceparent)
    if whole is None:
        return []
    arrived_s, ended_s = times.arrived_s, times.ended_s
    stretches: tuple[tuple[str, float, float], ...]
    if isinstance(request, Submit):
        operation = "generate"
        stretches = (
            ("queue", times.accepted_s, times.started_s),
            ("prefill", times.started_s, times.first_step_s),
            ("decode", times.first_step_s, ended_s),
        )
    else:
        operation = "embed"
        stretches = (("queue", arrived_s, times.started_s), ("encode", times.started_s, ended_s))
    told = [
        Span(whole.trace_id, span_id, whole.span_id, name, Kind.INTERNAL, start_s, end_s)
        for (name, start_s, end_s), span_id in zip(stretches, tracer.span_ids(len(stretches)), strict=True)
        if start_s < ended_s or not error_code
    ]
    told.append(
        whole.span(
            f"{operation} {request.model}",
            arrived_s,
            ended_s,
            attributes(card, request.model, error_code),
            kind=Kind.SERVER,
            error=error_code,
        )
    )
    return told


def attributes(card: UnitCard, model: str, error_code: str) -> Attributes:
    known: Attributes = (
        ("gen_ai.request.model", model),
        ("zerogrid.unit", card.unit_id),
        ("zerogrid.region", card.region),
        ("zerogrid.gpu_type", card.gpu_type),
    )
    return (*known, ("error.type", error_code)) if error_code else known
