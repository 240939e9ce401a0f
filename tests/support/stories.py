"""Ended calls, as the gateway writes them down."""

from __future__ import annotations

from gateway.observe.story import Story
from gateway.pipeline.events import Finished, StepTiming
from grid.errors import GridError, NoEligibleUnit
from grid.words import Usage


def story(
    status: int = 200,
    *,
    tenant_id: str = "acme",
    pipeline_id: str = "pl-1",
    usage: Usage = Usage(10, 4, 6, 0.25),  # noqa: B008  a NamedTuple
    total_ms: float = 100.0,
    ended_at: float = 1_000_000.0,
    error: GridError | None = None,
) -> Story:
    """Return a call of one generation step that ended with `status`."""
    told = Story("req_1", 0.0, ended_at - total_ms / 1000, tenant_id, "/v1/chat/completions", pipeline_id, 1)
    if error is None and status >= 500:
        error = NoEligibleUnit("no unit is left")
    run = told.run("m")
    run.step(StepTiming("generation-1", "generation", total_ms, decode_ms=total_ms / 2, usage=usage), error)
    if error is None:
        run.hear(Finished("length", usage, total_ms / 4, total_ms, (), (), True))
    else:
        run.fail(error)
    told.end(status, error, total_ms / 1000)
    return told
