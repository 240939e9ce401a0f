"""How many tokens a prompt has, for whoever asks: beside admission, so it takes no slot and charges nothing.

Its only state is what is being counted now, which is bounded. A count that nobody awaits any more runs to
its end: tokenising can't be stopped, and takes milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable
from typing import cast

from grid.engines.base import EmbeddingEngine, Engine
from grid.errors import GridError, InternalError, InvalidRequest, Saturated
from grid.wire.messages import Count, Counted, Refused, WireMessage
from grid.words import Task, UnitCard

log = logging.getLogger(__name__)

MAX_COUNTS = 16
"""At once: a long prompt takes a thread for milliseconds, and streams need those threads as well."""
RETRY_AFTER_S = 0.1
"""A handful of the longest prompts later."""


class Counting:
    """`send` hands a message to the connection of that number, if it is still there."""

    def __init__(
        self, card: UnitCard, engine: Engine | EmbeddingEngine, send: Callable[[int, WireMessage], None]
    ) -> None:
        self._card = card
        self._engine = engine
        self._send = send
        self._tasks: set[asyncio.Task[None]] = set()

    def asked(self, link_id: int, count: Count) -> None:
        card = self._card
        if card.task != Task.GENERATE or card.model != count.model:
            wrong = InvalidRequest(f"unit {card.unit_id} runs {card.model}, not {count.model}", param="model")
            self._refuse(link_id, count, wrong)
        elif len(self._tasks) >= MAX_COUNTS:
            full = Saturated(f"unit {card.unit_id} counts {MAX_COUNTS} prompts", retry_after_s=RETRY_AFTER_S)
            self._refuse(link_id, count, full)
        else:
            task = asyncio.get_running_loop().create_task(self._count(link_id, count))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _count(self, link_id: int, count: Count) -> None:
        engine = cast(Engine, self._engine)
        try:
            prepared = await engine.prepare(count.messages, count.documents, count.max_output_tokens)
        except Exception as error:
            self._refuse(link_id, count, as_grid_error(self._card.unit_id, error))
            return
        self._send(link_id, Counted(count.stream, len(prepared.prompt_ids), prepared.documents_used))

    def _refuse(self, link_id: int, count: Count, error: GridError) -> None:
        self._send(link_id, Refused.of(count.stream, error))


def as_grid_error(unit_id: str, error: BaseException) -> GridError:
    """Return what a peer may be told of an engine's exception, which is logged by its place."""
    if isinstance(error, GridError):
        return error
    where = "".join(traceback.format_tb(error.__traceback__))  # not the message: it could quote a prompt
    log.error("the engine of %s raised %s\n%s", unit_id, type(error).__name__, where)
    return InternalError(f"the engine raised {type(error).__name__}")
