"""The ASGI callable with a scripted run behind it: statuses, late failures, bugs, what is recorded."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import replace

import pytest
from support.scripted_app import (
    CHAT,
    CHUNK,
    FINISHED,
    INVOKE,
    KEY,
    MESSAGES,
    STARTED,
    OnePipeline,
    Recorder,
    Script,
    ScriptedRunner,
    app_of,
    ask,
    body_of,
    broken,
    client_of,
    services,
)

from gateway.http.app import INVOKE_ROUTE
from gateway.http.shapes.compatible import MessageAnswer
from gateway.http.shapes.errors import AnthropicErrorEnvelope, ErrorEnvelope
from gateway.observe.story import Outcome
from gateway.pipeline.events import Finished, RunFailed
from gateway.records import PipelineStatus
from grid.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    GridError,
    InternalError,
    NoEligibleUnit,
    Overloaded,
    Saturated,
    TooLarge,
    UnitLost,
)
from grid.words import Usage


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [INVOKE, CHAT])
async def test_a_refusal_is_a_real_status_with_retry_after(path: str, stream: bool) -> None:
    answer = await ask([Saturated("full", retry_after_s=1.2)], path, body_of(path, stream))
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["code"] == "saturated"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [INVOKE, CHAT])
async def test_a_failure_before_any_text_is_a_real_status_too(path: str, stream: bool) -> None:
    script: Script = [RunFailed(UnitLost("gone"), Usage(), "")]
    answer = await ask(script, path, body_of(path, stream))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "unit_lost"


async def test_a_failure_in_mid_stream_is_an_error_event_with_what_there_was() -> None:
    answer = await ask(broken(), INVOKE, body_of(INVOKE, True))
    assert answer.status_code == 200
    last = answer.text.rstrip("\n").split("\n\n")[-1]
    assert last.startswith("event: error\n")
    error = json.loads(last.split("data: ")[1])
    ErrorEnvelope.model_validate(error)
    assert error["error"]["details"]["output"] == "hel"
    assert error["error"]["details"]["usage"]["output_tokens"] == 1
    assert error["request_id"] == answer.headers["x-request-id"]
    assert "event: done" not in answer.text


async def test_a_failure_in_mid_chat_is_a_frame_with_error_and_no_done() -> None:
    answer = await ask(broken(), CHAT, body_of(CHAT, True))
    frames = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    assert json.loads(frames[-1])["error"]["code"] == "unit_lost"
    assert "[DONE]" not in answer.text


async def test_a_failed_whole_answer_tells_what_was_made() -> None:
    answer = await ask(broken(), INVOKE, body_of(INVOKE, False))
    assert answer.status_code == 503
    assert answer.json()["error"]["details"]["output"] == "hel"


async def test_a_failure_in_mid_message_is_that_apis_error_event() -> None:
    answer = await ask(broken(), MESSAGES, body_of(MESSAGES, True))
    assert answer.status_code == 200
    last = answer.text.rstrip("\n").split("\n\n")[-1]
    assert last.startswith("event: error\n")
    told = AnthropicErrorEnvelope.model_validate_json(last.split("data: ")[1])
    assert (told.error.type, told.request_id) == ("overloaded_error", answer.headers["x-request-id"])
    assert "message_stop" not in answer.text


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Saturated("yours", retry_after_s=2), 429, "rate_limit_error"),
        (Overloaded("full", retry_after_s=2), 529, "overloaded_error"),
        (NoEligibleUnit("none"), 529, "overloaded_error"),
        (UnitLost("gone"), 529, "overloaded_error"),
        (DeadlineExceeded("late"), 504, "timeout_error"),
        (Forbidden("no"), 403, "permission_error"),
        (InternalError("bug"), 500, "api_error"),
        (TooLarge("big"), 413, "request_too_large"),
        (Conflict("twice"), 409, "invalid_request_error"),
    ],
)
async def test_messages_are_refused_in_that_apis_words(error: GridError, status: int, kind: str) -> None:
    answer = await ask([error], MESSAGES, body_of(MESSAGES, True))
    told = AnthropicErrorEnvelope.model_validate(answer.json())
    assert (answer.status_code, told.type, told.error.type) == (status, "error", kind)
    assert answer.headers["request-id"] == told.request_id
    assert answer.headers.get("retry-after") == ("2" if error.retry_after_s else None)


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (FINISHED, "end_turn", None),
        (replace(FINISHED, finish_reason="length"), "max_tokens", None),
        (replace(FINISHED, stop="##"), "stop_sequence", "##"),
    ],
)
async def test_why_a_message_ended(finish: Finished, reason: str, sequence: str | None) -> None:
    whole = await ask([STARTED, CHUNK, finish], MESSAGES, body_of(MESSAGES, False))
    message = MessageAnswer.model_validate(whole.json())
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    streamed = await ask([STARTED, CHUNK, finish], MESSAGES, body_of(MESSAGES, True))
    [delta] = [line for line in streamed.text.split("\n") if line.startswith('data: {"type":"message_delta"')]
    assert json.loads(delta.removeprefix("data: "))["delta"] == {
        "stop_reason": reason,
        "stop_sequence": sequence,
    }


async def test_a_finished_chat_ends_with_done() -> None:
    answer = await ask([STARTED, CHUNK, FINISHED], CHAT, body_of(CHAT, True))
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [INVOKE, CHAT])
async def test_a_bug_is_a_500_with_its_request_id_and_no_details(
    path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        answer = await ask([KeyError("secret words")], path, body_of(path, stream))
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["type"] == "api_error"
    assert answer.headers["x-request-id"] in caplog.text


async def test_a_bug_in_a_cold_route_is_told_the_same_way(caplog: pytest.LogCaptureFixture) -> None:
    registry = OnePipeline(error=KeyError("secret words"))
    with caplog.at_level(logging.ERROR):
        async with (
            app_of(services(ScriptedRunner([]), registry=registry)) as app,
            client_of(app, KEY, raises=False) as client,
        ):
            answer = await client.get("/v1/pipelines/pl-1")
    assert answer.status_code == 500
    ErrorEnvelope.model_validate(answer.json())
    assert "secret" not in answer.text
    assert caplog.text.count(answer.headers["x-request-id"]) == 1


async def test_a_run_that_ends_without_a_word_is_a_500() -> None:
    for stream in (True, False):
        answer = await ask([], INVOKE, body_of(INVOKE, stream))
        assert answer.status_code == 500


@pytest.mark.parametrize(
    ("status", "expected"),
    [(PipelineStatus.ACTIVE, 200), (PipelineStatus.DEPLOYING, 200), (PipelineStatus.FAILED, 503)],
)
async def test_a_pipeline_that_failed_to_deploy_says_why(status: PipelineStatus, expected: int) -> None:
    script: Script = [STARTED, CHUNK, FINISHED]
    answer = await ask(script, INVOKE, body_of(INVOKE, False), registry=OnePipeline(status))
    assert answer.status_code == expected
    if expected == 503:
        assert "no units" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [INVOKE, CHAT])
@pytest.mark.parametrize(
    ("script", "status", "outcome"),
    [
        ([STARTED, CHUNK, FINISHED], 200, Outcome.GOOD),
        ([Saturated("full")], 429, Outcome.REFUSED),
        ([UnitLost("gone")], 503, Outcome.FAILED),
        (broken(), 503, Outcome.FAILED),
        ([KeyError("a bug")], 500, Outcome.FAILED),
        ([STARTED, CHUNK, KeyError("a bug")], 500, Outcome.FAILED),
    ],
)
async def test_every_call_is_taken_once_with_how_it_ended(
    path: str, stream: bool, script: Script, status: int, outcome: Outcome
) -> None:
    recorder = Recorder()
    with contextlib.suppress(InternalError):  # a bug after the status line breaks the body off
        await ask(script, path, body_of(path, stream), recorder=recorder)
    (story,) = recorder.stories
    assert (story.status, story.outcome) == (status, outcome)
    assert story.tenant_id == "t"
    assert story.pipeline_id == ("pl-1" if path == INVOKE else "")
    assert story.route == (INVOKE_ROUTE if path == INVOKE else CHAT)


@pytest.mark.parametrize(
    ("path", "body", "key", "status", "tenant", "pipeline"),
    [
        (INVOKE, b"{", "zg-good", 400, "t", "pl-1"),
        ("/v1/pipelines/pl-2/invoke", b"{}", "zg-good", 404, "t", ""),
        (INVOKE, b"{}", "zg-bad", 401, "", ""),
        (CHAT, b"[]", "zg-good", 400, "t", ""),
    ],
)
async def test_what_is_refused_early_is_taken_too(
    path: str, body: bytes, key: str, status: int, tenant: str, pipeline: str
) -> None:
    recorder = Recorder()
    async with app_of(services(ScriptedRunner([]), recorder=recorder)) as app, client_of(app) as client:
        await client.post(path, content=body, headers={"x-api-key": key})
        await client.get("/healthz")
        await client.get("/v1/nowhere", headers={"x-api-key": key})
    (story,) = recorder.stories
    assert (story.status, story.tenant_id, story.pipeline_id) == (status, tenant, pipeline)
    assert story.outcome is Outcome.REFUSED
