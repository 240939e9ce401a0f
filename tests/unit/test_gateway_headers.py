"""What a call's headers ask for: residency, and a version of the interface."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.scripted_app import CHAT, CHUNK, FINISHED, INVOKE, STARTED, Script, ask, body_of, broken

from gateway.http.versions import CURRENT, FIRST, VERSIONS
from grid.errors import NotFound


async def asked_with(*headers: tuple[str, str]) -> httpx.Response:
    return await ask([STARTED, CHUNK, FINISHED], INVOKE, body_of(INVOKE, False), *headers)


@pytest.mark.parametrize("values", [("",), (" ",), ("local", "local"), ("local", "US")])
async def test_a_blank_or_repeated_residency_is_refused(values: tuple[str, ...]) -> None:
    answer = await asked_with(*(("x-data-residency", value) for value in values))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-data-residency"


async def test_one_residency_is_taken() -> None:
    assert (await asked_with(("x-data-residency", "local"))).status_code == 200


@pytest.mark.parametrize("name", ["grid-version", "anthropic-version"])
async def test_only_served_versions_are_taken(name: str) -> None:
    for asked in VERSIONS:
        answer = await asked_with((name, asked))
        assert answer.status_code == 200
        assert answer.headers["grid-version-served"] == asked
        assert ("deprecation" in answer.headers) == (asked != CURRENT)
    answer = await asked_with((name, "2031-01-01"))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_request", name)
    assert error["details"]["supported"] == list(VERSIONS)
    assert answer.headers["grid-version-served"] == CURRENT


async def test_without_a_version_the_current_one_is_served() -> None:
    answer = await asked_with()
    assert answer.headers["grid-version-served"] == CURRENT
    assert "deprecation" not in answer.headers


async def in_version(version: str, script: Script, path: str, body: dict[str, Any]) -> httpx.Response:
    return await ask(script, path, body, ("grid-version", version))


async def test_a_conversation_as_input_is_the_first_versions() -> None:
    body = {"input": [{"role": "user", "content": "hello"}], "stream": False}
    old = await in_version(FIRST, [STARTED, CHUNK, FINISHED], INVOKE, body)
    assert old.status_code == 200, old.text
    new = await in_version(CURRENT, [STARTED, CHUNK, FINISHED], INVOKE, body)
    assert (new.status_code, new.json()["error"]["param"]) == (400, "input")
    assert "`messages`" in new.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_first_version_has_details_beside_the_fixed_fields(stream: bool) -> None:
    answer = await in_version(FIRST, broken(), INVOKE, body_of(INVOKE, stream))
    told = json.loads(answer.text.rstrip("\n").split("data: ")[-1]) if stream else answer.json()
    assert told["error"]["output"] == "hel"
    assert told["error"]["code"] == "unit_lost"
    assert "details" not in told["error"]


async def test_compatible_routes_look_the_same_in_every_version() -> None:
    answers = [await in_version(version, [NotFound("x")], CHAT, {"model": "sim"}) for version in VERSIONS]
    assert answers[0].json() == answers[1].json()
