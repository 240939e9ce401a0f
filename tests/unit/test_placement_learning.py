"""Answers' lengths and units' speeds are learned from what requests spent, and noise attracts nobody."""

from __future__ import annotations

import csv
import json
import math
import random
import statistics
from collections.abc import Callable
from typing import TextIO

import hypothesis.strategies as st
import pytest
from hypothesis import given
from support.fleet import make_card, make_load, make_request, make_view
from support.shared import data_file

from placement import lengths, speeds
from placement.decide import decide
from placement.factors import Factor, TwoTerms, learn
from placement.fleet import View
from placement.learning import STUDY_S
from placement.lengths import OutputLengths, Prompt
from placement.reports import Spent
from placement.speeds import LearnedSpeeds, Ran, Speeds, UnitSpeed

GATEWAY = 90


# --- lengths --------------------------------------------------------------------------------


def taught(*answers: int, model: str = "m", pipeline: str = "p", tenant: str = "t") -> OutputLengths:
    learned = OutputLengths()
    for answer in answers:
        learned.take(tenant, pipeline, model, answer)
    return learned


def test_nothing_known_is_the_prior() -> None:
    unknown = OutputLengths().forecast("t", "p", "m")
    assert unknown.mean_tokens == lengths.EXPECTED_OUTPUT_TOKENS
    assert 2 * unknown.mean_tokens < unknown.p90_tokens < 3 * unknown.mean_tokens


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
def test_nine_of_ten_answers_are_within_the_forecast(spread: float) -> None:
    rng, learned, within = random.Random(1), OutputLengths(), 0
    for _ in range(3_000):
        answer = max(1, round(rng.lognormvariate(4.0, spread)))
        within += answer <= learned.forecast("t", "p", "m").p90_tokens
        learned.take("t", "p", "m", answer)
    assert within >= 0.88 * 3_000
    if spread:
        assert within <= 0.93 * 3_000
    expected = math.exp(4.0 + spread**2 / 2)
    assert learned.forecast("t", "p", "m").mean_tokens == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(
    ("trace", "lengths_of"),
    [
        (
            "azure2023_code.csv",
            lambda lines: [int(row["GeneratedTokens"]) for row in csv.DictReader(lines)],
        ),
        ("mooncake_synthetic.jsonl", lambda lines: [json.loads(line)["output_length"] for line in lines]),
    ],
)
def test_nine_of_ten_answers_of_a_real_service_are_within_the_forecast(
    trace: str, lengths_of: Callable[[TextIO], list[int]]
) -> None:
    with data_file(f"traces/{trace}").open() as lines:
        answers = lengths_of(lines)
    learned, within = OutputLengths(), 0
    for answer in answers:
        within += answer <= learned.forecast("t", "p", "m").p90_tokens
        learned.take("t", "p", "m", answer)
    assert 0.85 <= within / len(answers) <= 0.95


def test_a_change_of_habit_is_followed() -> None:
    learned = taught(*[20] * 2_000, *[200] * 1_000)
    assert learned.forecast("t", "p", "m").mean_tokens == pytest.approx(200, rel=0.15)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(("t", "new", "m"), 40), (("new", "p", "m"), 200), (("new", "new", "m"), 200), (("t", "p", "new"), 400)],
)
def test_who_is_new_is_taken_for_the_next_wider_group(asked: tuple[str, str, str], expected: int) -> None:
    learned = OutputLengths()
    for _ in range(600):
        learned.take("t", "p", "m", 40)
        learned.take("u", "p", "m", 360)
        learned.take("u", "p", "n", 800)
    assert learned.forecast(*asked).mean_tokens == pytest.approx(expected, rel=0.15)


def test_a_few_answers_of_ones_own_soon_count_more_than_others() -> None:
    learned = taught(*[1_000] * 300)
    for _ in range(lengths.LEAN_ON):
        learned.take("t", "short", "m", 10)
    assert learned.forecast("t", "short", "m").mean_tokens == pytest.approx(505, rel=0.1)
    for _ in range(20 * lengths.LEAN_ON):
        learned.take("t", "short", "m", 10)
    assert learned.forecast("t", "short", "m").p90_tokens == 10
    assert learned.forecast("t", "p", "m").mean_tokens > 900, "the long ones' own group stays"


