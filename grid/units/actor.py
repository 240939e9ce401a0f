"""One compute unit as a process: engine, data-plane server, and the link on which it tells of itself.

A plain class: the supervisor wraps it for Ray, tests use it as it is. It owns the order of a unit's life:
load the engine, try one token through it, open the server, and only then register.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

from grid.config import Config, Model
from grid.engines import variants
from grid.engines.base import EmbeddingEngine, Engine, EngineFacts, Generation, steps_of
from grid.engines.registry import build_engine
from grid.errors import InternalError, UnitLost
from grid.hardware import catalogue
from grid.tracing.exporter import ExportingTracer, open_tracer
from grid.units import events as ev
from grid.units import machine
from grid.units.gathering import Numbering
from grid.units.planner_events import RESTART_REASON
from grid.units.scaling import Role
from grid.units.server import UnitServer
from grid.units.unit import Unit
from grid.wire.link import Beats, Link, Peer, Reconnecting, Resolve
from grid.wire.messages import Announce, DrainUnit, Report, TakeIn, WireMessage
from grid.words import UNKNOWN, Message, Sampling, Task, UnitCard, UnitLoad, UnitState, new_id

log = logging.getLogger(__name__)

REPORT_PERIOD_S = 0.1
CHECK_PERIOD_S = 1.0

NODE_BEATS = Beats(busy_s=0.1, idle_s=0.1, silent=3, lost_s=0.3)
"""Of the link to the node's probe: one that is frozen is found out before samples through it are stale, and
that it was merely slow costs nothing, since then each unit tells placement by itself."""

CANARY_LIMIT_S = 120.0
"""A first token includes warm-up and kernel compilation; far above what any of them took."""

UNIT_LENGTH_TOLERANCE = 1e-3
"""How far the norm of the canary's vector may be from 1: int8 models round."""

FAREWELL_S = 0.2
"""Lets the last frames (failed streams, the FAILED report) leave before the process ends."""

CPU_CORES = "CPU"
"""The catalogue's name for units without a GPU."""

CPU_MEMORY_SHARE = 0.5
"""Of the node's RAM: the grant of a CPU unit that names none. The rest is the cell's other processes'."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a unit runs."""

    node_id: str
    host: str
    """The node's address that gateways can reach."""
    region: str
    gpu: str = ""
    """Catalogue or NVML name of the unit's GPU; "" on CPU cores."""
    gpu_uuids: tuple[str, ...] = ()
    """NVML's names of all its GPUs."""
    gpu_memory_mb: float = UNKNOWN
    """Of one of them, as NVML says; it and the next matter for GPUs that the catalogue doesn't hold."""
    gpu_capability: tuple[int, int] = (0, 0)

    @property
    def accelerator(self) -> catalogue.GpuModel:
        if not self.gpu:
            return catalogue.GPUS[CPU_CORES]
        return catalogue.known(self.gpu, self.gpu_memory_mb, self.gpu_capability)


