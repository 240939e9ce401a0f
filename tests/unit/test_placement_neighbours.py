"""Units that share a GPU slow each other; how much is learned, and nobody is taken for a slow unit for it."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fleet import make_card, make_load, make_request, make_view

from grid.words import UnitCard
from placement.decide import decide
from placement.fleet import View
from placement.neighbours import MAX_LOOKED_AT, MAX_SLOWING, PRIOR_SLOWING, SharedGpu

GPU_A, GPU_B = "GPU-a", "GPU-b"
ALONE_MS = 20.0


def share(unit_id: str, gpu: str, **changes: object) -> UnitCard:
    return make_card(
        unit_id, gpus=0.5, gpu_uuids=(gpu,), gpu_type="H100", decode_ms_per_token=ALONE_MS, **changes
    )


class Interfering:
    """Units of which each takes `1 + slowing * neighbours at work` times as long as alone."""

    def __init__(self, slowing: float, *cards: UnitCard) -> None:
        self.cards, self.slowing = cards, slowing
        self.view = make_view(*cards, stale_after_s=1e9)
        self.rng = random.Random(1)
        self.now_s, self.steps = 0.0, 0

    def second(self, *running: int) -> None:
        """Each unit works on so many requests, and reports what its steps take."""
        for _ in range(10):
            self.now_s += 0.1
            self.steps += 1
            for link, (card, here) in enumerate(zip(self.cards, running, strict=True), start=1):
                others = sum(
                    count > 0 and other.gpu_uuids == card.gpu_uuids and other is not card
                    for other, count in zip(self.cards, running, strict=True)
                )
                step_ms = ALONE_MS * (1 + self.slowing * others) * self.rng.lognormvariate(0, 0.05)
                load = make_load(
                    card, running=here, steps=self.steps * bool(here), decode_ms_per_token=step_ms
                )
                self.view.report([load], link, self.now_s)
                self.view.tick(self.now_s)


def step_ms(view: View, unit_id: str) -> float:
    row = view.row(unit_id)
    assert row is not None
    speeds = view.units[row].speeds
    return speeds.step_ms + speeds.step_ms_per_request


@pytest.mark.slow
@pytest.mark.parametrize("slowing", [0.05, 0.8, 2.0])
def test_how_much_neighbours_slow_each_other_is_learned(slowing: float) -> None:
    world = Interfering(slowing, share("u0", GPU_A), share("u1", GPU_A))
    for second in range(120):
        world.second(1, second % 2)
    world.second(1, 1)
    assert step_ms(world.view, "u0") == pytest.approx(ALONE_MS * (1 + slowing), rel=0.12)
    world.second(1, 0)
    assert step_ms(world.view, "u0") == pytest.approx(ALONE_MS, rel=0.12)


def test_a_unit_alone_on_its_gpu_goes_before_one_with_a_neighbour_at_work() -> None:
    world = Interfering(0.8, share("u0", GPU_A), share("u1", GPU_A), share("u2", GPU_B))
    for _ in range(3):
        world.second(0, 1, 0)
    request = make_request(max_output_tokens=200)
    for seed in range(20):
        decision = decide(request, world.view, world.now_s, random.Random(seed))
        assert decision.chosen.unit_id == "u2", "before much is learned, the prior tells"


def test_neighbours_on_other_gpus_or_nodes_and_whole_gpus_change_nothing() -> None:
    cards = (
        share("u0", GPU_A),
        share("u1", GPU_B),
        share("u2", GPU_A, node_id="other"),
        make_card("u3", gpus=1.0, gpu_uuids=(GPU_A,)),
    )
    world = Interfering(0.0, *cards)
    before = step_ms(world.view, "u0")
    world.view.tick(0.0)
    for link, card in enumerate(cards[1:], start=2):
        world.view.report([make_load(card, running=4)], link, 0.1)
    world.view.tick(0.1)
    assert step_ms(world.view, "u0") == before


def test_who_leaves_slows_nobody() -> None:
    world = Interfering(0.8, share("u0", GPU_A), share("u1", GPU_A))
    world.second(1, 0)
    world.second(1, 1)
    assert step_ms(world.view, "u0") > 1.1 * ALONE_MS
    world.view.leave(2)
    world.view.tick(world.now_s + 0.1)
    assert step_ms(world.view, "u0") == pytest.approx(ALONE_MS, rel=0.1)


def test_many_shared_gpus_are_looked_at_in_turn() -> None:
    count = MAX_LOOKED_AT + 10
    cards = [share(f"u{number}-{half}", f"GPU-{number}") for number in range(count) for half in range(2)]
    view = make_view(*cards)
    for link, card in enumerate(cards, start=1):
        view.report([make_load(card, running=1)], link, 0.0)
    view.tick(0.1)
    view.tick(0.2)
    assert all(unit.speed.slowed.neighbours == 1 for unit in view.units)


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(0, 7)), max_size=50))
def test_any_observations_leave_a_slowing_that_can_be(observed: list[tuple[float, int]]) -> None:
    gpu = SharedGpu()
    for off, neighbours in observed:
        gpu.observed(off, neighbours)
        assert 0 <= gpu.slowing <= MAX_SLOWING
        assert math.isfinite(gpu.factor(neighbours))
    if all(neighbours == 0 for _, neighbours in observed):
        assert gpu.slowing == PRIOR_SLOWING, "nothing is learned of neighbours that do not work"
