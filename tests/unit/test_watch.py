"""What a gateway sees of its streams' units: pace, the budget of hedges, the fleet."""

from __future__ import annotations

import pytest
from support.fleet import make_card, make_load

from gateway.pipeline import watch as module
from gateway.pipeline.watch import HedgeBudget, Watch
from grid.wire.messages import Fleet
from grid.words import FleetUnit, UnitState


class Told:
    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def leave_unit(self, unit_id: str) -> None:
        self.said.append(("leave", unit_id))

    def doubt_unit(self, unit_id: str) -> None:
        self.said.append(("doubt", unit_id))


def fleet(**states: UnitState) -> Fleet:
    cards = [(make_card(unit_id), state) for unit_id, state in states.items()]
    return Fleet(
        0, 1, tuple(FleetUnit(card, make_load(card, state=int(state)), 0, 1.0) for card, state in cards)
    )


def test_wasted_hedges_are_a_share_of_the_streams() -> None:
    budget = HedgeBudget()
    wasted = sum(budget.spend() for _ in range(1000))
    assert wasted == module.HEDGE_BURST
    for _ in range(1000):
        budget.earn()
    assert sum(budget.spend() for _ in range(1000)) == pytest.approx(1000 * module.HEDGE_SHARE, abs=1)


def test_hedges_that_were_right_cost_nothing() -> None:
    budget = HedgeBudget()
    for _ in range(1000):
        assert budget.spend()
        budget.refund()
    assert (budget.spent, budget.refunded, budget.refused) == (1000, 1000, 0)


def test_a_slow_unit_may_be_silent_for_longer_and_a_quick_one_never_for_less_than_a_second() -> None:
    watch = Watch()
    assert watch.stuck_after_s("new") == module.STUCK_LEAST_S
    watch.said("quick", 0.01)
    assert watch.stuck_after_s("quick") == module.STUCK_LEAST_S
    watch.said("slow", 2.0)
    watch.said("slow", 0.5)
    assert watch.stuck_after_s("slow") == pytest.approx(2.0 * module.GAP_MEMORY * module.STUCK_FACTOR)
    for _ in range(500):
        watch.said("slow", 0.05)
    assert watch.stuck_after_s("slow") == module.STUCK_LEAST_S, "a pace is forgotten"


def test_the_units_whose_pace_is_known_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNITS", 2)
    watch = Watch()
    for unit_id in ("a", "b", "c"):
        watch.said(unit_id, 9.0)
    assert [watch.stuck_after_s(each) for each in ("a", "c")] == [module.STUCK_LEAST_S, 72.0]


def test_streams_hear_of_units_that_drain_fail_or_leave() -> None:
    watch, on_a, on_b = Watch(), Told(), Told()
    ready = UnitState.READY
    watch.fleet_changed(fleet(a=ready, b=ready, c=ready))
    watch.begins("a", on_a)
    watch.begins("b", on_b)
    watch.fleet_changed(fleet(a=UnitState.DRAINING, b=UnitState.FAILED, c=ready))
    assert (on_a.said, on_b.said) == ([("leave", "a")], [("doubt", "b")])
    watch.fleet_changed(fleet(b=ready, c=ready))
    assert on_a.said[1:] == [("doubt", "a")]
    watch.ends("a", on_a)
    watch.ends("b", on_b)
    watch.fleet_changed(fleet(a=UnitState.DRAINING, b=UnitState.FAILED))
    assert (len(on_a.said), len(on_b.said)) == (2, 1), "whoever has ended hears nothing"


def test_an_empty_view_is_that_of_a_placement_actor_that_has_just_started() -> None:
    watch, on_a = Watch(), Told()
    watch.fleet_changed(fleet(a=UnitState.READY, b=UnitState.READY))
    watch.begins("a", on_a)
    watch.fleet_changed(fleet())
    assert on_a.said == []
