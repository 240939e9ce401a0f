"""One generation carried out: the shell around `session.py`, which decides everything.

Owns the generation's link stream and its one timer. All waiting is in `events`; `leave` waits for nothing,
so a client that leaves at any moment frees its unit at once and its reservation exactly once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.knowledge.embedder import Places, step_placement
from gateway.observe.story import RunStory
from gateway.pipeline import session as se
from gateway.pipeline.context import Context
from gateway.pipeline.events import (
    NOTHING_USED,
    Chunk,
    Finished,
    RunEvent,
    RunFailed,
    Started,
    StepDone,
    StepPlacement,
    StepTiming,
)
from gateway.pipeline.farewell import Farewells
from gateway.pipeline.plan import GenerationPlan, Plan, estimated_tokens
from gateway.pipeline.prefix import prompt_prefix, turn
from gateway.pipeline.spans import GenerationEnd, generation_span
from grid.errors import Cancelled, GridError
from grid.tracing.spans import Kind
from grid.wire.link import Link, LinkStream
from grid.wire.messages import Cancel, Done, Submit, WireMessage
from grid.words import Decision, Usage

PLACE_WAIT_S = 5.0
"""The placement actor is back from a restart within it; a longer silence is the caller's to know."""

STREAM_BASE_BYTES = 64 * 1024
STREAM_BYTES_PER_TOKEN = 256
"""A token's frame has about 30 bytes: a whole answer waits in the gateway for the slowest client, and a unit
that sends more than that is broken."""


class Links(Protocol):
    """What is needed of `grid.wire.link.LinkPool`."""

    async def get(self, host: str, port: int) -> Link: ...


@dataclass(frozen=True, slots=True)
class Before:
    """What the steps before this generation did, and when the run began and must end (monotonic seconds)."""

    started_s: float
    deadline_s: float
    context: Context
    outputs: tuple[StepDone, ...] = ()
    """Of the generation steps before this one."""
    warnings: tuple[str, ...] = ()
    placement: tuple[StepPlacement, ...] = ()
    timing: tuple[StepTiming, ...] = ()
    usage: Usage = NOTHING_USED


