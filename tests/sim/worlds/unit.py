"""A compute unit of a simulated world: the real state machine over an engine whose time is the world's.

A token is a byte of the answer, so that most cuts are inside a character, and text comes from the grid's own
decoder. The answer to a prompt is the same on every unit.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from functools import lru_cache

from sim.worlds.clock import Clock, Process
from sim.worlds.network import End, Network
from support.fleet import make_card

from grid.engines.base import EngineLoad, Generation, Prepared, Step, check_emitted
from grid.engines.decoder import _ByteDecoder
from grid.engines.packing import prompt_hash
from grid.errors import GridError, InternalError
from grid.units import events as ev
from grid.units.unit import Unit
from grid.wire.messages import (
    Announce,
    Cancel,
    DrainUnit,
    Ping,
    Pong,
    Report,
    Submit,
    WireMessage,
)
from grid.words import FinishReason, UnitCard

STEP_S = 0.01
TICK_S = 0.05
REPORT_S = 0.1
PREFILL_STEPS = 3
RESTART_S = 0.8

MODEL = "model-x"
PIECES = ("ok ", "né ", "日本 ", "🙂", "end. ", "ß", "ab", " ")
BYTES = [bytes([byte]) for byte in range(256)]


@lru_cache(maxsize=256)
def answer_of(hash_: bytes) -> bytes:
    """Return the whole answer to a prompt."""
    rng = random.Random(hash_)
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(2, 40))).encode()


def prompt_of(messages: object) -> Prepared:
    ids = tuple(repr(messages).encode())
    return Prepared(ids, prompt_hash(ids), 0)


@dataclass
class Job:
    generation: Generation
    text: _ByteDecoder
    index: int
    prefill: int = PREFILL_STEPS


class SimEngine:
    """Gives every running job one token a step."""

    decoder_is_primed = True
    """The mutants' switch."""

    def __init__(self, unit: SimUnit) -> None:
        self._unit = unit
        self._jobs: dict[int, Job] = {}
        self._is_stepping = False
        self.steps = 0
        self.is_stuck = False
        self.slowness = 1.0
        self.breaks_next = False
        """The next job that would have a token ends with an error instead."""

    def generate(self, number: int, generation: Generation) -> None:
        text = _ByteDecoder(BYTES)
        if self.decoder_is_primed:
            check_emitted(text.feed(generation.emitted_ids), generation.emitted_code_points)
        self._jobs[number] = Job(generation, text, len(generation.emitted_ids))
        self._go()

    def abort(self, number: int) -> None:
        if self._jobs.pop(number, None) is not None:
            self._unit.after(STEP_S, lambda: self._unit.apply(ev.Released(number)))

    def free(self) -> None:
        self.is_stuck = False
        self._go()

    def load(self) -> EngineLoad:
        return EngineLoad(len(self._jobs), 0, 100_000, 100_000, 0, self.steps)

    def _go(self) -> None:
        if self._jobs and not self._is_stepping and not self.is_stuck:
            self._is_stepping = True
            self._unit.after(STEP_S * self.slowness, self._step)

    def _step(self) -> None:
        self._is_stepping = False
        if self.is_stuck:
            return
        self.steps += 1
        for number, job in list(self._jobs.items()):
            if number in self._jobs:
                self._advance(number, job)
        self._go()

    def _advance(self, number: int, job: Job) -> None:
        if job.prefill:
            job.prefill -= 1
            return
        if self.breaks_next:
            self.breaks_next = False
            del self._jobs[number]
            self._unit.apply(ev.Broke(number, InternalError("the engine raised")))
            self._unit.apply(ev.Released(number))
            return
        answer = answer_of(job.generation.prompt.prompt_hash)
        made = len(job.generation.emitted_ids) + job.generation.sampling.max_output_tokens
        ids, text, reason = (), "", None
        if job.index < len(answer):
            ids = (answer[job.index],)
            job.index += 1
            text = job.text.feed(ids)
        if job.index >= len(answer):
            reason = FinishReason.STOP
        elif job.index >= made:
            reason = FinishReason.LENGTH
        if reason is not None:
            text += job.text.finish()
            del self._jobs[number]
        self._unit.apply(ev.Stepped(number, Step(ids, text, reason, 0, STEP_S)))
        if reason is not None:
            self._unit.apply(ev.Released(number))