def test_answers_of_no_token_teach_nothing_and_huge_ones_are_bounded() -> None:
    assert len(taught(0, -5)) == 0
    assert taught(*[1 << 39] * 300).forecast("t", "p", "m").p90_tokens <= 2 * lengths.MAX_LENGTH


def test_groups_are_bounded_and_those_in_use_stay() -> None:
    learned = OutputLengths()
    for number in range(lengths.MAX_GROUPS + 100):
        learned.take("t", f"p{number}", "m", 7)
        learned.take("t", "busy", "m", 7)
    assert len(learned) == lengths.MAX_GROUPS
    assert learned.forecast("t", "busy", "m").p90_tokens == 7


def test_weights_never_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "MAX_WEIGHT", 4.0)
    assert taught(*[50] * 3_000).forecast("t", "p", "m").mean_tokens == pytest.approx(50, rel=0.06)


# --- speeds ---------------------------------------------------------------------------------


def true_run(rng: random.Random, slower: float, noise: float) -> Ran:
    """One request on a unit that is `slower` than its card says (10 ms a step, 1 ms a prompt token)."""
    batch, prompt = rng.randint(1, 4), rng.randint(50, 500)
    step_ms = slower * (10 + (batch - 1) * 3) * rng.lognormvariate(0, noise)
    ttft_ms = (step_ms + slower * prompt) * rng.lognormvariate(0, noise)
    return Ran(prompt, prompt // 2, ttft_ms, step_ms, batch, 0.0)


def first_ms(learned: Speeds, prompt_tokens: int) -> float:
    step_ms = learned.step_ms + learned.step_ms_per_request
    return learned.first_steps * step_ms + learned.prefill_ms_per_token * prompt_tokens


@pytest.mark.parametrize("slower", [0.05, 0.3, 1.0, 3.0, 20.0])
def test_a_wrong_prior_is_corrected_within_fifty_requests(slower: float) -> None:
    rng, learner = random.Random(2), LearnedSpeeds()
    unit = learner.join(make_card())
    for _ in range(50):
        unit.ran(true_run(rng, slower, noise=0.1))
        learner.publish()
    learned = unit.speeds
    assert learned.step_ms + learned.step_ms_per_request == pytest.approx(10 * slower, rel=0.25)
    assert first_ms(learned, 300) == pytest.approx(310 * slower, rel=0.15)


def learn_together(slower: list[float], runs: int, noise: float = 0.25) -> list[UnitSpeed]:
    rng, learner = random.Random(3), LearnedSpeeds()
    units = [learner.join(make_card(f"u{number}")) for number in range(len(slower))]
    for _ in range(runs):
        for unit, by in zip(units, slower, strict=True):
            unit.ran(true_run(rng, by, noise))
        learner.publish()
    return units


def test_equal_units_cost_exactly_the_same_whatever_they_measured() -> None:
    assert len({unit.speeds for unit in learn_together([1.3] * 8, runs=40)}) == 1
    assert len({unit.speeds for unit in learn_together([1.3] * 8, runs=300, noise=0.6)}) == 1


def test_a_unit_that_is_slower_for_sure_is_told_apart() -> None:
    units = learn_together([1.0, 1.0, 1.0, 1.0, 1.0, 1.4], runs=60)
    *equal, slow = [unit.speeds.step_ms + unit.speeds.step_ms_per_request for unit in units]
    assert slow / sorted(equal)[2] == pytest.approx(1.4, rel=0.1)


def test_a_new_unit_starts_with_what_its_kind_knows() -> None:
    learner, rng = LearnedSpeeds(), random.Random(4)
    first = learner.join(make_card())
    for _ in range(50):
        first.ran(true_run(rng, 3.0, noise=0.1))
    learner.publish()
    first.leave()
    again, other = learner.join(make_card("u1")), learner.join(make_card("u2", gpu_type="L4"))
    assert again.speeds.step_ms + again.speeds.step_ms_per_request == pytest.approx(30, rel=0.15)
    assert other.speeds.step_ms + other.speeds.step_ms_per_request == pytest.approx(10)


def test_an_outlier_moves_little_and_nonsense_stays_finite() -> None:
    [unit] = learn_together([1.0], runs=200)
    before = unit.speeds
    unit.ran(Ran(100, 50, 1e12, 1e12, 4, 1e12))
    unit.stepped(1 << 39, 1 << 39, 1e-9)
    assert unit.moved() is False
    assert unit.kind.speeds().prefill_ms_per_token == pytest.approx(before.prefill_ms_per_token, rel=0.1)
    for _ in range(2_000):
        unit.ran(Ran(1 << 39, 1, 1e12, 1e12, 64, 1e12))
    unit.kind.moved()
    assert all(math.isfinite(value) for value in unit.speeds)
    assert unit.speeds.step_ms + unit.speeds.step_ms_per_request > 0


def test_kinds_without_units_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "MAX_KINDS", 3)
    learner = LearnedSpeeds()
    kept = learner.join(make_card("u0", model="kept"))
    for number in range(10):
        learner.join(make_card(f"u{number}", model=f"m{number}")).leave()
    assert learner.join(make_card("u9", model="kept")).kind is kept.kind


