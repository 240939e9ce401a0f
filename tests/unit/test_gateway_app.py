"""The ASGI callable with a scripted run behind it: statuses, late failures, bugs, caps, lifespan."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from gateway.http import exchange
from gateway.http.app import INVOKE_ROUTE, GatewayApp
from gateway.http.exchange import SERVER_CANCELS
from gateway.http.shapes.compatible import MessageAnswer
from gateway.http.shapes.errors import AnthropicErrorEnvelope, ErrorEnvelope
from gateway.http.versions import CURRENT, FIRST, VERSIONS
from gateway.observe.story import Outcome, Story
from gateway.pipeline.contract import Contract
from gateway.pipeline.events import Chunk, Finished, RunEvent, RunFailed, Started
from gateway.pipeline.plan import Plan
from gateway.records import PipelineRecord, PipelineStatus, Tenant
from gateway.services import Services
from grid.config import Config
from grid.errors import (
    Conflict,
    DeadlineExceeded,
    Forbidden,
    GridError,
    InternalError,
    NoEligibleUnit,
    NotFound,
    Saturated,
    TooLarge,
    Unauthorised,
    UnitLost,
)
from grid.words import Usage

STARTED = Started("req_x", "pl-1", 1, "m", ("generation-1",), (), 3, "local")
CHUNK = Chunk(0, "hel", 1)
FINISHED = Finished("stop", Usage(3, 0, 1, 0.1), 1.0, 2.0, (), (), True)
INVOKE, CHAT, MESSAGES = "/v1/pipelines/pl-1/invoke", "/v1/chat/completions", "/v1/messages"
CONTRACT = {"pipeline": {"steps": [{"type": "generation", "model": "sim"}]}}
CONFIG = Config.model_validate(
    {"models": [{"name": "sim", "engine": "simulated"}], "gateway": {"max_streams_per_replica": 1}}
)

Script = list[RunEvent | BaseException]


class ScriptedRunner:
    """Plays a script, an event at a time."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.left = 0

    async def run(self, plan: Plan, story: Story) -> AsyncGenerator[list[RunEvent], None]:
        told = story.run(plan.model)
        try:
            for item in self.script:
                await asyncio.sleep(0)
                if isinstance(item, BaseException):
                    raise item
                told.hear(item)
                yield [item]
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise


class OneTenant:
    async def authenticate(self, key: str) -> Tenant:
        if key != "zg-good":
            raise Unauthorised("wrong key")
        return Tenant("t", "key-1", False, "salt")


class OnePipeline:
    def __init__(
        self, status: PipelineStatus = PipelineStatus.ACTIVE, error: Exception | None = None
    ) -> None:
        self._status = status
        self._error = error

    async def get_pipeline(self, tenant_id: str, pipeline_id: str) -> PipelineRecord:
        if self._error is not None:
            raise self._error
        if pipeline_id != "pl-1":
            raise NotFound("there is none", param="pipeline_id")
        contract = Contract.model_validate_json(json.dumps(CONTRACT))
        return PipelineRecord(pipeline_id, tenant_id, "p", 1, contract, self._status, "no units", "", "")


class Recorder:
    def __init__(self) -> None:
        self.stories: list[Story] = []

    def take(self, story: Story) -> None:
        self.stories.append(story)


class Closing:
    closed = 0


def services(runner: ScriptedRunner, **parts: Any) -> Services:
    async def close() -> None:
        Closing.closed += 1

    return cast(
        Services,
        SimpleNamespace(
            config=CONFIG,
            tenants=OneTenant(),
            registry=parts.get("registry", OnePipeline()),
            runner=runner,
            recorder=parts.get("recorder", Recorder()),
            tracer=None,
            close=close,
        ),
    )


@asynccontextmanager
async def app_of(built: Services) -> AsyncIterator[GatewayApp]:
    """Run the application's lifespan as a server does."""

    async def build() -> Services:
        return built

    app = GatewayApp(CONFIG, build)
    to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    from_app: asyncio.Queue[Any] = asyncio.Queue()
    life = asyncio.create_task(app({"type": "lifespan"}, to_app.get, from_app.put))
    await to_app.put({"type": "lifespan.startup"})
    assert (await from_app.get())["type"] == "lifespan.startup.complete"
    try:
        yield app
    finally:
        await to_app.put({"type": "lifespan.shutdown"})
        assert (await from_app.get())["type"] == "lifespan.shutdown.complete"
        await life


