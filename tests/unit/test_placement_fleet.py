"""The view: what counts as load, who is believed, what ends a reservation, when a sample is stale."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.fleet import make_card, make_load, make_request, make_view

from grid.errors import InvalidRequest, Saturated
from grid.words import UNKNOWN, UnitState
from placement.columns import Names
from placement.decide import decide
from placement.fleet import View
from placement.freshness import MASS_STALE_UNITS, ObservedClock, fresh
from placement.rules import Rules

GATEWAY = 90
FIRST, SECOND = make_request("req_1"), make_request("req_2")


def reserve(view: View, *requests: Any, unit_id: str = "u0", now_s: float = 0.0) -> None:
    for request in requests:
        view.reserve(request, unit_id, GATEWAY, now_s)


def load(view: View, unit_id: str = "u0") -> int:
    return view.loads()[unit_id]


# --- load counts every request once ---------------------------------------------------------


def test_a_reservation_counts_until_the_sample_holds_it_and_not_twice_then() -> None:
    card = make_card()
    view = make_view(card)
    reserve(view, FIRST, SECOND)
    assert load(view) == 2
    view.report([make_load(card, running=1, reservations=(FIRST.reservation_id,))], 1, 0.1)
    assert load(view) == 2
    view.report(
        [make_load(card, running=2, reservations=(FIRST.reservation_id, SECOND.reservation_id))], 1, 0.2
    )
    assert load(view) == 2


def test_settling_frees_the_place_at_once_seen_or_not() -> None:
    card = make_card()
    view = make_view(card)
    reserve(view, FIRST, SECOND)
    view.report([make_load(card, running=1, reservations=(FIRST.reservation_id,))], 1, 0.1)
    assert view.settle(FIRST.reservation_id, "done", 0.1)
    assert load(view) == 1
    assert view.settle(SECOND.reservation_id, "done", 0.1)
    assert load(view) == 0
    assert not view.settle(SECOND.reservation_id, "done", 0.1)
    view.report([make_load(card)], 1, 0.2)
    assert (load(view), view.reservations) == (0, 0)


def test_a_sample_never_brings_back_what_was_settled() -> None:
    card = make_card()
    view = make_view(card)
    reserve(view, FIRST)
    view.settle(FIRST.reservation_id, "done", 0.1)
    view.report([make_load(card, running=1, reservations=(FIRST.reservation_id,))], 1, 0.1)
    assert (load(view), view.reservations) == (1, 0)
    view.report([make_load(card)], 1, 0.2)
    assert load(view) == 0


def test_a_unit_that_stops_holding_a_reservation_ends_it() -> None:
    card = make_card()
    view = make_view(card)
    reserve(view, FIRST, SECOND)
    view.report([make_load(card, running=1, reservations=(FIRST.reservation_id,))], 1, 0.1)
    view.report([make_load(card)], 1, 0.2)
    assert (load(view), view.reservations) == (1, 1), "the one that is still under way stays"


def test_a_prompt_in_preparation_counts_before_the_engine_counts_it() -> None:
    card = make_card()
    view = make_view(card)
    reserve(view, FIRST)
    view.report([make_load(card, running=0, reservations=(FIRST.reservation_id,))], 1, 0.1)
    assert load(view) == 1


def test_a_unit_short_of_memory_is_given_no_more_than_it_says_it_takes() -> None:
    card = make_card(max_running=4)
    view = make_view(card)
    view.report([make_load(card, running=1, admits=2)], 1, 0.1)
    reserve(view, FIRST)
    with pytest.raises(Saturated, match="has 2 slots"):
        decide(SECOND, view, 0.1, random.Random(0))
    view.report([make_load(card, running=1, admits=4)], 1, 0.2)
    assert decide(SECOND, view, 0.2, random.Random(0)).chosen.unit_id == "u0"


def test_asking_again_for_a_reservation_counts_it_once() -> None:
    view = make_view(make_card(), make_card("u1"))
    reserve(view, FIRST)
    view.withdraw(FIRST.reservation_id)
    reserve(view, FIRST, unit_id="u1")
    assert (view.loads(), view.reservations) == ({"u0": 0, "u1": 1}, 1)


def test_tokens_on_their_way_are_charged_and_given_back() -> None:
    view = make_view(make_card())
    reserve(view, FIRST)
    columns = view.columns
    assert (columns.unseen_prompt_tokens[0], columns.unseen_kv_tokens[0]) == (100, 150)
    view.settle(FIRST.reservation_id, "cancelled", 0.0)
    assert (columns.unseen_prompt_tokens[0], columns.unseen_kv_tokens[0]) == (0, 0)


# --- leases, gateways, restarts -------------------------------------------------------------


def test_a_lease_ends_unless_samples_renew_it() -> None:
    card = make_card()
    view = make_view(card, lease_s=1.0)
    reserve(view, FIRST, SECOND)
    for tick in range(1, 13):
        view.report([make_load(card, running=1, reservations=(FIRST.reservation_id,))], 1, tick / 10)
        view.tick(tick / 10)
    assert (load(view), view.reservations) == (1, 1)


def test_an_expired_lease_leaves_what_the_sample_says() -> None:
    card = make_card()
    view = make_view(card, lease_s=1.0)
    reserve(view, FIRST)
    view.report([make_load(card, running=1, reservations=(FIRST.reservation_id,))], 1, 0.0)
    assert sum(view.tick(tick / 10) for tick in range(1, 12)) == 1
    assert (load(view), view.reservations) == (1, 0)
    view.report([make_load(card)], 1, 1.3)
    assert load(view) == 0


def test_a_lost_gateway_keeps_only_what_units_report() -> None:
    card = make_card()
    view = make_view(card)
    reserve(view, FIRST, SECOND)
    view.report([make_load(card, running=1, reservations=(FIRST.reservation_id,))], 1, 0.1)
    assert view.release_holder(GATEWAY) == 1
    assert (load(view), view.reservations) == (1, 1)
    view.report([make_load(card)], 1, 0.2)
    assert (load(view), view.reservations) == (0, 0)


def test_a_new_process_under_the_same_name_starts_empty() -> None:
    view = make_view(make_card())
    reserve(view, FIRST)
    reborn = make_card(incarnation="second")
    view.join(reborn, 2)
    assert (load(view), view.reservations) == (0, 0)
    view.report([make_load(make_card())], 1, 0.1)
    assert view.dropped == {"foreign_unit": 1}
    view.report([make_load(make_card())], 2, 0.1)
    assert view.dropped == {"foreign_unit": 1, "wrong_incarnation": 1}


def test_a_unit_that_only_lost_its_link_keeps_its_reservations() -> None:
    card = make_card()
    view = make_view(card)
    reserve(view, FIRST, SECOND)
    view.report([make_load(card, running=1, reservations=(FIRST.reservation_id,))], 1, 0.1)
    assert view.leave(1) == ("u0",)
    assert (view.units, view.reservations) == ([], 2)
    view.join(card, 5)
    assert load(view) == 2
    view.settle(FIRST.reservation_id, "done", 0.2)
    assert load(view) == 1, "no sample holds it, so nothing else may be taken off"
    view.report([make_load(card)], 5, 0.3)
    assert load(view) == 1


def test_a_link_that_ends_late_does_not_take_the_unit_that_moved_on() -> None:
    card = make_card()
    view = make_view(card)
    view.join(card, 2)
    assert view.leave(1) == ()
    assert view.leave(2) == ("u0",)


def test_rows_stay_right_when_one_in_the_middle_leaves() -> None:
    cards = [make_card(f"u{i}", model=f"m{i}", region=f"r{i % 2}") for i in range(40)]
    view = make_view(*cards)
    reserve(view, FIRST, unit_id="u39")
    for link in (5, 1, 39):
        view.leave(link)
    assert len(view.units) == view.columns.size == 37
    for row, unit in enumerate(view.units):
        assert view.row(unit.card.unit_id) == row
        assert view.columns.model[row] == view.models.number(unit.card.model)
        assert view.columns.region[row] == view.regions.number(unit.card.region)
    assert view.loads()["u39"] == 1
    assert (len(view.models), len(view.regions)) == (37, 2)


# --- who is believed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"running": -1},
        {"waiting": 1 << 50},
        {"kv_tokens_free": -5},
        {"steps": -1},
        {"state": 9},
        {"decode_ms_per_token": float("nan")},
        {"prefill_tokens_per_s": float("inf")},
        {"memory_used_mb": -2.0},
        {"compute_utilisation": -0.5},
    ],
)
def test_a_senseless_sample_is_dropped_and_the_unit_goes_stale(change: dict[str, Any]) -> None:
    card = make_card()
    view = View(Rules(), 0.0)
    view.join(card, 1)
    version = view.version
    view.report([make_load(card, **change)], 1, 0.0)
    assert view.dropped == {"bad_sample": 1}
    assert next(iter(change)) in view.last_flaw
    fresh_now, _ = view.fresh(0.0)
    assert fresh_now is not None
    assert not fresh_now[0]
    assert view.version == version


def test_unknown_readings_are_fine() -> None:
    card = make_card(prefill_tokens_per_s=UNKNOWN, decode_ms_per_token=UNKNOWN)
    assert make_view(card).dropped == {}


def test_samples_of_unknown_and_foreign_units_are_counted() -> None:
    view = make_view(make_card(), make_card("u1"))
    view.report([make_load(make_card("ghost")), make_load(make_card("u1"), running=3)], 1, 0.0)
    assert view.dropped == {"unknown_unit": 1, "foreign_unit": 1}
    assert load(view, "u1") == 0


@pytest.mark.parametrize(
    "change",
    [
        {"unit_id": ""},
        {"model": "m" * 300},
        {"task": 5},
        {"precision": 3},
        {"max_running": 0},
        {"max_waiting": -1},
        {"memory_grant_mb": -1},
        {"gpus": float("nan")},
        {"decode_ms_per_token": float("inf")},
    ],
)
def test_a_senseless_card_is_refused(change: dict[str, Any]) -> None:
    view = View(Rules(), 0.0)
    with pytest.raises(InvalidRequest, match=next(iter(change))):
        view.join(make_card(**change), 1)
    assert (view.units, view.dropped) == ([], {"bad_card": 1})


# --- version and snapshot -------------------------------------------------------------------


def test_version_rises_with_membership_and_state_only() -> None:
    card = make_card()
    view = View(Rules(), 0.0, first_version=10)
    seen = [view.version]

    def rose() -> bool:
        seen.append(view.version)
        return seen[-1] > seen[-2]

    view.join(card, 1)
    assert rose()
    view.report([make_load(card)], 1, 0.0)
    assert rose(), "starting -> ready"
    view.report([make_load(card, running=2)], 1, 0.1)
    reserve(view, FIRST)
    assert not rose()
    assert view.drain("u0", True)
    assert rose()
    assert view.drain("u0", True)
    assert not rose()
    view.report([make_load(card, state=int(UnitState.FAILED))], 1, 0.2)
    assert rose()
    view.leave(1)
    assert rose()
    view.leave(1)
    assert not rose()


def test_an_operators_drain_outlives_the_unit_and_shows_as_its_state() -> None:
    card = make_card()
    view = make_view(card)
    assert not view.drain("nobody", True)
    view.drain("u0", True)
    view.leave(1)
    view.join(card._replace(incarnation="second"), 2)
    view.report([make_load(card, incarnation="second")], 2, 0.0)
    assert view.snapshot(0.0)[0].load.state == UnitState.DRAINING
    view.drain("u0", False)
    assert view.snapshot(0.0)[0].load.state == UnitState.READY


def test_snapshot_tells_age_and_reservations_but_not_whose() -> None:
    card = make_card()
    view = make_view(card)
    view.join(make_card("u1"), 2)
    reserve(view, FIRST)
    view.report([make_load(card, running=1, reservations=(FIRST.reservation_id,))], 1, 0.0)
    first, second = view.snapshot(0.1)
    assert (first.reserved, first.sample_age_ms, first.load.reservations) == (1, pytest.approx(100.0), ())
    assert (second.reserved, second.sample_age_ms, second.load.state) == (0, UNKNOWN, UnitState.STARTING)


# --- freshness ------------------------------------------------------------------------------


def test_the_observed_clock_does_not_count_its_own_stalls() -> None:
    clock = ObservedClock(100.0)
    clock.tick(100.1)
    assert clock.read(100.15) == pytest.approx(0.15)
    assert clock.read(105.0) == pytest.approx(0.3)
    clock.tick(105.0)
    assert clock.read(105.05) == pytest.approx(0.35)
    assert clock.read(104.0) == pytest.approx(0.3), "a clock that jumps back adds nothing"


def test_a_stalled_observer_takes_nobody_for_stale() -> None:
    view = make_view(make_card())
    assert view.fresh(60.0)[0] is None


def test_one_silent_unit_is_stale_and_most_together_are_the_observers_fault() -> None:
    assert _fresh([9.9, 9.9, 9.0]) == ([True, True, False], False)
    assert _fresh([9.9, 9.0, 9.0]) == ([True, True, True], True)
    assert _fresh([9.0, 9.0, 9.0]) == ([True, True, True], True)


def test_units_that_went_stale_one_by_one_are_not_excused() -> None:
    assert _fresh([9.9, 9.0, 7.0, 5.0, 3.0]) == ([True, False, False, False, False], False)


def test_few_units_and_silent_ones_are_no_witnesses() -> None:
    assert MASS_STALE_UNITS == 3
    assert _fresh([9.0, 9.0]) == ([False, False], False)
    assert _fresh([-np.inf, -np.inf, 9.0, 9.9]) == ([False, False, False, True], False)
    assert _fresh([]) == ([], False)


def _fresh(sampled_s: list[float]) -> tuple[list[bool], bool]:
    mask, fault = fresh(np.array(sampled_s), observed_s=10.0, stale_after_s=0.5)
    return mask.tolist(), fault


# --- names ----------------------------------------------------------------------------------


def test_names_are_numbered_while_held() -> None:
    names = Names()
    a, b = names.hold("a"), names.hold("b")
    assert names.hold("a") == a
    names.drop(a)
    assert names.where(lambda name: name == "a")[a]
    names.drop(a)
    assert (names.number("a"), len(names)) == (-1, 1)
    assert names.hold("c") == a
    assert names.where(lambda name: name == "b").tolist() == [index == b for index in range(2)]
