"""Which units should run where: the pure core of the supervisor. Nothing here awaits or reads a clock.

`Planner.handle(event, now_s)` returns starts and stops; `supervisor.py` carries them out and feeds back what
happened. Rules: every model has its wanted number of units; starts that would fight for one GPU or for the
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

REGION_LABEL = "region"

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
    """Another number of units of a model, within its min and max."""

    model: str
    units: int


class StopAll(NamedTuple):
    pass


class Tick(NamedTuple):
    pass


Event = NodesSeen | Adopted | Placed | Ready | Ended | Scale | StopAll | Tick


# --- effects --------------------------------------------------------------------------------


class StartUnit(NamedTuple):
    unit_id: str
    model: Model
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
    model: str
    node_id: str
    stage: Stage
    since_s: float


@dataclass(slots=True)
class _Wish:
    """A model, how many units of it are wanted, and how its starts have gone."""

    model: Model
    prefix: str
    units: int
    failed_in_a_row: int = 0
    not_before_s: float = 0.0
    lacking: str = ""
    lacking_since_s: float = 0.0
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=FAILURES_KEPT))


class Planner:
    def __init__(self, config: Config) -> None:
        self._region = config.cell.region
        self._wishes: dict[str, _Wish] = {}
        prefixes: set[str] = set()
        for model in config.models:
            prefix = unit_prefix(model.name)
            if prefix in prefixes:  # two names that differ only in what an id can't hold
                prefix += hashlib.sha256(model.name.encode()).hexdigest()[:6] + "-"
            prefixes.add(prefix)
            self._wishes[model.name] = _Wish(model, prefix, model.min_units)
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
                self._units[unit_id] = _Unit(unit_id, model, node_id, Stage.READY, now_s)
            case Placed(unit_id):
                self._move(unit_id, Stage.LOADING, now_s)
            case Ready(unit_id):
                self._move(unit_id, Stage.READY, now_s)
            case Ended(unit_id, reason):
                self._ended(unit_id, reason, now_s)
            case Scale(model, units):
                wish = self._wishes[model]
                wish.units = min(max(units, wish.model.min_units), wish.model.max_units)
            case StopAll():
                self._is_stopping = True
            case Tick():
                effects += self._overdue(now_s)
        return effects + self._reconcile(now_s)

    def status(self, now_s: float) -> list[dict[str, Any]]:
        """Return one plain row a model: what is wanted, what there is, what failed and why."""
        return [self._row(wish, now_s) for wish in self._wishes.values()]

    # --- what happened ----------------------------------------------------------------------

    def _move(self, unit_id: str, stage: Stage, now_s: float) -> None:
        unit = self._units.get(unit_id)
        if unit is not None and unit.stage is not Stage.STOPPING:
            unit.stage, unit.since_s = stage, now_s

    def _ended(self, unit_id: str, reason: str, now_s: float) -> None:
        unit = self._units.pop(unit_id, None)
        if unit is None or unit.stage is Stage.STOPPING or unit.model not in self._wishes:
            return
        served_s = now_s - unit.since_s if unit.stage is Stage.READY else 0.0
        self._failed(self._wishes[unit.model], f"{unit_id}: {reason}", served_s, now_s)

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
            wish = self._wishes.get(unit.model)
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
            self._stop(unit, "its model is not configured any more", now_s)
            for unit in self._units.values()
            if unit.model not in self._wishes and unit.stage is not Stage.STOPPING
        ]
        for wish in self._wishes.values():
            wanted = 0 if self._is_stopping else wish.units
            units = [unit for unit in self._of(wish.model.name) if unit.stage is not Stage.STOPPING]
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
        fitting, lacking = self._fitting(model, label)
        self._note_lack(wish, lacking, now_s)
        if not fitting or now_s < wish.not_before_s:
            return None
        free = [node for node in fitting if self._may_start_on(node, model)]
        if not free:
            return None
        node = min(free, key=lambda node: (self._count(node, model.name), self._count(node), node.node_id))
        taken = set(self._units)
        unit_id = next(name for i in range(len(taken) + 1) if (name := f"{wish.prefix}{i}") not in taken)
        self._units[unit_id] = _Unit(unit_id, model.name, node.node_id, Stage.PLACING, now_s)
        return StartUnit(unit_id, model, node.node_id, region, label)

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

    def _fitting(self, model: Model, label: str) -> tuple[list[Node], str]:
        """Return the nodes with the right label and room, or else a sentence on what is lacking."""
        nodes = [node for node in self._nodes if not label or node.labels.get(REGION_LABEL) == label]
        if not nodes:
            known = sorted({node.labels.get(REGION_LABEL, "none") for node in self._nodes})
            return (
                [],
                f"none carries region={label} (there are: {', '.join(known)})" if label else "none joined",
            )
        cpus, gpus = demands(model)
        fitting = []
        for node in nodes:
            used = [demands(self._wishes[unit.model].model) for unit in self._on(node)]
            has_cpus = node.cpus - sum(each[0] for each in used) >= cpus
            if has_cpus and gpus_fit(node.gpus, [each[1] for each in used], gpus):
                fitting.append(node)
        where = f" with region={label}" if label else ""
        return fitting, "" if fitting else f"it needs {_needs(model)}; no node{where} has that free"

    def _may_start_on(self, node: Node, model: Model) -> bool:
        kind = start_kind(model)
        starting = sum(
            unit.stage in (Stage.PLACING, Stage.LOADING)
            and start_kind(self._wishes[unit.model].model) == kind
            for unit in self._on(node)
        )
        return starting < STARTS_AT_ONCE[kind]

    def _on(self, node: Node) -> Iterable[_Unit]:
        return (u for u in self._units.values() if u.node_id == node.node_id and u.model in self._wishes)

    def _count(self, node: Node, model: str | None = None) -> int:
        return sum(model is None or unit.model == model for unit in self._on(node))

    def _of(self, model: str) -> Iterable[_Unit]:
        return (unit for unit in self._units.values() if unit.model == model)

    def _row(self, wish: _Wish, now_s: float) -> dict[str, Any]:
        by_stage = {
            stage: sorted(u.unit_id for u in self._of(wish.model.name) if u.stage is stage) for stage in Stage
        }
        wanted = 0 if self._is_stopping else wish.units
        missing = len(by_stage[Stage.READY]) < wanted
        return {
            "model": wish.model.name,
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


def unit_prefix(model: str) -> str:
    """Return the beginning of the ids of a model's units, such as `unit-smollm2-135m-instruct-`."""
    return f"unit-{re.sub(r'[^a-z0-9.]+', '-', model.lower()).strip('-')}-"


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
