"""Which units should run where: the pure core of the supervisor. Nothing here awaits or reads a clock.

`Planner.handle(event, now_s)` returns starts and stops; `supervisor.py` carries them out and feeds back what
happened. Rules: every pool of a model has its wanted number of units, each with the best of the model's
checkpoints that its node's GPU serves (`engines.variants`); starts that would fight for one GPU or for the
cores of one node go one after another; a start that fails is tried again, ever later up to a bound; a model
that no node can take is said to be so, with the reason, instead of waiting in silence.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from grid.config import Config, Model
from grid.engines.variants import NoVariant, fitted, pretended_gpu
from grid.errors import InvalidRequest
from grid.hardware import catalogue

REGION_LABEL = "region"
GPU_LABEL = "gpu"
"""Set by operators where Ray's own label says too little: it calls an A100 of 40 and one of 80 GB alike."""
RAY_GPU_LABEL = "ray.io/accelerator-type"

FIRST_BACKOFF_S = 0.5
LAST_BACKOFF_S = 60.0
"""A broken model costs one start a minute, and is back a minute after it was mended."""

STABLE_S = 10.0
"""A unit that served this long was no failed start: the next one starts at once."""

GAVE_UP_AFTER = 3
"""Failed starts in a row after which whoever waits for the model may stop waiting. Tries go on."""

UNSATISFIED_AFTER_S = 30.0
"""Nodes of a cluster that is starting join within this; later, the lack of one is a failure."""

PLACE_LIMIT_S = 60.0
"""From asking Ray until the process answers. A process takes one to a few seconds; the rest is queueing."""

START_LIMIT_S = 900.0
"""A large model on a cold disk takes minutes."""

FAILURES_KEPT = 8

RESTART_REASON = "restarted by an operator"
"""Why a unit ends that was asked to: no failure, so the next one starts at once."""

STARTS_AT_ONCE = {"light": 4, "gpu": 4, "gpu share": 1, "cpu": 1}
"""On one node. Light engines load in a second; whole GPUs are not shared, but the disk and RAM that weights
come through are; engines on shares of one GPU would each measure the memory that the other is taking; an
engine on CPU cores takes them all while it loads."""


class Node(NamedTuple):
    """A live node of the cluster and all that it has."""

    node_id: str
    labels: dict[str, str]
    cpus: float
    gpus: float

    @property
    def gpu(self) -> str:
        """The model of its GPUs, as the operator or else Ray says; "" if neither does."""
        return self.labels.get(GPU_LABEL) or self.labels.get(RAY_GPU_LABEL, "")


class Stage(StrEnum):
    PLACING = "placing"
    """Ray has been asked; the process has not answered yet."""
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


# --- events ---------------------------------------------------------------------------------


class NodesSeen(NamedTuple):
    nodes: tuple[Node, ...]


class Adopted(NamedTuple):
    """A ready unit that an earlier supervisor started."""

    unit_id: str
    model: str
    node_id: str


class Placed(NamedTuple):
    unit_id: str


class Ready(NamedTuple):
    unit_id: str


class Ended(NamedTuple):
    """The unit's process is gone, its name is free."""

    unit_id: str
    reason: str


class Scale(NamedTuple):
    """Another number of units of a model's pool, within its min and max."""

    model: str
    units: int
    pool: str = ""
    """Its label; "" for a model without pools. Raises InvalidRequest for one that there isn't."""


class StopAll(NamedTuple):
    pass


class Tick(NamedTuple):
    pass


Event = NodesSeen | Adopted | Placed | Ready | Ended | Scale | StopAll | Tick


# --- effects --------------------------------------------------------------------------------


class StartUnit(NamedTuple):
    unit_id: str
    model: Model
    """As its pool says, with one checkpoint."""
    node_id: str
    region: str
    region_label: str
    """The label that the node must carry; "" where the cluster's nodes carry none."""


class StopUnit(NamedTuple):
    unit_id: str
    reason: str


Effect = StartUnit | StopUnit


# --- state ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Unit:
    unit_id: str
    pool: str
    """Its `_Wish.prefix`."""
    node_id: str
    stage: Stage
    since_s: float


