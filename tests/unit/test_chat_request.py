"""What the OpenAI-compatible body accepts, ignores and refuses by name."""

import json
from typing import Any

import pytest

from gateway.http.chat import NEUTRAL, NEUTRAL_IN_TURNS, ChatRequest
from gateway.pipeline.contract import parse
from grid.errors import InvalidRequest

HELLO = {"role": "user", "content": "hello"}


def request(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [HELLO], **fields}
    parsed = parse(ChatRequest, json.dumps(body).encode())
    parsed.check()
    return parsed


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        request(**fields)
    return raised.value


def test_sampling_names_only_what_the_caller_set() -> None:
    assert request().sampling == {}
    given = request(temperature=0.5, max_tokens=7, stop="END", seed=3, top_p=0.9, presence_penalty=1)
    assert given.sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 1.0,
        "seed": 3,
        "stop": ("END",),
        "max_output_tokens": 7,
    }
    assert request(max_tokens=7, max_completion_tokens=9).sampling == {"max_output_tokens": 9}


def test_turns_become_the_grids_own() -> None:
    turns = request(
        messages=[
            {"role": "developer", "content": "  be brief \r\n"},
            {"role": "user", "content": [{"type": "text", "text": "a\r\nb"}, {"type": "text", "text": "c"}]},
            {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": None, "annotations": []},
            HELLO,
        ]
    ).messages
    assert [(turn.message.role, turn.message.content) for turn in turns] == [
        ("system", "be brief"),
        ("user", "a\nbc"),
        ("assistant", "ok"),
        ("user", "hello"),
    ]


@pytest.mark.parametrize("field", ["user", "metadata", "store", "service_tier", "prompt_cache_key"])
def test_fields_that_change_nothing_are_ignored(field: str) -> None:
    assert request(**{field: "anything"}).sampling == {}


@pytest.mark.parametrize(
    ("field", "same"), [(f, v) for f, values in NEUTRAL.items() for v in (*values, None)]
)
def test_a_field_that_asks_for_nothing_is_accepted(field: str, same: Any) -> None:
    assert request(**{field: same}).sampling == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("logprobs", True),
        ("top_logprobs", 3),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("reasoning_effort", "high"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    assert field in NEUTRAL
    error = refused(**{field: value})
    assert error.param == field
    assert "leave it out" in error.message


@pytest.mark.parametrize("field", sorted(NEUTRAL_IN_TURNS))
def test_parts_of_a_turn_that_cannot_be_honoured_are_refused(field: str) -> None:
    assert refused(messages=[{**HELLO, field: "x"}]).param == f"messages[0].{field}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [HELLO, {"role": "assistant", "content": "x"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
        ),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 9}, "stop"),
        ({"temprature": 1}, "temprature"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": ""}, "model"),
    ],
)
def test_mistakes_name_their_field(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_a_misspelt_field_gets_a_suggestion() -> None:
    assert "`temperature`" in refused(temprature=1).message


def test_usage_is_included_on_request() -> None:
    assert request(stream=True, stream_options={"include_usage": True}).include_usage
    assert not request(stream=True).include_usage
