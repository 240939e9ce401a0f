"""Which GPUs a unit gets: sound ones with room, those nearest to each other, and near groups left whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from grid.units.gpu_room import Gpu, NoRoom, choose, distance, nearest
from grid.words import UNKNOWN, GpuCard, GpuSample

FREE_MB = 80_000.0


def node_of(levels: Sequence[Sequence[int]], links: Sequence[Sequence[int]] = ()) -> list[Gpu]:
    """GPUs of one node by their distances over PCIe and their NVLinks."""
    return [
        Gpu(
            place,
            GpuCard(
                f"GPU-{place}", place, "NVIDIA", FREE_MB, tuple(links[place]) if links else (), tuple(row)
            ),
            GpuSample(f"GPU-{place}", memory_used_mb=0.0, memory_free_mb=FREE_MB),
        )
        for place, row in enumerate(levels)
    ]


def tree(groups: Sequence[int], near: int = 10, far: int = 50) -> list[list[int]]:
    """Levels of GPUs of which equal numbers in `groups` sit under one switch."""
    return [
        [0 if i == j else near if groups[i] == groups[j] else far for j in range(len(groups))]
        for i in range(len(groups))
    ]


def cliques(groups: Sequence[int], count: int) -> list[list[int]]:
    """`count` NVLinks between GPUs of equal numbers."""
    return [
        [count if i != j and groups[i] == groups[j] else 0 for j in range(len(groups))]
        for i in range(len(groups))
    ]


def places(chosen: tuple[Gpu, ...] | NoRoom) -> list[int]:
    assert not isinstance(chosen, NoRoom), chosen
    return [gpu.place for gpu in chosen]


def sampled(gpu: Gpu, **changes: object) -> Gpu:
    return gpu._replace(sample=gpu.sample._replace(**changes))  # type: ignore[arg-type]


def test_nvlink_comes_before_a_common_switch() -> None:
    # 0 and 1 share a switch, as do 2 and 3; NVLink joins 1 with 2.
    links = [[0, 0, 0, 0], [0, 0, 4, 0], [0, 4, 0, 0], [0, 0, 0, 0]]
    gpus = node_of(tree([0, 0, 1, 1]), links)
    assert places(choose(gpus, {}, 2, 0)) == [1, 2]
    assert places(choose(gpus, {"GPU-1": 1.0}, 2, 0)) == [2, 3]


def test_four_gpus_are_a_group_in_which_each_is_linked_with_each() -> None:
    groups = [0, 1, 0, 1, 0, 1, 0, 1]
    gpus = node_of(tree(groups, near=40), cliques(groups, 6))
    assert places(choose(gpus, {}, 4, 0)) == [0, 2, 4, 6]
    assert places(choose(gpus, {"GPU-2": 0.5}, 4, 0)) == [1, 3, 5, 7]


def test_without_nvlink_the_nearest_over_pcie() -> None:
    gpus = node_of([[0, 50, 30, 50], [50, 0, 50, 50], [30, 50, 0, 50], [50, 50, 50, 0]])
    assert places(choose(gpus, {}, 2, 0)) == [0, 2]


def test_what_the_driver_does_not_say_is_far_and_usable() -> None:
    gpus = node_of([[0, -1, -1], [-1, 0, 50], [-1, 50, 0]])
    assert distance(gpus[0], gpus[1]) > distance(gpus[1], gpus[2])
    assert places(choose(gpus, {}, 2, 0)) == [1, 2]
    assert places(choose(gpus, {}, 3, 0)) == [0, 1, 2]
    unknown = [sampled(gpu, memory_free_mb=UNKNOWN) for gpu in gpus]
    assert places(choose(unknown, {}, 1, 70_000)) == [0]


def test_one_gpu_is_taken_where_it_breaks_no_near_group() -> None:
    groups = [0, 0, 1, 0, 0]
    gpus = node_of(tree(groups, near=40), cliques(groups, 18))
    assert places(choose(gpus, {}, 1, 0)) == [2]
    assert places(choose(gpus, {"GPU-2": 1.0}, 2, 0)) == [0, 1]


def test_a_pair_is_taken_from_the_group_that_is_broken_already() -> None:
    groups = [0, 0, 0, 0, 1, 1, 1, 1]
    gpus = node_of(tree(groups), cliques(groups, 4))
    assert places(choose(gpus, {"GPU-7": 1.0}, 2, 0)) == [4, 5]


def test_shares_fill_a_gpu_before_they_open_another() -> None:
    gpus = node_of(tree([0, 0]))
    assert places(choose(gpus, {"GPU-1": 0.5}, 0.5, 0)) == [1]
    assert places(choose(gpus, {"GPU-1": 0.75}, 0.5, 0)) == [0]
    third = 1 / 3
    assert places(choose(gpus[:1], {"GPU-0": third + third}, third, 0)) == [0]


def test_a_refusal_names_what_is_in_the_way_of_each_gpu() -> None:
    one, two, three = node_of(tree([0, 0, 0]))
    refused = choose(
        [
            sampled(one, memory_free_mb=20_000.0, memory_foreign_mb=60_000.0),
            two,
            sampled(three, fault="Xid 79: it fell off the bus"),
        ],
        {"GPU-1": 0.5},
        1,
        72_000,
    )
    assert refused == NoRoom(
        "GPU 0 has 20000 MB free of the 72000 MB it needs, and others use 60000 MB; "
        "GPU 1 is taken by the cell's own units; GPU 2 is faulty (Xid 79: it fell off the bus)"
    )


def test_a_refusal_stays_short() -> None:
    gpus = [sampled(gpu, memory_free_mb=0.0) for gpu in node_of(tree([0] * 9))]
    refused = choose(gpus, {}, 1, 1000)
    assert isinstance(refused, NoRoom)
    assert refused.reason.endswith("and 5 more")


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.data())
def test_no_other_group_of_a_tree_is_nearer(groups: list[int], data: st.DataObject) -> None:
    has_links = data.draw(st.booleans())
    gpus = node_of(tree(groups), cliques(groups, 2) if has_links else ())
    count = data.draw(st.integers(1, len(gpus)))
    chosen = nearest(gpus, count)
    assert len(set(chosen)) == count

    def farthest(group: Sequence[Gpu]) -> int:
        return max((distance(one, other) for one, other in combinations(group, 2)), default=0)

    assert farthest(chosen) == min(farthest(group) for group in combinations(gpus, count))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, FREE_MB)), min_size=1, max_size=6))
def test_whoever_is_chosen_has_room(state: list[tuple[float, float]]) -> None:
    gpus = node_of(tree([0] * len(state)))
    gpus = [sampled(gpu, memory_free_mb=free) for gpu, (_, free) in zip(gpus, state, strict=True)]
    taken = {gpu.card.uuid: share for gpu, (share, _) in zip(gpus, state, strict=True)}
    for wanted in (0.25, 0.5, 1.0, 2.0):
        chosen = choose(gpus, taken, wanted, 40_000)
        fits = [gpu for gpu in gpus if taken[gpu.card.uuid] + min(wanted, 1) <= 1]
        fits = [gpu for gpu in fits if gpu.sample.memory_free_mb >= 40_000]
        if isinstance(chosen, NoRoom):
            assert len(fits) < max(wanted, 1)
        else:
            assert len(chosen) == max(wanted, 1)
            assert set(chosen) <= set(fits)
