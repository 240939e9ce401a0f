"""The placement actor of a simulated world: the real view and decision, behind the world's network."""

from __future__ import annotations

import random

from sim.worlds.clock import Clock, Process
from sim.worlds.network import End, Network

from grid.errors import GridError
from grid.wire.messages import (
    Announce,
    Decided,
    DrainUnit,
    Fleet,
    Place,
    Refused,
    Report,
    Settle,
    Watch,
    WireMessage,
)
from placement.decide import decide
from placement.fleet import View
from placement.freshness import TICK_S
from placement.rules import Rules

PUSH_S = 0.05
RESTART_S = 0.5
LEASE_S = 3600.0
"""No lease ends what somebody forgot to settle."""


class SimPlacement(Process):
    def __init__(self, clock: Clock, network: Network, rng: random.Random) -> None:
        super().__init__(clock, "placement")
        self._network = network
        self._rng = rng
        self._starts = 0
        self.drained: set[str] = set()
        self.start()

    def start(self) -> None:
        self._starts += 1
        self.rise()
        self.view = View(Rules(lease_s=LEASE_S), self.clock.now_s, first_version=1_000_000 * self._starts)
        self._watchers: list[End] = []
        self._units: dict[str, End] = {}
        self._pushed_version = 0
        self.after(TICK_S, self._tick)
        self.after(PUSH_S, self._push)

    def kill(self) -> None:
        self.die()
        self._network.died(self)
        self.clock.after(RESTART_S, self.start)

    def drain(self, unit_id: str, draining: bool) -> None:
        (self.drained.add if draining else self.drained.discard)(unit_id)
        self.view.drain(unit_id, draining)
        if unit_id in self._units:
            self._units[unit_id].send(DrainUnit(0, unit_id, draining))

    def accept(self) -> SimPlacement:
        return self

    def received(self, end: End, message: WireMessage) -> None:
        now_s = self.clock.now_s
        if isinstance(message, Announce):
            self.view.join(message.card, end.number)
            self._units[message.card.unit_id] = end
            if message.card.unit_id in self.drained:
                self.drain(message.card.unit_id, True)
        elif isinstance(message, Report):
            self.view.report(message.loads, end.number, now_s)
        elif isinstance(message, Watch):
            self._watchers.append(end)
            self._pushed_version = 0
        elif isinstance(message, Settle):
            self.view.settle(message.reservation_id, message.outcome, now_s)
        elif isinstance(message, Place):
            self._place(end, message, now_s)

    def lost(self, end: End) -> None:
        if end in self._watchers:
            self._watchers.remove(end)
        self.view.release_holder(end.number)
        for unit_id in self.view.leave(end.number):
            self._units.pop(unit_id, None)

    def _place(self, end: End, message: Place, now_s: float) -> None:
        request = message.request
        self.view.withdraw(request.reservation_id)
        try:
            decision = decide(request, self.view, now_s, self._rng)
        except GridError as error:
            end.send(Refused.of(message.stream, error))
            return
        self.view.reserve(request, decision.chosen.unit_id, end.number, now_s)
        end.send(Decided(message.stream, decision))

    def _tick(self) -> None:
        self.view.tick(self.clock.now_s)
        self.after(TICK_S, self._tick)

    def _push(self) -> None:
        if self.view.version != self._pushed_version:
            self._pushed_version = self.view.version
            fleet = Fleet(0, self.view.version, self.view.snapshot(self.clock.now_s))
            for end in self._watchers:
                end.send(fleet)
        self.after(PUSH_S, self._push)
