"""An explanation tells what was decided and how it went, and nothing that was said."""

from __future__ import annotations

import json

import pytest
from support.stories import decision, explained_story, story

from gateway.http.shapes.metrics import Explanation
from gateway.observe.explain import explanation, told
from gateway.observe.story import Story
from grid.errors import ContextOverflow, GridError, InvalidRequest, NoEligibleUnit
from grid.words import Usage


def test_a_moved_step_shows_both_placements_and_predicted_against_actual() -> None:
    ended = explained_story()
    shown = Explanation.model_validate(explanation(told(ended)))
    (step,) = shown.runs[0].steps
    assert [(p.chosen.unit_id, p.outcome) for p in step.placements] == [
        ("unit-a", "refused"),
        ("unit-c", "done"),
    ]
    assert step.placements[0].next_best[0].queue_ms == 9.0
    assert step.placements[0].rejected_by_code == {"region": 2, "saturated": 1}
    assert step.placements[1].chosen.prefill_ms == 2.0
    assert step.actual is not None
    assert (step.actual.prefill_ms, step.actual.total_ms, step.actual.cu_seconds) == (5.0, 40.0, 0.05)


def test_a_step_that_the_client_left_has_no_end() -> None:
    ended = Story("req_1", 0.0, 1000.0, "acme", "/v1/chat/completions")
    run = ended.run("m")
    run.decided("generation-1", decision("unit-a", 1))
    run.charge(Usage(3, 0, 2, 0.0))
    ended.end(499, None, 0.05)
    shown = Explanation.model_validate(explanation(told(ended)))
    assert shown.outcome == "cancelled"
    assert shown.runs[0].steps[0].actual is None
    assert shown.usage.output_tokens == 2


@pytest.mark.parametrize("error", [InvalidRequest("secret words", param="input"), ContextOverflow("secret")])
def test_a_callers_own_mistake_is_told_without_its_sentence(error: GridError) -> None:
    text = json.dumps(explanation(told(story(400, error=error))))
    assert "secret" not in text
    assert error.code in text


def test_a_refusal_of_placement_is_told_with_its_reasons() -> None:
    error = NoEligibleUnit("no unit", rejected_by_code={"memory": 3}, reasons=["too small"], output="secret")
    shown = Explanation.model_validate(explanation(told(story(503, error=error))))
    assert shown.error is not None
    assert shown.error.message == "no unit"
    assert shown.error.details == {"rejected_by_code": {"memory": 3}, "reasons": ["too small"]}
