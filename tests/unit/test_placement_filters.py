"""Every rule of the table: what passes, what is rejected, and a sentence that helps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.fleet import make_card, make_load, make_request, make_view

from grid.words import (
    GpuCard,
    GpuSample,
    NodeCard,
    PlacementRequest,
    Precision,
    Task,
    UnitCard,
    UnitState,
)
from placement.filters import (
    REASONS,
    RULES,
    Question,
    avoided_by,
    avoided_names,
    is_version_of,
    rejections,
    sift,
)
from placement.fleet import View

NOW_S = 0.0


def verdicts(view: View, request: PlacementRequest, now_s: float = NOW_S) -> dict[str, tuple[str, str]]:
    """Return (code, sentence) of every rejected unit by its id."""
    question = Question(request, view, now_s)
    sifted = sift(question)
    rejected = rejections(question, sifted, 100)
    assert len(rejected) + len(sifted.rows) == len(view.units)
    assert dict(sifted.counts) == {
        code: n for code in RULES if (n := sum(rejection.code == code for rejection in rejected))
    }
    return {rejection.unit_id: (rejection.code, rejection.detail) for rejection in rejected}


CARD_CASES: list[tuple[str, dict[str, Any], dict[str, Any], list[str]]] = [
    ("task", {}, {"task": int(Task.EMBED)}, ["generate", "embed"]),
    ("model", {}, {"model": "model-z"}, ["'model-x'", "'model-z'"]),
    ("avoided", {}, {"avoid_models": ("model-x",)}, ["'model-x'"]),
    ("region", {}, {"allowed_regions": ("us-east-1", "us-west-2")}, ["eu-central-1", "us-east-1, us-west-2"]),
    (
        "precision",
        {"precision": int(Precision.INT4)},
        {"lowest_precision": int(Precision.INT8)},
        ["runs int4", "accepts int8", "int8 on A100-80"],
    ),
    ("memory", {"memory_grant_mb": 20_000}, {"min_memory_mb": 24_000}, ["20000 MB", "24000 MB"]),
    ("context", {}, {"max_output_tokens": 2048}, ["2048", "2047"]),
    ("excluded", {}, {"exclude_units": ("u0", "stranger"), "attempt": 1}, ["attempt 1"]),
]


@pytest.mark.parametrize(
    ("code", "card", "request_", "says"), CARD_CASES, ids=[case[0] for case in CARD_CASES]
)
def test_rule_rejects_and_names_the_numbers(
    code: str, card: dict[str, Any], request_: dict[str, Any], says: list[str]
) -> None:
    view = make_view(make_card(**card))
    assert verdicts(view, make_request()) == {}
    found, sentence = verdicts(view, make_request(**request_))["u0"]
    assert found == code
    for part in says:
        assert part in sentence
    assert Question(make_request(**request_), view, NOW_S).model == request_.get("model", "model-x")


@pytest.mark.parametrize(
    "request_",
    [
        {"allowed_regions": ("us-east-1", "eu-central-1")},
        {"lowest_precision": int(Precision.INT8)},
        {"lowest_precision": int(Precision.FP16)},
        {"min_memory_mb": 80_000},
        {"max_output_tokens": 2047},
        {"prompt_tokens": 1_000_000},
        {"avoid_models": ("model-x-mini", "model", "")},
        {"exclude_units": ("u1",)},
    ],
)
def test_what_just_suffices_passes(request_: dict[str, Any]) -> None:
    assert verdicts(make_view(make_card()), make_request(**request_)) == {}


def test_embeddings_know_no_output_so_no_context_rule() -> None:
    view = make_view(make_card(task=int(Task.EMBED), context_tokens=256))
    assert verdicts(view, make_request(task=int(Task.EMBED), max_output_tokens=0, prompt_tokens=9_999)) == {}


def test_alias_runs_on_the_model_that_it_names() -> None:
    view = make_view(make_card(), aliases={"gpt-nice": "model-x"})
    assert verdicts(view, make_request(model="gpt-nice")) == {}
    code, sentence = verdicts(view, make_request(model="gpt-nasty"))["u0"]
    assert (code, "'gpt-nasty'" in sentence) == ("model", True)


@pytest.mark.parametrize("avoid", ["gpt-nice", "GPT-Nice", "model-x", "MODEL-X", "gpt"])
def test_avoiding_an_alias_or_an_alias_version_avoids_what_it_names(avoid: str) -> None:
    aliases = {"gpt-nice": "model-x", "gpt-4": "model-x", "other": "model-y"}
    view = make_view(make_card(), make_card("u1", model="model-y"), aliases=aliases)
    code, sentence = verdicts(view, make_request(avoid_models=(avoid,)))["u0"]
    assert code == "avoided"
    assert "'model-x'" in sentence
    assert "u1" not in verdicts(view, make_request(model="other", avoid_models=(avoid,)))


def test_an_avoided_model_is_avoided_by_any_name() -> None:
    view = make_view(make_card(model="model-x-2024-06"), aliases={"nice": "model-x-2024-06"})
    assert verdicts(view, make_request(model="nice", avoid_models=("model-x",)))["u0"][0] == "avoided"


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        ("model-x", "model-x", True),
        ("Model-X", "model-x", True),
        ("model-x-2024-06-15", "model-x", True),
        ("model-x:v2", "model-x", True),
        ("model-x@latest", "model-x", True),
        ("model-x.1", "model-x", True),
        ("llama-3-8b", "llama-3", True),
        ("model-xl", "model-x", False),
        ("model-x2", "model-x", False),
        ("model-x-mini", "model-x", False),
        ("model-x-vision", "model-x", False),
        ("model-x-", "model-x", False),
        ("model-x", "model-x-2024", False),
        ("a.b-1", "a.b", True),
        ("axb-1", "a.b", False),
    ],
)
def test_version_rule(model: str, name: str, expected: bool) -> None:
    assert is_version_of(model, name) is expected


@pytest.mark.parametrize(
    ("avoid", "says"),
    [
        (("model-x",), "'model-x'"),
        (("gpt-4o",), "'gpt-4o'"),
        (("other", "gpt"), "'gpt' (which covers the alias 'gpt-4o')"),
    ],
)
def test_the_name_to_take_off_the_list_is_the_one_that_stands_on_it(
    avoid: tuple[str, ...], says: str
) -> None:
    aliases = {"gpt-4o": "model-x", "z": "other"}
    assert avoided_by(avoid, aliases, "model-x-2") == says


def test_avoided_names_without_any() -> None:
    assert avoided_names((), {"a": "b"}) == frozenset()
    assert avoided_names(("",), {"a": "b"}) == frozenset()


def _isolate(view: View, card: UnitCard) -> None:
    view.join(card._replace(unit_id="u1"), 2)
    view.report([make_load(card, unit_id="u1")], 2, NOW_S)
    for attempt in range(2):
        view.tick(NOW_S + attempt)
        request = make_request(attempt=attempt)
        view.reserve(request, "u0", holder=9, now_s=NOW_S + attempt)
        view.settle(request.reservation_id, "failed", NOW_S + attempt)


def _enter(state: UnitState) -> Callable[[View, UnitCard], object]:
    return lambda view, card: view.report([make_load(card, state=int(state))], 1, NOW_S)


def _lose_gpu(view: View, card: UnitCard) -> None:
    view.join(card._replace(gpu_uuids=("GPU-0",)), 1)
    view.join_node(NodeCard(card.node_id, "first", "575", (GpuCard("GPU-0", 0, "L4", 23_000.0),)), 8)
    view.report_node(
        card.node_id, "first", [GpuSample("GPU-0", fault="Xid 79: it fell off the bus")], 8, NOW_S
    )


STATE_CASES: list[tuple[str, Callable[[View, UnitCard], object], list[str]]] = [
    ("gpu", _lose_gpu, ["GPU-0", "Xid 79"]),
    ("state", _enter(UnitState.FAILED), ["failed"]),
    ("state", _enter(UnitState.STARTING), ["starting"]),
    ("draining", _enter(UnitState.DRAINING), ["draining"]),
    ("draining", lambda v, c: v.drain("u0", True), ["operator", "resume"]),
    ("standby", _enter(UnitState.STANDBY), ["on standby"]),
    ("standby", _enter(UnitState.ASLEEP), ["on standby"]),
    ("isolated", _isolate, ["is isolated: failed 2 of its newest 2 requests"]),
    ("stale", lambda v, c: v.join(c, 7), ["has not reported yet"]),
    ("saturated", lambda v, c: v.report([make_load(c, running=4, waiting=4)], 1, NOW_S), ["8", "4 slots"]),
]


@pytest.mark.parametrize(("code", "happen", "says"), STATE_CASES)
def test_state_rules(code: str, happen: Callable[[View, UnitCard], object], says: list[str]) -> None:
    card = make_card()
    view = make_view(card)
    happen(view, card)
    found, sentence = verdicts(view, make_request())["u0"]
    assert found == code
    for part in says:
        assert part in sentence


def test_a_stale_unit_counts_as_saturated_and_says_how_old_its_sample_is() -> None:
    view = make_view(make_card(), make_card("u1"), stale_after_s=0.5)
    for tick in range(1, 7):
        view.tick(tick / 10)
        view.report([make_load(make_card("u1"))], 2, tick / 10)
    assert verdicts(view, make_request(), 0.6) == {
        "u0": ("stale", "last reported 600 ms ago; after 500 ms a unit counts as saturated")
    }


def test_one_place_below_the_limit_is_room() -> None:
    card = make_card()
    view = make_view(card)
    view.report([make_load(card, running=3)], 1, NOW_S)
    assert verdicts(view, make_request()) == {}
    view.reserve(make_request("req_2"), "u0", holder=9, now_s=NOW_S)
    assert verdicts(view, make_request())["u0"][0] == "saturated"


def test_first_broken_rule_gives_the_code() -> None:
    view = make_view(make_card(model="other", region="us-east-1"))
    view.drain("u0", True)
    assert verdicts(view, make_request(allowed_regions=("eu-central-1",)))["u0"][0] == "model"


def test_every_code_has_a_meaning() -> None:
    assert set(REASONS) == {case[0] for case in CARD_CASES} | {case[0] for case in STATE_CASES}
    assert all(REASONS.values())


def test_unknown_numbers_fail_closed_with_a_sentence() -> None:
    view = make_view(make_card())
    assert verdicts(view, make_request(task=77))["u0"] == (
        "task",
        "does generate, the step needs task 77: name a model that does task 77",
    )
    assert verdicts(view, make_request(lowest_precision=99))["u0"][0] == "precision"
