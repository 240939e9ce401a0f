"""What placement tells of a decision for a request that is traced."""

from __future__ import annotations

from grid.tracing.spans import Kind, Span
from grid.tracing.tracer import Tracer
from grid.words import Decision, PlacementRequest


def spans(
    tracer: Tracer, request: PlacementRequest, decision: Decision, began_s: float, spent_us: float
) -> list[Span]:
    branch = tracer.under(request.traceparent)
    if branch is None:
        return []
    chosen = decision.chosen
    span = branch.span(
        f"decide {decision.model}",
        began_s,
        began_s + spent_us / 1e6,
        (
            ("zerogrid.unit", chosen.unit_id),
            ("zerogrid.region", chosen.region),
            ("zerogrid.rejected", sum(count for _, count in decision.rejected_by_code)),
        ),
        own=(("zerogrid.predicted_ttft_ms", chosen.ttft_ms),),
        kind=Kind.SERVER,
    )
    return [span]
