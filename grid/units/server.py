"""The data-plane server of one unit: a thin shell around `Unit` that owns connections and engine tasks.

Frames and answers of the engine become events; effects become frames and tasks. `unit.py` decides everything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

from grid.engines.base import EmbeddingEngine, Engine, Running, Sleeper, Step
from grid.tracing.tracer import Tracer
from grid.units import events as ev
from grid.units import traces
from grid.units.counting import Counting, as_grid_error
from grid.units.outbox import Outbox
from grid.units.unit import Unit
from grid.wire.link import LinkServer, Peer
from grid.wire.messages import Accepted, Cancel, Count, Embed, Submit, WireMessage
from grid.words import UnitLoad

log = logging.getLogger(__name__)

TICK_S = 0.05
"""How exact deadlines are, and how soon a peer that reads again gets what was held for it."""


class UnitServer:
    """Serves one unit's streams to gateways. `died` is called once, when the engine can't serve any more."""

    def __init__(
        self,
        unit: Unit,
        engine: Engine | EmbeddingEngine,
        *,
        secret: bytes,
        died: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        self.unit = unit
        self._engine = engine
        self._died = died
        self._clock = clock
        self._tracer = tracer
        self._server = LinkServer(role="unit", peer_id=unit.card.unit_id, secret=secret, handler=self)
        self._peers: dict[int, Peer] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._runs: dict[int, _Run] = {}
        self._encoding: set[int] = set()
        self._counting = Counting(unit.card, engine, self._send_beside)
        self._timer: asyncio.TimerHandle | None = None
        self._power = asyncio.Lock()
        self._is_asleep = False
        self._effects: deque[ev.Effect] = deque()
        self._carrying_out = False

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        return await self._server.start(host, port)

    async def close(self, code: str = "unit_lost", message: str = "the unit stops") -> None:
        """Close every connection and end every task of the engine."""
        await self._server.close(code, message)
        for peer in list(self._peers.values()):
            self.disconnected(peer, message)
        for run in list(self._runs.values()):
            run.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._counting.close()
        if self._timer is not None:
            self._timer.cancel()

    async def sleep(self) -> bool:
        """Let the engine give its memory back; False where it can't, or has work."""
        engine = self._engine
        async with self._power:
            if not self._is_asleep and self.unit.is_idle and isinstance(engine, Sleeper):
                await engine.sleep()
                self._is_asleep = True
        return self._is_asleep

    async def wake(self) -> None:
        async with self._power:
            if self._is_asleep:
                await cast(Sleeper, self._engine).wake()
                self._is_asleep = False

    def load(self) -> UnitLoad:
        return self.unit.load(self._engine.load())

    def apply(self, event: ev.Event) -> None:
        """Hand one event to the unit and carry out what it asks for.

        Carrying out an effect may bring the next event (closing a link reports it gone): its effects queue
        up behind, so that effects are always carried out in the order in which the unit asked.
        """
        self._effects.extend(self.unit.handle(event, self._clock()))
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._effects:
                self._carry_out(self._effects.popleft())
        finally:
            self._carrying_out = False
        self._keep_time()

    # --- the link's handler -----------------------------------------------------------------

    def connected(self, peer: Peer) -> None:
        self._peers[peer.link_id] = peer

    def received(self, peer: Peer, message: WireMessage) -> None:
        if isinstance(message, Submit):
            self.apply(ev.Submitted(peer.link_id, message))
        elif isinstance(message, Cancel):
            self.apply(ev.CancelAsked(peer.link_id, message.stream))
        elif isinstance(message, Embed):
            self.apply(ev.EmbedAsked(peer.link_id, message))
        elif isinstance(message, Count):
            self._counting.asked(peer.link_id, message)
        else:
            log.warning("a unit takes no %s; ignored (from %s)", type(message).__name__, peer.peer_id)

    def disconnected(self, peer: Peer, reason: str) -> None:
        if self._peers.pop(peer.link_id, None) is None:
            return
        self._outboxes.pop(peer.link_id, None)
        self.apply(ev.PeerLost(peer.link_id))

    # --- effects ----------------------------------------------------------------------------

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(peer, message):
                self._send(peer, message)
            case ev.Prepare():
                self._spawn(effect.job, self._prepare(effect))
            case ev.Generate():
                self._generate(effect)
            case ev.Encode():
                self._spawn(effect.job, self._encode(effect), releases=True)
            case ev.Abort(job):
                self._abort(job)
            case ev.Drop(link_id, code, text):
                self._drop(link_id, code, text)
            case ev.Traced(times, error_code):
                if self._tracer is not None:
                    self._tracer.later(traces.spans, self._tracer, times, self.unit.card, error_code)
            case ev.Died(reason):
                self._died(reason)

    def _send(self, link_id: int, message: WireMessage) -> None:
        peer = self._peers.get(link_id)
        if peer is None:
            return
        outbox = self._outboxes.get(link_id)
        if outbox is None and not peer.is_paused:
            # The first token, if it is quick, brings the acceptance along: one write and one wake-up less.
            peer.send_lazily(message) if type(message) is Accepted else peer.send(message)
            return
        if outbox is None:
            outbox = self._outboxes[link_id] = Outbox()
        outbox.hold(message)
        if outbox.is_full:
            self._drop(link_id, "saturated", "the peer does not read what it asked for")

    def _send_beside(self, link_id: int, message: WireMessage) -> None:
        """Send what no event of the unit asked for."""
        self._send(link_id, message)
        self._keep_time()

    def _drop(self, link_id: int, code: str, text: str) -> None:
        """Close a connection; its streams end when the link reports it gone."""
        peer = self._peers.get(link_id)
        if peer is not None:
            log.warning("closing the link of %s: %s", peer.peer_id, text)
            self._outboxes.pop(link_id, None)
            peer.close(code, text)

    # --- the engine's work ------------------------------------------------------------------

    def _spawn(self, job: int, work: Coroutine[Any, Any, None], *, releases: bool = False) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[job] = task
        task.add_done_callback(lambda ended: self._ended(job, ended, releases))

    def _ended(self, job: int, task: asyncio.Task[None], releases: bool) -> None:
        # A done callback, not a `finally` in the task: a task cancelled before its first step runs no code.
        if self._tasks.get(job) is task:
            del self._tasks[job]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.apply(ev.Broke(job, as_grid_error(self.unit.card.unit_id, error)))
        if releases:
            self.apply(ev.Released(job))

    def _abort(self, job: int) -> None:
        run = self._runs.get(job)
        if run is not None:
            run.cancel()
            return
        # An encode call runs to its end: what it computes can't be stopped, so neither can its slot be free.
        task = self._tasks.get(job)
        if task is not None and job not in self._encoding:
            task.cancel()

    async def _prepare(self, effect: ev.Prepare) -> None:
        engine = cast(Engine, self._engine)
        if self._is_asleep or self._power.locked():
            await self.wake()
        prepared = await engine.prepare(effect.messages, effect.documents, effect.max_output_tokens)
        self.apply(ev.PromptReady(effect.job, prepared))

    def _generate(self, effect: ev.Generate) -> None:
        run = self._runs[effect.job] = _Run(self, effect.job)
        try:
            run.running = cast(Engine, self._engine).generate(effect.generation, run)
        except Exception as error:
            self._released(run, error)

    def _released(self, run: _Run, error: BaseException | None) -> None:
        del self._runs[run.job]
        if error is not None:
            self.apply(ev.Broke(run.job, as_grid_error(self.unit.card.unit_id, error)))
        self.apply(ev.Released(run.job))

    async def _encode(self, effect: ev.Encode) -> None:
        engine = cast(EmbeddingEngine, self._engine)
        self._encoding.add(effect.job)
        try:
            rows, input_tokens = await engine.embed(effect.texts)
        finally:
            self._encoding.discard(effect.job)
        data = rows.astype("<f4", copy=False).tobytes()
        self.apply(ev.Encoded(effect.job, int(rows.shape[1]), data, input_tokens))

    # --- time -------------------------------------------------------------------------------

    @property
    def _is_quiet(self) -> bool:
        return self.unit.is_idle and not self._outboxes

    def _keep_time(self) -> None:
        if self._timer is None and not self._is_quiet:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for link_id, outbox in list(self._outboxes.items()):
            peer = self._peers[link_id]
            if not peer.is_paused:
                del self._outboxes[link_id]
                for message in outbox.take():
                    peer.send(message)
        self.apply(ev.Tick(self._engine.load().steps))


class _Run:
    """Takes one generation's steps from the engine to the unit."""

    __slots__ = ("_server", "job", "running")

    def __init__(self, server: UnitServer, job: int) -> None:
        self._server = server
        self.job = job
        self.running: Running | None = None

    def step(self, step: Step) -> None:
        try:
            self._server.apply(ev.Stepped(self.job, step))
        except Exception as error:
            # A bug; it costs this stream, not the engine's loop and with it all others.
            self._server.apply(ev.Broke(self.job, as_grid_error(self._server.unit.card.unit_id, error)))
            self.cancel()

    def released(self, error: BaseException | None) -> None:
        self._server._released(self, error)

    def cancel(self) -> None:
        if self.running is not None:
            self.running.cancel()