@dataclass(slots=True)
class _Wish:
    """A pool, how many units of it are wanted, and how its starts have gone."""

    model: Model
    label: str
    prefix: str
    """Of the ids of its units; no other pool's."""
    units: int
    failed_in_a_row: int = 0
    not_before_s: float = 0.0
    lacking: str = ""
    lacking_since_s: float = 0.0
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=FAILURES_KEPT))


class _Place(NamedTuple):
    node: Node
    model: Model
    """With the checkpoint that a unit would run there."""


class Planner:
    def __init__(self, config: Config) -> None:
        self._region = config.cell.region
        self._wishes: dict[str, _Wish] = {}
        """By prefix."""
        for label, model in (pool for configured in config.models for pool in configured.split()):
            prefix = unit_prefix(model.name, label)
            if prefix in self._wishes:  # two names that differ only in what an id can't hold
                prefix += hashlib.sha256(model.name.encode()).hexdigest()[:6] + "-"
            self._wishes[prefix] = _Wish(model, label, prefix, model.min_units)
        self._units: dict[str, _Unit] = {}
        self._nodes: tuple[Node, ...] = ()
        self._is_stopping = False

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event at `now_s` (monotonic seconds) and return what is to be started and stopped."""
        effects: list[Effect] = []
        match event:
            case NodesSeen(nodes):
                self._nodes = nodes
            case Adopted(unit_id, model, node_id):
                pool = self._pool_of(unit_id, model)
                self._units[unit_id] = _Unit(unit_id, pool, node_id, Stage.READY, now_s)
            case Placed(unit_id):
                self._move(unit_id, Stage.LOADING, now_s)
            case Ready(unit_id):
                self._move(unit_id, Stage.READY, now_s)
            case Ended(unit_id, reason):
                self._ended(unit_id, reason, now_s)
            case Scale(model, units, pool):
                wish = self._wish(model, pool)
                wish.units = min(max(units, wish.model.min_units), wish.model.max_units)
            case StopAll():
                self._is_stopping = True
            case Tick():
                effects += self._overdue(now_s)
        return effects + self._reconcile(now_s)

    def status(self, now_s: float) -> list[dict[str, Any]]:
        """Return one plain row a pool: what is wanted, what there is, what failed and why."""
        return [self._row(wish, now_s) for wish in self._wishes.values()]

    # --- what happened ----------------------------------------------------------------------

    def _move(self, unit_id: str, stage: Stage, now_s: float) -> None:
        unit = self._units.get(unit_id)
        if unit is not None and unit.stage is not Stage.STOPPING:
            unit.stage, unit.since_s = stage, now_s

    def _ended(self, unit_id: str, reason: str, now_s: float) -> None:
        unit = self._units.pop(unit_id, None)
        asked = reason == RESTART_REASON
        if unit is None or asked or unit.stage is Stage.STOPPING or unit.pool not in self._wishes:
            return
        served_s = now_s - unit.since_s if unit.stage is Stage.READY else 0.0
        self._failed(self._wishes[unit.pool], f"{unit_id}: {reason}", served_s, now_s)

    def _failed(self, wish: _Wish, failure: str, served_s: float, now_s: float) -> None:
        wish.failures.append(failure)
        wish.failed_in_a_row = 0 if served_s >= STABLE_S else wish.failed_in_a_row + 1
        if wish.failed_in_a_row:
            wish.not_before_s = now_s + min(
                FIRST_BACKOFF_S * 2.0 ** (wish.failed_in_a_row - 1), LAST_BACKOFF_S
            )

    def _overdue(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for unit in list(self._units.values()):
            wish = self._wishes.get(unit.pool)
            waited_s = now_s - unit.since_s
            if unit.stage is Stage.PLACING and waited_s > PLACE_LIMIT_S and wish is not None:
                reason = f"Ray found no room for it within {PLACE_LIMIT_S:.0f} s ({_needs(wish.model)})"
            elif unit.stage is Stage.LOADING and waited_s > START_LIMIT_S and wish is not None:
                reason = f"not ready within {START_LIMIT_S:.0f} s"
            else:
                continue
            self._failed(wish, f"{unit.unit_id}: {reason}", 0.0, now_s)
            effects.append(self._stop(unit, reason, now_s))
        return effects

    # --- what to do -------------------------------------------------------------------------

    def _reconcile(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = [
            self._stop(unit, "its pool is not configured any more", now_s)
            for unit in self._units.values()
            if unit.pool not in self._wishes and unit.stage is not Stage.STOPPING
        ]
        for wish in self._wishes.values():
            wanted = 0 if self._is_stopping else wish.units
            units = [unit for unit in self._of(wish) if unit.stage is not Stage.STOPPING]
            # Those that are still starting go first, then the newest.
            units.sort(key=lambda unit: (unit.stage is Stage.READY, -unit.since_s, unit.unit_id))
            surplus = units[: max(len(units) - wanted, 0)]
            effects += [self._stop(unit, "not wanted any more", now_s) for unit in surplus]
            if len(units) >= wanted:
                wish.lacking = ""
            for _ in range(wanted - len(units)):
                start = self._start(wish, now_s)
                if start is None:
                    break
                effects.append(start)
        return effects

    def _stop(self, unit: _Unit, reason: str, now_s: float) -> Effect:
        unit.stage, unit.since_s = Stage.STOPPING, now_s
        return StopUnit(unit.unit_id, reason)

    def _start(self, wish: _Wish, now_s: float) -> Effect | None:
        model = wish.model
        region = model.region or self._region
        label = region if any(REGION_LABEL in node.labels for node in self._nodes) else ""
        places, lacking = self._fitting(model, label)
        self._note_lack(wish, lacking, now_s)
        if now_s < wish.not_before_s:
            return None
        free = [place for place in places if self._may_start_on(place.node, model)]
        if not free:
            return None
        node, here = min(free, key=lambda p: (self._count(p.node, wish), self._count(p.node), p.node.node_id))
        taken = set(self._units)
        unit_id = next(name for i in range(len(taken) + 1) if (name := f"{wish.prefix}{i}") not in taken)
        self._units[unit_id] = _Unit(unit_id, wish.prefix, node.node_id, Stage.PLACING, now_s)
        return StartUnit(unit_id, here, node.node_id, region, label)

    def _note_lack(self, wish: _Wish, lacking: str, now_s: float) -> None:
        """Remember since when no node fits; once that is long enough, it is a failure."""
        if not lacking:
            wish.lacking = ""
        elif not wish.lacking:
            wish.lacking, wish.lacking_since_s = lacking, now_s
        else:
            wish.lacking = lacking
            text = f"no node for it: {lacking}"
            if self._lacks(wish, now_s) and text not in wish.failures:
                wish.failures.append(text)

    def _lacks(self, wish: _Wish, now_s: float) -> bool:
        return bool(wish.lacking) and now_s - wish.lacking_since_s >= UNSATISFIED_AFTER_S

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
        able = [(node, on_node(model, node)) for node in nodes if node.gpus or not gpus]
        unable = {here.reason for _, here in able if isinstance(here, NoVariant)}
        places = []
        for node, here in able:
            used = [demands(self._wishes[unit.pool].model) for unit in self._on(node)]
            has_cpus = node.cpus - sum(each[0] for each in used) >= cpus
            has_gpus = gpus_fit(node.gpus, [each[1] for each in used], gpus)
            if has_cpus and has_gpus and not isinstance(here, NoVariant):
                places.append(_Place(node, here))
        if unable and all(isinstance(here, NoVariant) for _, here in able):
            return [], "; ".join(sorted(unable))
        where = f" with region={label}" if label else ""
        return places, "" if places else f"it needs {_needs(model)}; no node{where} has that free"

    def _may_start_on(self, node: Node, model: Model) -> bool:
        kind = start_kind(model)
        starting = sum(
            unit.stage in (Stage.PLACING, Stage.LOADING) and start_kind(self._wishes[unit.pool].model) == kind
            for unit in self._on(node)
        )
        return starting < STARTS_AT_ONCE[kind]

    def _on(self, node: Node) -> Iterable[_Unit]:
        return (u for u in self._units.values() if u.node_id == node.node_id and u.pool in self._wishes)

    def _count(self, node: Node, wish: _Wish | None = None) -> int:
        return sum(wish is None or unit.pool == wish.prefix for unit in self._on(node))

    def _of(self, wish: _Wish) -> Iterable[_Unit]:
        return (unit for unit in self._units.values() if unit.pool == wish.prefix)

    def _wish(self, model: str, label: str) -> _Wish:
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

    def _row(self, wish: _Wish, now_s: float) -> dict[str, Any]:
        by_stage = {stage: sorted(u.unit_id for u in self._of(wish) if u.stage is stage) for stage in Stage}
        wanted = 0 if self._is_stopping else wish.units
        missing = len(by_stage[Stage.READY]) < wanted
        return {
            "model": wish.model.name,
            "pool": wish.label,
            "wanted": wanted,
            "min_units": wish.model.min_units,
            "max_units": wish.model.max_units,
            "ready": len(by_stage[Stage.READY]),
            "starting": len(by_stage[Stage.PLACING]) + len(by_stage[Stage.LOADING]),
            "stopping": len(by_stage[Stage.STOPPING]),
            "units": by_stage[Stage.READY],
            "failures": list(wish.failures),
            "waiting_for": wish.lacking,
            "retry_in_s": max(wish.not_before_s - now_s, 0.0),
            "gave_up": missing and (wish.failed_in_a_row >= GAVE_UP_AFTER or self._lacks(wish, now_s)),
        }


def unit_prefix(model: str, pool: str = "") -> str:
    """Return the beginning of the ids of a pool's units, such as `unit-smollm2-135m-instruct-`."""
    return f"unit-{re.sub(r'[^a-z0-9.]+', '-', f'{model}-{pool}'.lower()).strip('-')}-"


