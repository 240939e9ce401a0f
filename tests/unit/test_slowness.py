"""Slow units: far slower than they were and than those of their kind are, for a while."""

from __future__ import annotations

import math
import random

import pytest
from support.fleet import make_card, make_load, make_view

from placement.fleet import View
from placement.slowness import FAR, FAR_S, LEAST_OBSERVATIONS, Slowness

KIND = "a kind"
USUAL_S = 60


class Kind:
    """Units that each report once a second; `factors` say how slow each is."""

    def __init__(self, units: int) -> None:
        self.slowness = Slowness()
        self.factors = dict.fromkeys((f"u{number}" for number in range(units)), 1.0)
        self.rng = random.Random(0)
        self.now_s = 0.0

    def run(self, seconds: float) -> list[str]:
        found = []
        for _ in range(round(seconds)):
            self.now_s += 1.0
            for unit_id, factor in self.factors.items():
                off = math.log(factor) + self.rng.gauss(0.0, 0.3)
                self.slowness.observed(unit_id, KIND, off, self.now_s)
            found += [slow.unit_id for slow in self.slowness.found(self.now_s)]
        return found


def test_a_unit_that_becomes_far_slower_is_found_once() -> None:
    kind = Kind(4)
    assert kind.run(USUAL_S) == []
    kind.factors["u1"] = 10.0
    assert kind.run(FAR_S + 8) == ["u1"]


@pytest.mark.parametrize("factor", [1.5, 3.0])
def test_one_that_is_merely_slower_is_left_to_its_price(factor: float) -> None:
    kind = Kind(4)
    kind.run(USUAL_S)
    kind.factors["u1"] = factor
    assert kind.run(120) == []


def test_all_that_become_slow_together_are_not_to_blame() -> None:
    kind = Kind(4)
    kind.run(USUAL_S)
    kind.factors = dict.fromkeys(kind.factors, 10.0)
    assert kind.run(60) == []


def test_one_that_always_was_slow_is_as_it_was() -> None:
    kind = Kind(4)
    kind.factors["u1"] = 10.0
    assert kind.run(USUAL_S + 60) == []


def test_a_moment_is_no_fault() -> None:
    kind = Kind(4)
    kind.run(USUAL_S)
    for _ in range(10):
        kind.factors["u1"] = 30.0
        assert kind.run(4) == []
        kind.factors["u1"] = 1.0
        assert kind.run(20) == []


def test_of_two_nobody_can_say_who_is_slow() -> None:
    kind = Kind(2)
    kind.run(USUAL_S)
    kind.factors["u1"] = 10.0
    assert kind.run(60) == []


def test_who_has_left_or_does_nothing_is_forgotten() -> None:
    kind = Kind(4)
    kind.run(USUAL_S)
    kind.factors["u1"] = 10.0
    kind.run(5)
    del kind.factors["u1"]
    kind.run(2)
    kind.slowness.leave("u1")
    kind.slowness.leave("u1")
    assert kind.run(60) == []


def isolated(view: View) -> dict[str, str]:
    return dict(view.isolated_units())


def test_in_the_view_a_slow_unit_is_isolated_with_the_reason() -> None:
    cards = [make_card(f"u{number}") for number in range(4)]
    view = make_view(*cards, stale_after_s=1e9)
    steps, now_s = 0, 0.0
    for second in range(LEAST_OBSERVATIONS + 60):
        steps += 100
        for link, card in enumerate(cards, start=1):
            slow = card.unit_id == "u2" and second >= LEAST_OBSERVATIONS + 10
            load = make_load(card, running=2, steps=steps, decode_ms_per_token=12.0 * (9.0 if slow else 1.0))
            view.report([load], link, now_s)
        for _ in range(10):
            now_s += 0.1
            view.tick(now_s)
        if isolated(view):
            break
    assert set(isolated(view)) == {"u2"}
    assert "its steps take" in isolated(view)["u2"]
    assert math.exp(FAR) == pytest.approx(4.0)
