"""The supervisor actor: keeps the configured units alive as detached Ray actors, as `Planner` decides.

It owns the life of every unit process: one task a unit creates it, starts it, watches it and, at the end,
kills what is left. It survives its own restart by taking over the units that it finds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Set
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from grid.config import Config
from grid.engines.environment import engine_environment, gpu_environment
from grid.errors import GridError
from grid.units import planner_events as events
from grid.units.nodes import REGION_LABEL, Node, demands
from grid.units.planner import Planner
from grid.units.pools import UNIT_PREFIX
from grid.units.probes import NODE_ID_LABEL, Probes
from grid.units.ray_unit import NAMESPACE, PLACEMENT, PROBE_PREFIX, RayUnit
from grid.units.scaling import ROLES, Role
from grid.words import Outlook, UnitState

log = logging.getLogger(__name__)

POLL_PERIOD_S = 1.0

PING_LIMIT_S = 1.0
PINGS_MISSED = 15
"""Unanswered pings in a row after which a unit counts as frozen. Placement sees that within 150 ms and sends
it no work; killing costs a reload, so a loop that is only starved of CPU time may come back."""

ADOPT_LIMIT_S = 5.0
STOP_LIMIT_S = 5.0
"""How long a unit may take to close its links and its engine before it is killed."""

UNIT_CONCURRENCY = 100
"""Calls that a unit actor takes at a time: the supervisor's few and an operator's."""

NAME_PERIOD_S = 0.05
IDLE_PERIOD_S = 0.1
MAX_REASON_CHARACTERS = 500


class SupervisorActor:
    """Wrapped by ray.remote. It begins by itself, because nobody calls `start` after Ray restarted it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._planner = Planner(config)
        self._probes = Probes(config)
        self._handles: dict[str, Any] = {}
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        self._starting = asyncio.get_running_loop().create_task(self._start())
        self._polling: asyncio.Task[None] | None = None
        self._stops: set[asyncio.Task[None]] = set()
        self._lacking: Set[tuple[str, str]] = frozenset()
        self._placement: Any = None

    # --- what others call -------------------------------------------------------------------

    async def start(self) -> None:
        """Return once existing units were taken over and the first starts are under way."""
        await asyncio.shield(self._starting)

    async def status(self) -> dict[str, Any]:
        """Return `{"models": [row, …]}`, see `Planner.status`."""
        return {"models": self._planner.status(time.monotonic())}

    async def process(self) -> int:
        """Return the process id: another one after Ray restarted the supervisor."""
        return os.getpid()

    async def scale(self, model: str, units: int, pool: str = "") -> None:
        """Want another number of units of a model's pool, within its configured min and max."""
        self._apply(events.Scale(model, units, pool))

    async def drain(self, unit_id: str, draining: bool = True) -> bool:
        """Tell a unit to take no new work; False when there is no such unit."""
        handle = self._handles.get(unit_id)
        if handle is None:
            return False
        await handle.drain.remote(draining)
        return True

    async def stop_all(self) -> None:
        """Stop every unit and start none again; returns when all are gone."""
        await self.start()
        self._apply(events.StopAll())
        while self._lives:
            self._ended.clear()
            await self._ended.wait()
        if self._polling is not None:
            self._polling.cancel()
        self._probes.stop_all()

    # --- the shell --------------------------------------------------------------------------

    async def _start(self) -> None:
        await self._adopt()
        self._apply(events.NodesSeen(await self._see_nodes()))
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_PERIOD_S)
            try:
                self._apply(events.NodesSeen(await self._see_nodes()))
            except RayError:
                log.exception("the nodes of the cluster can't be read; trying again")
            if (outlook := await self._outlook()) is not None:
                self._apply(events.Seen(outlook))
            self._apply(events.Tick())
            self._say_what_waits()

    def _say_what_waits(self) -> None:
        """Log once what keeps each pool's units from starting."""
        lacking = {
            (row["model"], row["pool"]): row["waiting_for"]
            for row in self._planner.status(time.monotonic())
            if row["waiting_for"]
        }
        for pool, reason in lacking.items():
            if pool not in self._lacking:
                log.warning("no unit of %s can start: %s", " ".join(filter(None, pool)), reason)
        self._lacking = lacking.keys()

    async def _see_nodes(self) -> tuple[Node, ...]:
        return await self._probes.see(await asyncio.to_thread(_nodes))

    async def _outlook(self) -> Outlook | None:
        """Return what placement sees; None while it is away, which a later poll makes good."""
        try:
            if self._placement is None:
                self._placement = ray.get_actor(PLACEMENT, namespace=NAMESPACE)
            seen: Outlook = await asyncio.wait_for(self._placement.outlook.remote(), PING_LIMIT_S)
        except (RayError, ValueError, TimeoutError) as error:
            self._placement = None
            log.debug("placement does not answer: %s", _reason(error))
            return None
        return seen

    def _apply(self, event: events.Event) -> None:
        for effect in self._planner.handle(event, time.monotonic()):
            match effect:
                case events.StartUnit(unit_id):
                    log.info("starting %s on node %s", unit_id, effect.node_id)
                    self._live(unit_id, self._run(effect))
                case events.StopUnit(unit_id, reason, grace_s):
                    log.info("stopping %s: %s", unit_id, reason)
                    self._keep(self._stop(unit_id, grace_s))
                case events.SetRole(unit_id, role):
                    log.info("%s is to be %s", unit_id, role)
                    self._keep(self._set_role(unit_id, role))

    async def _adopt(self) -> None:
        """Take over ready units; kill those that an earlier supervisor left half-started."""
        for entry in await asyncio.to_thread(list_named_actors, all_namespaces=True):
            name = entry["name"]
            if entry["namespace"] != NAMESPACE or not name.startswith((UNIT_PREFIX, PROBE_PREFIX)):
                continue
            try:
                if name.startswith(PROBE_PREFIX):
                    self._probes.adopt(name)
                    continue
                handle = ray.get_actor(name, namespace=NAMESPACE)
                found: dict[str, Any] = await asyncio.wait_for(handle.describe.remote(), ADOPT_LIMIT_S)
            except (RayError, ValueError, TimeoutError) as error:
                log.info("ending %s: %s", name, _reason(error))
                await _kill(name)
                continue
            self._handles[name] = handle
            card = found["card"]
            self._apply(
                events.Adopted(
                    *(name, card["model"], card["node_id"], tuple(card["gpu_uuids"]), card["incarnation"]),
                    ROLES.get(UnitState(found["load"]["state"]), Role.SERVING),
                )
            )
            self._live(name, self._watch_to_end(name, handle))

    # --- the life of one unit ---------------------------------------------------------------

    def _live(self, unit_id: str, life: Coroutine[Any, Any, None]) -> None:
        self._lives[unit_id] = asyncio.get_running_loop().create_task(life)

    async def _run(self, start: events.StartUnit) -> None:
        try:
            # Nothing is awaited before the handle is known, so that a stop always finds it.
            handle = self._handles[start.unit_id] = self._create(start)
            await handle.ping.remote()
            self._apply(events.Placed(start.unit_id))
            card = await handle.start.remote()
            self._apply(events.Ready(start.unit_id, card.gpu_uuids, card.incarnation))
        except (RayError, ValueError, GridError) as error:
            await self._end(start.unit_id, _reason(error))
        else:
            await self._watch_to_end(start.unit_id, handle)

    def _create(self, start: events.StartUnit) -> Any:
        model = start.model
        cpus, gpus = demands(model)
        labels = {NODE_ID_LABEL: start.node_id}
        if start.region_label:
            labels[REGION_LABEL] = start.region_label
        environment = engine_environment(model) | gpu_environment(start.gpus)
        return (
            ray.remote(RayUnit)
            .options(
                name=start.unit_id,
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=cpus,
                num_gpus=gpus,
                label_selector=labels,
                # Restarted by Ray, it would come back without its engine; the next one is started here.
                max_restarts=0,
                max_concurrency=UNIT_CONCURRENCY,
                runtime_env={"env_vars": environment} if environment else None,
            )
            .remote(self._config, model, start.unit_id, start.region, start.role)
        )

    async def _watch_to_end(self, unit_id: str, handle: Any) -> None:
        try:
            reason = await _watch(handle)
        except RayError as error:
            reason = _reason(error)
        await self._end(unit_id, reason)

    async def _stop(self, unit_id: str, grace_s: float) -> None:
        """Let the unit end its streams within `grace_s`, close its links and engine, then kill it; its life's
        task sees the end."""
        handle = self._handles.get(unit_id)
        if handle is None:
            return
        try:
            if grace_s:
                async with asyncio.timeout(grace_s):
                    await _until_idle(handle)
        except (RayError, TimeoutError) as error:
            log.info("%s did not become idle: %s", unit_id, _reason(error))
        try:
            await asyncio.wait_for(handle.stop.remote(), STOP_LIMIT_S)
        except (RayError, TimeoutError) as error:
            log.info("%s did not stop by itself: %s", unit_id, _reason(error))
        ray.kill(handle)

    async def _set_role(self, unit_id: str, role: Role) -> None:
        """What does not succeed shows in placement's view, and is tried again."""
        handle = self._handles.get(unit_id)
        try:
            if handle is not None:
                await handle.set_role.remote(role)
        except RayError as error:
            log.warning("%s did not become %s: %s", unit_id, role, _reason(error))

    async def _end(self, unit_id: str, reason: str) -> None:
        log.info("%s ended: %s", unit_id, reason)
        await _kill(unit_id)
        self._handles.pop(unit_id, None)
        self._lives.pop(unit_id, None)
        self._apply(events.Ended(unit_id, reason))
        self._ended.set()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)


