"""The GPUs of the cell as their nodes' probes tell of them: what they are, newest samples, faults.

Only the probe that announced a node may report it, and only its own GPUs. Whatever can't be believed is
counted in `dropped` and left out. A fault holds until the node's probe opens the driver anew, also while
the probe is away. Nothing here awaits or reads a clock. Bounded by MAX_NODES and MAX_GPUS_A_NODE.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from grid.errors import InvalidRequest, Saturated
from grid.words import UNKNOWN, FleetGpu, GpuSample, NodeCard, UnitCard
from placement.reports import MAX_NAME_CHARS, are_readings

MAX_NODES = 20_000
"""Twice the units that one cell is built for: a node has at least one."""

MAX_GPUS_A_NODE = 64
MAX_FAULT_CHARS = 1000

MOST = 1e12
"""Nothing real comes near: not megabytes, not errors."""

_NUMBERS = slice(GpuSample._fields.index("memory_used_mb"), GpuSample._fields.index("fault"))
_SHARES = slice(GpuSample._fields.index("compute_utilisation"), GpuSample._fields.index("memory_busy") + 1)


def sample_flaw(sample: GpuSample) -> str:
    """Return what makes `sample` unusable, in one sentence; "" when nothing does."""
    numbers = cast(tuple[float, ...], sample[_NUMBERS])
    shares = cast(tuple[float, ...], sample[_SHARES])
    if not are_readings(numbers, MOST):
        names = GpuSample._fields[_NUMBERS]
        wrong = next(place for place, number in enumerate(numbers) if not are_readings((number,), MOST))
        return f"{names[wrong]} is {numbers[wrong]!r}; {UNKNOWN} or a finite number of at least 0 is needed"
    if max(shares) > 1:
        names = GpuSample._fields[_SHARES]
        return f"{names[shares.index(max(shares))]} is {max(shares)!r}; a share is at most 1"
    if len(sample.fault) > MAX_FAULT_CHARS:
        return f"fault has {len(sample.fault)} characters; at most {MAX_FAULT_CHARS} are taken"
    return ""


def card_flaw(card: NodeCard) -> str:
    """Return what makes a node's card unusable, in one sentence; "" when nothing does."""
    names = (card.node_id, card.incarnation, *(gpu.uuid for gpu in card.gpus))
    if not all(0 < len(name) <= MAX_NAME_CHARS for name in names):
        return f"node_id, incarnation and uuid have 1 to {MAX_NAME_CHARS} characters"
    if len(card.gpus) > MAX_GPUS_A_NODE:
        return f"{len(card.gpus)} GPUs; a node has at most {MAX_GPUS_A_NODE}"
    if len({gpu.uuid for gpu in card.gpus}) < len(card.gpus):
        return "two of its GPUs have one uuid"
    for gpu in card.gpus:
        if not are_readings((gpu.memory_mb,), MOST):
            return f"{gpu.uuid} has memory_mb {gpu.memory_mb!r}"
    return ""


@dataclass(slots=True)
class _Node:
    card: NodeCard
    link: int | None
    """The connection that its probe announced it on; None while the probe is away."""
    samples: dict[str, tuple[GpuSample, float]] = field(default_factory=dict)
    """By uuid, with the observed time of its arrival."""
    faults: dict[str, str] = field(default_factory=dict)
    """By uuid."""
    own: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.own = frozenset(gpu.uuid for gpu in self.card.gpus)


class Gpus:
    """What changes a fault returns True: answers that rest on faults must be worked out anew."""

    def __init__(self) -> None:
        self.dropped: Counter[str] = Counter()
        self.last_flaw = ""
        self._nodes: dict[str, _Node] = {}

    def join(self, card: NodeCard, link: int) -> bool:
        """Take a node in, or take it over from an earlier link. Raises InvalidRequest or Saturated."""
        if flaw := card_flaw(card):
            self.dropped["bad_node"] += 1
            raise InvalidRequest(f"node {card.node_id!r} can't register: {flaw}", param="card")
        known = self._nodes.get(card.node_id)
        if known is None and len(self._nodes) >= MAX_NODES:
            self.dropped["too_many_nodes"] += 1
            raise Saturated(f"this cell holds {MAX_NODES} nodes already; start another cell")
        node = _Node(card, link)
        if known is not None and known.card.incarnation == card.incarnation:
            node.samples, node.faults = known.samples, known.faults
        self._nodes[card.node_id] = node
        return known is not None and known.faults != node.faults

    def leave(self, link: int) -> None:
        """The probe's link is gone. Its samples go with it; faults stay until it is back."""
        for node_id in [name for name, node in self._nodes.items() if node.link == link]:
            node = self._nodes[node_id]
            node.link, node.samples = None, {}
            if not node.faults:
                del self._nodes[node_id]

    def report(
        self, node_id: str, incarnation: str, samples: Iterable[GpuSample], link: int, observed_s: float
    ) -> bool:
        """Take one batch of a node; return whether a GPU became faulty."""
        node = self._nodes.get(node_id)
        if node is None or node.link != link:
            self.dropped["unknown_node" if node is None else "foreign_node"] += 1
            return False
        if node.card.incarnation != incarnation:
            self.dropped["wrong_incarnation"] += 1
            return False
        is_new = False
        for sample in samples:
            if sample.uuid not in node.own:
                self.dropped["foreign_gpu"] += 1
            elif flaw := sample_flaw(sample):
                self.dropped["bad_gpu_sample"] += 1
                self.last_flaw = f"{node_id} {sample.uuid}: {flaw}"
            else:
                node.samples[sample.uuid] = (sample, observed_s)
                if sample.fault and sample.uuid not in node.faults:
                    node.faults[sample.uuid] = sample.fault
                    is_new = True
        return is_new

    # --- reading ----------------------------------------------------------------------------

    def speaks_for(self, node_id: str, link: int) -> bool:
        """Return whether the node announced itself on `link`."""
        node = self._nodes.get(node_id)
        return node is not None and node.link == link

    def has_faults(self) -> bool:
        return any(node.faults for node in self._nodes.values())

    def fault(self, card: UnitCard) -> str:
        """Return why the GPUs of a unit may not be used, naming the first that may not; "" when all may."""
        node = self._nodes.get(card.node_id)
        if node is None or not node.faults:
            return ""
        return next((f"{uuid}: {node.faults[uuid]}" for uuid in card.gpu_uuids if uuid in node.faults), "")

    def faults(self) -> dict[str, str]:
        """Return every fault by `NODE/UUID`."""
        return {
            f"{node_id}/{uuid}": fault
            for node_id, node in self._nodes.items()
            for uuid, fault in node.faults.items()
        }

    def snapshot(self, units: Iterable[UnitCard], observed_s: float) -> tuple[FleetGpu, ...]:
        """Return every GPU that a probe reads now, with the units of `units` that run on it."""
        if not self._nodes:
            return ()
        runs: dict[tuple[str, str], list[str]] = {}
        for unit in units:
            for uuid in unit.gpu_uuids:
                runs.setdefault((unit.node_id, uuid), []).append(unit.unit_id)
        rows = []
        for node_id, node in self._nodes.items():
            for gpu in node.card.gpus if node.link is not None else ():
                sample, sampled_s = node.samples.get(gpu.uuid, (GpuSample(gpu.uuid), None))
                age_ms = UNKNOWN if sampled_s is None else 1e3 * (observed_s - sampled_s)
                rows.append(FleetGpu(node_id, gpu, sample, age_ms, tuple(runs.get((node_id, gpu.uuid), ()))))
        return tuple(rows)
