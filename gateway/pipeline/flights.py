"""The attempts of one generation in flight: their tasks, their streams, and the wait for whichever has news.

While one attempt speaks, which is nearly always, its link stream is read directly; what is being placed, or
speaks beside another, has a task. Nothing here decides: `delivery.py` hands what comes to the session.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from gateway.pipeline import stream as st
from gateway.pipeline.alarm import Alarm
from gateway.pipeline.watch import STUCK_LEAST_S, Watch, Watched
from grid.errors import GridError
from grid.wire.link import LinkStream
from grid.wire.messages import Cancel, Tokens, WireMessage
from grid.words import Decision

FOREVER_S = 3600.0
"""A wait that something else ends: longer than any request may take."""

PUNCTUAL_S = 0.1
"""A look at a silent stream that comes later than this was held up itself, and says nothing of the unit."""


class Flight:
    """One attempt carried out: first a place is looked for, then its stream is read."""

    __slots__ = (
        "decision",
        "heard_s",
        "number",
        "order",
        "placing",
        "reader",
        "stream",
        "stuck_after_s",
        "submission",
    )

    def __init__(self, order: st.Place) -> None:
        self.number = order.attempt
        self.order = order
        self.placing: asyncio.Task[None] | None = None
        self.decision: Decision | None = None
        self.submission: st.SubmitTo | None = None
        self.stream: LinkStream | None = None
        self.reader: asyncio.Task[list[WireMessage]] | None = None
        self.heard_s = math.inf
        """When its unit last said something; later where nobody listened, and in the future before the first
        token is due."""
        self.stuck_after_s = STUCK_LEAST_S
        """How much later its engine is in doubt."""

    @property
    def unit_id(self) -> str:
        """ "" before it was placed."""
        return "" if self.decision is None else self.decision.chosen.unit_id

    def cancel(self) -> None:
        """Tell its unit to stop."""
        if self.stream is not None:
            self.stream.send(Cancel(self.stream.id, self.number))

    def unread(self) -> None:
        """Let its stream be read directly again: only there is its silence noticed."""
        if self.reader is not None and not self.reader.done():
            self.reader.cancel()  # what has come meanwhile stays in the stream
            self.reader = None

    def halt(self) -> None:
        """End its tasks; the stream stays."""
        if self.placing is not None and self.placing is not asyncio.current_task():
            self.placing.cancel()
        if self.reader is not None:
            self.reader.cancel()


News = Sequence[WireMessage] | GridError | None
"""What arrived on a flight's stream, perhaps nothing; why the stream is lost; or None: it is silent for so
long that its unit's engine may be stuck."""


class Flights:
    """Those of one generation. `owner` is told by `watch` of what happens to their units."""

    def __init__(self, watch: Watch, owner: Watched) -> None:
        self._watch = watch
        self._owner = owner
        self._alarm = Alarm()
        self._all: dict[int, Flight] = {}

    def __contains__(self, flight: Flight) -> bool:
        return self._all.get(flight.number) is flight

    def __getitem__(self, number: int) -> Flight:
        return self._all[number]

    def __iter__(self) -> Iterator[Flight]:
        return iter(tuple(self._all.values()))

    def add(self, order: st.Place) -> Flight:
        flight = self._all[order.attempt] = Flight(order)
        return flight

    @property
    def unplaced(self) -> Flight | None:
        """The one for which nobody looks for a place yet."""
        for flight in self._all.values():
            if flight.decision is None and flight.placing is None:
                return flight
        return None

    def on(self, unit_id: str) -> list[Flight]:
        return [flight for flight in self._all.values() if flight.unit_id == unit_id]

    def placed(self, flight: Flight) -> None:
        """From now on the owner hears of its unit."""
        self._watch.begins(flight.unit_id, self._owner)

    def drop(self, flight: Flight) -> None:
        """Forget it: end its tasks, close its stream."""
        self._all.pop(flight.number, None)
        flight.halt()
        if flight.decision is not None and not self.on(flight.unit_id):
            self._watch.ends(flight.unit_id, self._owner)
        if flight.stream is not None:
            flight.stream.close()
        if len(self._all) == 1:
            for left in self._all.values():
                left.unread()

    def close(self) -> None:
        for flight in self:
            self.drop(flight)
        self._alarm.cancel()

    # --- waiting --------------------------------------------------------------------------------

    def listen_again(self) -> None:
        """Somebody reads again: what no token came in meanwhile says nothing of a unit."""
        now_s = time.monotonic()
        for flight in self._all.values():
            if flight.heard_s < now_s:
                flight.heard_s = now_s

    def ring(self) -> None:
        """End the wait that is under way: there is something to do."""
        self._alarm.ring()

    @property
    def speaker(self) -> Flight | None:
        """The one that is alone and has a stream."""
        if len(self._all) == 1:
            for flight in self._all.values():
                return flight if flight.stream is not None and flight.reader is None else None
        return None

    async def read(self, speaker: Flight, due_s: float) -> News:
        """Return what came from the one that speaks, at `due_s` (monotonic seconds) at the latest; an empty
        list where nothing did. The way of nearly every token."""
        assert speaker.stream is not None
        stuck_s = speaker.heard_s + speaker.stuck_after_s
        try:
            messages = await self._alarm.wait(speaker.stream.receive(), due_s if due_s < stuck_s else stuck_s)
        except GridError as error:
            return error
        if messages is not None:
            self._heard(speaker, messages)
            return messages
        now_s = time.monotonic()
        if now_s < stuck_s:
            return ()
        speaker.heard_s = now_s
        return None if now_s < stuck_s + PUNCTUAL_S else ()

    async def read_any(self, due_s: float) -> list[tuple[Flight, News]]:
        """Return what came from whichever has news, at `due_s` at the latest."""
        waits: list[asyncio.Task[Any]] = []
        for flight in self._all.values():
            if flight.stream is not None and flight.reader is None:
                flight.reader = asyncio.create_task(flight.stream.receive())
            waits += [task for task in (flight.placing, flight.reader) if task is not None]
        wait: Coroutine[Any, Any, Any] = asyncio.sleep(FOREVER_S)
        if waits:
            wait.close()
            wait = asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await self._alarm.wait(wait, due_s)
        news: list[tuple[Flight, News]] = []
        for flight in self:
            placing, reader = flight.placing, flight.reader
            if placing is not None and placing.done():
                flight.placing = None
                placing.result()
            if reader is not None and reader.done():
                flight.reader = None
                try:
                    messages = reader.result()
                except GridError as error:
                    news.append((flight, error))
                else:
                    self._heard(flight, messages)
                    news.append((flight, messages))
        return news

    def _heard(self, flight: Flight, messages: Sequence[WireMessage]) -> None:
        """Its unit lives; once it has brought tokens, the gaps between them are its pace."""
        now_s = time.monotonic()
        spoke = flight.heard_s < now_s
        if type(messages[-1]) is Tokens:
            if spoke:
                flight.stuck_after_s = self._watch.said(flight.unit_id, now_s - flight.heard_s)
            flight.heard_s = now_s
        elif spoke:
            flight.heard_s = now_s
