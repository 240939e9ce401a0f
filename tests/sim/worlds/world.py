"""A simulated world: clients, a gateway, placement and units, faults, and what must always hold.

Everything in it follows from one seed. `run` returns the digest of all bytes that arrived anywhere; it raises
an AssertionError that names what was broken.
"""

from __future__ import annotations

import codecs
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from sim.worlds.clock import Clock
from sim.worlds.gateway import Ask, SimGateway, Stream
from sim.worlds.network import Network
from sim.worlds.placement import SimPlacement
from sim.worlds.unit import SimUnit, answer_of, prompt_of

from gateway.pipeline import stream as st
from gateway.pipeline.attempts import MAX_BREAKS
from gateway.pipeline.events import Chunk
from gateway.pipeline.session import Session
from grid.words import Message

UNITS = 4
CLIENTS = (6, 12, 24)
"""As many as the units hold."""
FAULTS = 8
TROUBLE_S = 4.0
"""While clients come and things break."""
LONGEST_FAULT_S = 3.0
DEADLINE_S = 60.0
REST_S = 0.25
LAST_S = 4.0
HEALED_S = TROUBLE_S + LONGEST_FAULT_S + 1.0

LONGEST_STOP = 24
"""Characters; long ones are often begun by one unit and complete on another."""


@dataclass
class Client:
    """Hears what a real one would, and knows what it should."""

    ask: Ask
    stream: Stream | None = None
    text: str = ""
    index: int = 0
    begun: bool = False
    gone: bool = False
    ends: list[st.Effect] = field(default_factory=list)

    @cached_property
    def whole(self) -> str:
        """The text of a run that nothing disturbs."""
        answer = answer_of(prompt_of((Message("user", self.ask.prompt),)).prompt_hash)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(answer[: self.ask.max_output_tokens], final=True)
        return stopped(text, self.ask.stops)

    @property
    def session(self) -> Session:
        assert self.stream is not None
        return self.stream.session

    def hear(self, effect: st.Effect) -> None:
        if not isinstance(effect, st.Begin | Chunk | st.Finish | st.Fail):
            return
        assert not self.ends, f"{self.ask.request_id}: something came after the end: {effect}"
        assert not self.gone, f"{self.ask.request_id}: its client has left"
        if isinstance(effect, st.Begin):
            assert not self.begun, f"{self.ask.request_id} began twice"
            self.begun = True
        elif isinstance(effect, Chunk):
            assert effect.index == self.index, f"{self.ask.request_id}: {effect} where {self.index} was next"
            self.index += effect.tokens
            self.text += effect.text
            assert self.whole.startswith(self.text), f"{self.ask.request_id}: {self.text!r} of {self.whole!r}"
        else:
            self.ends.append(effect)

    def check_end(self) -> None:
        loss = self.session._loss
        assert loss is None or (loss.code != "conflict" and "protocol" not in loss.message), (
            f"{self.ask.request_id} blamed a unit that is right: {loss}"
        )
        if self.gone:
            return
        (end,) = self.ends
        if isinstance(end, st.Finish):
            assert self.text == self.whole, f"{self.ask.request_id}: {self.text!r} for {self.whole!r}"
            assert end.exact
        else:
            assert isinstance(end, st.Fail)
            assert not self.begun or self.session._attempts._breaks == MAX_BREAKS, (
                f"{self.ask.request_id} had begun and ended with {end.error}"
            )


def stopped(text: str, stops: tuple[str, ...]) -> str:
    for end in range(1, len(text) + 1):
        matching = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(matching)]
    return text