class Delivery:
    def __init__(
        self,
        plan: Plan,
        generation: GenerationPlan,
        before: Before,
        *,
        placement: Places,
        links: Links,
        farewells: Farewells,
        noted: RunStory,
    ) -> None:
        control = generation.stream_control
        self._plan = plan
        self._generation = generation
        self._before = before
        self._placement = placement
        self._links = links
        self._farewells = farewells
        self._noted = noted
        self._documents = before.context.texts
        self._prefix = prompt_prefix(plan.tenant.salt, generation.messages, self._documents)
        self._began_s = time.monotonic()
        self._session = se.Session(
            se.Order(
                max_output_tokens=generation.sampling.max_output_tokens,
                stops=generation.stops,
                min_tokens_per_chunk=control.min_tokens_per_chunk,
                max_latency_s=control.max_latency_ms / 1000,
                flush_on_eos=control.flush_on_eos,
                deadline_s=before.deadline_s,
            )
        )
        self._alarm = Alarm()
        self._stream: LinkStream | None = None
        self._decision: Decision | None = None
        self._placing_s = 0.0
        self._begun = False
        self.documents_used = 0
        """Of those offered, once a unit has accepted."""
        self._sent: list[str] = []
        self._events: list[RunEvent] = []
        self._span = generation_span(plan, generation)

    async def events(self) -> list[RunEvent]:
        """Wait for at least one event and return all there are; empty after the last.

        Raises the GridError of a generation that no unit accepted.
        """
        session = self._session
        while not self._events and session.phase is not se.Phase.ENDED:
            now_s = time.monotonic()
            due_s = session.due_s
            if due_s <= now_s:
                self._handle(se.Tick())
            elif session.phase is se.Phase.PLACING:
                await self._place(self._before.deadline_s - now_s)
            else:
                await self._listen(due_s)
        events, self._events = self._events, []
        return events

    def leave(self) -> None:
        """Nobody listens any more. Does nothing after the last event."""
        session = self._session
        if session.phase is not se.Phase.ENDED:
            self._noted.charge(session.usage)
            self._end_span(time.monotonic(), session.usage, error=Cancelled.code)
            self._handle(se.ClientGone())
            if session.accepted is not None and self._stream is not None:
                self._farewells.hear(self._stream, self._noted.charge_late)
                self._stream = None
        self._close_stream()
        self._alarm.cancel()

    # --- waiting --------------------------------------------------------------------------------

    async def _place(self, left_s: float) -> None:
        """Place the current attempt and submit it."""
        session = self._session
        self._close_stream()
        prompt_tokens = self._generation.placement.prompt_tokens
        span = None if self._span is None else self._span.child()
        request = self._generation.placement._replace(
            attempt=session.attempt,
            prompt_tokens=prompt_tokens + sum(estimated_tokens(text) for text in self._documents),
            exclude_units=session.excluded,
            prefix=self._prefix.hashes,
            deadline_ms=left_s * 1000,
            traceparent="" if span is None else span.traceparent,
        )
        began_s = time.monotonic()
        try:
            decision = await self._placement.place(request, min(left_s, PLACE_WAIT_S))
        except GridError as error:
            if span is not None:
                span.end("place", began_s, time.monotonic(), kind=Kind.CLIENT, error=error.code)
            self._handle(se.NotPlaced(error))
            return
        placed_s = time.monotonic()
        self._placing_s += placed_s - began_s
        if span is not None:
            span.end("place", began_s, placed_s, kind=Kind.CLIENT)
        self._decision = decision
        self._noted.decided(self._generation.step_id, decision)
        self._handle(se.Placed(decision.reservation_id, decision.chosen.unit_id))
        try:
            link = await self._links.get(decision.chosen.host, decision.chosen.port)
        except GridError as error:
            self._handle(se.LinkLost(error))
            return
        self._submit(link, decision)

    def _submit(self, link: Link, decision: Decision) -> None:
        sampling = self._generation.sampling
        self._stream = link.open(STREAM_BASE_BYTES + STREAM_BYTES_PER_TOKEN * sampling.max_output_tokens)
        self._stream.send(
            Submit(
                stream=self._stream.id,
                request_id=self._plan.request_id,
                attempt=self._session.attempt,
                reservation_id=decision.reservation_id,
                model=decision.model,
                messages=self._generation.messages,
                documents=self._documents,
                sampling=sampling,
                tenant_salt=self._plan.tenant.salt,
                deadline_ms=max(self._before.deadline_s - time.monotonic(), 0.0) * 1000,
                traceparent="" if self._span is None else self._span.traceparent,
            )
        )

    async def _listen(self, until_s: float) -> None:
        assert self._stream is not None
        try:
            messages = await self._alarm.receive(self._stream, until_s)
        except GridError as error:
            self._handle(se.LinkLost(error))
            return
        self._handle(se.Frames(messages) if messages else se.Tick())

    # --- effects --------------------------------------------------------------------------------

    def _handle(self, event: se.Event) -> None:
        now_s = time.monotonic()
        for effect in self._session.handle(event, now_s):
            if isinstance(effect, Chunk):
                self._sent.append(effect.text)
                self._events.append(effect)
            elif isinstance(effect, se.Settle):
                self._settle(effect)
            elif isinstance(effect, se.Begin):
                self._begin(effect)
            elif isinstance(effect, se.Finish):
                self._finish(effect, now_s)
            elif isinstance(effect, se.CancelUnit):
                if self._stream is not None:
                    self._stream.send(Cancel(self._stream.id, effect.attempt))
            else:
                self._fail(effect, now_s)

    def _settle(self, effect: se.Settle) -> None:
        self._noted.settled(effect.reservation_id, effect.outcome)
        self._placement.settle(
            effect.reservation_id,
            effect.outcome,
            input_tokens=effect.input_tokens,
            output_tokens=effect.output_tokens,
            ttft_ms=effect.ttft_ms,
            total_ms=effect.total_ms,
            cached_tokens=effect.cached_tokens,
            prefix=self._prefix.extend(turn("assistant", "".join(self._sent)))
            if effect.outcome == "done"
            else (),
        )

    def _begin(self, effect: se.Begin) -> None:
        assert self._decision is not None
        self._begun = True
        plan, accepted = self._plan, effect.accepted
        self.documents_used = accepted.documents_used
        self._events.append(
            Started(
                request_id=plan.request_id,
                pipeline_id=plan.pipeline_id,
                revision=plan.revision,
                model=plan.model,
                steps=plan.step_ids,
                warnings=plan.warnings + self._before.warnings,
                input_tokens=accepted.prompt_tokens,
                region=self._decision.chosen.region,
            )
        )
        self._events += self._before.context.retrieved(accepted.documents_used)
        self._events += self._before.outputs

    def _finish(self, effect: se.Finish, now_s: float) -> None:
        assert self._decision is not None
        before, timing = self._before, self._timing(effect.usage, effect.figures, now_s)
        ttft_ms = (effect.first_token_s - before.started_s) * 1000
        self._noted.step(timing)
        self._end_span(now_s, effect.usage, finish_reason=effect.finish_reason, ttft_ms=ttft_ms)
        self._events.append(
            Finished(
                finish_reason=effect.finish_reason,
                usage=before.usage + effect.usage,
                ttft_ms=ttft_ms,
                total_ms=(now_s - before.started_s) * 1000,
                timing=(*before.timing, timing),
                placement=(*before.placement, step_placement(timing.step_id, self._decision)),
                exact=True,
                stop=effect.stop,
            )
        )

    def _timing(self, usage: Usage, figures: Done | None, now_s: float) -> StepTiming:
        return StepTiming(
            step_id=self._generation.step_id,
            type="generation",
            total_ms=(now_s - self._began_s) * 1000,
            placement_ms=self._placing_s * 1000,
            queue_ms=figures.queue_ms if figures is not None else 0.0,
            prefill_ms=figures.prefill_ms if figures is not None else 0.0,
            decode_ms=figures.decode_ms if figures is not None else 0.0,
            usage=usage,
        )

    def _end_span(
        self, now_s: float, usage: Usage, *, finish_reason: str = "", ttft_ms: float = 0.0, error: str = ""
    ) -> None:
        """Once: whatever ends a generation first has the word."""
        span, self._span = self._span, None
        if span is not None:
            end = GenerationEnd(self._decision, usage, finish_reason, ttft_ms, error, "".join(self._sent))
            span.end(self._began_s, now_s, end)

    def _fail(self, effect: se.Fail, now_s: float) -> None:
        self._noted.step(self._timing(effect.usage, None, now_s), effect.error)
        self._end_span(now_s, effect.usage, error=effect.error.code)
        if not self._begun:
            raise effect.error
        usage = self._before.usage + effect.usage
        self._events.append(RunFailed(effect.error, usage, "".join(self._sent)))

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class Alarm:
    """Ends the waits of one task in time. The timer is set once and moved only to ring earlier, so that a
    stream with a far deadline pays nothing a token."""

    __slots__ = ("_rang", "_rings_s", "_task", "_timer", "_until_s")

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._rings_s = 0.0
        self._task: asyncio.Task[object] | None = None
        self._until_s = 0.0
        self._rang = False

    async def receive(self, stream: LinkStream, until_s: float) -> Sequence[WireMessage]:
        """Return what arrived on `stream`; nothing if nothing did until `until_s` (monotonic seconds)."""
        task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        self._task, self._until_s, self._rang = task, until_s, False
        if self._timer is None or until_s < self._rings_s:
            self._set(until_s)
        try:
            return await stream.receive()
        except asyncio.CancelledError:
            # As asyncio.timeout does: a cancel that came from elsewhere as well is not ours to swallow.
            if self._rang and task.uncancel() <= cancelling:
                return ()
            raise
        finally:
            self._task = None

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, until_s: float) -> None:
        self.cancel()
        self._rings_s = until_s
        delay_s = max(until_s - time.monotonic(), 0.0)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._task is None:
            return
        if time.monotonic() < self._until_s:
            self._set(self._until_s)
            return
        self._rang = True
        self._task.cancel()
