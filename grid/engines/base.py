"""What an engine is to its unit: one protocol, whatever runs behind it.

Ownership: the unit owns admission, streams and accounting; the engine owns the model, its KV cache and
its tokenizer. An engine never sees a connection and never refuses for load. It pushes its steps: a token
costs a call, not a task that wakes up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from grid.errors import Conflict
from grid.words import UNKNOWN, Message, Precision, Sampling

if TYPE_CHECKING:  # most units' processes have no other use for numpy
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine knows of itself once it is loaded."""

    model: str
    precision: Precision
    fingerprint: str
    """Same model weights, precision and kernels: same greedy text."""
    context_tokens: int
    simulated: bool = False
    dimension: int = 0
    """Vector length of an embedding engine; 0 for others."""
    kv_tokens_total: int = 0
    prefill_tokens_per_s: float = UNKNOWN
    decode_ms_per_token: float = UNKNOWN


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A sample of the engine's own state; never older than the engine's last step or change."""

    running: int
    waiting: int
    kv_tokens_free: int
    kv_tokens_total: int
    prefill_tokens_queued: int
    steps: int
    prefill_tokens_per_s: float = UNKNOWN
    """Measured; UNKNOWN before the first request."""
    decode_ms_per_token: float = UNKNOWN
    prompt_tokens: int = 0
    """Looked up in the prefix cache since the engine started."""
    cached_tokens: int = 0
    """Of them, found there."""
    admits: int = 0
    """Requests in work at once now, fewer than configured under memory pressure; 0: as configured."""
    chunk_tokens: int = 0
    """Of prompts that one step computes now; 0 where there is no such limit."""
    preemptions: int = 0
    """Requests evicted for want of KV memory, since the engine started."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A tokenised prompt that fits the model's context with at least the asked output."""

    prompt_ids: tuple[int, ...]
    prompt_hash: bytes
    """16 bytes over the ids; a continuation must present the same."""
    documents_used: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One attempt, as the unit hands it to the engine. `engine_id` is never reused."""

    engine_id: str
    prompt: Prepared
    sampling: Sampling
    tenant_salt: str
    emitted_ids: tuple[int, ...] = ()
    """Output ids that earlier attempts produced; generation goes on after them."""
    emitted_code_points: int = 0
    """Of the text that they made; text goes on after it."""
    priority: int = 0


class Step(NamedTuple):
    """New output of one generation after one engine step."""

    ids: tuple[int, ...]
    text: str
    """From the one incremental decoder over prompt ids and output ids; "" inside a character."""
    finish_reason: str | None
    """A `FinishReason` on the last step, which may carry no ids."""
    cached_tokens: int
    step_seconds: float
    """This request's share of the scheduled step time since its previous step."""


class Sink(Protocol):
    """Takes what one generation brings, in the event loop, once `generate` has returned. Neither call blocks
    or raises."""

    def step(self, step: Step) -> None: ...

    def released(self, error: BaseException | None) -> None:
        """The engine holds nothing of the generation any more. Called exactly once, after the last step,
        also for one that was cancelled; `error` says why it ended early otherwise."""


class Running(Protocol):
    """A generation that has begun."""

    def cancel(self) -> object:
        """Free its slot as soon as can be: `released` follows, perhaps before this returns. Does nothing
        after the end."""


class Engine(Protocol):
    """A text-generation engine. Every coroutine runs in the unit's event loop."""

    async def start(self) -> EngineFacts:
        """Load and become ready to generate. Raises InternalError with the remedy."""

    async def prepare(
        self, messages: Sequence[Message], documents: Sequence[str], max_output_tokens: int
    ) -> Prepared:
        """Apply the chat template and tokenise; pack as many documents as fit.

        User text and documents are tokenised without special tokens. Raises ContextOverflow with
        `prompt_tokens`, `max_output_tokens` and `context_tokens` in its details.
        """

    def generate(self, generation: Generation, sink: Sink) -> Running:
        """Begin a generation and push its steps into `sink`.

        Raises InvalidRequest, ContextOverflow or UnitLost where it can't begin, and Conflict where what was
        emitted makes another text here; then `sink` is never called.
        """

    def load(self) -> EngineLoad: ...

    async def check(self) -> None:
        """Raises UnitLost when the engine can't serve any more."""

    async def close(self) -> None: ...


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can give its GPU memory back while it has nothing to do. Called when it is idle."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class EmbeddingEngine(Protocol):
    async def start(self) -> EngineFacts: ...

    async def embed(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.float32], int]:
        """Return unit-length rows, shape (len(texts), dimension), and the count of tokens read."""

    def load(self) -> EngineLoad: ...

    async def close(self) -> None: ...


def check_emitted(text: str, code_points: int) -> None:
    """Raise Conflict unless the text that emitted ids make here is as long as what its reader has of it."""
    if len(text) != code_points:
        raise Conflict(
            f"the ids of this continuation make {len(text)} code points here, and its reader has "
            f"{code_points}: this unit's tokenizer is another"
        )


async def steps_of(engine: Engine, generation: Generation) -> AsyncGenerator[Step, None]:
    """Run one generation and yield its steps. Closing it waits until the slot is free.

    Raises what ended the generation early.
    """
    queue = _Queue()
    running = engine.generate(generation, queue)
    try:
        while isinstance(item := await queue.items.get(), Step):
            yield item
        if item is not None:
            raise item
    finally:
        running.cancel()
        await queue.ended.wait()


class _Queue:
    """Bounded by the generation's own max_output_tokens."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Step | BaseException | None] = asyncio.Queue()
        self.ended = asyncio.Event()

    def step(self, step: Step) -> None:
        self.items.put_nowait(step)

    def released(self, error: BaseException | None) -> None:
        self.items.put_nowait(error)
        self.ended.set()
