"""How calls went: one explained, the last minute in figures, what was used."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gateway.http.shapes.operations import UnitView
from gateway.http.shapes.pipelines import CandidateView
from gateway.http.shapes.runs import UsageView
from gateway.http.shapes.shape import Shape


class PlacementStory(Shape):
    """One placement of a step: more than one where a unit turned it away."""

    outcome: Literal["done", "refused", "failed", "cancelled"] | None
    chosen: CandidateView
    next_best: list[CandidateView]
    candidate_count: int
    rejected_by_code: dict[str, int]
    decide_us: float
    queued_ms: float = Field(description="waited in placement's queue before it was decided")
    fleet_version: int
    stale_view: bool


class ToldError(Shape):
    code: str
    param: str | None
    message: str | None = Field(description="null where it could quote what was sent")
    details: dict[str, Any]


class ActualTimes(Shape):
    total_ms: float
    placement_ms: float
    embed_ms: float
    search_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    cu_seconds: float


class StepStory(Shape):
    step_id: str
    type: Literal["retrieval", "generation"] | None = Field(description="null where the step did not end")
    error: ToldError | None
    actual: ActualTimes | None
    placements: list[PlacementStory]


class RunStoryView(Shape):
    finished: bool
    ttft_ms: float | None
    error: ToldError | None
    usage: UsageView
    steps: list[StepStory]


class Explanation(Shape):
    """What became of one call, and why. Never a word of its prompt or answer."""

    request_id: str
    ended_at: str
    route: str
    pipeline_id: str | None
    revision: int
    model: str
    outcome: Literal["good", "refused", "cancelled", "failed"]
    status: int
    error: ToldError | None
    total_ms: float
    usage: UsageView
    runs: list[RunStoryView]


class MetricsBody(Shape):
    request_rate_per_second: float
    p99_latency_ms: float | None = Field(description="of good calls, within 2 %; null without any")
    cache_hit_ratio: float | None = Field(
        description="share of input tokens that a cache held; null without any"
    )
    cu_utilization_pct: float = Field(description="of the ready units of the pipeline's models")
    error_rate_5xx: float = Field(description="share of calls that ended with a fault of the cell, 0 to 1")
    burst_detection_active: bool


class UnitHealth(UnitView):
    health: Literal["healthy", "isolated", "starting", "draining", "standby", "asleep", "stale", "failed"]


class MetricsView(Shape):
    """The last 60 to 65 seconds over all replicas, at most a second late."""

    pipeline_id: str | None = Field(description="null: all of the tenant's calls")
    metrics: MetricsBody
    hardware: list[UnitHealth] | None = Field(None, description="with `detail=hardware`")


class UsageBody(Shape):
    calls: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cu_seconds: float


class UsageHourView(UsageBody):
    hour: str = Field(description="its beginning, RFC 3339, UTC")
    pipeline_id: str | None = Field(description="null: calls of a model itself")


class UsagePipelineView(UsageBody):
    pipeline_id: str | None


class UsageAnswer(Shape):
    since: str
    until: str
    total: UsageBody
    pipelines: list[UsagePipelineView]
    hours: list[UsageHourView]