def test_answers_that_were_cut_off_count_among_the_longer_ones() -> None:
    rng, whole, cut = random.Random(0), OutputLengths(), OutputLengths()
    for _ in range(2_000):
        length = max(1, round(rng.lognormvariate(5, 0.7)))
        cap = rng.choice([100, 200, 400, 4_000])
        whole.take("t", "p", "m", length)
        cut.take("t", "p", "m", min(length, cap), is_cut=length >= cap)
    truth, learned = whole.forecast("t", "p", "m"), cut.forecast("t", "p", "m")
    assert learned.mean_tokens == pytest.approx(truth.mean_tokens, rel=0.15)
    assert learned.p90_tokens == pytest.approx(truth.p90_tokens, rel=0.15)


def test_answers_that_are_always_cut_off_say_nothing_of_their_end() -> None:
    learned = OutputLengths()
    for _ in range(500):
        learned.take("t", "p", "m", 20, is_cut=True)
    assert learned.forecast("t", "p", "m").mean_tokens > 200
    mixed = OutputLengths()
    for number in range(500):
        mixed.take("t", "p", "m", 20 if number % 2 else 10, is_cut=bool(number % 2))
    assert 100 < mixed.forecast("t", "p", "m").mean_tokens < 300


@given(answers=st.lists(st.tuples(st.integers(1, 1 << 21), st.booleans()), max_size=40))
def test_any_answers_make_a_distribution(answers: list[tuple[int, bool]]) -> None:
    learned = OutputLengths()
    for length, is_cut in answers:
        learned.take("t", "p", "m", length, is_cut=is_cut)
        told = learned.forecast("t", "p", "m")
        assert 0 < told.p90_tokens <= 2 * lengths.MAX_LENGTH
        assert 0 < told.mean_tokens <= 2 * lengths.MAX_LENGTH
        group = learned._groups["t", "p", "m"]
        assert group.shares.sum() == pytest.approx(1)
        assert group.shares.min() >= 0


def test_prompts_are_scaled_by_what_units_counted_of_their_like() -> None:
    learned = OutputLengths()
    for _ in range(50):
        learned.take("t", "chat", "m", 10, prompt=Prompt(400, 300))
        learned.take("t", "code", "m", 10, prompt=Prompt(400, 600))
    assert learned.forecast("t", "chat", "m").prompt_scale == pytest.approx(0.75, abs=0.05)
    assert learned.forecast("t", "code", "m").prompt_scale == pytest.approx(1.5, abs=0.1)
    assert learned.forecast("t", "new", "m").prompt_scale == pytest.approx(1.125, abs=0.05)
    for _ in range(200):
        learned.take("t", "code", "m", 10, prompt=Prompt(1, 1 << 40))
    assert learned.forecast("t", "code", "m").prompt_scale <= lengths.MAX_SCALE