class UnitActor:
    """One unit of `model`. `resolve_placement` finds the placement actor, `resolve_node` the node's probe,
    which tells placement of the node's units; `end_process` takes a status."""

    def __init__(
        self,
        config: Config,
        model: Model,
        unit_id: str,
        site: Site,
        *,
        resolve_placement: Resolve,
        end_process: Callable[[int], None],
        engine: Engine | EmbeddingEngine | None = None,
        resolve_node: Resolve | None = None,
        role: Role = Role.SERVING,
    ) -> None:
        self._config = config
        self._model = model
        self._unit_id = unit_id
        self._site = site
        self._resolve_placement = resolve_placement
        self._resolve_node = resolve_node
        self._end_process = end_process
        self._engine = engine or build_engine(model, config.cell.state_dir / "models", gpu=site.accelerator)
        self._role = role
        """In which it starts."""
        self._server: UnitServer | None = None
        self._tracer: ExportingTracer | None = None
        self._placement: Reconnecting | None = None
        self._node: Reconnecting | None = None
        self._numbering = Numbering()
        self._loops: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._reason = ""
        self._restarting = False

    # --- control plane: what the supervisor calls -------------------------------------------

    async def start(self) -> UnitCard:
        """Become ready to serve and register. Raises InternalError with the remedy."""
        if not self._site.accelerator.listed:
            log.warning("%s: %s", self._unit_id, catalogue.unlisted_warning(self._site.accelerator))
        facts = await self._engine.start()
        await asyncio.wait_for(self._canary(facts), CANARY_LIMIT_S)
        secret = (self._config.cell.state_dir / "secrets" / "link.key").read_bytes()
        unit = Unit(card(self._model, self._unit_id, facts, self._site))
        self._tracer = open_tracer(self._config.tracing, "unit", self._unit_id, self._site.region)
        self._server = UnitServer(unit, self._engine, secret=secret, died=self._died, tracer=self._tracer)
        host, port = await self._server.start(self._site.host)
        unit.card = unit.card._replace(host=host, port=port)
        await self.set_role(self._role)
        self._placement = Reconnecting(
            self._resolve_placement,
            role="unit",
            peer_id=self._unit_id,
            secret=secret,
            handler=_Asked(self._drain_asked, self._taken_in),
            on_connected=self._announce,
        )
        await self._placement.start()
        if self._resolve_node is not None:
            self._node = Reconnecting(
                self._resolve_node, role="unit", peer_id=self._unit_id, secret=secret, beats=NODE_BEATS
            )
            await self._node.start()
        self._loops = [asyncio.create_task(self._report_loop()), asyncio.create_task(self._check_loop())]
        return unit.card

    async def address(self) -> tuple[str, int]:
        card = self._ready.unit.card
        return card.host, card.port

    async def describe(self) -> dict[str, Any]:
        """Return card, load and counters as plain values. Raises UnitLost before `start` has finished."""
        server = self._ready
        return {
            "card": server.unit.card._asdict(),
            "load": self._sample()._asdict(),
            "counters": asdict(server.unit.counters),
            "pid": os.getpid(),
        }

    async def drain(self, draining: bool = True) -> None:
        """Take no new work (or, with False, take it again); what runs goes on."""
        self._ready.apply(ev.SetDraining(draining))
        self._report()

    async def set_role(self, role: Role) -> None:
        """Serve, or stay on standby; what runs goes on. One that still has work does not fall asleep."""
        server = self._ready
        if role is Role.ASLEEP:
            server.apply(ev.SetState(UnitState.STANDBY))
            if await server.sleep():
                server.apply(ev.SetState(UnitState.ASLEEP))
        else:
            await server.wake()
            server.apply(ev.SetState(UnitState.READY if role is Role.SERVING else UnitState.STANDBY))
        self._report()

    def _taken_in(self) -> None:
        """Its first request wakes the engine, if need be."""
        self._ready.apply(ev.SetState(UnitState.READY))
        self._report()

    def _drain_asked(self, message: DrainUnit) -> None:
        self._restarting = message.draining and message.restart
        self._ready.apply(ev.SetDraining(message.draining))
        self._report()

    async def ended(self) -> str:
        """Wait until the unit can't serve any more and return why; a dead process breaks the call off."""
        await self._ended.wait()
        return self._reason

    async def stop(self) -> None:
        """Close links, then the engine. Idempotent."""
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self._loops = []
        for link in filter(None, (self._node, self._placement)):
            await link.close()
        if self._server is not None:
            await self._server.close()
        await self._engine.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        self._reason = self._reason or "stopped"
        self._ended.set()

    # --- readiness --------------------------------------------------------------------------

    @property
    def _ready(self) -> UnitServer:
        if self._server is None:
            raise UnitLost(f"unit {self._unit_id} has not started yet")
        return self._server

    async def _canary(self, facts: EngineFacts) -> None:
        """One token (or one vector) through the engine: a broken kernel shows here, not at a client."""
        if facts.dimension:
            rows, _ = await cast(EmbeddingEngine, self._engine).embed(["ready?"])
            norm = float((rows[0] ** 2).sum()) ** 0.5
            if rows.shape != (1, facts.dimension) or abs(norm - 1.0) > UNIT_LENGTH_TOLERANCE:
                raise InternalError(
                    f"{facts.model} gave a vector of shape {rows.shape} and length {norm:.4f}; "
                    f"(1, {facts.dimension}) and 1 were expected: prepare the model again"
                )
            return
        engine = cast(Engine, self._engine)
        prompt = await engine.prepare([Message("user", "ready?")], [], 1)
        ids: tuple[int, ...] = ()
        sampling = Sampling(max_output_tokens=1, temperature=0.0)
        async for step in steps_of(engine, Generation(f"canary/{new_id('')}", prompt, sampling, "canary")):
            ids += step.ids
        if len(ids) != 1:
            raise InternalError(f"{facts.model} gave {len(ids)} tokens where one was asked for")

    # --- telling of itself ------------------------------------------------------------------

    def _announce(self, link: Link) -> None:
        link.send(Announce(0, self._ready.unit.card))
        link.send(self._report_message())

    def _report(self) -> None:
        """Tell placement at once."""
        link = self._placement.link if self._placement is not None else None
        if link is not None:
            link.send(self._report_message())

    def _report_in_turn(self) -> None:
        """Leave it to the node, which tells of all its units together; tell placement if the node is away."""
        link = self._node.link if self._node is not None else None
        if link is None:
            self._report()
        elif not link.is_paused:
            link.send(self._report_message())

    def _report_message(self) -> Report:
        return Report(0, self._site.node_id, (self._numbering.next(self._sample()),))

    def _sample(self) -> UnitLoad:
        load = self._ready.load()
        # Of a GPU unit, memory is what NVML says of its GPU, which this process does not watch.
        return load if self._model.gpus else load._replace(memory_used_mb=machine.resident_mb())

    async def _report_loop(self) -> None:
        """Report at 10 Hz without drift; a loop that was late skips what it missed."""
        due_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            due_s = max(due_s + REPORT_PERIOD_S, now_s)
            await asyncio.sleep(due_s - now_s)
            self._report_in_turn()
            if self._restarting and self._ready.unit.is_idle:
                self._reason = RESTART_REASON
                self._ended.set()
                return

    async def _check_loop(self) -> None:
        """Ask the engine every second whether it lives: an idle one has no stream that would tell."""
        if self._ready.unit.card.task != Task.GENERATE:
            return
        engine = cast(Engine, self._engine)
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            try:
                await engine.check()
            except UnitLost as lost:
                self._ready.apply(ev.EngineDied(lost.message))
                return

    # --- the end ----------------------------------------------------------------------------

    def _died(self, reason: str) -> None:
        """The engine is dead: say so to placement and supervisor, then end the process."""
        log.error("unit %s ends: %s", self._unit_id, reason)
        self._report()
        self._reason = reason
        self._ended.set()
        asyncio.get_running_loop().call_later(FAREWELL_S, self._end_process, 1)


