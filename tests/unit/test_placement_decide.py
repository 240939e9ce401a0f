"""Cost, order and pick: cheapest first, preferred regions strictly, ties at random, refusals that explain."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from support.fleet import make_card, make_load, make_request, make_view

from grid.errors import InvalidRequest, NoEligibleUnit, Saturated, revive
from grid.words import UNKNOWN, Decision, PlacementRequest, Task, UnitState
from placement import cost
from placement.decide import MAX_LISTED, NEXT_BEST, decide
from placement.fleet import View
from placement.lengths import EXPECTED_OUTPUT_TOKENS
from placement.speeds import PROMPT_PER_OUTPUT


def choose(view: View, request: PlacementRequest, *, seed: int = 0, now_s: float = 0.0) -> Decision:
    return decide(request, view, now_s, random.Random(seed))


def predict(view: View, request: PlacementRequest, row: int = 0) -> dict[str, float]:
    costs = cost.predict(request, view.forecast(request), view.columns, np.array([row]))
    names = ("network_ms", "queue_ms", "prefill_ms", "decode_ms", "pressure_ms", "others_ms")
    assert sum(costs.parts_ms(0)) == pytest.approx(costs.total_ms[0])
    return dict(zip(names, costs.parts_ms(0), strict=True))


def step_ms(view: View, batch: int, kv_tokens: int, row: int = 0) -> float:
    speeds = view.units[row].speeds
    return speeds.step_ms + speeds.step_ms_per_request * batch + speeds.step_ms_per_kv_token * kv_tokens


# --- cost -----------------------------------------------------------------------------------


def test_cost_of_a_lone_request_is_its_prefill_and_its_decode() -> None:
    view = make_view(make_card())
    step = step_ms(view, batch=1, kv_tokens=150)
    assert step == pytest.approx(10.0, rel=0.01)
    assert predict(view, make_request()) == {
        "network_ms": cost.ROUND_TRIP_MS,
        "queue_ms": 0.0,
        "prefill_ms": pytest.approx(100.0 + step, rel=0.01),
        "decode_ms": pytest.approx(49 * step),
        "pressure_ms": 0.0,
        "others_ms": 0.0,
    }


def test_prompts_ahead_and_full_slots_make_a_queue() -> None:
    card = make_card()
    view = make_view(card)
    view.report([make_load(card, running=2, prefill_tokens_queued=300)], 1, 0.0)
    assert predict(view, make_request())["queue_ms"] == pytest.approx(300.0)
    view.reserve(make_request("req_0"), "u0", 9, 0.0)
    assert predict(view, make_request())["queue_ms"] == pytest.approx(400.0), "an unseen prompt is ahead, too"
    view.report([make_load(card, running=4, waiting=1)], 1, 0.0)
    costs = predict(view, make_request())
    # Three must end first (of six; four run at a time), and four end in the time of an answer.
    assert costs["queue_ms"] == pytest.approx(100.0 + costs["decode_ms"] * 50 / 49 * 3 / 4)


def test_decode_slows_with_what_shares_the_step() -> None:
    card = make_card()
    view = make_view(card)
    view.report([make_load(card, running=3, kv_tokens_free=94_000)], 1, 0.0)
    step = step_ms(view, batch=4, kv_tokens=6_150)
    # Each of three others computes its token, and the share of a prompt that comes in meanwhile, at 1 ms.
    assert step == pytest.approx(10.0 + 3 * (1 + PROMPT_PER_OUTPUT) + 0.53, abs=0.05)
    assert predict(view, make_request())["decode_ms"] == pytest.approx(49 * step)


def test_a_large_cap_is_not_taken_for_a_long_answer() -> None:
    view = make_view(make_card(context_tokens=200_000))
    request = make_request(max_output_tokens=100_000)
    step = step_ms(view, batch=1, kv_tokens=100 + EXPECTED_OUTPUT_TOKENS)
    assert predict(view, request)["decode_ms"] == pytest.approx((EXPECTED_OUTPUT_TOKENS - 1) * step)
    decision = choose(view, request)
    assert decision.expected_output_tokens == EXPECTED_OUTPUT_TOKENS
    assert EXPECTED_OUTPUT_TOKENS < decision.output_tokens_p90 < 100_000


def test_memory_pressure_grows_as_free_kv_shrinks() -> None:
    card = make_card()
    view = make_view(card)
    seen = []
    for free in (50_000, 10_150, 5_150, 150, 0):
        view.report([make_load(card, kv_tokens_free=free)], 1, 0.0)
        seen.append(predict(view, make_request())["pressure_ms"])
    assert seen == [0.0, 0.0, pytest.approx(75.0), pytest.approx(150.0), pytest.approx(150.0)]
    view.report([make_load(card, kv_tokens_free=0, kv_tokens_total=0)], 1, 0.0)
    assert predict(view, make_request())["pressure_ms"] == 0.0, "an engine without KV cache has no pressure"


@pytest.mark.parametrize("speed", [UNKNOWN, 0.0, 1e-300, 1e12])
def test_odd_speeds_never_make_a_cost_that_is_not_a_number(speed: float) -> None:
    view = make_view(make_card(prefill_tokens_per_s=speed, decode_ms_per_token=speed))
    parts = predict(view, make_request(prompt_tokens=1 << 39, max_output_tokens=1 << 39))
    assert all(np.isfinite(part) and part >= 0 for part in parts.values())


def test_a_cost_that_is_not_a_number_asserts() -> None:
    view = make_view(make_card())
    view.columns.next_step_ms[0] = np.nan
    with pytest.raises(AssertionError, match="not a"):
        choose(view, make_request())


# --- choosing -------------------------------------------------------------------------------


def test_the_cheapest_wins_and_the_next_best_follow_in_order() -> None:
    cards = [make_card(f"u{i}", decode_ms_per_token=50.0 - i) for i in range(20)]
    decision = choose(make_view(*cards), make_request())
    assert decision.chosen.unit_id == "u19"
    assert [candidate.unit_id for candidate in decision.next_best] == ["u18", "u17", "u16"]
    assert decision.chosen.total_ms < decision.next_best[0].total_ms
    assert len(decision.next_best) == NEXT_BEST


def test_a_fast_busy_gpu_can_beat_a_slow_idle_one() -> None:
    fast, slow = make_card("fast", decode_ms_per_token=5.0), make_card("slow", decode_ms_per_token=40.0)
    view = make_view(fast, slow)
    view.report([make_load(fast, running=2)], 1, 0.0)
    assert choose(view, make_request()).chosen.unit_id == "fast"
    view.report([make_load(fast, running=2, prefill_tokens_queued=2000)], 1, 0.0)
    assert choose(view, make_request()).chosen.unit_id == "slow"


def test_ties_are_broken_by_the_random_source_alone() -> None:
    view = make_view(*(make_card(f"u{i}") for i in range(8)))
    picks = Counter(choose(view, make_request(), seed=seed).chosen.unit_id for seed in range(400))
    assert len(picks) == 8
    assert max(picks.values()) < 100
    assert choose(view, make_request(), seed=7) == choose(view, make_request(), seed=7)
    decision = choose(view, make_request(), seed=7)
    assert decision.chosen.unit_id not in {candidate.unit_id for candidate in decision.next_best}


@pytest.mark.parametrize("task", [Task.GENERATE, Task.EMBED])
def test_simultaneous_requests_spread_evenly(task: Task) -> None:
    cards = [make_card(f"u{i}", task=int(task), max_running=64, max_waiting=0) for i in range(10)]
    view, rng = make_view(*cards), random.Random(1)
    output = 0 if task is Task.EMBED else 64
    for number in range(200):
        request = make_request(f"req_{number}", task=int(task), max_output_tokens=output)
        decision = decide(request, view, 0.0, rng)
        view.reserve(request, decision.chosen.unit_id, 9, 0.0)
        assert max(view.loads().values()) - min(view.loads().values()) <= 1
    assert set(view.loads().values()) == {20}


def test_the_decision_says_what_it_was_made_of() -> None:
    view = make_view(make_card(), make_card("u1", region="us-east-1"), aliases={"nice": "model-x"})
    decision = choose(view, make_request(model="nice", allowed_regions=("eu-central-1",)))
    assert decision.model == "model-x"
    assert decision.rejected_by_code == (("region", 1),)
    assert decision.rejections == ()
    assert decision.fleet_version == view.version
    assert decision.lease_ms == 30_000.0
    assert not decision.stale_view
    explained = choose(view, make_request(model="nice", allowed_regions=("eu-central-1",), explain=True))
    assert [(rejection.unit_id, rejection.code) for rejection in explained.rejections] == [("u1", "region")]
    assert view.reservations == 0


def test_an_explained_decision_lists_the_best_of_both_up_to_a_bound() -> None:
    fit = [make_card(f"fit-{n}") for n in range(MAX_LISTED + 5)]
    other = [make_card(f"other-{n}", model="other") for n in range(MAX_LISTED + 5)]
    drained = make_card("drained")
    view = make_view(*other, *fit, drained)
    view.drain("drained", draining=True)
    view.report([make_load(fit[0], prefill_tokens_queued=1000)], 2 * MAX_LISTED, 0.0)
    explained = choose(view, make_request(explain=True))
    listed = (explained.chosen, *explained.next_best)
    assert len({candidate.unit_id for candidate in listed}) == len(listed) == MAX_LISTED
    assert [c.total_ms for c in listed] == sorted(c.total_ms for c in listed)
    assert explained.candidates == MAX_LISTED + 5
    assert len(explained.rejections) == MAX_LISTED
    assert explained.rejections[0].unit_id == "drained", "nearest to being eligible"
    live = choose(view, make_request())
    assert (len(live.next_best), live.rejections, live.candidates) == (NEXT_BEST, (), MAX_LISTED + 5)


def test_a_refusal_explains_every_unit_when_asked() -> None:
    view = make_view(make_card("u0", model="other"), make_card("u1", region="us-east-1"))
    request = make_request(allowed_regions=("eu-central-1",))
    with pytest.raises(NoEligibleUnit) as plain:
        choose(view, request)
    assert "rejections" not in plain.value.details
    with pytest.raises(NoEligibleUnit) as explained:
        choose(view, request._replace(explain=True))
    assert [(unit, code) for unit, code, _ in explained.value.details["rejections"]] == [
        ("u1", "region"),
        ("u0", "model"),
    ]


def test_predicted_work_is_a_share_of_the_step_time() -> None:
    card = make_card(cu_factor=2.0, max_running=4)
    view = make_view(card)
    alone = choose(view, make_request()).chosen
    assert alone.cu_seconds == pytest.approx(2.0 * (alone.prefill_ms + alone.decode_ms) / 1e3)
    view.report([make_load(card, running=3)], 1, 0.0)
    shared = choose(view, make_request()).chosen
    assert shared.cu_seconds == pytest.approx(2.0 * (shared.prefill_ms + shared.decode_ms) / 4 / 1e3)


def test_a_decision_on_a_mass_stale_view_says_so_and_trusts_reservations() -> None:
    view = make_view(*(make_card(f"u{i}", max_running=1, max_waiting=0) for i in range(4)))
    for tick in range(1, 11):
        view.tick(tick / 10)
    taken = set()
    for number in range(4):
        request = make_request(f"req_{number}")
        decision = choose(view, request, now_s=1.0)
        assert decision.stale_view
        taken.add(decision.chosen.unit_id)
        view.reserve(request, decision.chosen.unit_id, 9, 1.0)
    assert len(taken) == 4
    with pytest.raises(Saturated):
        choose(view, make_request("req_5"), now_s=1.0)


# --- preferred regions ----------------------------------------------------------------------


def regional(*regions: str, **queued: int) -> View:
    """One unit a region, named after it, with the given prompt tokens (1 ms each) in its queue."""
    cards = [make_card(region, region=region) for region in regions]
    view = make_view(*cards)
    for link, card in enumerate(cards, start=1):
        load = make_load(card, prefill_tokens_queued=queued.get(card.region, 0))
        view.report([load], link, 0.0)
    return view


@pytest.mark.parametrize(
    ("queued", "prefer", "expected"),
    [
        ({"a": 1900}, ("a", "b"), ["a", "b", "c"]),
        ({"a": 2100}, ("a", "b"), ["b", "c", "a"]),
        ({"a": 2100, "b": 2100}, ("a", "b"), ["c", "a", "b"]),
        ({"a": 2300, "b": 2200, "c": 2100}, ("a", "b"), ["c", "b", "a"]),
        ({"b": 100}, ("nowhere", "b"), ["b", "a", "c"]),
        ({"a": 10, "b": 20}, ("c", "b", "c"), ["c", "b", "a"]),
        ({"a": 10, "b": 5}, (), ["c", "b", "a"]),
    ],
)
def test_preferred_regions_come_strictly_in_order_within_the_wait_bound(
    queued: dict[str, int], prefer: tuple[str, ...], expected: list[str]
) -> None:
    decision = choose(regional("a", "b", "c", **queued), make_request(prefer_regions=prefer))
    assert [c.unit_id for c in (decision.chosen, *decision.next_best)] == expected


def test_a_greedy_answer_goes_on_where_its_text_is_the_same_if_it_can() -> None:
    cards = [make_card(f"u-{n}", region="ab"[n % 2], fingerprint="xy"[n // 2]) for n in range(4)]
    view = make_view(*cards)
    wish = make_request(prefer_regions=("b", "a"), prefer_fingerprint="y")
    decision = choose(view, wish)
    order = [each.unit_id for each in (decision.chosen, *decision.next_best)]
    assert order == ["u-3", "u-2", "u-1", "u-0"]
    assert choose(view, wish._replace(exclude_units=("u-2", "u-3"))).chosen.unit_id == "u-1"
    assert choose(view, wish._replace(prefer_regions=(), exclude_units=("u-3",))).chosen.unit_id == "u-2"


def test_a_preference_never_widens_residency() -> None:
    view = regional("a", "b")
    request = make_request(prefer_regions=("a",), allowed_regions=("b",))
    assert choose(view, request).chosen.unit_id == "b"
    with pytest.raises(NoEligibleUnit):
        choose(view, make_request(prefer_regions=("a",), allowed_regions=("c",)))


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "code", "ever", "retryable"),
    [
        ({"model": "none"}, "model", False, True),  # a unit of that model may be on its way
        ({"allowed_regions": ("mars",)}, "region", False, False),
        ({"min_memory_mb": 1_000_000}, "memory", False, False),
        ({"exclude_units": ("u0", "u1")}, "excluded", True, True),
    ],
)
def test_no_eligible_unit_says_why_and_whether_waiting_could_help(
    change: dict[str, Any], code: str, ever: bool, retryable: bool
) -> None:
    view = make_view(make_card(), make_card("u1"))
    with pytest.raises(NoEligibleUnit) as refused:
        choose(view, make_request(**change))
    details = refused.value.details
    assert details["rejected_by_code"] == {code: 2}
    assert details["ever"] is ever
    # As the gateway sees it, over the link.
    told = revive("no_eligible_unit", "none", details=details)
    assert (refused.value.retryable, told.retryable) == (retryable, retryable)
    assert details["reasons"][0].startswith("u0 ")
    assert "1 more" in details["reasons"][0]
    assert details["reasons"][0] in refused.value.message


def test_an_output_that_no_context_holds_is_the_callers_mistake() -> None:
    view = make_view(make_card(), make_card("u1", context_tokens=4096), make_card("u2", model="other"))
    with pytest.raises(
        InvalidRequest, match=r"^max_output_tokens: 5000 .* 4096 tokens; ask for at most 4095$"
    ) as refused:
        choose(view, make_request(max_output_tokens=5000))
    assert refused.value.param == "max_output_tokens"
    assert not refused.value.retryable
    assert refused.value.details["rejected_by_code"] == {"model": 1, "context": 2}


def test_a_context_that_only_waits_for_its_unit_is_not_a_mistake() -> None:
    large = make_card("u1", context_tokens=100_000)
    view = make_view(make_card(), large)
    view.report([make_load(large, state=int(UnitState.FAILED))], 2, 0.0)
    with pytest.raises(NoEligibleUnit) as refused:
        choose(view, make_request(max_output_tokens=5000))
    assert refused.value.details["ever"]
    assert refused.value.retryable


def test_a_cell_without_units_says_so() -> None:
    with pytest.raises(NoEligibleUnit, match="no units") as refused:
        choose(make_view(), make_request())
    assert refused.value.details == {
        "rejected_by_code": {},
        "reasons": ["the cell has no units: start one for the model, and see `grid units`"],
        "ever": False,
    }


def test_reasons_name_the_nearest_rule_first_and_are_few() -> None:
    view = make_view(*(make_card(f"m{i}", model=f"m{i}") for i in range(30)), make_card(region="mars"))
    with pytest.raises(NoEligibleUnit) as refused:
        choose(view, make_request(allowed_regions=("eu-central-1",)))
    reasons = refused.value.details["reasons"]
    assert [reason.split()[0] for reason in reasons] == ["u0", "m0"]
    assert "29 more" in reasons[1]


def test_a_full_fleet_is_saturated_with_a_time_to_come_back() -> None:
    card = make_card(max_running=2, max_waiting=0)
    view = make_view(card, make_card("u1", model="other"))
    view.report([make_load(card, running=2)], 1, 0.0)
    with pytest.raises(Saturated) as refused:
        choose(view, make_request())
    # One of two slots frees in half the time of an answer, to which our own KV adds a little.
    assert refused.value.retry_after_s == pytest.approx(50 * step_ms(view, 2, 0) / 2 / 1e3, rel=0.01)
    assert refused.value.details["rejected_by_code"] == {"model": 1, "saturated": 1}
    assert refused.value.details["ever"]


def test_a_silent_fleet_is_saturated_not_idle() -> None:
    view = make_view(make_card())
    for tick in range(1, 11):
        view.tick(tick / 10)
    with pytest.raises(Saturated, match="last reported") as refused:
        choose(view, make_request(), now_s=1.0)
    assert refused.value.retry_after_s == 0.5


@pytest.mark.parametrize(
    "change", [{"prompt_tokens": -1}, {"max_output_tokens": 1 << 60}, {"min_memory_mb": -5}]
)
def test_senseless_counts_are_the_callers_mistake(change: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        choose(make_view(make_card()), make_request(**change))
    assert refused.value.param == next(iter(change))
