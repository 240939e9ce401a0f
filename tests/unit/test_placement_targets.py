"""A placement counts what it does to others on the unit, the way there, and targets that it would miss."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.fleet import make_card, make_load, make_request, make_view

from grid.words import PlacementRequest
from placement.decide import decide
from placement.fleet import View
from placement.reports import Spent
from placement.targets import HARM, MISS_MS, TAIL, Targets, others_ms


def chosen(view: View, request: PlacementRequest) -> str:
    return decide(request, view, 0.0, random.Random(1)).chosen.unit_id


def priced(
    *,
    prompt: int = 1000,
    ttft_ms: float = 100.0,
    step_ms: float = 10.0,
    backlog_ms: float = 50.0,
    load: int = 1,
    felt_ms: float = 0.0,
) -> float:
    row = np.ones(1)
    return others_ms(
        *(Targets(), prompt, 10, ttft_ms * row, step_ms * row, backlog_ms * row, 50.0 * row, 0.05 * row),
        *(np.array([load]), felt_ms * row),
    ).item()


def test_a_prompt_delays_all_that_are_there() -> None:
    assert priced(load=8) - priced(load=4) == pytest.approx(4 * 50.0 * HARM)


def test_a_first_token_that_is_late_for_sure_costs_a_miss() -> None:
    assert priced(load=0, ttft_ms=5000.0) > MISS_MS
    assert priced(load=0, ttft_ms=2000.0) > 2 * priced(load=0, ttft_ms=1400.0)
    assert priced(load=0, ttft_ms=2000.0, prompt=20_000) < priced(load=0, ttft_ms=2000.0), (
        "longer prompt, later token"
    )


def test_a_long_wait_weighs_more_than_two_of_half_its_length() -> None:
    assert priced(load=0, ttft_ms=1000.0) == pytest.approx(4 * priced(load=0, ttft_ms=500.0))
    assert priced(load=0, ttft_ms=1000.0) == pytest.approx(TAIL * 1000.0**2 / 2250.0)


def test_gaps_that_are_too_long_cost_a_miss_with_or_without_others() -> None:
    assert priced(load=0, step_ms=200.0) == pytest.approx(MISS_MS, rel=0.01)
    quiet, busy = priced(backlog_ms=100.0), priced(backlog_ms=2000.0)
    assert busy > quiet, "those who answer would wait for all of the prompts ahead"


def test_gaps_that_those_who_run_there_feel_count_whatever_the_prediction() -> None:
    assert priced(load=0, felt_ms=200.0) == pytest.approx(MISS_MS, rel=0.01)
    assert priced(load=3, felt_ms=40.0) == priced(load=3), "far below the target they say nothing"


def test_the_felt_gap_is_the_time_of_a_step_while_requests_run() -> None:
    card = make_card()
    view = make_view(card)
    for number in range(1, 40):
        view.tick(number / 10)
        view.report([make_load(card, running=2, steps=2 * number)], 1, number / 10)
    assert view.columns.gap_ms[0] == pytest.approx(50.0, rel=0.05)
    for number in range(40, 140):
        view.tick(number / 10)
        view.report([make_load(card, running=0, steps=78)], 1, number / 10)
    assert view.columns.gap_ms[0] < 1.0


def test_a_far_unit_loses_against_a_near_one() -> None:
    cards = [make_card("near", region="eu-central-1"), make_card("far", region="us-east-1")]
    trips = {
        "": {"eu-central-1": 2.0, "us-east-1": 92.0},
        "us-west-2": {"eu-central-1": 140.0, "us-east-1": 60.0},
    }
    view = make_view(*cards, round_trip_ms=trips)
    assert chosen(view, make_request()) == "near"
    assert chosen(view, make_request()._replace(origin_region="us-west-2")) == "far"
    decision = decide(make_request(), view, 0.0, random.Random(1))
    assert (decision.chosen.network_ms, decision.next_best[0].network_ms) == (2.0, 92.0)


def test_the_way_is_not_taken_for_the_units_slowness() -> None:
    def first_token_ms(trip_ms: float, ttft_ms: float) -> float:
        view = make_view(make_card(), round_trip_ms={"": {"eu-central-1": trip_ms}})
        for number in range(60):
            request, now_s = make_request(f"req_{number}", attempt=1), 1.0 + number
            view.tick(now_s)
            view.report([make_load(make_card())], 1, now_s)
            view.reserve(request, "u0", 9, now_s)
            view.settle(request.reservation_id, "done", now_s, Spent(100, 50, ttft_ms, ttft_ms + 500.0))
        view.tick(100.0)
        return view.units[0].speeds.first_steps

    assert first_token_ms(200.0, 310.0) == pytest.approx(first_token_ms(0.0, 110.0))


def test_a_unit_whose_context_the_prompt_seems_to_exceed_comes_last() -> None:
    small, large = make_card("small"), make_card("large", context_tokens=8_000, decode_ms_per_token=40.0)
    view = make_view(small, large)
    assert chosen(view, make_request(prompt_tokens=100)) == "small"
    assert chosen(view, make_request(prompt_tokens=6_000)) == "large"