class World:
    def __init__(self, seed: int, session: type[Session] = Session) -> None:
        def child(name: str) -> random.Random:
            return random.Random(f"{seed}/{name}")

        self.clock = Clock()
        self.network = Network(self.clock, child("network"))
        self.placement = SimPlacement(self.clock, self.network, child("placement"))
        self.units = {
            name: SimUnit(self.clock, self.network, self.placement, name)
            for name in (f"unit-{number}" for number in range(UNITS))
        }
        self.gateway = SimGateway(
            self.clock, self.network, self.placement, self.units, child("gateway"), session
        )
        self.clients: list[Client] = []
        self.clock.checks.append(self._check_caps)
        self._plan_clients(child("clients"))
        self._plan_faults(child("faults"))

    def run(self) -> str:
        self.clock.run(HEALED_S)
        self._heal()
        while not self._is_quiet:
            assert self.clock.now_s < HEALED_S + DEADLINE_S, "a healed world comes to rest"
            self.clock.run(self.clock.now_s + REST_S)
        for client in self.clients:
            assert client.gone or len(client.ends) == 1, f"{client.ask.request_id} never ended"
            client.check_end()
        last = self._comes("last", random.Random(0))
        self.clock.run(self.clock.now_s + LAST_S)
        assert last.begun, "a healed world serves"
        last.check_end()
        return self.network.digest

    @property
    def _is_quiet(self) -> bool:
        """Every answer has ended, every unit is up and idle, and nothing is reserved."""
        return (
            all(client.gone or client.ends for client in self.clients)
            and all(unit.is_up and unit.machine.is_idle for unit in self.units.values())
            and self.placement.view.reservations == 0
        )

    @property
    def moves(self) -> int:
        return sum(client.session.moves for client in self.clients)

    # --- clients ------------------------------------------------------------------------------------

    def _plan_clients(self, rng: random.Random) -> None:
        for number in range(rng.choice(CLIENTS)):
            self.clock.after(rng.uniform(0.3, TROUBLE_S), lambda name=f"req-{number}": self._comes(name, rng))

    def _comes(self, name: str, rng: random.Random) -> Client:
        ask = Ask(
            request_id=name,
            prompt=f"{name} {rng.random()}",
            max_output_tokens=rng.choice((3, 20, 200)),
            stops=(),
            min_tokens_per_chunk=rng.choice((1, 1, 7)),
            deadline_s=DEADLINE_S,
        )
        whole = Client(ask).whole
        if rng.random() < 0.5:
            at = rng.randrange(len(whole))
            ask = replace(ask, stops=(whole[at : at + rng.randint(1, LONGEST_STOP)], "never said"))
        client = Client(ask)
        self.clients.append(client)
        client.stream = Stream(self.gateway, client.ask, client.hear)
        if rng.random() < 0.1 and name != "last":
            self.clock.after(rng.uniform(0.0, 1.0), lambda: self._leaves(client))
        return client

    def _leaves(self, client: Client) -> None:
        if not client.ends:
            assert client.stream is not None
            client.gone = True
            client.stream.leave()

    # --- faults -------------------------------------------------------------------------------------

    def _plan_faults(self, rng: random.Random) -> None:
        names = list(self.units)
        kinds: list[Callable[[SimUnit, float], None]] = [
            self._kill,
            self._freeze,
            self._slow,
            self._stick,
            self._cut,
            self._hole,
            self._drain,
            self._lose_engine,
            self._break_one,
            self._restart_placement,
        ]
        for _ in range(FAULTS):
            strike, unit = rng.choice(kinds), self.units[rng.choice(names)]
            lasts_s = rng.choice((0.05, 0.2, rng.uniform(0.0, LONGEST_FAULT_S)))
            self.clock.after(
                rng.uniform(0.5, TROUBLE_S),
                lambda strike=strike, unit=unit, lasts_s=lasts_s: strike(unit, lasts_s),
            )

    def _kill(self, unit: SimUnit, lasts_s: float) -> None:
        if unit.is_up:
            unit.kill()

    def _freeze(self, unit: SimUnit, lasts_s: float) -> None:
        unit.freeze()
        self.clock.after(lasts_s, unit.thaw)

    def _slow(self, unit: SimUnit, lasts_s: float) -> None:
        unit.engine.slowness = 30.0
        self.clock.after(lasts_s, lambda: setattr(unit.engine, "slowness", 1.0))

    def _stick(self, unit: SimUnit, lasts_s: float) -> None:
        engine = unit.engine
        engine.is_stuck = True
        self.clock.after(lasts_s, lambda: unit.run(engine.free))

    def _cut(self, unit: SimUnit, lasts_s: float) -> None:
        for end in self.network.ends_of(unit):
            if end.other.process is self.gateway:
                end.close()

    def _hole(self, unit: SimUnit, lasts_s: float) -> None:
        self.network.black_hole(self.gateway, unit)
        self.clock.after(lasts_s, lambda: self.network.heal(self.gateway, unit))

    def _drain(self, unit: SimUnit, lasts_s: float) -> None:
        if self.placement.is_up:
            self.placement.drain(unit.name, True)
            self.clock.after(lasts_s, lambda: self._undrain(unit))

    def _undrain(self, unit: SimUnit) -> None:
        if self.placement.is_up:
            self.placement.drain(unit.name, False)

    def _lose_engine(self, unit: SimUnit, lasts_s: float) -> None:
        if unit.is_up:
            unit.run(unit.lose_engine)

    def _break_one(self, unit: SimUnit, lasts_s: float) -> None:
        unit.engine.breaks_next = True

    def _restart_placement(self, unit: SimUnit, lasts_s: float) -> None:
        if self.placement.is_up:
            self.placement.kill()

    def _heal(self) -> None:
        for unit in self.units.values():
            unit.thaw()
            unit.engine.breaks_next = False
            unit.engine.slowness = 1.0
            unit.run(unit.engine.free)
            self.network.heal(self.gateway, unit)
            self._undrain(unit)

    # --- what always holds --------------------------------------------------------------------------

    def _check_caps(self) -> None:
        for unit in self.units.values():
            card = unit.machine.card
            assert unit.machine.in_engine <= card.max_running, f"{unit.name} runs more than it has slots"
            assert len(unit.machine._jobs) <= card.max_running + card.max_waiting, f"{unit.name} is overfull"
