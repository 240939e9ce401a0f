"""Canaries: small real requests to a unit that failed, sent as a gateway would and checked as one would.

They go to the unit's own server, so that network, admission, engine and decoding are tried together. The
verdict is pure (`flaw_of_generation`, `flaw_of_vectors`); what it means for the unit is `health.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import numpy as np

from grid.errors import GridError, Rejected
from grid.wire.link import LinkPool
from grid.wire.messages import (
    Accepted,
    Done,
    Embed,
    Failed,
    Progress,
    Refused,
    Submit,
    Tokens,
    Vectors,
    WireMessage,
)
from grid.words import Message, Sampling, Task, UnitCard, new_id

log = logging.getLogger(__name__)

PROMPT = "ready?"

CANARY_TOKENS = 4
"""The prefill and some decode steps: what each request needs, in a tenth of a second of most units."""

CANARY_LIMIT_S = 10.0
"""An isolated unit has nothing else to do; one that takes this long for a few tokens is stuck."""

MAX_AT_ONCE = 32
"""Over all units, so that a cell in which everything fails is not busy with canaries."""

CANARY_BUFFER_BYTES = 1 << 16
"""Far above the frames of a few tokens, and above any vector that is known."""

LENGTH_TOLERANCE = 1e-2
"""How far the norm of a vector may be from 1: int8 models round."""

Ended = Callable[[UnitCard, str | None], None]
"""Takes the unit and what was wrong: "" for nothing, None where the canary says nothing about the unit."""


class Canaries:
    """Sends them. The owner sends a unit its next one only after `ended` was called for the last."""

    def __init__(self, *, peer_id: str, secret: bytes, ended: Ended) -> None:
        self._links = LinkPool(role="placement", peer_id=peer_id, secret=secret)
        self._ended = ended
        self._free = asyncio.Semaphore(MAX_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, card: UnitCard) -> None:
        task = asyncio.create_task(self._send(card))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._links.close()

    async def _send(self, card: UnitCard) -> None:
        async with self._free:
            try:
                flaw = await self._try(card)
            except Exception as error:
                # A bug of ours is not the unit's fault, and must not leave it isolated for ever.
                log.exception("a canary for %s was not sent", card.unit_id)
                flaw = None if not isinstance(error, GridError) else error.message
        if flaw:
            log.warning("canary of %s: %s", card.unit_id, flaw)
        self._ended(card, flaw)

    async def _try(self, card: UnitCard) -> str | None:
        frames: list[WireMessage] = []
        try:
            async with asyncio.timeout(CANARY_LIMIT_S):
                link = await self._links.get(card.host, card.port)
                stream = link.open(CANARY_BUFFER_BYTES)
                try:
                    stream.send(question(card, stream.id))
                    while not frames or not isinstance(frames[-1], Done | Failed | Refused | Vectors):
                        frames += await stream.receive()
                finally:
                    stream.close()
        except TimeoutError:
            if isinstance(frames[-1] if frames else None, Progress):
                return None  # it waits behind others: a unit that was spared is merely busy
            return f"it did not answer within {CANARY_LIMIT_S:.0f} s"
        except GridError as error:
            return error.message
        return flaw_of_vectors(card, frames) if card.task == Task.EMBED else flaw_of_generation(card, frames)


def question(card: UnitCard, stream: int) -> Submit | Embed:
    request_id, deadline_ms = new_id("canary-"), CANARY_LIMIT_S * 1000
    if card.task == Task.EMBED:
        return Embed(stream, request_id, "", card.model, (PROMPT,), deadline_ms)
    return Submit(
        stream=stream,
        request_id=request_id,
        attempt=1,
        reservation_id="",
        model=card.model,
        messages=(Message("user", PROMPT),),
        documents=(),
        sampling=Sampling(max_output_tokens=CANARY_TOKENS, temperature=0.0),
        # Nobody else's prefix cache: the prefill is computed, or at most found where canaries left it.
        tenant_salt="canary",
        deadline_ms=deadline_ms,
    )


def flaw_of_generation(card: UnitCard, frames: Sequence[WireMessage]) -> str | None:
    """Return what is wrong with all the frames of a canary's answer; None where it was only refused."""
    accepted, received = False, 0
    for frame in frames:
        match frame:
            case Refused():
                return _refusal(frame)
            case Accepted(fingerprint=fingerprint):
                if fingerprint != card.fingerprint:
                    return f"it calls itself {fingerprint!r} and was announced as {card.fingerprint!r}"
                accepted = True
            case Tokens(first_index=first, ids=ids):
                if not accepted or first != received:
                    return f"token {first} came where {received} was next"
                received += len(ids)
            case Failed(message=message):
                return message
            case Done(output_tokens=counted):
                if counted != received or not 0 < received <= CANARY_TOKENS:
                    return (
                        f"it sent {received} tokens, counted {counted}, and 1 to {CANARY_TOKENS} were asked"
                    )
                return ""
            case Progress():
                continue
            case _:
                return f"it answered with {type(frame).__name__}"
    return "its answer has no end"


def flaw_of_vectors(card: UnitCard, frames: Sequence[WireMessage]) -> str | None:
    """Return what is wrong with the answer of an embedding unit, as `flaw_of_generation`."""
    reply = frames[-1]
    if isinstance(reply, Refused):
        return _refusal(reply)
    if not isinstance(reply, Vectors):
        return f"it answered with {type(reply).__name__}"
    if reply.dimension != card.dimension or len(reply.data) != 4 * card.dimension:
        return f"it sent {len(reply.data)} bytes of dimension {reply.dimension}, not one of {card.dimension}"
    length = float(np.linalg.norm(np.frombuffer(reply.data, dtype="<f4")))
    # A comparison that a NaN fails, too.
    return "" if abs(length - 1.0) <= LENGTH_TOLERANCE else f"its vector has the length {length:.3f}, not 1"


def _refusal(frame: Refused) -> str | None:
    """A unit that is full or drains says nothing of its health; any other refusal is wrong."""
    return None if isinstance(frame.error(), Rejected) else frame.message
