"""Texts to vectors: place, call the unit, settle. Every reservation that is taken here is ended here.

Embedding can be repeated without harm, so a unit that is lost or full is left out and another one is asked,
a bounded number of times and within the same deadline.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gateway.knowledge.splitting import estimate_pieces
from gateway.observe.story import RunStory
from gateway.pipeline.events import StepPlacement
from gateway.tracing import PROVIDER, span, traceparent
from grid.errors import DeadlineExceeded, GridError, InternalError, Interrupted, Saturated, UnitLost
from grid.tracing.spans import Attributes, Kind
from grid.wire.link import LinkPool
from grid.wire.messages import Embed, Vectors
from grid.words import Decision, PlacementRequest, Task, Usage

MAX_ATTEMPTS = 3
"""Units asked for one batch; a cell that fails three times in a row is not going to work the fourth."""
BATCH_TEXTS = 32
"""Two of an embedding unit's runs: enough to keep it busy, short enough that a query fits in between."""


class Places(Protocol):
    """What is needed of `placement.client.PlacementClient`."""

    async def place(self, request: PlacementRequest, timeout_s: float) -> Decision: ...

    def settle(
        self,
        reservation_id: str,
        outcome: str,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        ttft_ms: float = 0.0,
        total_ms: float = 0.0,
        cached_tokens: int = 0,
        prefix: tuple[int, ...] = (),
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Embedded:
    """Unit-length rows in the order of the texts, and what they cost."""

    vectors: npt.NDArray[np.float32]
    usage: Usage
    placement: StepPlacement
    placement_ms: float
    """Without `queue_ms`, the wait for a slot."""
    queue_ms: float
    embed_ms: float


@dataclass(frozen=True, slots=True)
class EmbedOrder:
    """One batch of at most BATCH_TEXTS texts. `deadline_s` is in the loop's time."""

    tenant_id: str
    request_id: str
    step_id: str
    model: str
    texts: tuple[str, ...]
    allowed_regions: tuple[str, ...]
    deadline_s: float
    noted: RunStory | None = None
    """Where the placements are written down."""


class Embedder:
    """`links` carry the vectors; bulk loads use a pool of their own, so that they never delay an answer."""

    def __init__(self, *, placement: Places, links: LinkPool) -> None:
        self._placement = placement
        self._links = links

    async def embed(self, order: EmbedOrder) -> Embedded:
        """Raises NoEligibleUnit or Saturated if no unit takes it, UnitLost, DeadlineExceeded."""
        loop = asyncio.get_running_loop()
        failed: list[str] = []
        placement_ms = queue_ms = 0.0
        while True:
            left_s = _left(order, loop.time())
            # Not the loop's time, which uvloop gives in whole milliseconds.
            started_s = time.monotonic()
            with span("place", Kind.CLIENT):
                request = embed_request(order, len(failed) + 1, tuple(failed), left_s)
                decision = await self._placement.place(request, left_s)
            queue_ms += decision.queued_ms
            placement_ms += max((time.monotonic() - started_s) * 1000 - decision.queued_ms, 0.0)
            if order.noted is not None:
                order.noted.decided(order.step_id, decision)
            try:
                with span(f"embeddings {order.model}", Kind.CLIENT, _attributes(order, decision)):
                    reply, embed_ms = await self._call(order, decision)
            except (UnitLost, Saturated):
                failed.append(decision.chosen.unit_id)
                if len(failed) == MAX_ATTEMPTS:
                    raise
                continue
            usage = Usage(input_tokens=reply.input_tokens, cu_seconds=reply.cu_seconds)
            placed = step_placement(order.step_id, decision, moves=len(failed))
            return Embedded(_rows(reply, len(order.texts)), usage, placed, placement_ms, queue_ms, embed_ms)

    async def _call(self, order: EmbedOrder, decision: Decision) -> tuple[Vectors, float]:
        loop = asyncio.get_running_loop()
        started_s = time.monotonic()
        outcome, input_tokens = "cancelled", 0
        try:
            link = await self._links.get(decision.chosen.host, decision.chosen.port)
            left_s = _left(order, loop.time())
            reply = await link.call(
                lambda stream: Embed(
                    stream,
                    order.request_id,
                    decision.reservation_id,
                    decision.model,
                    order.texts,
                    left_s * 1000,
                    traceparent(),
                ),
                left_s,
            )
            if not isinstance(reply, Vectors):
                raise InternalError(f"an embedding unit answered with {type(reply).__name__}")
            outcome, input_tokens = "done", reply.input_tokens
            return reply, (time.monotonic() - started_s) * 1000
        except GridError as error:
            # Only a fault of the unit's own counts against its health, never what it was right to refuse.
            outcome = "failed" if isinstance(error, Interrupted | InternalError) else "refused"
            raise
        finally:
            if order.noted is not None:
                order.noted.settled(decision.reservation_id, outcome)
            self._placement.settle(
                decision.reservation_id,
                outcome,
                input_tokens=input_tokens,
                total_ms=(time.monotonic() - started_s) * 1000,
            )


def step_placement(step_id: str, decision: Decision, moves: int = 0) -> StepPlacement:
    """Return where a step runs and why, for people."""
    chosen = decision.chosen
    if decision.next_best:
        other = decision.next_best[0]
        why = f"{chosen.total_ms:.1f} ms predicted; next best {other.unit_id} with {other.total_ms:.1f} ms"
    else:
        why = f"the only eligible unit; {chosen.total_ms:.1f} ms predicted"
    return StepPlacement(
        step_id=step_id,
        unit_id=chosen.unit_id,
        model=chosen.model,
        region=chosen.region,
        gpu_type=chosen.gpu_type,
        simulated=chosen.simulated,
        predicted_ttft_ms=chosen.ttft_ms,
        why=why,
        moves=moves,
    )


def embed_request(
    order: EmbedOrder, attempt: int, exclude: tuple[str, ...], left_s: float
) -> PlacementRequest:
    """Return what placement is asked for a batch that has `left_s` seconds left."""
    return PlacementRequest(
        request_id=order.request_id,
        step_id=order.step_id,
        attempt=attempt,
        tenant_id=order.tenant_id,
        task=Task.EMBED,
        model=order.model,
        prompt_tokens=sum(estimate_pieces(text) for text in order.texts),
        max_output_tokens=0,
        allowed_regions=order.allowed_regions,
        exclude_units=exclude,
        deadline_ms=left_s * 1000,
        traceparent=traceparent(),
    )


def _attributes(order: EmbedOrder, decision: Decision) -> Attributes:
    return (
        PROVIDER,
        ("gen_ai.operation.name", "embeddings"),
        ("gen_ai.request.model", order.model),
        ("gen_ai.response.model", decision.model),
        ("zerogrid.unit", decision.chosen.unit_id),
    )


def _left(order: EmbedOrder, now_s: float) -> float:
    left_s = order.deadline_s - now_s
    if left_s <= 0:
        raise DeadlineExceeded("the deadline passed before the texts were embedded")
    return left_s


def _rows(reply: Vectors, texts: int) -> npt.NDArray[np.float32]:
    """Raises InternalError for anything but one finite row a text, so that no store is ever given less."""
    if reply.dimension <= 0 or len(reply.data) != 4 * reply.dimension * texts:
        raise InternalError(f"an embedding unit sent {len(reply.data)} bytes for {texts} texts")
    rows = np.frombuffer(reply.data, dtype="<f4").reshape(texts, reply.dimension)
    if not np.isfinite(rows).all():
        raise InternalError("an embedding unit sent numbers that are not finite")
    return rows.astype(np.float32, copy=False)
