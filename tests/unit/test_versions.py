"""The adapter between the first version of the interface and the current one, in both directions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.errors import GRID, envelope
from gateway.http.versions import (
    ADAPTERS,
    CURRENT,
    FIRST,
    MESSAGES_API,
    VERSIONS,
    ecosystem_of,
    first_error,
    first_request,
    served_headers,
    version_asked,
)
from gateway.pipeline.contract import parse
from gateway.pipeline.invocation import Invocation, OneShot
from grid.errors import ContextOverflow, InvalidRequest
from grid.exchange import INTERFACE_VERSION

INVOKE, ONE_SHOT = "/v1/pipelines/pl-1/invoke", "/v1/pipeline"
TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


# --- which version ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "alias", "served"),
    [
        (None, None, CURRENT),
        (FIRST, None, FIRST),
        (None, FIRST, FIRST),
        (CURRENT, CURRENT, CURRENT),
    ],
)
def test_either_header_says_it(given: str | None, alias: str | None, served: str) -> None:
    assert version_asked(given, alias, INVOKE) == served


@pytest.mark.parametrize(
    ("given", "alias", "path", "param"),
    [
        ("2024-06-16", None, INVOKE, "grid-version"),
        (None, MESSAGES_API[0], INVOKE, "anthropic-version"),
        (None, "2020-01-01", "/v1/messages", "anthropic-version"),
        (MESSAGES_API[0], None, "/v1/messages", "grid-version"),
        (FIRST, CURRENT, INVOKE, "anthropic-version"),
    ],
)
def test_what_nobody_can_serve_is_refused(
    given: str | None, alias: str | None, path: str, param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        version_asked(given, alias, path)
    assert refused.value.param == param


def test_the_refusal_lists_what_is_served() -> None:
    with pytest.raises(InvalidRequest) as refused:
        version_asked("2019-01-01", None, INVOKE)
    assert all(version in refused.value.message for version in VERSIONS)


@pytest.mark.parametrize("version", MESSAGES_API)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/models"])
def test_the_messages_api_has_versions_of_its_own(path: str, version: str) -> None:
    assert version_asked(None, version, path) == CURRENT
    assert version_asked(FIRST, version, path) == FIRST


def test_the_client_speaks_the_current_version() -> None:
    assert INTERFACE_VERSION == CURRENT


def test_only_older_versions_are_deprecated_since_the_next_began() -> None:
    assert dict(served_headers(CURRENT)) == {b"grid-version-served": CURRENT.encode()}
    older = dict(served_headers(FIRST))
    assert older[b"grid-version-served"] == FIRST.encode()
    assert older[b"deprecation"] == b"@1796083200"  # 2026-12-01T00:00:00Z


def test_every_older_version_has_its_adapter() -> None:
    assert set(ADAPTERS) == set(VERSIONS[:-1])
    assert ecosystem_of(CURRENT) is GRID


# --- old request → new request ------------------------------------------------------------------------


@pytest.mark.parametrize("path", [INVOKE, "/v1/pipelines/pl-1/dry-run", ONE_SHOT])
def test_a_conversation_moves_from_input_to_messages(path: str) -> None:
    body = json.dumps({"input": TURNS, "stream": False}).encode()
    current, renamed = first_request(path, body)
    assert json.loads(current) == {"messages": TURNS, "stream": False}
    assert renamed == {"messages": "input"}


def test_what_it_makes_is_a_call_of_the_current_version() -> None:
    asked = parse(Invocation, first_request(INVOKE, json.dumps({"input": TURNS}).encode())[0])
    assert asked.messages is not None
    assert [turn.content for turn in asked.messages] == ["a", "b", "c"]
    contract = {"pipeline": {"steps": [{"type": "generation", "model": "m"}]}, "input": TURNS}
    shot = parse(OneShot, first_request(ONE_SHOT, json.dumps(contract).encode())[0])
    assert shot.messages is not None


@pytest.mark.parametrize(
    "body",
    [
        b'{"input": "text"}',
        b'{"messages": [{"role": "user", "content": "a"}]}',
        b'{"input": [1], "messages": [2]}',
        b"[]",
        b"{",
        b"",
        b"\xff",
        b"[" * 5_000,
    ],
)
def test_everything_else_stays_as_it_came(body: bytes) -> None:
    assert first_request(INVOKE, body) == (body, {})


def test_a_list_as_input_of_another_route_is_not_a_conversation() -> None:
    body = b'{"input": ["a", "b"]}'
    assert first_request("/v1/embeddings", body) == (body, {})


# --- new error → old error ----------------------------------------------------------------------------


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_no_detail_hides_a_fixed_field(details: dict[str, Any]) -> None:
    fixed = {"type": "t", "code": "c", "message": "m", "param": None, "retryable": False}
    old = first_error({"error": {**fixed, "details": details}, "request_id": "req_1"})
    assert old["request_id"] == "req_1"
    assert {name: old["error"][name] for name in fixed} == fixed
    for name, value in details.items():
        assert name in fixed or old["error"][name] == value


def test_the_first_version_keeps_its_shape() -> None:
    error = ContextOverflow("too long", param="input", prompt_tokens=9)
    assert envelope(error, "req_1")["error"]["details"] == {"prompt_tokens": 9}
    assert ecosystem_of(FIRST).envelope(error, "req_1") == {
        "error": {
            "type": "invalid_request_error",
            "code": "context_overflow",
            "message": "too long",
            "param": "input",
            "retryable": False,
            "prompt_tokens": 9,
        },
        "request_id": "req_1",
    }


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ([{"role": "user"}], "input[0].content", "input[0].content: is missing, and has no default"),
        ([], "input", "input: needs at least 1 item; got 0"),
        (
            [{"role": "assistant", "content": "x"}],
            "input",
            "input: the last message must be the user's, not the assistant's",
        ),
    ],
)
def test_a_mistake_in_a_conversation_is_told_under_the_name_that_its_caller_used(
    given: list[Any], param: str, message: str
) -> None:
    body, renamed = first_request(INVOKE, json.dumps({"input": given}).encode())
    with pytest.raises(InvalidRequest) as refused:
        parse(Invocation, body)
    error = ecosystem_of(FIRST, renamed).envelope(refused.value, "req_1")["error"]
    assert (error["param"], error["message"]) == (param, message)


def test_further_mistakes_are_told_so_too_and_other_words_stay() -> None:
    renamed = {"messages": "input"}
    listed = [
        {"param": f"messages[{n}].content", "message": f"messages[{n}].content: is missing"} for n in (0, 1)
    ]
    several = InvalidRequest(listed[0]["message"], param=listed[0]["param"], errors=listed)
    error = ecosystem_of(FIRST, renamed).envelope(several, "req_1")["error"]
    assert [fault["param"] for fault in error["errors"]] == ["input[0].content", "input[1].content"]
    assert all(fault["message"] == fault["param"] + ": is missing" for fault in error["errors"])
    assert several.details["errors"] is listed
    assert listed[0]["param"] == "messages[0].content"
    other = InvalidRequest("of all messages none is text; send `messages`", param="pipeline.messages")
    told = ecosystem_of(FIRST, renamed).envelope(other, "req_1")["error"]
    assert (told["message"], told["param"]) == (
        "of all messages none is text; send `input`",
        "pipeline.messages",
    )
    # Who wrote `messages` is told of `messages`.
    assert ecosystem_of(FIRST).envelope(other, "req_1")["error"]["message"].endswith("send `messages`")