class _Asked:
    """The handler of the link to placement: what placement asks of the unit."""

    def __init__(self, drain: Callable[[DrainUnit], None], taken_in: Callable[[], None]) -> None:
        self._drain = drain
        self._taken_in = taken_in

    def connected(self, peer: Peer) -> None:
        """The unit announces itself by `on_connected`."""

    def received(self, peer: Peer, message: WireMessage) -> None:
        if isinstance(message, DrainUnit):
            self._drain(message)
        elif isinstance(message, TakeIn):
            self._taken_in()

    def disconnected(self, peer: Peer, reason: str) -> None:
        """The link is dialled again by itself."""


def card(model: Model, unit_id: str, facts: EngineFacts, site: Site) -> UnitCard:
    """Return the card of a unit that has not opened its server yet (port 0)."""
    gpu, gpus = _owned(model, site)
    memory_mb = variants.memory_mb(model, gpu) or machine.physical_mb() * CPU_MEMORY_SHARE
    return UnitCard(
        unit_id=unit_id,
        incarnation=new_id("inc-"),
        host=site.host,
        port=0,
        node_id=site.node_id,
        region=site.region,
        task=int(Task.EMBED if facts.dimension else Task.GENERATE),
        model=facts.model,
        precision=int(facts.precision),
        fingerprint=facts.fingerprint,
        context_tokens=facts.context_tokens,
        gpu_type=gpu.name,
        gpus=gpus,
        memory_grant_mb=int(memory_mb),
        max_running=model.max_running,
        max_waiting=model.max_waiting,
        cu_factor=gpu.cu_factor * (gpus or 1.0),
        simulated=facts.simulated,
        dimension=facts.dimension,
        prefill_tokens_per_s=facts.prefill_tokens_per_s,
        decode_ms_per_token=facts.decode_ms_per_token,
        gpu_uuids=site.gpu_uuids,
    )


def _owned(model: Model, site: Site) -> tuple[catalogue.GpuModel, float]:
    """Return the hardware that the unit owns (or pretends to), and how much of it."""
    if model.engine == "simulated":
        return variants.pretended_gpu(model), model.gpus or 1.0
    return site.accelerator, model.gpus
