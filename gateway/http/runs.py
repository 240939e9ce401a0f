"""From the events of one run to its answer, streamed or whole, for every route that runs something.

The status line waits for the run's first event, so a refusal is a real 4xx or 5xx.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from gateway.http.call import Call
from gateway.http.exchange import Header
from gateway.http.pace import Pace
from gateway.http.sse import KEEP_ALIVE, SSE_HEADERS, write_events
from gateway.pipeline.events import Chunk, Finished, Retrieved, RunEvent, RunFailed, Started, StepDone
from gateway.pipeline.plan import Plan
from grid.errors import GridError, InternalError
from grid.words import Usage

Run = AsyncGenerator[list[RunEvent], None]
"""What `Runner.run` returns: the events of one run, at once all that are there."""


@dataclass(slots=True)
class WholeRun:
    """A run that finished."""

    started: Started | None = None
    retrieved: list[Retrieved] = field(default_factory=list)
    earlier: list[StepDone] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def output(self) -> str:
        return "".join(self.texts)

    def add(self, item: RunEvent) -> None:
        if isinstance(item, Chunk):
            self.texts.append(item.text)
        elif isinstance(item, Started):
            self.started = item
        elif isinstance(item, Retrieved):
            self.retrieved.append(item)
        elif isinstance(item, StepDone):
            self.earlier.append(item)
        elif isinstance(item, Finished):
            self.finished = item
        else:
            raise failure(item)

    def ends(self) -> tuple[Started, Finished]:
        if self.started is None or self.finished is None:
            raise InternalError("the run ended without saying how")
        return self.started, self.finished


def failure(item: RunFailed) -> GridError:
    """Return a failed run's error with what the caller paid for and got."""
    item.error.details.update(usage=usage(item.usage), output=item.output_so_far)
    return item.error


async def whole(run: Run) -> WholeRun:
    """Run to the end. Raises the GridError of a refused or failed run."""
    result = WholeRun()
    async with aclosing(run):
        async for items in run:
            for item in items:
                result.add(item)
    return result


def pauses(pace: Pace, most_s: float) -> Callable[[object], float]:
    """Return what says after a write, by its last event, how long to let more gather: only after text, and
    `most_s` at most."""

    def pause_s(written: object) -> float:
        if not isinstance(written, Chunk):
            return 0.0
        pace.wrote(written.tokens)
        return pace.pause_s(most_s)

    return pause_s


async def streamed(
    call: Call,
    plan: Plan,
    run: Run,
    encode: Callable[[RunEvent], bytes],
    last: bytes = b"",
    keep_alive: bytes = KEEP_ALIVE,
) -> None:
    """Write a run as SSE; `last` follows a finished one, `keep_alive` breaks a silence.

    Raises GridError while nothing has been written.
    """
    # The caller's own bound on how late a token may be holds for the replica's pauses as well.
    most_s = plan.generation.stream_control.max_latency_ms / 1000 if plan.generation is not None else 0.0
    async with aclosing(run):
        first = await anext(run, None)
        if first is None:
            raise InternalError("the run ended without saying how")
        if isinstance(first[-1], RunFailed) and not any(isinstance(item, Chunk) for item in first):
            raise failure(first[-1])
        await call.exchange.start(200, [*SSE_HEADERS, *region_header(first)])
        pause_s = pauses(call.pace, most_s)
        ended = await write_events(first, run, encode, call.exchange.write, pause_s, keep_alive)
        await call.exchange.finish(last if isinstance(ended, Finished) else b"")


def region_header(items: Sequence[RunEvent]) -> list[Header]:
    """Return `x-processing-region` when the events say where the answer is made."""
    region = ""
    for item in items:
        if isinstance(item, Started):
            region = item.region
        elif isinstance(item, Finished) and item.placement:
            region = item.placement[-1].region
    return [(b"x-processing-region", region.encode())] if region else []


def usage(used: Usage) -> dict[str, Any]:
    return {
        "input_tokens": used.input_tokens,
        "cached_tokens": used.cached_tokens,
        "output_tokens": used.output_tokens,
        "cu_seconds": round(used.cu_seconds, 6),
    }
