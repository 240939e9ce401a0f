"""Which GPUs of a node a unit gets, from what its probe saw; or why none. Pure.

A GPU has room when it is sound, nobody else of the cell owns the asked share, and enough of its memory is
free now for the unit to load: what others use is not the cell's to give. Several GPUs are those nearest to
each other: joined by NVLink first, then by a PCIe switch, a host bridge, a socket. Of equals, those are taken
whose going costs the remaining ones least, so that near groups stay whole for units that need them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from grid.words import UNKNOWN, GpuCard, GpuSample

NVLINK_DISTANCE = 0
UNKNOWN_DISTANCE = 60
"""Above all of NVML's levels, which are 10 for one PCIe switch to 50 for different sockets."""

REASONS_SAID = 4
"""Of a node's GPUs, for how many a refusal says what is in the way."""

SHARE_SLACK = 1e-9
"""Shares such as a third don't add up to one exactly."""


class Gpu(NamedTuple):
    """One GPU as its node's probe last saw it."""

    place: int
    """In the node's card, whose order `nvlinks` and `ancestors` follow."""
    card: GpuCard
    sample: GpuSample


class NoRoom(NamedTuple):
    reason: str


def choose(
    gpus: Sequence[Gpu], taken: Mapping[str, float], wanted: float, need_mb: float
) -> tuple[Gpu, ...] | NoRoom:
    """Return the GPUs for a unit that wants a share of one, or a whole number of them.

    `taken` is the share of each GPU, by uuid, that the cell's units own; `need_mb` the free memory that the
    unit needs on each of its GPUs.
    """
    share, count = (wanted, 1) if wanted < 1 else (1.0, int(wanted))
    obstacles = [(gpu, _obstacle(gpu, taken.get(gpu.card.uuid, 0.0), share, need_mb)) for gpu in gpus]
    free = [gpu for gpu, obstacle in obstacles if not obstacle]
    if len(free) < count:
        said = [f"GPU {gpu.card.number} {obstacle}" for gpu, obstacle in obstacles if obstacle]
        more = f" and {len(said) - REASONS_SAID} more" if len(said) > REASONS_SAID else ""
        return NoRoom("; ".join(said[:REASONS_SAID]) + more)
    if share < 1:
        # The fullest that still fits, so that whole GPUs stay whole.
        fullest = max(taken.get(gpu.card.uuid, 0.0) for gpu in free)
        free = [gpu for gpu in free if taken.get(gpu.card.uuid, 0.0) == fullest]
    return nearest(free, count)


def _obstacle(gpu: Gpu, taken: float, share: float, need_mb: float) -> str:
    """Return what keeps a share of a GPU from a unit; "" for nothing."""
    sample = gpu.sample
    if sample.fault:
        return f"is faulty ({sample.fault})"
    if taken + share > 1 + SHARE_SLACK:
        return "is taken by the cell's own units"
    # Where the driver can't tell, the engine itself finds out.
    if sample.memory_free_mb == UNKNOWN or sample.memory_free_mb >= need_mb:
        return ""
    foreign = f", and others use {sample.memory_foreign_mb:.0f} MB" if sample.memory_foreign_mb > 0 else ""
    return f"has {sample.memory_free_mb:.0f} MB free of the {need_mb:.0f} MB it needs{foreign}"


def nearest(gpus: Sequence[Gpu], count: int) -> tuple[Gpu, ...]:
    """Return the `count` GPUs of `gpus` (at least as many) that are nearest to each other, by place."""
    groups = [_grown(first, gpus, count) for first in gpus]
    best = min(groups, key=lambda group: (*_spread(group), _bereft(group, gpus), _places(group)))
    return tuple(sorted(best, key=lambda gpu: gpu.place))


def _grown(first: Gpu, gpus: Sequence[Gpu], count: int) -> list[Gpu]:
    """The group that grows from `first`, each time by the GPU that is nearest to all of it."""
    group = [first]
    while len(group) < count:
        others = [gpu for gpu in gpus if gpu not in group]
        group.append(min(others, key=lambda gpu: (*_to_group(gpu, group), gpu.place)))
    return group


def _to_group(gpu: Gpu, group: Sequence[Gpu]) -> tuple[int, int, int]:
    distances = [distance(gpu, other) for other in group]
    return max(distances), sum(distances), -sum(links(gpu, other) for other in group)


def _spread(group: Sequence[Gpu]) -> tuple[int, int, int]:
    """How far apart a group is: its farthest pair, all pairs, and how few links they have."""
    pairs = [(one, other) for place, one in enumerate(group) for other in group[:place]]
    distances = [distance(one, other) for one, other in pairs]
    return max(distances, default=0), sum(distances), -sum(links(one, other) for one, other in pairs)


def _bereft(group: Sequence[Gpu], gpus: Sequence[Gpu]) -> int:
    """How much nearness the GPUs that remain lose when `group` goes."""
    remaining = [gpu for gpu in gpus if gpu not in group]
    return sum(UNKNOWN_DISTANCE - distance(gpu, other) for gpu in group for other in remaining)


def _places(group: Sequence[Gpu]) -> list[int]:
    return sorted(gpu.place for gpu in group)


def links(one: Gpu, other: Gpu) -> int:
    """Return the number of active NVLinks between two GPUs of a node."""
    return one.card.nvlinks[other.place] if other.place < len(one.card.nvlinks) else 0


def distance(one: Gpu, other: Gpu) -> int:
    """Return how far two GPUs of a node are apart: NVLINK_DISTANCE, NVML's level, or UNKNOWN_DISTANCE."""
    if links(one, other) > 0:
        return NVLINK_DISTANCE
    level = one.card.ancestors[other.place] if other.place < len(one.card.ancestors) else -1
    return level if level > 0 else UNKNOWN_DISTANCE
