"""What a forecast asks of placement, and what it makes of the answers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.fleet import make_card, make_view
from support.scripted import planned

from gateway.http.forecasts import plan_view
from gateway.http.shapes.pipelines import PlanView
from gateway.pipeline.forecast import EXPECTED_DOCUMENT_TOKENS, forecast, requests_of
from grid.errors import NoEligibleUnit, Saturated
from grid.words import Decision, PlacementRequest, Task
from placement.decide import decide

FIND = '{"type": "retrieval", "source": "kb", "id": "find", "top_k": 3}'
ALSO = '{"type": "retrieval", "source": "kb", "id": "also", "uses": [], "top_k": 1}'
WRITE = '{"type": "generation", "model": "m", "id": "write", "max_output_tokens": 50}'


class Deciding:
    """Placement's own decisions on a small fleet."""

    def __init__(self, *cards: Any) -> None:
        self.view = make_view(*cards)
        self.asked: list[PlacementRequest] = []

    async def place(self, request: PlacementRequest, timeout_s: float) -> Decision:
        self.asked.append(request)
        return decide(request, self.view, 0.0, random.Random(1))


def fleet() -> Deciding:
    return Deciding(
        make_card("chat-0", model="m"),
        make_card("chat-1", model="m", decode_ms_per_token=20.0),
        make_card("embed-0", model="e", task=int(Task.EMBED), prefill_tokens_per_s=100.0),
    )


def test_every_step_is_asked_for_and_nothing_reserved() -> None:
    requests = requests_of(planned(FIND, ALSO, WRITE))
    assert [request.step_id for request in requests] == ["find", "also", "write"]
    assert all(request.dry_run and request.explain for request in requests)
    embed, _, generate = requests
    assert (embed.task, embed.model, embed.max_output_tokens) == (Task.EMBED, "e", 0)
    alone = requests_of(planned(WRITE))[0]
    assert generate.prompt_tokens == alone.prompt_tokens + 4 * EXPECTED_DOCUMENT_TOKENS


async def test_steps_side_by_side_take_the_longer_of_their_times() -> None:
    told = await forecast(planned(FIND, ALSO, WRITE), fleet())
    find, also, write = told.steps
    assert (find.begins_ms, also.begins_ms) == (0.0, 0.0)
    assert write.begins_ms == max(find.ends_ms, also.ends_ms)
    assert told.runnable
    assert write.decision is not None
    assert told.ttft_ms == pytest.approx(write.begins_ms + write.decision.chosen.ttft_ms)
    assert told.total_ms == pytest.approx(write.ends_ms)
    assert told.cu_seconds == pytest.approx(
        sum(step.decision.chosen.cu_seconds for step in told.steps if step.decision is not None)
    )
    assert [candidate.unit_id for candidate in write.candidates] == ["chat-0", "chat-1"]
    PlanView.model_validate(plan_view(told))


async def test_a_step_that_no_unit_takes_is_part_of_the_answer() -> None:
    told = await forecast(planned(FIND, WRITE), Deciding(make_card("chat-0", model="m")))
    find, write = told.steps
    assert isinstance(find.refusal, NoEligibleUnit)
    assert [rejection.code for rejection in find.rejections] == ["task"]
    assert write.decision is not None
    assert not told.runnable
    view = PlanView.model_validate(plan_view(told))
    assert view.steps[0].refusal is not None
    assert view.steps[0].refusal.status == 503


async def test_a_pipeline_that_only_retrieves_answers_with_its_end() -> None:
    told = await forecast(planned(FIND, ALSO), fleet())
    assert told.ttft_ms == told.total_ms == max(step.ends_ms for step in told.steps) > 0


async def test_placement_that_cannot_be_asked_is_an_error() -> None:
    class Away:
        async def place(self, request: PlacementRequest, timeout_s: float) -> Decision:
            raise Saturated("the placement actor can't be reached", retry_after_s=1.0)

    with pytest.raises(Saturated):
        await forecast(planned(WRITE), Away())
