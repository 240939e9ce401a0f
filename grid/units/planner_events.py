"""What can happen to the units of a cell (events) and what is to be done (effects): the words of `planner.py`
and `supervisor.py`."""

from __future__ import annotations

from typing import NamedTuple

from grid.model import Model
from grid.units.nodes import Node
from grid.units.scaling import Role
from grid.words import Outlook

RESTART_REASON = "restarted by an operator"
"""Why a unit ends that was asked to: no failure, so the next one starts at once."""

# --- events ---------------------------------------------------------------------------------


class NodesSeen(NamedTuple):
    nodes: tuple[Node, ...]


class Adopted(NamedTuple):
    """A ready unit that an earlier supervisor started."""

    unit_id: str
    model: str
    node_id: str
    gpu_uuids: tuple[str, ...] = ()
    incarnation: str = ""
    role: Role = Role.SERVING


class Placed(NamedTuple):
    unit_id: str


class Ready(NamedTuple):
    unit_id: str
    gpu_uuids: tuple[str, ...] = ()
    """As the unit itself found them."""
    incarnation: str = ""


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


class Seen(NamedTuple):
    """What placement sees of the cell now."""

    outlook: Outlook


class StopAll(NamedTuple):
    pass


class Tick(NamedTuple):
    pass


Event = NodesSeen | Adopted | Placed | Ready | Ended | Scale | Seen | StopAll | Tick


# --- effects --------------------------------------------------------------------------------


class StartUnit(NamedTuple):
    unit_id: str
    model: Model
    """As its pool says, with one checkpoint."""
    node_id: str
    region: str
    region_label: str
    """The label that the node must carry; "" where the cluster's nodes carry none."""
    gpus: tuple[int, ...] = ()
    """NVML's numbers of the GPUs that it gets; empty where that is left to Ray."""
    role: Role = Role.SERVING


class StopUnit(NamedTuple):
    unit_id: str
    reason: str
    grace_s: float = 0.0
    """How long what runs on it may go on; nothing new comes meanwhile."""


class SetRole(NamedTuple):
    """Of a ready unit."""

    unit_id: str
    role: Role


Effect = StartUnit | StopUnit | SetRole