async def ask(
    script: Script, path: str, body: dict[str, Any], **parts: Any
) -> tuple[httpx.Response, ScriptedRunner]:
    runner = ScriptedRunner(script)
    async with app_of(services(runner, **parts)) as app:
        transport = httpx.ASGITransport(app)
        headers = {"x-api-key": "zg-good"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            return await client.post(path, json=body), runner


def body_of(path: str, stream: bool) -> dict[str, Any]:
    if path in (CHAT, MESSAGES):
        body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "stream": stream}
        return body if path == CHAT else {**body, "max_tokens": 9}
    return {"input": "x", "stream": stream}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [INVOKE, CHAT])
async def test_a_refusal_is_a_real_status_with_retry_after(path: str, stream: bool) -> None:
    answer, _ = await ask([Saturated("full", retry_after_s=1.2)], path, body_of(path, stream))
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "2"
    assert answer.json()["error"]["code"] == "saturated"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [INVOKE, CHAT])
async def test_a_failure_before_any_text_is_a_real_status_too(path: str, stream: bool) -> None:
    script: Script = [RunFailed(UnitLost("gone"), Usage(), "")]
    answer, _ = await ask(script, path, body_of(path, stream))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "unit_lost"


async def test_a_failure_in_mid_stream_is_an_error_event_with_what_there_was() -> None:
    script: Script = [STARTED, CHUNK, RunFailed(UnitLost("gone"), Usage(3, 0, 1, 0.1), "hel")]
    answer, _ = await ask(script, INVOKE, body_of(INVOKE, True))
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
    script: Script = [STARTED, CHUNK, RunFailed(UnitLost("gone"), Usage(3, 0, 1, 0.1), "hel")]
    answer, _ = await ask(script, CHAT, body_of(CHAT, True))
    frames = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    assert json.loads(frames[-1])["error"]["code"] == "unit_lost"
    assert "[DONE]" not in answer.text


async def test_a_failed_whole_answer_tells_what_was_made() -> None:
    script: Script = [STARTED, CHUNK, RunFailed(UnitLost("gone"), Usage(3, 0, 1, 0.1), "hel")]
    answer, _ = await ask(script, INVOKE, body_of(INVOKE, False))
    assert answer.status_code == 503
    assert answer.json()["error"]["details"]["output"] == "hel"


async def test_a_failure_in_mid_message_is_that_apis_error_event() -> None:
    script: Script = [STARTED, CHUNK, RunFailed(UnitLost("gone"), Usage(3, 0, 1, 0.1), "hel")]
    answer, _ = await ask(script, MESSAGES, body_of(MESSAGES, True))
    assert answer.status_code == 200
    last = answer.text.rstrip("\n").split("\n\n")[-1]
    assert last.startswith("event: error\n")
    told = AnthropicErrorEnvelope.model_validate_json(last.split("data: ")[1])
    assert (told.error.type, told.request_id) == ("overloaded_error", answer.headers["x-request-id"])
    assert "message_stop" not in answer.text


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Saturated("full", retry_after_s=2), 529, "overloaded_error"),
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
    answer, _ = await ask([error], MESSAGES, body_of(MESSAGES, True))
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
    whole, _ = await ask([STARTED, CHUNK, finish], MESSAGES, body_of(MESSAGES, False))
    message = MessageAnswer.model_validate(whole.json())
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    streamed, _ = await ask([STARTED, CHUNK, finish], MESSAGES, body_of(MESSAGES, True))
    [delta] = [line for line in streamed.text.split("\n") if line.startswith('data: {"type":"message_delta"')]
    assert json.loads(delta.removeprefix("data: "))["delta"] == {
        "stop_reason": reason,
        "stop_sequence": sequence,
    }


