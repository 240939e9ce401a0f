"""Deciding by the last view: the same filters, two choices, and what was decided here counts."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from support.fleet import make_card, make_load, make_request

from grid.errors import NoEligibleUnit, Overloaded
from grid.wire.messages import Fleet
from grid.words import UNKNOWN, FleetUnit, UnitState
from placement.fallback import LastView
from placement.rules import Rules


def pushed(
    name: str = "u0", *, reserved: int = 0, age_ms: float = 1e6, isolated: str = "", **card: Any
) -> FleetUnit:
    made = make_card(name, **card)
    return FleetUnit(made, make_load(made), reserved, age_ms, isolated)


def last(*units: FleetUnit, **rules: Any) -> LastView:
    return LastView(Fleet(0, 77, units), Rules(**rules))


def choose(view: LastView, number: int = 1, *, even_full: bool = False, **request: Any) -> str:
    asked = make_request(f"req_{number}", **request)
    return view.decide(asked, random.Random(number), even_full=even_full).chosen.unit_id


def test_samples_of_any_age_will_do_and_the_decision_says_that_the_view_is_old() -> None:
    decision = last(pushed(age_ms=1e9)).decide(make_request(), random.Random(0))
    assert (decision.chosen.unit_id, decision.stale_view, decision.fleet_version) == ("u0", True, 77)


@pytest.mark.parametrize(
    ("unit", "request_"),
    [
        (pushed(region="us-east-1"), {"allowed_regions": ("eu-central-1",)}),
        (pushed(model="another"), {}),
        (pushed(), {"avoid_models": ("model-x",)}),
        (pushed(), {"exclude_units": ("u0",)}),
        (pushed(memory_grant_mb=1000), {"min_memory_mb": 2000}),
        (pushed(isolated="failed 2 of 20"), {}),
        (pushed()._replace(load=make_load(make_card(), state=int(UnitState.DRAINING))), {}),
        (pushed()._replace(load=make_load(make_card(), state=int(UnitState.FAILED))), {}),
    ],
)
@pytest.mark.parametrize("even_full", [False, True])
def test_all_other_filters_hold(unit: FleetUnit, request_: dict[str, Any], even_full: bool) -> None:
    with pytest.raises(NoEligibleUnit):
        choose(last(unit), even_full=even_full, **request_)


def test_a_unit_that_never_reported_gets_nothing() -> None:
    with pytest.raises(Overloaded, match="has not reported"):
        choose(last(pushed(age_ms=UNKNOWN)))


def test_an_alias_stands_for_its_model() -> None:
    assert choose(last(pushed(), aliases={"gpt": "model-x"}), model="gpt") == "u0"


def test_a_full_unit_is_tried_only_where_that_is_asked_for() -> None:
    view = last(pushed(max_running=2, reserved=2))
    with pytest.raises(Overloaded):
        choose(view)
    assert choose(view, even_full=True) == "u0"


def test_a_unit_on_standby_is_taken_in_where_no_other_has_room() -> None:
    load = make_load(make_card("u1"), state=int(UnitState.STANDBY))
    spare = pushed("u1", max_running=1)._replace(load=load)
    view = last(pushed(max_running=1), spare, pushed("u2", isolated="failed 2 of 20"))
    assert [choose(view, number) for number in range(2)] == ["u0", "u1"]
    with pytest.raises(Overloaded):
        choose(view, 2)
    assert view.decide(make_request("req_3"), random.Random(0), even_full=True).fleet_version == 77


def test_what_was_decided_here_fills_units_until_it_is_settled() -> None:
    view = last(pushed(max_running=1), pushed("u1", max_running=1))
    assert {choose(view, 1), choose(view, 2)} == {"u0", "u1"}
    with pytest.raises(Overloaded):
        choose(view, 3)
    view.settle("req_1/s/0")
    view.settle("req_unknown/s/0")
    choose(view, 3)


def test_a_dry_run_counts_for_nothing() -> None:
    view = last(pushed(max_running=1))
    choose(view, 1, dry_run=True)
    assert choose(view, 2) == "u0"


def test_asked_again_a_request_counts_once() -> None:
    view = last(pushed(max_running=1))
    choose(view, 1)
    view.settle("req_1/s/0")
    assert choose(view, 1) == "u0"


def test_work_is_spread_and_the_loaded_unit_gets_little() -> None:
    names = [f"u{number}" for number in range(8)]
    units = [pushed(name, max_running=512, reserved=300 if name == "u0" else 0) for name in names]
    view = last(*units)
    counts = Counter(choose(view, number) for number in range(200))
    assert counts["u0"] <= 10
    assert min(counts[name] for name in names[1:]) >= 15


def test_a_preferred_region_comes_first() -> None:
    view = last(*(pushed(f"u{n}", region="us" if n else "eu") for n in range(6)))
    assert {choose(view, number, prefer_regions=("eu",)) for number in range(4)} == {"u0"}


def test_an_answer_goes_on_on_its_own_variant_before_all_else() -> None:
    view = last(
        *(
            pushed(f"u{n}", region="us" if n == 0 else "eu", fingerprint="a" if n < 2 else "b")
            for n in range(9)
        )
    )
    wanted = {"prefer_fingerprint": "a", "prefer_regions": ("eu",)}
    assert {choose(view, number, **wanted) for number in range(4)} == {"u1"}
    assert choose(view, 5, prefer_fingerprint="none has it") in {f"u{n}" for n in range(9)}
