"""Ended calls, as the gateway writes them down."""

from __future__ import annotations

from gateway.observe.story import Story
from gateway.pipeline.events import Finished, StepTiming
from grid.errors import GridError, NoEligibleUnit
from grid.words import Candidate, Decision, Usage


def decision(unit_id: str, attempt: int) -> Decision:
    chosen = Candidate(unit_id, "i", "host", 1, "local", "m", 16, "H100", True, 0.3, 1, 2, 30, 0, 1.0, 0.04)
    other = chosen._replace(unit_id="unit-b", queue_ms=9.0)
    rejected = (("region", 2), ("saturated", 1))
    return Decision(f"req_1/generation-1/{attempt}", chosen, (other,), rejected, (), "m", 1.0, 7, 80.0)


def explained_story() -> Story:
    """Return a good call of one step that a unit turned away and the next one ran."""
    told = Story("req_1", 0.0, 1000.0, "acme", "/v1/chat/completions")
    run = told.run("m")
    run.decided("generation-1", decision("unit-a", 1))
    run.settled("req_1/generation-1/1", "refused")
    run.decided("generation-1", decision("unit-c", 2))
    run.settled("req_1/generation-1/2", "done")
    run.step(StepTiming("generation-1", "generation", 40.0, prefill_ms=5.0, usage=Usage(3, 0, 2, 0.05)))
    told.end(200, None, 0.05)
    return told


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
