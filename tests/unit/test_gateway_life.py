"""How long things last at a replica: its start and end, a stream's place, a body, a client's patience."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from support.scripted_app import (
    CHUNK,
    CONFIG,
    FINISHED,
    INVOKE,
    KEY,
    STARTED,
    Closing,
    Recorder,
    ScriptedRunner,
    app_of,
    body_of,
    client_of,
    services,
)

from gateway.http import exchange
from gateway.http.app import GatewayApp
from gateway.http.exchange import SERVER_CANCELS
from gateway.observe.story import Outcome, Story
from gateway.pipeline.events import RunEvent
from gateway.pipeline.plan import Plan
from gateway.services import Services
from grid.errors import GridError


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

    async with app_of(services(Held([]))) as app, client_of(app, KEY) as client:
        first = asyncio.create_task(client.post(INVOKE, json=body_of(INVOKE, False)))
        while not app._pace.streams:  # noqa: ASYNC110  a turn of the loop at a time
            await asyncio.sleep(0)
        refused = await client.post(INVOKE, json=body_of(INVOKE, False))
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        hold.set()
        assert (await first).status_code == 200
        assert (await client.post(INVOKE, json=body_of(INVOKE, False))).status_code == 200


async def test_a_body_that_dribbles_in_holds_no_place() -> None:
    slow = Dribbler()
    async with app_of(services(ScriptedRunner([STARTED, CHUNK, FINISHED]))) as app:
        asking = asyncio.create_task(slow.ask(app))
        while not slow.parts.empty():  # noqa: ASYNC110
            await asyncio.sleep(0)
        async with client_of(app, KEY) as client:
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
        SERVER_CANCELS: server_cancels,
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

    async with client_of(GatewayApp(CONFIG, build)) as client:
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
