"""The placement actor: sockets, clock and chance around view and queue. It alone writes them.

A message is taken whole inside `received`, which never awaits: between a decision and its reservation
nothing else can run, so simultaneous requests see each other. Everything that a peer gets wrong ends in a
typed refusal or a counter, never in an exception. The composition root makes a Ray actor of this class.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from grid.config import Config
from grid.errors import Forbidden, GridError, InternalError, NotFound, Rejected
from grid.tracing.exporter import ExportingTracer, open_tracer
from grid.wire.link import LinkServer, Peer
from grid.wire.messages import (
    Announce,
    AnnounceNode,
    Decided,
    DrainUnit,
    Fleet,
    Place,
    Refused,
    Report,
    ReportNode,
    ReportUnits,
    Settle,
    TakeIn,
    Watch,
    WireMessage,
)
from grid.words import Decision, Demand, FleetUnit, Outlook, PlacementRequest, UnitCard, UnitState
from placement import samples, traces
from placement.canary import Canaries
from placement.decide import Among, decide
from placement.dispatch import Answer, Dispatch
from placement.fleet import View
from placement.freshness import TICK_S
from placement.intake import Intake
from placement.queue import Limits
from placement.reports import Spent
from placement.rules import Rules
from placement.samples import Batch

log = logging.getLogger(__name__)

PUSH_PERIOD_S = 1.0
"""How often watchers get the view when no membership changed: load for people and metrics."""

PUSH_GAP_S = 0.05
"""Least time between two pushes: a thousand units that join at once cost a few pushes, not a thousand."""

SERVE_GAP_S = 0.005
"""Within it, slots that reports freed are given out: far below a request's time, and a thousand units that
report at once cost one look at the queue. A settlement gives its slot out at once."""

GATHER_S = 1.5
"""After a start: units reconnect within a second. Gateways that know the fleet decide by themselves."""

MISFITS = frozenset({"avoided", "region", "precision", "memory", "context"})
"""Codes of units of the model that can't run the request, so that another of them could not either."""

DECIDE_SAMPLES = 1024
"""Newest decision times kept for the percentiles of `stats`."""


def limits_of(config: Config) -> Limits:
    placement = config.placement
    return Limits(placement.queue_max, placement.queue_max_per_tenant, placement.queue_wait_ms)


class Duty(NamedTuple):
    """Who may send a message, and what happens then."""

    roles: frozenset[str]
    act: Callable[[Peer, Any, float], None]


