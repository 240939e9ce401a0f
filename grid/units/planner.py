"""Which units should run where: the pure core of the supervisor. Nothing here awaits or reads a clock.

`Planner.handle(event, now_s)` returns starts and stops; `supervisor.py` carries them out and feeds back what
happened. Rules: every pool of a model has its wanted number of units, each with the best of the model's
checkpoints that its node's GPU serves (`engines.variants`); starts that would fight for one GPU or for the
cores of one node go one after another; a start that fails is tried again, ever later up to a bound; a model
that no node can take is said to be so, with the reason, instead of waiting in silence. Where a node's probe
tells of its GPUs, the planner gives each unit its own (`gpu_room`), and ends units whose GPU became faulty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from grid.config import Config, Model
from grid.engines.variants import NoVariant
from grid.errors import InvalidRequest
from grid.units.gpu_room import Gpu, NoRoom
from grid.units.nodes import REGION_LABEL, Node, Owner, demands, gpus_for, on_node
from grid.units.planner_events import (
    RESTART_REASON,
    Adopted,
    Effect,
    Ended,
    Event,
    NodesSeen,
    Placed,
    Ready,
    Scale,
    Seen,
    SetRole,
    StartUnit,
    StopAll,
    StopUnit,
    Tick,
)
from grid.units.pools import STARTS_AT_ONCE, PlannedUnit, Stage, Wish, needs, start_kind, unit_prefix
from grid.units.scaling import ROLES, Role, Wanted
from grid.words import Condemned, Outlook, UnitState

PLACE_LIMIT_S = 60.0
"""From asking Ray until the process answers. A process takes one to a few seconds; the rest is queueing."""

START_LIMIT_S = 900.0
"""A large model on a cold disk takes minutes."""

ROLE_SETTLES_S = 3.0
"""A unit that was given another role has told placement by then."""

REPLACE_GRACE_S = 10.0
"""Of a unit that fails often, most streams still end well; what takes longer goes on elsewhere."""


class _Place(NamedTuple):
    node: Node
    model: Model
    """With the checkpoint that a unit would run there."""
    gpus: tuple[Gpu, ...] = ()


class Planner:
    def __init__(self, config: Config) -> None:
        self._region = config.cell.region
        self._wishes: dict[str, Wish] = {}
        """By prefix."""
        for label, model in (pool for configured in config.models for pool in configured.split()):
            prefix = unit_prefix(model.name, label)
            if prefix in self._wishes:  # two names that differ only in what an id can't hold
                prefix += hashlib.sha256(model.name.encode()).hexdigest()[:6] + "-"
            self._wishes[prefix] = Wish(model, label, prefix, Wanted(model, model.min_units))
        self._units: dict[str, PlannedUnit] = {}
        self._nodes: tuple[Node, ...] = ()
        self._is_stopping = False

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event at `now_s` (monotonic seconds) and return what is to be started and stopped."""
        effects: list[Effect] = []
        match event:
            case NodesSeen(nodes):
                self._nodes = nodes
            case Adopted(unit_id, model, node_id, gpu_uuids, incarnation, role):
                pool = self._pool_of(unit_id, model)
                self._units[unit_id] = PlannedUnit(
                    unit_id, pool, node_id, Stage.READY, now_s, gpu_uuids, incarnation, role
                )
            case Placed(unit_id):
                self._move(unit_id, Stage.LOADING, now_s)
            case Ready(unit_id, gpu_uuids, incarnation):
                self._move(unit_id, Stage.READY, now_s, gpu_uuids, incarnation)
            case Ended(unit_id, reason):
                self._ended(unit_id, reason, now_s)
            case Scale(model, units, pool):
                wish = self._wish(model, pool)
                wish.wanted.units = wish.wanted.bounded(units)
            case Seen(outlook):
                self._follow(outlook, now_s)
                effects += [e for unit in outlook.condemned for e in self._replace(unit, now_s)]
            case StopAll():
                self._is_stopping = True
            case Tick():
                effects += self._overdue(now_s)
        return effects + self._reconcile(now_s)

    def status(self, now_s: float) -> list[dict[str, Any]]:
        """Return one plain row a pool: what is wanted, what there is, what failed and why."""
        return [self._row(wish, now_s) for wish in self._wishes.values()]

    # --- what happened ----------------------------------------------------------------------

    def _move(
        self,
        unit_id: str,
        stage: Stage,
        now_s: float,
        gpu_uuids: tuple[str, ...] = (),
        incarnation: str = "",
    ) -> None:
        unit = self._units.get(unit_id)
        if unit is not None and unit.stage is not Stage.STOPPING:
            unit.stage, unit.since_s = stage, now_s
            unit.gpu_uuids = gpu_uuids or unit.gpu_uuids
            unit.incarnation = incarnation

    def _ended(self, unit_id: str, reason: str, now_s: float) -> None:
        unit = self._units.pop(unit_id, None)
        asked = reason == RESTART_REASON
        if unit is None or asked or unit.stage is Stage.STOPPING or unit.pool not in self._wishes:
            return
        served_s = now_s - unit.since_s if unit.stage is Stage.READY else 0.0
        self._wishes[unit.pool].failed(f"{unit_id}: {reason}", served_s, now_s)

    def _follow(self, outlook: Outlook, now_s: float) -> None:
        """Want as many units as the demand needs, and note which ones placement has taken in."""
        for unit_id, state in outlook.states:
            unit, role = self._units.get(unit_id), ROLES.get(UnitState(state))
            if unit is None or role is None or unit.stage is not Stage.READY:
                continue
            if max(unit.role_since_s, unit.since_s) <= now_s - ROLE_SETTLES_S:
                unit.role = role
        left = {demand.model: float(demand.requests) for demand in outlook.demand}
        refused = {demand.model: demand.refused for demand in outlook.demand}
        for wish in self._wishes.values():
            name = wish.model.name
            if name in left:
                left[name] = wish.wanted.follow(left[name], refused[name], self._serving(wish), now_s)

    def _overdue(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for unit in list(self._units.values()):
            wish = self._wishes.get(unit.pool)
            waited_s = now_s - unit.since_s
            if unit.stage is Stage.PLACING and waited_s > PLACE_LIMIT_S and wish is not None:
                reason = f"Ray found no room for it within {PLACE_LIMIT_S:.0f} s ({needs(wish.model)})"
            elif unit.stage is Stage.LOADING and waited_s > START_LIMIT_S and wish is not None:
                reason = f"not ready within {START_LIMIT_S:.0f} s"
            else:
                continue
            wish.failed(f"{unit.unit_id}: {reason}", 0.0, now_s)
            effects.append(self._stop(unit, reason, now_s))
        return effects

    # --- what to do -------------------------------------------------------------------------

    def _reconcile(self, now_s: float) -> list[Effect]:
        grace_s = 0.0 if self._is_stopping else REPLACE_GRACE_S
        effects: list[Effect] = [
            self._stop(unit, "its pool is not configured any more", now_s)
            for unit in self._units.values()
            if unit.pool not in self._wishes and unit.stage is not Stage.STOPPING
        ]
        effects += self._stop_on_faulty_gpus(now_s)
        for wish in self._wishes.values():
            wanted = 0 if self._is_stopping else wish.wanted.total
            units = [unit for unit in self._of(wish) if unit.stage is not Stage.STOPPING]
            units.sort(key=_first_to_go)
            surplus = units[: max(len(units) - wanted, 0)]
            effects += [self._stop(unit, "not wanted any more", now_s, grace_s) for unit in surplus]
            if len(units) >= wanted:
                wish.lacking = ""
            for _ in range(wanted - len(units)):
                start = self._start(wish, now_s)
                if start is None:
                    break
                effects.append(start)
            effects += self._assign(wish, now_s)
        return effects

    def _assign(self, wish: Wish, now_s: float) -> list[Effect]:
        """Take in, or put on standby, as many ready units as the pool needs."""
        if not wish.model.standby.units or self._is_stopping:
            return []
        effects: list[Effect] = []
        ready = sorted(self._ready(wish), key=lambda unit: (unit.since_s, unit.unit_id))
        for unit, role in zip(ready, wish.wanted.roles([unit.role for unit in ready]), strict=True):
            if role is not unit.role:
                unit.role, unit.role_since_s = role, now_s
                effects.append(SetRole(unit.unit_id, role))
        return effects

    def _stop_on_faulty_gpus(self, now_s: float) -> list[Effect]:
        faults = {
            (node.node_id, gpu.card.uuid): gpu.sample.fault
            for node in self._nodes
            for gpu in node.hardware or ()
            if gpu.sample.fault
        }
        effects: list[Effect] = []
        for unit in self._units.values() if faults else ():
            uuid = next((uuid for uuid in unit.gpu_uuids if (unit.node_id, uuid) in faults), "")
            if uuid and unit.stage is not Stage.STOPPING:
                reason = f"its GPU {uuid} is faulty: {faults[unit.node_id, uuid]}"
                self._wishes[unit.pool].failures.append(f"{unit.unit_id}: {reason}")
                effects.append(self._stop(unit, reason, now_s))
        return effects

    def _replace(self, condemned: Condemned, now_s: float) -> list[Effect]:
        """Stop a unit that placement does not trust: its pool then lacks one, and the next start fills it."""
        unit = self._units.get(condemned.unit_id)
        if unit is None or unit.stage is not Stage.READY or unit.incarnation != condemned.incarnation:
            return []
        wish = self._wishes[unit.pool]
        if not condemned.is_isolated and any(u.stage is not Stage.READY for u in self._of(wish)):
            return []  # it still serves, and others of its pool don't yet
        wish.failed(f"{unit.unit_id}: {condemned.reason}", now_s - unit.since_s, now_s)
        return [self._stop(unit, condemned.reason, now_s, REPLACE_GRACE_S)]

    def _stop(self, unit: PlannedUnit, reason: str, now_s: float, grace_s: float = 0.0) -> Effect:
        unit.stage, unit.since_s = Stage.STOPPING, now_s
        return StopUnit(unit.unit_id, reason, grace_s)

    def _start(self, wish: Wish, now_s: float) -> Effect | None:
        model = wish.model
        region = model.region or self._region
        label = region if any(REGION_LABEL in node.labels for node in self._nodes) else ""
        places, lacking = self._fitting(model, label)
        wish.lack(lacking, now_s)
        if now_s < wish.not_before_s:
            return None
        free = [place for place in places if self._may_start_on(place.node, model)]
        if not free:
            return None
        node, here, gpus = min(
            free, key=lambda p: (self._count(p.node, wish), self._count(p.node), p.node.node_id)
        )
        taken = set(self._units)
        unit_id = next(name for i in range(len(taken) + 1) if (name := f"{wish.prefix}{i}") not in taken)
        uuids = tuple(gpu.card.uuid for gpu in gpus)
        numbers = tuple(gpu.card.number for gpu in gpus)
        serving = sum(u.role is Role.SERVING and u.stage is not Stage.STOPPING for u in self._of(wish))
        role = Role.SERVING if serving < wish.wanted.units else Role.WARM
        self._units[unit_id] = PlannedUnit(
            unit_id, wish.prefix, node.node_id, Stage.PLACING, now_s, uuids, role=role
        )
        return StartUnit(unit_id, here, node.node_id, region, label, numbers, role)

    def _fitting(self, model: Model, label: str) -> tuple[list[_Place], str]:
        """Return the nodes with the right label and room, each with the model as it would run there; or else
        a sentence on what is lacking."""
        nodes = [node for node in self._nodes if not label or node.labels.get(REGION_LABEL) == label]
        if not nodes:
            known = sorted({node.labels.get(REGION_LABEL, "none") for node in self._nodes})
            return (
                [],
                f"none carries region={label} (there are: {', '.join(known)})" if label else "none joined",
            )
        cpus, gpus = demands(model)
        kinds = [kind for node in nodes if node.gpus for kind in node.by_gpu()] if gpus else nodes
        able = [(node, on_node(model, node)) for node in kinds]
        unable = {here.reason for _, here in able if isinstance(here, NoVariant)}
        places, obstacles = [], set()
        for node, here in able:
            if isinstance(here, NoVariant):
                continue
            owners = [Owner(unit.unit_id, self._demands(unit)[1], unit.gpu_uuids) for unit in self._on(node)]
            room = gpus_for(node, here, owners)
            if isinstance(room, NoRoom):
                obstacles.add(room.reason)
            elif node.cpus - sum(self._demands(unit)[0] for unit in self._on(node)) >= cpus:
                places.append(_Place(node, here, room))
        if unable and all(isinstance(here, NoVariant) for _, here in able):
            return [], "; ".join(sorted(unable))
        where = f" with region={label}" if label else ""
        why = "".join(f" ({obstacle})" for obstacle in sorted(filter(None, obstacles)))
        return places, "" if places else f"it needs {needs(model)}; no node{where} has that free{why}"

    def _demands(self, unit: PlannedUnit) -> tuple[float, float]:
        return demands(self._wishes[unit.pool].model)

    def _may_start_on(self, node: Node, model: Model) -> bool:
        kind = start_kind(model)
        starting = sum(
            unit.stage in (Stage.PLACING, Stage.LOADING) and start_kind(self._wishes[unit.pool].model) == kind
            for unit in self._on(node)
        )
        return starting < STARTS_AT_ONCE[kind]

    def _on(self, node: Node) -> Iterable[PlannedUnit]:
        return (u for u in self._units.values() if u.node_id == node.node_id and u.pool in self._wishes)

    def _count(self, node: Node, wish: Wish | None = None) -> int:
        return sum(wish is None or unit.pool == wish.prefix for unit in self._on(node))

    def _ready(self, wish: Wish) -> Iterable[PlannedUnit]:
        return (unit for unit in self._of(wish) if unit.stage is Stage.READY)

    def _serving(self, wish: Wish) -> int:
        return sum(unit.role is Role.SERVING for unit in self._ready(wish))

    def _of(self, wish: Wish) -> Iterable[PlannedUnit]:
        return (unit for unit in self._units.values() if unit.pool == wish.prefix)

    def _wish(self, model: str, label: str) -> Wish:
        for wish in self._wishes.values():
            if (wish.model.name, wish.label) == (model, label):
                return wish
        known = ", ".join(f"{wish.model.name} {wish.label}".strip() for wish in self._wishes.values())
        raise InvalidRequest(
            f"there is no pool {f'{model} {label}'.strip()!r}; there are {known}", param="pool"
        )

    def _pool_of(self, unit_id: str, model: str) -> str:
        """Return the prefix of the pool that a unit of an earlier supervisor belongs to, "" for none."""
        return next(
            (
                wish.prefix
                for wish in self._wishes.values()
                if wish.model.name == model
                and unit_id.startswith(wish.prefix)
                and unit_id.removeprefix(wish.prefix).isdigit()
            ),
            "",
        )

    def _row(self, wish: Wish, now_s: float) -> dict[str, Any]:
        by_stage = {stage: sorted(u.unit_id for u in self._of(wish) if u.stage is stage) for stage in Stage}
        wanted = 0 if self._is_stopping else wish.wanted.total
        missing = len(by_stage[Stage.READY]) < wanted
        return {
            "model": wish.model.name,
            "pool": wish.label,
            "wanted": wanted,
            "min_units": wish.model.min_units,
            "max_units": wish.model.max_units,
            "ready": len(by_stage[Stage.READY]),
            "serving": self._serving(wish),
            "starting": len(by_stage[Stage.PLACING]) + len(by_stage[Stage.LOADING]),
            "stopping": len(by_stage[Stage.STOPPING]),
            "units": by_stage[Stage.READY],
            "failures": list(wish.failures),
            "waiting_for": wish.lacking,
            "retry_in_s": max(wish.not_before_s - now_s, 0.0),
            "gave_up": missing and wish.gave_up(now_s),
        }


def _first_to_go(unit: PlannedUnit) -> tuple[bool, bool, float, str]:
    """Order units: those that are still starting, then those on standby, then the newest."""
    return unit.stage is Stage.READY, unit.role is Role.SERVING, -unit.since_s, unit.unit_id