async def test_a_finished_chat_ends_with_done() -> None:
    answer, _ = await ask([STARTED, CHUNK, FINISHED], CHAT, body_of(CHAT, True))
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [INVOKE, CHAT])
async def test_a_bug_is_a_500_with_its_request_id_and_no_details(
    path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        answer, _ = await ask([KeyError("secret words")], path, body_of(path, stream))
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["type"] == "api_error"
    assert answer.headers["x-request-id"] in caplog.text


async def test_a_bug_in_a_cold_route_is_told_the_same_way(caplog: pytest.LogCaptureFixture) -> None:
    registry = OnePipeline(error=KeyError("secret words"))
    with caplog.at_level(logging.ERROR):
        async with app_of(services(ScriptedRunner([]), registry=registry)) as app:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                answer = await client.get("/v1/pipelines/pl-1", headers={"x-api-key": "zg-good"})
    assert answer.status_code == 500
    ErrorEnvelope.model_validate(answer.json())
    assert "secret" not in answer.text
    assert caplog.text.count(answer.headers["x-request-id"]) == 1


async def test_a_run_that_ends_without_a_word_is_a_500() -> None:
    for stream in (True, False):
        answer, _ = await ask([], INVOKE, body_of(INVOKE, stream))
        assert answer.status_code == 500


@pytest.mark.parametrize(
    ("status", "expected"),
    [(PipelineStatus.ACTIVE, 200), (PipelineStatus.DEPLOYING, 200), (PipelineStatus.FAILED, 503)],
)
async def test_a_pipeline_that_failed_to_deploy_says_why(status: PipelineStatus, expected: int) -> None:
    script: Script = [STARTED, CHUNK, FINISHED]
    answer, _ = await ask(script, INVOKE, body_of(INVOKE, False), registry=OnePipeline(status))
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
        ([STARTED, CHUNK, RunFailed(UnitLost("gone"), Usage(3, 0, 1, 0.1), "hel")], 503, Outcome.FAILED),
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
    async with app_of(services(ScriptedRunner([]), recorder=recorder)) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await client.post(path, content=body, headers={"x-api-key": key})
            await client.get("/healthz")
            await client.get("/v1/nowhere", headers={"x-api-key": key})
    (story,) = recorder.stories
    assert (story.status, story.tenant_id, story.pipeline_id) == (status, tenant, pipeline)
    assert story.outcome is Outcome.REFUSED


@pytest.mark.parametrize("server_cancels", [True, False])
async def test_a_client_that_leaves_is_a_cancelled_call(server_cancels: bool) -> None:
    recorder = Recorder()

    class Endless(ScriptedRunner):
        async def run(self, plan: Plan, story: Story) -> AsyncGenerator[list[RunEvent], None]:
            yield [STARTED]
            await asyncio.Event().wait()

    async with app_of(services(Endless([]), recorder=recorder)) as app:
        slow = Dribbler()
        slow.parts.put_nowait({"type": "http.request", "body": b'"stream": true}', "more_body": False})
        asking = asyncio.create_task(slow.ask(app, **({SERVER_CANCELS: True} if server_cancels else {})))
        while not slow.sent:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if server_cancels:
            asking.cancel()
        slow.parts.put_nowait({"type": "http.disconnect"})
        await asyncio.wait((asking,))
    (story,) = recorder.stories
    assert story.outcome is Outcome.CANCELLED


async def test_streams_above_the_cap_are_refused_and_places_come_back() -> None:
    hold = asyncio.Event()

    class Held(ScriptedRunner):
        async def run(self, plan: Plan, story: Story) -> AsyncGenerator[list[RunEvent], None]:
            yield [STARTED]
            await hold.wait()
            yield [FINISHED]

    async with app_of(services(Held([]))) as app:
        transport = httpx.ASGITransport(app)
        headers = {"x-api-key": "zg-good"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            first = asyncio.create_task(client.post(INVOKE, json=body_of(INVOKE, False)))
            while not app._pace.streams:  # noqa: ASYNC110  a turn of the loop at a time
                await asyncio.sleep(0)
            refused = await client.post(INVOKE, json=body_of(INVOKE, False))
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            hold.set()
            assert (await first).status_code == 200
            assert (await client.post(INVOKE, json=body_of(INVOKE, False))).status_code == 200


class Dribbler:
    """A request whose body comes when it is let."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.parts.put_nowait({"type": "http.request", "body": b'{"input": "x", ', "more_body": True})
        self.sent: list[Any] = []

    async def ask(self, app: GatewayApp, **more: Any) -> None:
        async def send(message: Any) -> None:
            self.sent.append(message)

        headers = [(b"x-api-key", b"zg-good")]
        scope = {"type": "http", "method": "POST", "path": INVOKE, "headers": headers, **more}
        await app(scope, self.parts.get, send)


async def test_a_body_that_dribbles_in_holds_no_place() -> None:
    slow = Dribbler()
    async with app_of(services(ScriptedRunner([STARTED, CHUNK, FINISHED]))) as app:
        asking = asyncio.create_task(slow.ask(app))
        while not slow.parts.empty():  # noqa: ASYNC110
            await asyncio.sleep(0)
        transport = httpx.ASGITransport(app)
        headers = {"x-api-key": "zg-good"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            assert (await client.post(INVOKE, json=body_of(INVOKE, False))).status_code == 200
        slow.parts.put_nowait({"type": "http.request", "body": b'"stream": false}', "more_body": False})
        await asking
        assert app._pace.streams == 0
    assert slow.sent[0]["status"] == 200


async def test_a_body_that_does_not_end_in_time_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_TIME_S", 0.0)
    slow = Dribbler()
    async with app_of(services(ScriptedRunner([]))) as app:
        await slow.ask(app)
    assert slow.sent[0]["status"] == 408
    assert (b"connection", b"close") in slow.sent[0]["headers"]
    error = json.loads(slow.sent[1]["body"])["error"]
    assert (error["code"], error["param"]) == ("request_timeout", "body")


async def asked_with(*headers: tuple[str, str]) -> httpx.Response:
    async with app_of(services(ScriptedRunner([STARTED, CHUNK, FINISHED]))) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            given = [("x-api-key", "zg-good"), *headers]
            return await client.post(INVOKE, json=body_of(INVOKE, False), headers=given)


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
    async with app_of(services(ScriptedRunner(script))) as app:
        headers = {"x-api-key": "zg-good", "grid-version": version}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://x", headers=headers
        ) as client:
            return await client.post(path, json=body)


async def test_a_conversation_as_input_is_the_first_versions() -> None:
    body = {"input": [{"role": "user", "content": "hello"}], "stream": False}
    old = await in_version(FIRST, [STARTED, CHUNK, FINISHED], INVOKE, body)
    assert old.status_code == 200, old.text
    new = await in_version(CURRENT, [STARTED, CHUNK, FINISHED], INVOKE, body)
    assert (new.status_code, new.json()["error"]["param"]) == (400, "input")
    assert "`messages`" in new.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_the_first_version_has_details_beside_the_fixed_fields(stream: bool) -> None:
    script: Script = [STARTED, CHUNK, RunFailed(UnitLost("gone"), Usage(3, 0, 1, 0.1), "hel")]
    answer = await in_version(FIRST, script, INVOKE, body_of(INVOKE, stream))
    told = json.loads(answer.text.rstrip("\n").split("data: ")[-1]) if stream else answer.json()
    assert told["error"]["output"] == "hel"
    assert told["error"]["code"] == "unit_lost"
    assert "details" not in told["error"]


async def test_compatible_routes_look_the_same_in_every_version() -> None:
    answers = [await in_version(version, [NotFound("x")], CHAT, {"model": "sim"}) for version in VERSIONS]
    assert answers[0].json() == answers[1].json()


@pytest.mark.parametrize("server_cancels", [True, False])
async def test_a_client_that_leaves_ends_the_run(server_cancels: bool) -> None:
    """Serve cancels the request; plain servers only say that the client is gone."""
    runner = ScriptedRunner([STARTED, CHUNK, *[CHUNK] * 10_000])
    sent: list[Any] = []
    gone = asyncio.Event()
    body = [{"type": "http.request", "body": b'{"input": "x"}', "more_body": False}]

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": INVOKE,
        "headers": [(b"x-api-key", b"zg-good")],
        "zerogrid.server_cancels": server_cancels,
    }
    async with app_of(services(runner)) as app:
        task = asyncio.create_task(app(scope, receive, send))
        while len(sent) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        if server_cancels:
            task.cancel()
        else:
            gone.set()
        await asyncio.wait([task])
        assert runner.left == 1
        assert app._pace.streams == 0


async def test_the_services_are_closed_with_the_server() -> None:
    before = Closing.closed
    async with app_of(services(ScriptedRunner([]))):
        pass
    assert Closing.closed == before + 1


async def test_a_start_that_fails_is_told_to_the_server() -> None:
    async def build() -> Services:
        raise GridError("Redis is away")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    await GatewayApp(CONFIG, build)({"type": "lifespan"}, receive, send)
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert "Redis is away" in sent[0]["message"]


async def test_before_its_start_the_gateway_says_so() -> None:
    async def build() -> Services:
        raise AssertionError("never built")

    transport = httpx.ASGITransport(GatewayApp(CONFIG, build))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.get("/v1/models")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"


async def test_websockets_are_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {}

    async def build() -> Services:
        raise AssertionError("never built")

    await GatewayApp(CONFIG, build)({"type": "websocket"}, receive, send)
    assert sent[0]["type"] == "websocket.close"