def test_noise_does_not_lengthen_the_memory() -> None:
    known_ms = []
    for seed in range(5):
        rng, terms, own = random.Random(seed), TwoTerms(), Factor()
        for number in range(2_400):
            truth_ms = 100.0 if number < 2_000 else 200.0
            observed_ms = truth_ms * rng.lognormvariate(0, 4 * speeds.REQUEST_NOISE)
            learn(terms, own, 50.0, 50.0, observed_ms, speeds.REQUEST_NOISE)
        known_ms.append(terms.predict(50.0, 50.0) * math.exp(own.log))
    assert statistics.fmean(known_ms) == pytest.approx(200, rel=0.15)


# --- in the view ----------------------------------------------------------------------------


def lone_ms(view: View) -> float:
    speeds = view.units[0].speeds
    return speeds.step_ms + speeds.step_ms_per_request


def run(view: View, number: int, unit_id: str, spent: Spent, now_s: float = 0.0, **asked: object) -> None:
    request = make_request(f"req_{number}", max_output_tokens=1_000, **asked)
    view.reserve(request, unit_id, GATEWAY, now_s)
    view.settle(request.reservation_id, "done", now_s, spent)


def test_a_view_learns_lengths_for_pipelines_by_the_model_behind_an_alias() -> None:
    view = make_view(make_card(), aliases={"nice": "model-x"})
    for number in range(100):
        run(view, number, "u0", Spent(100, 40, 120.0, 520.0), model="nice", pipeline_id="pl-1")
    decision = decide(make_request(pipeline_id="pl-1", max_output_tokens=1_000), view, 0.0, random.Random(0))
    assert decision.expected_output_tokens == pytest.approx(40, abs=2)
    assert decision.chosen.decode_ms == pytest.approx(10 * decision.expected_output_tokens, rel=0.05)
    capped = decide(make_request(pipeline_id="pl-1", max_output_tokens=8), view, 0.0, random.Random(0))
    assert (capped.expected_output_tokens, capped.output_tokens_p90) == (8, 8)


def test_a_prompt_is_priced_and_counted_by_its_expected_tokens() -> None:
    view = make_view(make_card(max_running=64))
    for number in range(200):
        run(view, number, "u0", Spent(200, 40, 200.0, 600.0))
    request = make_request("last", prefix=tuple(range(1, 3)), prompt_tokens=130)
    half = decide(make_request(prompt_tokens=65), view, 0.0, random.Random(0)).chosen.prefill_ms
    whole = decide(request, view, 0.0, random.Random(0)).chosen.prefill_ms
    per_token_ms = view.units[0].speeds.prefill_ms_per_token
    assert whole - half == pytest.approx(2 * 65 * per_token_ms, rel=0.05)
    view.reserve(request, "u0", GATEWAY, 0.0)
    assert view.columns.tokens_ahead[0] == pytest.approx(2 * 130, rel=0.02)
    cached = decide(request, view, 0.0, random.Random(0)).chosen.cached_tokens
    assert cached == pytest.approx(2 * 128, rel=0.02)


def test_speeds_change_at_a_tick_and_predictions_come_true() -> None:
    view, spent = make_view(make_card()), Spent(100, 51, 330.0, 330.0 + 50 * 30.0)
    before = lone_ms(view)
    for number in range(50):
        run(view, number, "u0", spent, number / 10)
        if number == 0:
            assert lone_ms(view) == before
        view.tick(number / 10)
    view.report([make_load(make_card())], 1, 5.0)
    chosen = decide(make_request(), view, 5.0, random.Random(0)).chosen
    assert chosen.ttft_ms == pytest.approx(330, rel=0.1)
    assert chosen.decode_ms / 49 == pytest.approx(30, rel=0.1)


