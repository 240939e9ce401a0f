"""A gateway of a simulated world: the real sessions and the real watch, with a shell on the world's clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from sim.worlds.clock import Clock, Process
from sim.worlds.network import End, Network
from sim.worlds.unit import MODEL, SimUnit
from support.fleet import make_request

from gateway.pipeline import stream as st
from gateway.pipeline.session import Order, Phase, Session
from gateway.pipeline.watch import Watch
from grid.errors import GridError, Saturated, UnitLost
from grid.wire.messages import (
    Cancel,
    Decided,
    Fleet,
    Ping,
    Place,
    Refused,
    Settle,
    Submit,
    Tokens,
    WireMessage,
)
from grid.wire.messages import Watch as WatchFleet
from grid.wire.peer import CELL_BEATS
from grid.words import Decision, Message, Sampling

PLACE_WAIT_S = 5.0
DIAL_WAIT_S = 5.0
BACK_S = 0.05
WATCH_S = 0.05

LOST_BEATS = round(CELL_BEATS.lost_s / CELL_BEATS.busy_s)


@dataclass(frozen=True)
class Ask:
    """What a client wants."""

    request_id: str
    prompt: str
    max_output_tokens: int
    stops: tuple[str, ...]
    min_tokens_per_chunk: int
    deadline_s: float


@dataclass
class Flight:
    number: int
    order: st.Place
    decision: Decision | None = None
    submission: st.SubmitTo | None = None
    link: Link | None = None
    stream: int = 0
    heard_s: float = float("inf")


class Stream:
    """What `delivery.py` is to a real session."""

    def __init__(self, gateway: SimGateway, ask: Ask, tell: Callable[[st.Effect], None]) -> None:
        self._gateway = gateway
        self.ask = ask
        self._tell = tell
        self.session = gateway.session(
            Order(
                ask.max_output_tokens,
                ask.stops,
                ask.min_tokens_per_chunk,
                0.05,
                True,
                gateway.clock.now_s + ask.deadline_s,
            )
        )
        self.flights: dict[int, Flight] = {}
        self._ticks_s = float("inf")
        gateway.watch.budget.earn()
        self.handle(st.Start())
        gateway.after(WATCH_S, self._look)

    @property
    def is_over(self) -> bool:
        return self.session.phase is Phase.ENDED

    def leave(self) -> None:
        self.handle(st.ClientGone())

    def handle(self, event: st.Event) -> None:
        gateway = self._gateway
        for effect in self.session.handle(event, gateway.clock.now_s):
            if isinstance(effect, st.Place):
                self._place(effect)
            elif isinstance(effect, st.SubmitTo):
                self.flights[effect.attempt].submission = effect
            elif isinstance(effect, st.CancelUnit):
                self._cancel(self.flights[effect.attempt])
            elif isinstance(effect, st.GiveUp):
                flight = self.flights.pop(effect.attempt)
                self._cancel(flight)
                self._end(flight)
            elif isinstance(effect, st.Settle):
                gateway.settle(effect)
            elif isinstance(effect, st.Moved) and self.flights[effect.attempt].order.is_hedge:
                gateway.watch.budget.refund()
            self._tell(effect)
        if self.is_over:
            for number in list(self.flights):
                self._end(self.flights.pop(number))
        elif self.session.due_s < self._ticks_s:
            self._ticks_s = self.session.due_s
            gateway.after(self._ticks_s - gateway.clock.now_s, self._tick)

    def _tick(self) -> None:
        self._ticks_s = float("inf")
        if self.session.due_s <= self._gateway.clock.now_s:
            self.handle(st.Tick())
        else:
            self.handle(st.Charged(0.0))

    # --- a place ------------------------------------------------------------------------------------

    def _place(self, order: st.Place) -> None:
        flight = self.flights[order.attempt] = Flight(order.attempt, order)
        assert len(self.flights) <= 2, "at most two attempts live"
        request = make_request(
            self.ask.request_id,
            attempt=order.attempt,
            model=MODEL,
            prompt_tokens=len(self.ask.prompt) + order.emitted_tokens,
            max_output_tokens=order.rest_tokens,
            exclude_units=order.excluded,
        )
        self._gateway.place(Place(0, request), lambda answer: self._placed(flight, answer))

    def _placed(self, flight: Flight, answer: Decision | GridError) -> None:
        if self.flights.get(flight.number) is not flight:
            if isinstance(answer, Decision):  # as the placement client does with what nobody waits for
                self._gateway.settle(st.Settle(answer.reservation_id, "cancelled", 0, 0, 0.0, 0.0))
            return
        if isinstance(answer, GridError):
            del self.flights[flight.number]
            self.handle(st.NotPlaced(flight.number, answer))
            return
        unit_id = answer.chosen.unit_id
        for other in self.flights.values():
            assert other.decision is None or other.decision.chosen.unit_id != unit_id, (
                "two attempts of one answer never share a unit"
            )
        flight.decision = answer
        self.handle(st.Placed(flight.number, answer.reservation_id, unit_id))
        if flight.submission is not None and flight.number in self.flights:
            self._gateway.watch.begins(unit_id, self)
            self._gateway.dial(unit_id, lambda link: self._dialled(flight, link))

    def _dialled(self, flight: Flight, link: Link | None) -> None:
        if self.flights.get(flight.number) is not flight:
            return
        if link is None:
            self.handle(st.LinkLost(flight.number, UnitLost("it can't be dialled")))
            return
        assert flight.submission is not None
        assert flight.decision is not None
        flight.link, submission = link, flight.submission
        flight.stream = link.open(self, flight)
        flight.heard_s = self._gateway.clock.now_s + self._gateway.watch.first_token_s(0.0)
        link.end.send(
            Submit(
                stream=flight.stream,
                request_id=self.ask.request_id,
                attempt=flight.number,
                reservation_id=flight.decision.reservation_id,
                model=MODEL,
                messages=(Message("user", self.ask.prompt),),
                documents=(),
                sampling=Sampling(submission.rest_tokens, temperature=0.0),
                tenant_salt="",
                deadline_ms=1e3 * self.ask.deadline_s,
                emitted_ids=submission.emitted_ids,
                emitted_code_points=submission.emitted_code_points,
                prompt_hash=submission.prompt_hash,
            )
        )

    def _cancel(self, flight: Flight) -> None:
        if flight.link is not None:
            flight.link.end.send(Cancel(flight.stream, flight.number))

    def _end(self, flight: Flight) -> None:
        if flight.link is not None:
            flight.link.streams.pop(flight.stream, None)
        if flight.decision is not None and not self._on(flight.decision.chosen.unit_id):
            self._gateway.watch.ends(flight.decision.chosen.unit_id, self)

    # --- what is seen -------------------------------------------------------------------------------

    def heard(self, flight: Flight, message: WireMessage) -> None:
        now_s = self._gateway.clock.now_s
        assert flight.decision is not None
        if isinstance(message, Tokens):
            if flight.heard_s < now_s:
                self._gateway.watch.said(flight.decision.chosen.unit_id, now_s - flight.heard_s)
            flight.heard_s = now_s
        elif flight.heard_s < now_s:
            flight.heard_s = now_s
        self.handle(st.Frames(flight.number, [message]))

    def doubt(self, flight: Flight) -> None:
        if self.session.can_hedge(flight.number) and self._gateway.watch.budget.spend():
            self.handle(st.Suspected(flight.number))

    def _on(self, unit_id: str) -> list[Flight]:
        return [
            each
            for each in self.flights.values()
            if each.decision and each.decision.chosen.unit_id == unit_id
        ]

    def leave_unit(self, unit_id: str) -> None:
        for flight in self._on(unit_id):
            self.handle(st.Leaving(flight.number))

    def doubt_unit(self, unit_id: str) -> None:
        for flight in self._on(unit_id):
            self.doubt(flight)

    def _look(self) -> None:
        now_s = self._gateway.clock.now_s
        for flight in list(self.flights.values()):
            if flight.decision is not None:
                limit_s = self._gateway.watch.stuck_after_s(flight.decision.chosen.unit_id)
                if now_s >= flight.heard_s + limit_s:
                    flight.heard_s = now_s
                    self.doubt(flight)
        if not self.is_over:
            self._gateway.after(WATCH_S, self._look)


class Link:
    """The dialling side of a connection to a unit, with its beats."""

    def __init__(self, gateway: SimGateway, unit_id: str) -> None:
        self._gateway = gateway
        self._unit_id = unit_id
        self._silent = 0
        self._beats = False
        self._numbers = itertools.count(1)
        self.streams: dict[int, tuple[Stream, Flight]] = {}
        self.end: End

    def open(self, stream: Stream, flight: Flight) -> int:
        if not self.streams:
            self._silent = 0
            if not self._beats:
                self._beats = True
                self._gateway.after(CELL_BEATS.busy_s, self._beat)
        number = next(self._numbers)
        self.streams[number] = (stream, flight)
        return number

    def _beat(self) -> None:
        if not self.end.is_open or not self.streams:
            self._beats = False
            return
        if self.end.heard:
            self.end.heard, self._silent = False, 0
        else:
            self._silent += 1
            if self._silent % CELL_BEATS.silent == 0:
                for stream, flight in list(self.streams.values()):
                    stream.doubt(flight)
            if self._silent >= LOST_BEATS:
                self.end.is_open = False
                self._gateway.network.lose(self.end.other)
                self.lost(self.end)
                return
        self.end.send(Ping(0, 0))
        self._gateway.after(CELL_BEATS.busy_s, self._beat)

    def received(self, end: End, message: WireMessage) -> None:
        there = self.streams.get(message.stream)
        if there is not None:
            there[0].heard(there[1], message)

    def lost(self, end: End) -> None:
        self._gateway.links.pop(self._unit_id, None)
        streams, self.streams = self.streams, {}
        for stream, flight in streams.values():
            stream.handle(st.LinkLost(flight.number, UnitLost("the link is gone")))


class SimGateway(Process):
    def __init__(
        self,
        clock: Clock,
        network: Network,
        placement: Process,
        units: dict[str, SimUnit],
        rng: random.Random,
        session: type[Session] = Session,
    ) -> None:
        super().__init__(clock, "gateway")
        self.network = network
        self.session = session
        self.watch = Watch()
        self.links: dict[str, Link] = {}
        self._dials: dict[str, list[Callable[[Link | None], None]]] = {}
        self._placement = placement
        self._units = units
        self._to_placement: End | None = None
        self._asked: dict[int, tuple[Place, Callable[[Decision | GridError], None]]] = {}
        self._numbers = itertools.count(1)
        self._reach()

    # --- placement ----------------------------------------------------------------------------------

    def _reach(self) -> None:
        self.network.connect(self, self, self._placement, self._placement.accept, self._reached)

    def _reached(self, end: End | None) -> None:
        if end is None:
            self.after(BACK_S, self._reach)
            return
        self._to_placement = end
        end.send(WatchFleet(0))
        for place, _ in self._asked.values():
            end.send(place)

    def place(self, place: Place, answered: Callable[[Decision | GridError], None]) -> None:
        number = next(self._numbers)
        place = place._replace(stream=number)
        self._asked[number] = (place, answered)
        if self._to_placement is not None:
            self._to_placement.send(place)
        self.after(PLACE_WAIT_S, lambda: self._answer(number, Saturated("placement does not answer")))

    def _answer(self, number: int, answer: Decision | GridError) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            asked[1](answer)
        elif isinstance(answer, Decision):
            self.settle(st.Settle(answer.reservation_id, "cancelled", 0, 0, 0.0, 0.0))

    def settle(self, effect: st.Settle) -> None:
        if self._to_placement is not None:
            self._to_placement.send(Settle(0, effect.reservation_id, effect.outcome))

    def received(self, end: End, message: WireMessage) -> None:
        if isinstance(message, Decided):
            self._answer(message.stream, message.decision)
        elif isinstance(message, Refused):
            self._answer(message.stream, message.error())
        elif isinstance(message, Fleet):
            self.watch.fleet_changed(message)

    def lost(self, end: End) -> None:
        self._to_placement = None
        self.after(BACK_S, self._reach)

    # --- units --------------------------------------------------------------------------------------

    def dial(self, unit_id: str, done: Callable[[Link | None], None]) -> None:
        link = self.links.get(unit_id)
        if link is not None:
            self.after(0.0, lambda: done(link if link.end.is_open else None))
            return
        waiting = self._dials.setdefault(unit_id, [])
        waiting.append(done)
        if len(waiting) > 1:
            return
        link, unit = Link(self, unit_id), self._units[unit_id]

        def dialled(end: End | None) -> None:
            if self._dials.get(unit_id) is not waiting:
                if end is not None:
                    end.close()
                return
            del self._dials[unit_id]
            if end is not None:
                self.links[unit_id] = link
                link.end = end
            for each in waiting:
                each(link if end is not None else None)

        self.network.connect(self, link, unit, unit.accept, dialled)
        self.after(DIAL_WAIT_S, lambda: dialled(None) if self._dials.get(unit_id) is waiting else None)
