"""Pipelines, and what a call of one would do."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, RootModel

from gateway.http.shapes.runs import BatchAnswer, InvokeAnswer
from gateway.http.shapes.shape import Shape


class StepMetricsView(Shape):
    """One step of the current revision, over the last hour and all replicas."""

    step_id: str
    calls: int
    errors: int
    p50_ms: float | None = Field(description="of calls in which it did not fail; null without any")
    p99_ms: float | None
    tokens: int = Field(description="input and output")


class PipelineView(Shape):
    pipeline_id: str
    name: str
    revision: int = Field(description="the newest one; status, reason and contract are its own")
    serving_revision: int | None = Field(description="the active one, which calls run; null before the first")
    status: Literal["deploying", "active", "failed"]
    reason: str | None = Field(description="why it failed, and what would have to change")
    created_at: str
    updated_at: str
    contract: dict[str, Any]
    step_metrics: list[StepMetricsView] | None = Field(None, description="where one pipeline is read")


class PipelineList(Shape):
    pipelines: list[PipelineView]
    next: str | None = Field(description="give it as `after` for the next page; null on the last")


class CandidateView(Shape):
    """A unit that could take the step, with what it is predicted to take there."""

    unit_id: str
    model: str
    precision: str
    region: str
    gpu_type: str
    simulated: bool
    network_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    pressure_ms: float = Field(description="the chance of an eviction, times the work to do again")
    ttft_ms: float
    total_ms: float
    cu_seconds: float
    cached_tokens: int = Field(
        description="of the prompt, what its prefix cache should hold; not in prefill_ms"
    )
    others_ms: float = Field(
        description="delay of others there and latency targets at risk: counts in the choice, not in total_ms"
    )


class RejectionView(Shape):
    unit_id: str
    code: str
    detail: str = Field(description="what would have to change")


class RefusalView(Shape):
    """What a call would be refused with now."""

    status: int
    code: str
    message: str


class StepPlanView(Shape):
    step_id: str
    type: Literal["retrieval", "generation"]
    uses: list[str]
    model: str
    prompt_tokens: int = Field(description="estimated, with what other steps are expected to add")
    max_output_tokens: int
    begins_ms: float = Field(description="when all that it uses should have ended")
    chosen: CandidateView | None
    next_best: CandidateView | None
    candidates: list[CandidateView] = Field(description="best first, at most 500")
    candidate_count: int
    rejections: list[RejectionView] = Field(description="nearest to being eligible first, at most 500")
    rejected_by_code: dict[str, int]
    refusal: RefusalView | None


class PlanView(Shape):
    """What a call would do now. Nothing was computed, reserved or charged."""

    request_id: str
    pipeline_id: str
    revision: int
    runnable: bool = Field(description="every step would find a unit now")
    steps: list[StepPlanView]
    ttft_ms: float = Field(description="predicted, as if searches took no time")
    total_ms: float
    cu_seconds: float
    fleet_version: int
    allowed_regions: list[str] = Field(description="residency; empty means anywhere")
    execution_hints: dict[str, Any] = Field(description="as they hold for this call")
    stream_control: dict[str, Any] = Field(description="as it holds for this call")
    warnings: list[str]


class OneShotAnswer(RootModel[InvokeAnswer | BatchAnswer | PlanView]):
    """The answer, or of a call with `inputs` all of them, or without input the plan."""
