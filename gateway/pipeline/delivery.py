"""One generation carried out: the shell around `session.py`, which decides everything.

Owns the generation's attempts in flight. All waiting is in `events`; `leave` waits for nothing, so a client
that leaves at any moment frees its units at once and its reservations exactly once.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from gateway.knowledge.embedder import Places, step_placement
from gateway.observe.story import RunStory
from gateway.pipeline import stream as st
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
from gateway.pipeline.flights import Flight, Flights, News
from gateway.pipeline.plan import GenerationPlan, Plan, estimated_tokens
from gateway.pipeline.prefix import prompt_prefix, turn
from gateway.pipeline.session import Order, Phase, Session
from gateway.pipeline.spans import GenerationEnd, generation_span
from gateway.pipeline.watch import Watch
from grid.errors import Cancelled, GridError
from grid.tracing.spans import Kind
from grid.wire.link import Link
from grid.wire.messages import Done, Submit
from grid.words import Decision, Sampling, Usage
from placement.lines import URGENT

STREAM_BASE_BYTES = 64 * 1024
STREAM_BYTES_PER_TOKEN = 256
"""A token's frame has about 30 bytes: a whole answer waits in the gateway for the slowest client, and a unit
that sends more than that is broken."""


SLOW_DIAL_S = 0.25
"""A dial and its handshake take a millisecond; a unit that is not reached within this is in doubt."""


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
        watch: Watch,
        noted: RunStory,
    ) -> None:
        control, sampling = generation.stream_control, generation.sampling
        self._plan = plan
        self._generation = generation
        self._before = before
        self._placement = placement
        self._links = links
        self._farewells = farewells
        self._watch = watch
        self._noted = noted
        self._documents = before.context.texts
        self._prefix = prompt_prefix(plan.tenant.salt, generation.messages, self._documents)
        self._began_s = time.monotonic()
        self._session = Session(
            Order(
                max_output_tokens=sampling.max_output_tokens,
                stops=generation.stops,
                min_tokens_per_chunk=control.min_tokens_per_chunk,
                max_latency_s=control.max_latency_ms / 1000,
                flush_on_eos=control.flush_on_eos,
                deadline_s=before.deadline_s,
                is_greedy=sampling.temperature == 0,
                bound_by=bound_by(sampling),
            )
        )
        self._flights = Flights(watch, self)
        self._decision: Decision | None = None
        """Of the attempt that the answer comes from; before one is accepted, of the newest."""
        self._placing_s = self._queued_s = 0.0
        self._begun = False
        self._refusal: GridError | None = None
        """Why no unit accepted: to be raised to whoever waits, whichever task heard of it."""
        self.documents_used = 0
        """Of those offered, once a unit has accepted."""
        self._sent: list[str] = []
        self._events: list[RunEvent] = []
        self._span = generation_span(plan, generation)
        self._watch.budget.earn()
        self._handle(st.Start())

    async def events(self) -> list[RunEvent]:
        """Wait for at least one event and return all there are; empty after the last.

        Raises the GridError of a generation that no unit accepted.
        """
        session = self._session
        self._flights.listen_again()
        while not self._events and session.phase is not Phase.ENDED:
            due_s = session.due_s
            if due_s <= time.monotonic():
                self._handle(st.Tick())
            elif (speaker := self._flights.speaker) is not None:
                self._take(speaker, await self._flights.read(speaker, due_s))
            elif not self._begun and (flight := self._flights.unplaced) is not None:
                await self._place(flight)  # there is nothing else to wait for
            else:
                for flight, news in await self._flights.read_any(due_s):
                    self._take(flight, news)
        if self._refusal is not None:
            raise self._refusal
        events, self._events = self._events, []
        return events

    def leave(self) -> None:
        """Nobody listens any more. Does nothing after the last event."""
        session = self._session
        if session.phase is not Phase.ENDED:
            self._noted.charge(session.usage)
            self._end_span(time.monotonic(), session.usage, error=Cancelled.code)
            self._handle(st.ClientGone())
        self._flights.close()

    # --- what others see of a unit ----------------------------------------------------------------

    def leave_unit(self, unit_id: str) -> None:
        for flight in self._flights.on(unit_id):
            self._handle(st.Leaving(flight.number))
        self._flights.ring()

    def doubt_unit(self, unit_id: str) -> None:
        for flight in self._flights.on(unit_id):
            self._doubt(flight)

    def _doubt(self, flight: Flight) -> None:
        """Its unit is silent: let another race it, if that may be."""
        if self._session.can_hedge(flight.number) and self._watch.budget.spend():
            self._handle(st.Suspected(flight.number))
            self._flights.ring()

    def _take(self, flight: Flight, news: News) -> None:
        if news is None:
            self._doubt(flight)
        elif isinstance(news, GridError):
            self._handle(st.LinkLost(flight.number, news))
            self._flights.drop(flight)  # also where only a tail is still to leave: it can't be read again
        elif news:
            self._handle(st.Frames(flight.number, news))

    # --- placing --------------------------------------------------------------------------------

    async def _place(self, flight: Flight) -> None:
        """Place an attempt and submit it."""
        order, generation = flight.order, self._generation
        left_s = self._before.deadline_s - time.monotonic()
        documents = sum(estimated_tokens(text) for text in self._documents)
        span = None if self._span is None else self._span.child()
        request = generation.placement._replace(
            attempt=order.attempt,
            prompt_tokens=generation.placement.prompt_tokens + documents + order.emitted_tokens,
            max_output_tokens=order.rest_tokens,
            exclude_units=order.excluded,
            prefix=self._prefix.hashes,
            priority=URGENT if order.emitted_tokens else 0,
            prefer_fingerprint=order.fingerprint,
            deadline_ms=left_s * 1000,
            traceparent="" if span is None else span.traceparent,
        )
        began_s = time.monotonic()
        try:
            decision = await self._placement.place(request, left_s)
        except GridError as error:
            if span is not None:
                span.end("place", began_s, time.monotonic(), kind=Kind.CLIENT, error=error.code)
            self._flights.drop(flight)
            if order.is_hedge:
                self._watch.budget.refund()  # it has cost nobody anything
            self._handle(st.NotPlaced(flight.number, error))
            return
        placed_s = time.monotonic()
        self._queued_s += decision.queued_ms / 1e3
        self._placing_s += max(placed_s - began_s - decision.queued_ms / 1e3, 0.0)
        if span is not None:
            span.end("place", began_s, placed_s, kind=Kind.CLIENT)
        flight.decision = decision
        if not self._begun:
            self._decision = decision
        self._noted.decided(generation.step_id, decision)
        self._handle(st.Placed(flight.number, decision.reservation_id, decision.chosen.unit_id))
        if flight.submission is None:
            return
        self._flights.placed(flight)
        try:
            async with asyncio.timeout(SLOW_DIAL_S):
                await self._dial(flight, decision)
        except TimeoutError:
            # Whoever waits in `events` must be free to hear of the attempt that races this one.
            if flight in self._flights:
                flight.placing = asyncio.create_task(self._dial(flight, decision))
                self._doubt(flight)

    async def _dial(self, flight: Flight, decision: Decision) -> None:
        try:
            link = await self._links.get(decision.chosen.host, decision.chosen.port)
        except GridError as error:
            self._handle(st.LinkLost(flight.number, error))
            return
        if flight in self._flights:
            assert flight.submission is not None
            self._submit(flight, flight.submission, link, decision)

    def _submit(self, flight: Flight, submission: st.SubmitTo, link: Link, decision: Decision) -> None:
        sampling = self._generation.sampling._replace(max_output_tokens=submission.rest_tokens)
        stream = link.open(STREAM_BASE_BYTES + STREAM_BYTES_PER_TOKEN * submission.rest_tokens)
        stream.on_silent = partial(self._doubt, flight)
        flight.stream = stream
        flight.stuck_after_s = self._watch.stuck_after_s(flight.unit_id)
        flight.heard_s = time.monotonic() + self._watch.first_token_s(decision.chosen.ttft_ms)
        stream.send(
            Submit(
                stream=stream.id,
                request_id=self._plan.request_id,
                attempt=flight.number,
                reservation_id=decision.reservation_id,
                model=decision.model,
                messages=self._generation.messages,
                documents=self._documents,
                sampling=sampling,
                tenant_salt=self._plan.tenant.salt,
                deadline_ms=max(self._before.deadline_s - time.monotonic(), 0.0) * 1000,
                emitted_ids=submission.emitted_ids,
                emitted_code_points=submission.emitted_code_points,
                prompt_hash=submission.prompt_hash,
                traceparent="" if self._span is None else self._span.traceparent,
            )
        )

    # --- effects --------------------------------------------------------------------------------

    def _handle(self, event: st.Event) -> None:
        now_s = time.monotonic()
        for effect in self._session.handle(event, now_s):
            if isinstance(effect, Chunk):
                self._sent.append(effect.text)
                self._events.append(effect)
            elif isinstance(effect, st.Place):
                self._find_place(effect)
            elif isinstance(effect, st.SubmitTo):
                self._flights[effect.attempt].submission = effect
            elif isinstance(effect, st.Settle):
                self._settle(effect)
            elif isinstance(effect, st.Begin):
                self._begin(effect)
            elif isinstance(effect, st.Moved):
                self._moved(effect)
            elif isinstance(effect, st.GiveUp):
                self._give_up(effect)
            elif isinstance(effect, st.CancelUnit):
                self._flights[effect.attempt].cancel()
            elif isinstance(effect, st.Finish):
                self._finish(effect, now_s)
            else:
                self._fail(effect, now_s)

    def _find_place(self, effect: st.Place) -> None:
        is_alone = not any(self._flights)
        flight = self._flights.add(effect)
        if self._begun or not is_alone:
            flight.placing = asyncio.create_task(self._place(flight))

    def _moved(self, effect: st.Moved) -> None:
        flight = self._flights[effect.attempt]
        self._decision = flight.decision
        if effect.gap_s:
            self._noted.gaps_s.append(effect.gap_s)
        if flight.order.is_hedge:
            self._watch.budget.refund()

    def _give_up(self, effect: st.GiveUp) -> None:
        flight = self._flights[effect.attempt]
        flight.cancel()
        if effect.is_charged and flight.stream is not None:
            flight.halt()
            self._farewells.hear(flight.stream, self._charge)
            flight.stream = None
        self._flights.drop(flight)

    def _charge(self, cu_seconds: float) -> None:
        """A unit says what an attempt took that was given up."""
        if self._session.phase is Phase.ENDED:
            self._noted.charge_late(cu_seconds)
        else:
            self._handle(st.Charged(cu_seconds))

    def _settle(self, effect: st.Settle) -> None:
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

    def _begin(self, effect: st.Begin) -> None:
        flight = self._flights[effect.attempt]
        self._decision = flight.decision
        assert self._decision is not None
        self._begun = True
        if flight.order.is_hedge:
            self._watch.budget.refund()
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

    def _finish(self, effect: st.Finish, now_s: float) -> None:
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
                placement=(*before.placement, step_placement(timing.step_id, self._decision, effect.moves)),
                exact=effect.exact,
                stop=effect.stop,
            )
        )

    def _timing(self, usage: Usage, figures: Done | None, now_s: float) -> StepTiming:
        return StepTiming(
            step_id=self._generation.step_id,
            type="generation",
            total_ms=(now_s - self._began_s) * 1000,
            placement_ms=self._placing_s * 1000,
            queue_ms=self._queued_s * 1000 + (figures.queue_ms if figures is not None else 0.0),
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

    def _fail(self, effect: st.Fail, now_s: float) -> None:
        self._noted.step(self._timing(effect.usage, None, now_s), effect.error)
        self._end_span(now_s, effect.usage, error=effect.error.code)
        if not self._begun:
            self._refusal = effect.error
            return
        usage = self._before.usage + effect.usage
        self._events.append(RunFailed(effect.error, usage, "".join(self._sent)))


def bound_by(sampling: Sampling) -> str:
    """Return why an answer that has begun can't go on elsewhere; "" where it can."""
    if sampling.frequency_penalty or sampling.presence_penalty:
        return (
            "an answer with frequency_penalty or presence_penalty can't go on where it was broken off, "
            "because they count the tokens of one engine: ask again"
        )
    return ""