async def _until_idle(handle: Any) -> None:
    """Let a unit take nothing new, and return when nothing runs on it."""
    await handle.drain.remote()
    while True:
        load = (await handle.describe.remote())["load"]
        if not load["running"] + load["waiting"]:
            return
        await asyncio.sleep(IDLE_PERIOD_S)


async def _watch(handle: Any) -> str:
    """Return why the unit ended. A process that dies raises RayError, at once."""
    ended = asyncio.ensure_future(handle.ended.remote())
    missed = 0
    try:
        while missed < PINGS_MISSED:
            done, _ = await asyncio.wait({ended}, timeout=POLL_PERIOD_S)
            if done:
                return str(ended.result())
            try:
                await asyncio.wait_for(handle.ping.remote(), PING_LIMIT_S)
                missed = 0
            except TimeoutError:
                missed += 1
    finally:
        ended.cancel()
    return f"frozen: {missed} pings in a row were not answered"


async def _kill(name: str) -> None:
    """End an actor and wait until its name is free."""
    for _ in range(int(STOP_LIMIT_S / NAME_PERIOD_S)):
        try:
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))
        except (ValueError, RayError):
            return
        await asyncio.sleep(NAME_PERIOD_S)
    log.warning("the name %s is still taken", name)


def _nodes() -> tuple[Node, ...]:
    return tuple(
        Node(
            node["NodeID"],
            dict(node.get("Labels") or {}),
            float(node["Resources"].get("CPU", 0.0)),
            float(node["Resources"].get("GPU", 0.0)),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    )


def _reason(error: BaseException) -> str:
    """Return one line for people; a remote traceback's last line is the one that says what happened."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, GridError):
        return cause.message
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[-1].strip()}"[:MAX_REASON_CHARACTERS]