def test_requests_that_end_together_are_one_lesson_of_speed() -> None:
    view, spent = make_view(make_card()), Spent(100, 51, 330.0, 330.0 + 50 * 30.0)
    run(view, 0, "u0", spent)
    once = view.units[0].speed.kind.speeds()
    for number in range(1, 20):
        run(view, number, "u0", spent)
    assert view.units[0].speed.kind.speeds() == once


def test_what_units_measure_is_learned_from_once_a_second_while_they_work() -> None:
    card = make_card()
    view = make_view(card)
    for tick in range(1, 101):
        busy = make_load(card, running=1, steps=tick, decode_ms_per_token=30.0)
        view.report([busy], 1, tick / 10)
        view.tick(tick / 10)
    assert lone_ms(view) == pytest.approx(30, rel=0.15)
    assert view.columns.studied_s[0] >= 10 - STUDY_S
    learned = lone_ms(view)
    for tick in range(101, 200):
        view.report([make_load(card, running=1, steps=100, decode_ms_per_token=300.0)], 1, tick / 10)
        view.tick(tick / 10)
    assert lone_ms(view) == learned, "an engine that does not step says nothing new"


def test_equal_units_share_a_burst_evenly_after_noisy_lessons() -> None:
    cards = [make_card(f"u{number}", max_running=64) for number in range(10)]
    view, rng = make_view(*cards), random.Random(5)
    for number in range(400):
        slower = rng.lognormvariate(0.5, 0.25)
        now_s = number / 50
        view.tick(now_s)
        run(view, number, f"u{number % 10}", Spent(100, 51, 110 * slower, (110 + 50 * 10) * slower), now_s)
    assert lone_ms(view) > 12, "learned"
    for link, card in enumerate(cards, start=1):
        view.report([make_load(card)], link, now_s)
    for number in range(200):
        request = make_request(f"burst_{number}")
        unit_id = decide(request, view, now_s, rng).chosen.unit_id
        view.reserve(request, unit_id, GATEWAY, now_s)
        assert max(view.loads().values()) - min(view.loads().values()) <= 1


@pytest.mark.parametrize(
    "spent",
    [
        Spent(100, 50, math.nan, 500.0),
        Spent(100, 50, 100.0, math.inf),
        Spent(100, -1, 100.0, 500.0),
        Spent(1 << 50, 50, 100.0, 500.0),
    ],
)
def test_senseless_figures_are_counted_and_teach_nothing(spent: Spent) -> None:
    view = make_view(make_card())
    before = view.forecast(make_request())
    run(view, 1, "u0", spent)
    view.tick(0.1)
    assert view.dropped == {"bad_figures": 1}
    assert view.forecast(make_request()) == before
    assert view.reservations == 0


def test_continued_and_queued_attempts_and_times_that_run_backwards_do_no_harm() -> None:
    card = make_card()
    view = make_view(card)
    before = lone_ms(view), view.columns.prefill_ms_per_token[0]
    run(view, 1, "u0", Spent(100, 50, 5_000.0, 9_000.0), attempt=2)
    view.report([make_load(card, running=4, waiting=1)], 1, 0.0)
    for number in range(2, 20):
        run(view, number, "u0", Spent(100, 5, 5_000.0, 4_000.0))
    view.tick(0.1)
    assert (lone_ms(view), view.columns.prefill_ms_per_token[0]) == pytest.approx(before, rel=0.3)
    assert view.columns.prefill_ms_per_token[0] == before[1]


def test_a_request_whose_unit_has_gone_still_tells_its_length() -> None:
    view, request = make_view(make_card()), make_request(max_output_tokens=1_000)
    before = view.forecast(request).mean_tokens
    view.reserve(request, "u0", GATEWAY, 0.0)
    view.leave(1)
    view.settle(request.reservation_id, "done", 0.0, Spent(100, 5, 100.0, 200.0))
    assert view.forecast(request).mean_tokens < before