class PlacementActor:
    """Serves one cell. `clock` gives monotonic seconds; `rng` breaks ties between equal units."""

    def __init__(
        self,
        config: Config,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._listen_on = (host, port)
        self._secret = secret
        self._clock = clock
        self._rng = rng or random.Random()
        # Milliseconds of wall time: a restarted actor's versions are above all that it gave out before.
        self._view = View(Rules.of(config), clock(), first_version=time.time_ns() // 1_000_000)
        self._dispatch = Dispatch(self._view, limits_of(config), self._decide)
        self._intake = Intake(self._take_samples, clock)
        self._gateways: dict[int, Peer] = {}
        """By link: those that have asked for a unit."""
        self._serve_timer: asyncio.TimerHandle | None = None
        self._watchers: set[Peer] = set()
        self._unit_peers: dict[str, Peer] = {}
        self._pushed_version = 0
        self._pushed_s = -PUSH_PERIOD_S
        self._push_timer: asyncio.TimerHandle | None = None
        self._counts: Counter[str] = Counter()
        self._models = frozenset(model.name for model in config.models)
        self._on_standby = frozenset(
            model.name for model in config.models for _, pool in model.split() if pool.standby.units
        )
        """Models with units on standby."""
        self._refused: Counter[str] = Counter()
        """By model."""
        self._decide_us: deque[float] = deque(maxlen=DECIDE_SAMPLES)
        self._mass_stale = False
        self._is_gathering = False
        self._gathered_s = 0.0
        self._tracer: ExportingTracer | None = None
        self._server: LinkServer | None = None
        self._canaries: Canaries | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._address: asyncio.Task[tuple[str, int]] | None = None
        gateways, units, nodes = frozenset({"gateway"}), frozenset({"unit"}), frozenset({"node"})
        self._duties: dict[type[WireMessage], Duty] = {
            Place: Duty(gateways, self._place),
            Settle: Duty(gateways, self._settle),
            Watch: Duty(gateways | {"supervisor"}, self._watch),
            DrainUnit: Duty(gateways | {"supervisor"}, self._drain),
            Announce: Duty(units, self._announce),
            Report: Duty(units, self._report),
            AnnounceNode: Duty(nodes, self._announce_node),
            ReportNode: Duty(nodes, self._report_node),
            ReportUnits: Duty(nodes, self._report_units),
        }

    # --- control plane ----------------------------------------------------------------------

    async def start(self) -> None:
        """Listen. Idempotent; raises OSError when the address can't be had or the secret not read."""
        await self.address()

    async def address(self) -> tuple[str, int]:
        """Return where the link listens; starts listening when first asked, as after a restart."""
        failed = self._address is not None and self._address.done() and self._address.exception() is not None
        if self._address is None or failed:
            self._address = asyncio.create_task(self._start())
        return await asyncio.shield(self._address)

    async def _start(self) -> tuple[str, int]:
        secret = self._secret or (self._config.cell.state_dir / "secrets" / "link.key").read_bytes()
        self._server = LinkServer(
            role="placement", peer_id=self._config.cell.name, secret=secret, handler=self
        )
        self._canaries = Canaries(peer_id=self._config.cell.name, secret=secret, ended=self._canary_ended)
        self._tracer = open_tracer(
            self._config.tracing, "placement", self._config.cell.name, self._config.cell.region
        )
        self._gathered_s, self._is_gathering = self._clock() + GATHER_S, True
        address = await self._server.start(*self._listen_on)
        self._ticker = asyncio.create_task(self._tick_loop())
        return address

    async def close(self) -> None:
        self._intake.close()
        for timer in (self._push_timer, self._serve_timer):
            if timer is not None:
                timer.cancel()
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
        if self._canaries is not None:
            await self._canaries.close()
        if self._server is not None:
            await self._server.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def stats(self) -> dict[str, Any]:
        """Return counts and percentiles as plain values; no request's content is among them."""
        return {
            **self.figures(),
            "fleet_version": self._view.version,
            "load": self._view.loads(),
            "watchers": len(self._watchers),
            "mass_stale": self._mass_stale,
            "counts": dict(self._counts),
            "dropped": dict(self._view.dropped + self._view.gpus.dropped),
            "last_flaw": self._view.last_flaw or self._view.gpus.last_flaw,
            "gpu_faults": self._view.gpus.faults(),
            "isolated_units": dict(self._view.isolated_units()),
        }

    async def outlook(self) -> Outlook:
        """Return what the supervisor should act on."""
        view = self._view
        queued = {model: pool.waiting for model, pool in self._dispatch.queue.pools.items()}
        load = view.loads_of_models()
        return Outlook(
            tuple(view.condemned()),
            tuple(
                Demand(model, load.get(model, 0) + queued.get(model, 0), self._refused[model])
                for model in self._models
            ),
            view.states_of(self._on_standby),
        )

    def figures(self) -> dict[str, float]:
        """Return the percentiles of the newest decisions, and what is held."""
        spent = sorted(self._decide_us)
        return {
            "units": len(self._view.units),
            "reservations": self._view.reservations,
            "waiting": len(self._dispatch.queue),
            "isolated": len(self._view.isolated_units()),
            "canaries": self._counts["canaries"],
            "canaries_failed": self._counts["canaries_failed"],
            "decide_us_p50": spent[len(spent) // 2] if spent else 0.0,
            "decide_us_p99": spent[len(spent) * 99 // 100] if spent else 0.0,
        }

    # --- data plane: the link's handler -----------------------------------------------------

    def connected(self, peer: Peer) -> None:
        self._counts[f"connected_{peer.role}"] += 1

    def received(self, peer: Peer, message: WireMessage) -> None:
        duty = self._duties.get(type(message))
        if duty is None:
            self._counts["unexpected"] += 1
            return
        try:
            if peer.role not in duty.roles:
                raise Forbidden(f"a {peer.role} may not send {type(message).__name__}")
            duty.act(peer, message, self._clock())
        except GridError as error:
            self._counts[f"refused_{error.code}"] += 1
            self._refuse(peer, message, error)
        except Exception as error:
            # A bug: it costs this one message, and the cell goes on deciding.
            self._counts["bugs"] += 1
            log.exception("a %s from %s %s was not handled", type(message).__name__, peer.role, peer.peer_id)
            self._refuse(
                peer, message, InternalError(f"placement failed ({type(error).__name__}); see its log")
            )
        if type(message) is not Place:
            self._serve_soon()
        self._push_if_changed()

    def disconnected(self, peer: Peer, reason: str) -> None:
        self._watchers.discard(peer)
        self._gateways.pop(peer.link_id, None)
        self._counts["waiting_lost"] += self._dispatch.leave(peer.link_id)
        released = self._view.release_holder(peer.link_id)
        gone = self._view.leave(peer.link_id)
        for unit_id in gone:
            self._unit_peers.pop(unit_id, None)
        if gone or released:
            log.info(
                "%s %s left (%s): units %s, reservations released %d",
                *(peer.role, peer.peer_id, reason, ", ".join(gone) or "none", released),
            )
        self._counts["reservations_released"] += released
        self._serve_soon()
        self._push_if_changed()

    def _refuse(self, peer: Peer, message: WireMessage, error: GridError) -> None:
        peer.send(Refused.of(message.stream, error))

    # --- one method a message ---------------------------------------------------------------

    def _place(self, peer: Peer, message: Place, now_s: float) -> None:
        self._gateways[peer.link_id] = peer
        self._tell(self._dispatch.place(message.request, peer.link_id, message.stream, now_s))

    def _decide(self, request: PlacementRequest, now_s: float, among: Among) -> Decision:
        began_ns = time.perf_counter_ns()
        try:
            decision = decide(request, self._view, now_s, self._rng, among)
        except GridError:
            raise
        except Exception as error:
            # A bug: it costs this one request, also among many that wait.
            self._counts["bugs"] += 1
            log.exception("a request for %r was not decided", request.model)
            raise InternalError(f"placement failed ({type(error).__name__}); see its log") from error
        spent_us = (time.perf_counter_ns() - began_ns) / 1e3
        self._decide_us.append(spent_us)
        self._counts["decided_dry" if request.dry_run else "decided"] += 1
        if request.traceparent and self._tracer is not None:
            self._tracer.later(traces.spans, self._tracer, request, decision, now_s, spent_us)
        return decision._replace(decide_us=spent_us)

    def _tell(self, answers: list[Answer]) -> None:
        while self._dispatch.taken_in:
            unit_id = self._dispatch.taken_in.pop()
            log.info("unit %s is taken in from standby", unit_id)
            if (unit := self._unit_peers.get(unit_id)) is not None:
                unit.send(TakeIn(0, unit_id))
        for answer in answers:
            outcome = answer.outcome
            reply: Refused | Decided
            if isinstance(outcome, GridError):
                self._counts[f"refused_{outcome.code}"] += 1
                self._note_refusal(answer.request, outcome)
                reply = Refused.of(answer.stream, outcome)
            else:
                self._counts["decided_after_waiting"] += outcome.queued_ms > 0
                reply = Decided(answer.stream, outcome)
            gateway = self._gateways.get(answer.holder)
            if gateway is not None:
                gateway.send(reply)

    def _note_refusal(self, request: PlacementRequest, refusal: GridError) -> None:
        """Count what another unit of the model would have helped: the supervisor then starts one."""
        model = self._view.rules.model(request.model)
        if request.dry_run or model not in self._models or not isinstance(refusal, Rejected):
            return
        if not MISFITS & dict(refusal.details.get("rejected_by_code") or ()).keys():
            self._refused[model] += 1

    def _settle(self, peer: Peer, message: Settle, now_s: float) -> None:
        spent = Spent(
            *(message.input_tokens, message.output_tokens, message.ttft_ms, message.total_ms),
            message.cached_tokens,
        )
        held, answers = self._dispatch.settle(
            message.reservation_id, message.outcome, now_s, spent, message.prefix
        )
        self._counts["settled" if held else "settled_unknown"] += 1
        self._tell(answers)
        if not held:
            # Its unit's report was quicker than its gateway's word.
            self._serve_soon()

    def _serve_soon(self) -> None:
        if self._serve_timer is None and len(self._dispatch.queue):
            self._serve_timer = asyncio.get_running_loop().call_later(SERVE_GAP_S, self._serve)

    def _serve(self) -> None:
        self._serve_timer = None
        self._tell(self._dispatch.serve(self._clock()))

    def _watch(self, peer: Peer, message: Watch, now_s: float) -> None:
        self._watchers.add(peer)
        self._push([peer], now_s)

    def _drain(self, peer: Peer, message: DrainUnit, now_s: float) -> None:
        unit = self._unit_peers.get(message.unit_id)
        # A drain is remembered here, also for the unit's next process; a restart is that process's alone.
        known = unit is not None if message.restart else self._view.drain(message.unit_id, message.draining)
        if not known:
            raise NotFound(f"unit {message.unit_id!r} is unknown; see `grid units`", param="unit_id")
        if unit is not None:
            unit.send(message._replace(stream=0))
        log.info(
            "unit %s: draining %s, restart %s, asked by %s",
            *(message.unit_id, message.draining, message.restart, peer.peer_id),
        )
        if message.stream:
            rows = [row for row in self._view.snapshot(now_s) if row.card.unit_id == message.unit_id]
            told = tuple(_as_asked(row, message.draining) for row in rows)
            peer.send(Fleet(message.stream, self._view.version, told))

    def _announce(self, peer: Peer, message: Announce, now_s: float) -> None:
        try:
            self._view.join(message.card, peer.link_id)
        except GridError as error:
            log.warning("refused: %s", error.message)
            raise
        self._unit_peers[message.card.unit_id] = peer
        log.info("unit %s joined (%s, %s)", message.card.unit_id, message.card.model, message.card.region)

    def _report(self, peer: Peer, message: Report, now_s: float) -> None:
        self._counts["reports_of_units"] += 1
        # Until its first sample a unit gets no work: that one does not wait for others.
        is_first = any(self._view.is_silent(load.unit_id) for load in message.loads)
        self._intake.add(samples.own(message.loads, peer.link_id), at_once=is_first)

    def _report_units(self, peer: Peer, message: ReportUnits, now_s: float) -> None:
        self._counts["batches_of_nodes"] += 1
        self._intake.add(samples.of_node(message, peer.link_id))

    def _take_samples(self, batches: Sequence[Batch]) -> None:
        try:
            self._view.take(batches, self._clock())
        except Exception:
            self._counts["bugs"] += 1
            log.exception("samples of %d batches were not taken", len(batches))
        self._serve_soon()
        self._push_if_changed()

    def _announce_node(self, peer: Peer, message: AnnounceNode, now_s: float) -> None:
        card = message.card
        self._view.join_node(card, peer.link_id)
        log.info(
            "node %s joined with %d GPUs%s", card.node_id, len(card.gpus), card.flaw and f" ({card.flaw})"
        )

    def _report_node(self, peer: Peer, message: ReportNode, now_s: float) -> None:
        is_new = self._view.report_node(
            message.node_id, message.incarnation, message.samples, peer.link_id, now_s
        )
        if is_new:
            log.error("GPUs that take no work any more: %s", self._view.gpus.faults())

    # --- time -------------------------------------------------------------------------------

    async def _tick_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._tick(self._clock())
            except Exception:
                self._counts["bugs"] += 1
                log.exception("a tick failed")

    def _tick(self, now_s: float) -> None:
        self._counts["leases_expired"] += self._view.tick(now_s)
        if len(self._dispatch.queue):
            # Freshness and time itself change without a message.
            self._tell(self._dispatch.serve(now_s))
        mass_stale = self._view.fresh(now_s)[1]
        if mass_stale != self._mass_stale:
            self._mass_stale = mass_stale
            level = logging.ERROR if mass_stale else logging.INFO
            log.log(level, "most units stale together: %s; reservations are trusted meanwhile", mass_stale)
        assert self._canaries is not None
        for card in self._view.canaries_due(now_s):
            self._canaries.send(card)
        if self._is_gathering and now_s >= self._gathered_s:
            self._is_gathering = False
            self._push_all()
        if now_s - self._pushed_s >= PUSH_PERIOD_S:
            self._push_all()

    def _canary_ended(self, card: UnitCard, flaw: str | None) -> None:
        self._counts["canaries"] += 1
        self._counts["canaries_failed"] += bool(flaw)
        self._view.canary_ended(card, flaw, self._clock())
        self._push_if_changed()

    # --- pushing the view -------------------------------------------------------------------

    def _push_if_changed(self) -> None:
        """Push a changed membership at once, and all that change within PUSH_GAP_S together."""
        if self._view.version == self._pushed_version or self._push_timer is not None:
            return
        wait_s = max(0.0, self._pushed_s + PUSH_GAP_S - self._clock())
        self._push_timer = asyncio.get_running_loop().call_later(wait_s, self._push_all)

    def _push_all(self) -> None:
        if self._push_timer is not None:
            self._push_timer.cancel()
            self._push_timer = None
        now_s = self._clock()
        self._pushed_s, self._pushed_version = now_s, self._view.version
        self._push([peer for peer in self._watchers if not peer.is_paused], now_s)

    def _push(self, peers: list[Peer], now_s: float) -> None:
        """Send the view; whoever does not read is skipped, because the next push replaces this one."""
        if peers:
            view = self._view
            fleet = Fleet(
                *(0, view.version, view.snapshot(now_s), view.gpu_snapshot(now_s)),
                *(self._is_gathering, self._dispatch.figures(now_s)),
            )
            for peer in peers:
                peer.send(fleet)


def _as_asked(row: FleetUnit, draining: bool) -> FleetUnit:
    """Return a unit as its next report will show it: it has only just been asked."""
    if row.load.state not in (UnitState.READY, UnitState.DRAINING):
        return row
    state = int(UnitState.DRAINING if draining else UnitState.READY)
    return row._replace(load=row.load._replace(state=state))