class SimUnit(Process):
    def __init__(self, clock: Clock, network: Network, placement: Process, name: str, **card: object) -> None:
        super().__init__(clock, name)
        self._network = network
        self._placement = placement
        self._card: UnitCard = make_card(
            name, model=MODEL, max_running=4, max_waiting=2, gpu_uuids=(), **card
        )
        self._starts = 0
        self.start()

    def start(self) -> None:
        self._starts += 1
        self.rise()
        self.machine = Unit(self._card._replace(incarnation=f"{self.name}-{self._starts}"))
        self.engine = SimEngine(self)
        self.drains = False
        self._peers: dict[int, End] = {}
        self._effects: deque[ev.Effect] = deque()
        self._is_busy = False
        self._to_placement: End | None = None
        self._register()
        self._ticks = False
        self.after(REPORT_S, self._report)

    def kill(self) -> None:
        self.die()
        self._network.died(self)
        self.clock.after(RESTART_S, self.start)

    # --- placement --------------------------------------------------------------------------------

    def _register(self) -> None:
        placement = self._placement
        self._network.connect(self, self, placement, placement.accept, self._registered)

    def _registered(self, end: End | None) -> None:
        if end is None:
            self.after(0.05, self._register)
            return
        self._to_placement = end
        end.send(Announce(0, self.machine.card))
        self._tell()

    def _tell(self) -> None:
        if self._to_placement is not None:
            load = self.machine.load(self.engine.load())
            self._to_placement.send(Report(0, self._card.node_id, (load,)))

    def _report(self) -> None:
        self._tell()
        self.after(REPORT_S, self._report)

    def _tick(self) -> None:
        self._ticks = False
        self.apply(ev.Tick(self.engine.steps))

    # --- the link ---------------------------------------------------------------------------------

    def accept(self) -> SimUnit:
        return self

    def received(self, end: End, message: WireMessage) -> None:
        self._peers[end.number] = end
        if isinstance(message, Submit):
            self.apply(ev.Submitted(end.number, message))
        elif isinstance(message, Cancel):
            self.apply(ev.CancelAsked(end.number, message.stream))
        elif isinstance(message, DrainUnit):
            self.apply(ev.SetDraining(message.draining))
            self._tell()
        elif isinstance(message, Ping):
            end.send(Pong(0, message.tick))

    def lost(self, end: End) -> None:
        if end is self._to_placement:
            self._to_placement = None
            self.after(0.05, self._register)
        elif self._peers.pop(end.number, None) is not None:
            self.apply(ev.PeerLost(end.number))

    # --- effects ----------------------------------------------------------------------------------

    def apply(self, event: ev.Event) -> None:
        if not self.is_up:
            return
        self._effects.extend(self.machine.handle(event, self.clock.now_s))
        if self._is_busy:
            return
        self._is_busy = True
        while self._effects and self.is_up:
            self._carry_out(self._effects.popleft())
        self._is_busy = False
        if not self._ticks and not self.machine.is_idle:
            self._ticks = True
            self.after(TICK_S, self._tick)

    def _carry_out(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Send):
            if effect.peer in self._peers:
                self._peers[effect.peer].send(effect.message)
        elif isinstance(effect, ev.Prepare):
            prepared = prompt_of(effect.messages)
            self.after(0.001, lambda: self.apply(ev.PromptReady(effect.job, prepared)))
        elif isinstance(effect, ev.Generate):
            try:
                self.engine.generate(effect.job, effect.generation)
            except GridError as error:
                self.apply(ev.Broke(effect.job, error))
        elif isinstance(effect, ev.Abort):
            self.engine.abort(effect.job)
        elif isinstance(effect, ev.Died):
            self.after(0.01, self.kill)
        else:
            assert not isinstance(effect, ev.Drop), effect

    def lose_engine(self) -> None:
        self.apply(ev.EngineDied("its process was killed"))