def on_node(model: Model, node: Node) -> Model | NoVariant:
    """Return the model with the checkpoint that a unit on `node` would run, or why none can."""
    if model.engine == "simulated":
        return fitted(model, pretended_gpu(model))
    if not model.gpus:
        return fitted(model, catalogue.GPUS["CPU"])
    if not node.gpu:
        if not model.gpu and len(model.checkpoints) == 1:
            return model  # the unit finds out by itself
        return NoVariant(
            f"it depends on the GPU, and no node says which it has: start Ray there with "
            f"--labels={GPU_LABEL}=NAME"
        )
    try:
        gpu = catalogue.find(node.gpu)
    except InvalidRequest as unknown:
        return NoVariant(unknown.message)
    if model.gpu and gpu.name != model.gpu:
        return NoVariant(f"it needs {model.gpu}; nodes have {gpu.name}")
    return fitted(model, gpu)


def demands(model: Model) -> tuple[float, float]:
    """Return the CPU cores and GPUs to reserve; a simulated unit only pretends to have any."""
    return (0.0, 0.0) if model.engine == "simulated" else (model.cpus, model.gpus)


def start_kind(model: Model) -> str:
    """Return the key of STARTS_AT_ONCE for a model."""
    if model.engine in ("simulated", "embedding") and demands(model)[1] == 0:
        return "light"
    if model.gpus == 0:
        return "cpu"
    return "gpu share" if model.gpus < 1 else "gpu"


def gpus_fit(total: float, used: Iterable[float], wanted: float) -> bool:
    """Tell whether `wanted` fits beside `used`: shares on one GPU each, whole ones on empty GPUs."""
    room = [1.0] * int(total)
    for amount in [*sorted(used, reverse=True), wanted]:
        if amount == 0:
            continue
        need, each = (1, amount) if amount < 1 else (int(amount), 1.0)
        open_gpus = [i for i, left in enumerate(room) if left >= each - 1e-9]
        if len(open_gpus) < need:
            return False
        # The fullest that still fits, so that whole GPUs stay whole.
        for i in sorted(open_gpus, key=lambda i: room[i])[:need]:
            room[i] -= each
    return True


def _needs(model: Model) -> str:
    cpus, gpus = demands(model)
    return f"{cpus:g} CPU cores and {gpus:g} GPUs"
