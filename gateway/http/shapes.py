"""The shapes of answers, for the API document. Handlers build plain maps; tests hold them to these."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorBody(Shape):
    type: str
    code: str
    message: str
    param: str | None
    retryable: bool
    details: dict[str, Any] = Field(description="counts and reasons, such as `prompt_tokens`")


class ErrorEnvelope(Shape):
    """Every error of the grid's own routes."""

    error: ErrorBody
    request_id: str


class OpenAIError(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorEnvelope(Shape):
    """Errors of the OpenAI-compatible routes; the request id is in the `x-request-id` header."""

    error: OpenAIError


class AnthropicError(Shape):
    type: str
    message: str


class AnthropicErrorEnvelope(Shape):
    """Errors of the Anthropic-compatible routes."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str


class UsageView(Shape):
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    cu_seconds: float = Field(description="1.0 is one second of an A100-80")


class TimingView(Shape):
    step_id: str
    type: str
    total_ms: float
    placement_ms: float
    embed_ms: float
    search_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    usage: UsageView


class PlacementView(Shape):
    step_id: str
    unit_id: str
    model: str
    region: str
    gpu_type: str
    simulated: bool
    predicted_ttft_ms: float
    why: str
    moves: int


class DocumentView(Shape):
    id: str
    text: str
    score: float
    metadata: dict[str, Any]


class RetrievalView(Shape):
    step_id: str
    documents: list[DocumentView] = Field(description="what the prompt holds, best first")
    dropped: int = Field(description="found, but without room in the context")


class StepEvent(Shape):
    """A generation step before the answer has ended; also the SSE event `step`."""

    step_id: str
    output: str
    finish_reason: str


class InvokeAnswer(Shape):
    request_id: str
    pipeline_id: str
    revision: int
    model: str
    output: str
    finish_reason: str
    retrieval: list[RetrievalView]
    earlier: list[StepEvent] = Field(description="what generation steps before the answer wrote")
    usage: UsageView
    ttft_ms: float
    total_ms: float
    timing: list[TimingView]
    placement: list[PlacementView]
    exact: bool
    warnings: list[str]


class InputAnswer(InvokeAnswer):
    input: int = Field(description="its place in `inputs`")


class InputError(ErrorEnvelope):
    input: int = Field(description="its place in `inputs`")


class BatchAnswer(Shape):
    """The outcomes of a call with `inputs`, in their order. One that fails does not fail the others."""

    request_id: str
    pipeline_id: str
    revision: int
    results: list[InputAnswer | InputError]
    succeeded: int
    failed: int
    usage: UsageView = Field(description="of all inputs together")


class EndEvent(Shape):
    """SSE event `end`: every one of `inputs` has had its `done` or `error`."""

    request_id: str
    succeeded: int
    failed: int
    usage: UsageView


class ChatMessageView(Shape):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Shape):
    index: int
    message: ChatMessageView
    logprobs: None
    finish_reason: str


class CachedTokens(Shape):
    cached_tokens: int


class ChatUsage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ChatCompletion(Shape):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: ChatUsage


class EmbeddingView(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="text (base64 of little-endian float32) where asked for")


class EmbeddingsUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Shape):
    object: Literal["list"]
    data: list[EmbeddingView]
    model: str
    usage: EmbeddingsUsage


class TextBlock(Shape):
    type: Literal["text"]
    text: str


class MessageUsage(Shape):
    input_tokens: int
    output_tokens: int


class MessageAnswer(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Shape):
    input_tokens: int


class StartEvent(Shape):
    """SSE event `start`."""

    request_id: str
    pipeline_id: str
    revision: int
    model: str
    steps: list[str]
    input_tokens: int
    region: str
    warnings: list[str]


class TokenEvent(Shape):
    """SSE event `token`."""

    index: int = Field(description="of the first token in the chunk, over the whole answer")
    text: str
    tokens: int


class DoneEvent(Shape):
    """SSE event `done`."""

    finish_reason: str
    usage: UsageView
    ttft_ms: float
    total_ms: float
    timing: list[TimingView]
    placement: list[PlacementView]
    moves: int
    exact: bool


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


class RunAnswer(RootModel[InvokeAnswer | BatchAnswer]):
    """The answer, or of a call with `inputs` all of them."""


class OneShotAnswer(RootModel[InvokeAnswer | BatchAnswer | PlanView]):
    """The answer, or of a call with `inputs` all of them, or without input the plan."""


class DataSourceView(Shape):
    data_source_id: str
    name: str
    type: str
    config: dict[str, Any]
    region: str
    embedding_model: str
    dimension: int
    document_count: int
    created_at: str
    last_updated_at: str


class DataSourceList(Shape):
    data_sources: list[DataSourceView]


class DocumentsAnswer(Shape):
    data_source_id: str
    added: int
    replaced: int
    document_count: int


class ModelView(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    task: Literal["generate", "embed"]
    alias_of: str | None
    context_tokens: int
    simulated: bool
    units: int = Field(description="ready units that serve it now")


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelView]


class UnitView(Shape):
    unit_id: str
    model: str
    task: Literal["generate", "embed"]
    state: Literal["starting", "ready", "draining", "drained", "failed"]
    simulated: bool
    region: str
    node_id: str
    gpu_type: str
    gpus: float
    gpu_uuids: list[str] = Field(description="which of `gpus` of the list it runs on")
    memory_grant_mb: int
    precision: str
    fingerprint: str
    context_tokens: int
    dimension: int
    cu_factor: float
    running: int
    max_running: int
    waiting: int
    max_waiting: int
    reserved: int
    kv_tokens_free: int
    kv_tokens_total: int
    prefill_tokens_per_s: float | None = Field(description="measured; null before the first request")
    decode_ms_per_token: float | None = Field(description="measured, as the batch is now")
    prompt_tokens: int = Field(description="looked up in the prefix cache since the unit started")
    cached_tokens: int = Field(description="of them, found there")
    sample_age_ms: float


class GpuView(Shape):
    """One GPU as its node's driver tells; null is what it can't tell."""

    uuid: str
    node_id: str
    index: int
    product: str
    memory_total_mb: float | None
    memory_used_mb: float | None
    memory_free_mb: float | None
    memory_foreign_mb: float | None = Field(description="used by processes that are not the cell's")
    nvlinks: list[int] = Field(description="active links to each GPU of the node; empty without NVLink")
    units: list[str] = Field(description="ids of the units that run on it")
    fault: str | None = Field(description="why no work runs on it, and what to do")
    throttled_by: list[str] | None = Field(description="what lowers its clocks")
    compute_utilisation: float | None = Field(description="share of time with a kernel running")
    sm_utilisation: float | None = Field(description="share of its multiprocessors busy; Hopper and later")
    bandwidth_utilisation: float | None = Field(description="share of peak bandwidth; Hopper and later")
    memory_busy: float | None = Field(description="share of time in which memory was used at all")
    pcie_sent_mb_per_s: float | None
    pcie_received_mb_per_s: float | None
    nvlink_sent_mb_per_s: float | None
    nvlink_received_mb_per_s: float | None
    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    temperature_c: float | None
    power_w: float | None
    ecc_corrected: int | None = Field(description="since the driver was loaded")
    ecc_uncorrected: int | None
    xid: int | None = Field(description="the newest Xid error; 0 for none")
    sample_age_ms: float | None


class UnitList(Shape):
    fleet_version: int
    units: list[UnitView]
    gpus: list[GpuView]


class PlacementStory(Shape):
    """One placement of a step: more than one where a unit turned it away."""

    outcome: Literal["done", "refused", "failed", "cancelled"] | None
    chosen: CandidateView
    next_best: list[CandidateView]
    candidate_count: int
    rejected_by_code: dict[str, int]
    decide_us: float
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
    health: Literal["healthy", "starting", "draining", "stale", "failed"]


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


class KeyView(Shape):
    key_id: str
    tenant_id: str
    operator: bool
    label: str
    created_at: str


class NewKeyView(KeyView):
    key: str = Field(description="shown this once")


class KeyList(Shape):
    keys: list[KeyView]


class Deleted(Shape):
    deleted: bool
    id: str


class Health(Shape):
    status: Literal["ok"]


class Readiness(Shape):
    ready: bool
    reasons: list[str]
