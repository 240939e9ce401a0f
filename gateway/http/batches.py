"""A call with a list of inputs, over HTTP: streamed with an `input` number on each event, or whole, in order.

The status line waits until one of the inputs is accepted. Where none is, the call is refused as its first is.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gateway.http.call import Call
from gateway.http.errors import Ecosystem
from gateway.http.exchange import Header
from gateway.http.runs import WholeRun, pauses, usage
from gateway.http.sse import SSE_HEADERS, event, write_events
from gateway.http.views import GridEvents, whole_answer
from gateway.observe.story import Story
from gateway.pipeline.batch import Told, side_by_side
from gateway.pipeline.events import NOTHING_USED, Finished, RunEvent, RunFailed
from gateway.pipeline.plan import Plan
from grid.errors import GridError
from grid.words import Usage

Batch = AsyncGenerator[list[Told], None]


@dataclass(slots=True)
class Tally:
    """What came of the inputs so far."""

    succeeded: int = 0
    errors: list[GridError] = field(default_factory=list)
    usage: Usage = NOTHING_USED

    def add(self, told: Told) -> None:
        if isinstance(told.event, Finished):
            self.succeeded += 1
            self.usage += told.event.usage
        elif isinstance(told.event, RunFailed):
            self.errors.append(told.event.error)
            self.usage += told.event.usage
        elif isinstance(told.event, GridError):
            self.errors.append(told.event)

    def view(self) -> dict[str, Any]:
        return {
            "succeeded": self.succeeded,
            "failed": len(self.errors),
            "usage": usage(self.usage),
        }

    def correct(self, story: Story) -> None:
        """Take back the errors of runs that only waited for a place, and then ran again."""
        for run in story.runs:
            if not any(run.error is error for error in self.errors):
                run.error = None


PlanMaker = Callable[[], Awaitable[Plan]]
"""Makes the plan of one input when its turn comes, so that one that can't be made fails alone."""


async def streamed_each(call: Call, makers: Sequence[PlanMaker], most_s: float) -> None:
    """Run every input and write their events as they come; `most_s` bounds how long a token may be held.

    Raises GridError while nothing has been written.
    """
    encode, tally = _Events(call.request_id, call.exchange.ecosystem), Tally()
    pause_s = pauses(call.pace, most_s)

    def noted(told: Told) -> bytes:
        tally.add(told)
        return encode(told)

    async with aclosing(_batch(call, makers)) as batch:
        first = await _until_accepted(batch)
        await call.exchange.start(200, SSE_HEADERS)
        await write_events(first, batch, noted, call.exchange.write, lambda told: pause_s(told.event))
        tally.correct(call.story)
        await call.exchange.finish(event("end", {"request_id": call.request_id, **tally.view()}))


async def whole_each(call: Call, makers: Sequence[PlanMaker]) -> None:
    """Run every input and answer with all outcomes in their order. Raises the first's error where all were
    refused."""
    outcomes = [_Outcome() for _ in makers]
    tally = Tally()
    async with aclosing(_batch(call, makers)) as batch:
        first = await _until_accepted(batch)
        _take(first, outcomes, tally)
        async for told in batch:
            _take(told, outcomes, tally)
    tally.correct(call.story)
    started = next(outcome.run.started for outcome in outcomes if outcome.run.started is not None)
    regions = sorted({o.run.started.region for o in outcomes if o.run.started is not None} - {""})
    results = [
        {"input": number, **outcome.view(input_id(call.request_id, number), call.exchange.ecosystem)}
        for number, outcome in enumerate(outcomes)
    ]
    payload = {
        "request_id": call.request_id,
        "pipeline_id": started.pipeline_id,
        "revision": started.revision,
        "results": results,
        **tally.view(),
    }
    headers: list[Header] = [(b"x-processing-region", ", ".join(regions).encode())] if regions else []
    await call.exchange.respond(200, payload, headers)


class _Events:
    """Encodes what inputs tell, each under its number and with a request id of its own."""

    def __init__(self, request_id: str, ecosystem: Ecosystem) -> None:
        self._request_id = request_id
        self._ecosystem = ecosystem
        self._encoders: dict[int, GridEvents] = {}

    def __call__(self, told: Told) -> bytes:
        number, item = told
        if isinstance(item, GridError):
            return event(
                "error",
                {"input": number, **self._ecosystem.envelope(item, input_id(self._request_id, number))},
            )
        if number not in self._encoders:
            self._encoders[number] = GridEvents(input_id(self._request_id, number), self._ecosystem, number)
        encoded = self._encoders[number](item)
        if told.is_last:
            del self._encoders[number]
        return encoded


@dataclass(slots=True)
class _Outcome:
    """What came of one input: a whole run, or an error."""

    run: WholeRun = field(default_factory=WholeRun)
    error: GridError | None = None

    def view(self, request_id: str, ecosystem: Ecosystem) -> dict[str, Any]:
        if self.error is not None:
            return ecosystem.envelope(self.error, request_id)
        return whole_answer(self.run)


def _take(all_told: list[Told], outcomes: list[_Outcome], tally: Tally) -> None:
    for told in all_told:
        tally.add(told)
        try:
            if isinstance(told.event, GridError):
                raise told.event
            outcomes[told.number].run.add(told.event)
        except GridError as error:
            outcomes[told.number].error = error


def _batch(call: Call, makers: Sequence[PlanMaker]) -> Batch:
    until_s = time.monotonic() + call.services.config.gateway.default_deadline_s
    return side_by_side([partial(_run, call, maker, until_s) for maker in makers])


async def _run(call: Call, maker: PlanMaker, until_s: float) -> AsyncGenerator[list[RunEvent], None]:
    """Run one input until the call's time is up; it counts among the replica's streams."""
    call.pace.streams += 1
    try:
        plan = replace(await maker(), time_limit_s=until_s - time.monotonic())
        async with aclosing(call.services.runner.run(plan, call.story)) as run:
            async for events in run:
                yield events
    finally:
        call.pace.streams -= 1


async def _until_accepted(batch: Batch) -> list[Told]:
    """Return what was told up to the first acceptance. Raises the first input's error where none came."""
    all_told: list[Told] = []
    async for told in batch:
        all_told += told
        if not all(isinstance(each.event, GridError) for each in told):
            return all_told
    refusals = {told.number: told.event for told in all_told if isinstance(told.event, GridError)}
    error = refusals[0]
    error.details["inputs"] = [
        {"input": number, "code": refusals[number].code, "message": refusals[number].message}
        for number in sorted(refusals)
    ]
    raise error


def input_id(request_id: str, number: int) -> str:
    """Return the request id of one input, under which its steps are placed and its answer is told."""
    return f"{request_id}.{number}"
