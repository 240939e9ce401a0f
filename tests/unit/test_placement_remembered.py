"""What the view remembers between requests is never older than the cards, states and drains it came from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from support.fleet import make_card, make_load, make_request, make_view

from grid.errors import GridError
from grid.words import PlacementRequest, Precision, Task, UnitState
from placement.decide import decide
from placement.filters import Question, sift
from placement.fleet import MAX_REMEMBERED, View


def fleet() -> View:
    return make_view(make_card("u0"), make_card("u1", region="us-east-1", precision=int(Precision.INT4)))


def broken(view: View, request: PlacementRequest) -> list[int]:
    return sift(Question(request, view, 0.0)).broken.tolist()


@pytest.mark.parametrize(
    "asks",
    [
        {"task": int(Task.EMBED)},
        {"model": "model-z"},
        {"avoid_models": ("model-x",)},
        {"allowed_regions": ("us-east-1",)},
        {"lowest_precision": int(Precision.INT8)},
        {"min_memory_mb": 1 << 30},
        {"max_output_tokens": 1 << 30},
        {"exclude_units": ("u0",)},
    ],
    ids=lambda asks: next(iter(asks)),
)
def test_requests_that_differ_in_a_filter_do_not_share_an_answer(asks: dict[str, Any]) -> None:
    view, request = fleet(), make_request(**asks)
    plain = broken(view, make_request())
    assert broken(view, request) != plain
    assert broken(view, request) == broken(fleet(), request), "as in a view that never met another request"
    assert broken(view, make_request()) == plain


@pytest.mark.parametrize(
    "change",
    [
        lambda view: view.join(make_card("u2"), 3),
        lambda view: view.join(make_card("u0", incarnation="second", model="model-z"), 1),
        lambda view: view.leave(1),
        lambda view: view.drain("u0", True),
        lambda view: view.report([make_load(make_card("u0"), state=int(UnitState.FAILED))], 1, 0.0),
    ],
    ids=["joined", "another card", "left", "drained", "failed"],
)
def test_a_change_of_the_fleet_is_seen_by_the_next_request(change: Callable[[View], object]) -> None:
    view = fleet()
    before = broken(view, make_request())
    change(view)
    assert broken(view, make_request()) != before


def test_the_first_sample_of_a_starting_unit_is_seen() -> None:
    view, card = fleet(), make_card("u2")
    view.join(card, 3)
    assert dict(sift(Question(make_request(), view, 0.0)).counts) == {"stale": 1}
    view.report([make_load(card, state=int(UnitState.STARTING))], 3, 0.0)
    assert dict(sift(Question(make_request(), view, 0.0)).counts) == {"state": 1}


def test_however_many_kinds_of_requests_come_few_answers_are_kept() -> None:
    view, asked = fleet(), []

    def work_out() -> str:
        asked.append(1)
        return "answer"

    view.remembered("first", work_out)
    for length in range(1, MAX_REMEMBERED):
        broken(view, make_request(max_output_tokens=length))
    assert (view.remembered("first", work_out), len(asked)) == ("answer", 1)
    broken(view, make_request(max_output_tokens=MAX_REMEMBERED))
    assert (view.remembered("first", work_out), len(asked)) == ("answer", 2), "the oldest made room"


def test_preferred_regions_follow_the_fleet() -> None:
    view = fleet()
    request = make_request(prefer_regions=("eu-west-1",))

    def chosen() -> str:
        try:
            return decide(request, view, 0.0, random.Random(0)).chosen.unit_id
        except GridError as error:
            return error.code

    assert chosen() in ("u0", "u1")
    near = make_card("u2", region="eu-west-1", decode_ms_per_token=1000.0)
    view.join(near, 3)
    view.report([make_load(near)], 3, 0.0)
    assert chosen() == "u2"
