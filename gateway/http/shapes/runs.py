"""What a run answers on the grid's own routes: whole, for a list of inputs, and event by event."""

from __future__ import annotations

from typing import Any

from pydantic import Field, RootModel

from gateway.http.shapes.errors import ErrorEnvelope
from gateway.http.shapes.shape import Shape


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
    queue_ms: float = Field(description="waited for a slot, in placement's queue and at the unit")
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


class RunAnswer(RootModel[InvokeAnswer | BatchAnswer]):
    """The answer, or of a call with `inputs` all of them."""
