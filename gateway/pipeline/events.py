"""What a run says to whoever writes its answer (SSE, JSON, a compatible route). One stream of these
per run: `Started`, then `Retrieved` for each retrieval step, then `StepDone` for each generation step before
the answer, then `Chunk`s of the answer, then exactly one of `Finished` or `RunFailed`. A refusal or failure
before the step that answers was accepted is raised instead, as a GridError.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.records import RetrievedDocument
from grid.errors import GridError
from grid.words import Usage

NOTHING_USED = Usage()


@dataclass(frozen=True, slots=True)
class StepPlacement:
    """Where one step ran, and why there."""

    step_id: str
    unit_id: str
    model: str
    region: str
    gpu_type: str
    simulated: bool
    predicted_ttft_ms: float
    why: str
    """One sentence for people: the winning cost against the next best, or the only unit left."""
    moves: int = 0


@dataclass(frozen=True, slots=True)
class StepTiming:
    step_id: str
    type: str
    total_ms: float
    placement_ms: float = 0.0
    embed_ms: float = 0.0
    search_ms: float = 0.0
    queue_ms: float = 0.0
    """Waited for a slot: in placement's queue, then at the unit."""
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    usage: Usage = NOTHING_USED

    @property
    def charged(self) -> Usage:
        """What the step adds to the usage of an answer: a generation all, a retrieval only its compute,
        because an answer's tokens are those of prompts and texts."""
        return self.usage if self.type == "generation" else Usage(cu_seconds=self.usage.cu_seconds)


@dataclass(frozen=True, slots=True)
class Started:
    request_id: str
    pipeline_id: str
    revision: int
    model: str
    steps: tuple[str, ...]
    warnings: tuple[str, ...]
    input_tokens: int
    """Prompt tokens of the step that answers, known once its unit accepted it. How many of them a cache
    held is known only after its prefill, so `Finished` says that."""
    region: str = ""
    """Where the step that answers runs; "" where a pipeline only retrieves."""


@dataclass(frozen=True, slots=True)
class Retrieved:
    step_id: str
    documents: tuple[RetrievedDocument, ...]
    """The documents that the prompt holds, best first."""
    dropped: int
    """Found, but without room in the context."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A generation step before the answer has ended; what it wrote went to the steps that use it."""

    step_id: str
    output: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Chunk:
    index: int
    """Of the first token in the chunk, over the whole answer."""
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    finish_reason: str
    usage: Usage
    ttft_ms: float
    total_ms: float
    timing: tuple[StepTiming, ...]
    placement: tuple[StepPlacement, ...]
    exact: bool
    """Greedy text is the same as an undisturbed run's (always so when nothing was moved)."""
    stop: str = ""
    """The caller's stop string that ended the answer; "" for every other end."""


@dataclass(frozen=True, slots=True)
class RunFailed:
    error: GridError
    usage: Usage
    output_so_far: str


RunEvent = Started | Retrieved | StepDone | Chunk | Finished | RunFailed
