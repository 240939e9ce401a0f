"""The gateway's ASGI callable with a scripted run behind it, and a client that asks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx

from gateway.http.app import GatewayApp
from gateway.observe.story import Story
from gateway.pipeline.contract import Contract
from gateway.pipeline.events import Chunk, Finished, RunEvent, RunFailed, Started
from gateway.pipeline.plan import Plan
from gateway.records import PipelineRecord, PipelineStatus, Tenant
from gateway.services import Services
from grid.config import Config
from grid.errors import NotFound, Unauthorised, UnitLost
from grid.words import Usage

STARTED = Started("req_x", "pl-1", 1, "m", ("generation-1",), (), 3, "local")
CHUNK = Chunk(0, "hel", 1)
FINISHED = Finished("stop", Usage(3, 0, 1, 0.1), 1.0, 2.0, (), (), True)
KEY = ("x-api-key", "zg-good")
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
        if key != KEY[1]:
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


def client_of(app: GatewayApp, *headers: tuple[str, str], raises: bool = True) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=raises)
    return httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers)


async def ask(
    script: Script, path: str, body: dict[str, Any], *headers: tuple[str, str], **parts: Any
) -> httpx.Response:
    """Post `body` with the tenant's key to a gateway whose run plays `script`."""
    async with app_of(services(ScriptedRunner(script), **parts)) as app, client_of(app, KEY) as client:
        return await client.post(path, json=body, headers=headers)


def broken() -> Script:
    """A run whose unit is lost in mid-answer."""
    return [STARTED, CHUNK, RunFailed(UnitLost("gone"), Usage(3, 0, 1, 0.1), "hel")]


def body_of(path: str, stream: bool) -> dict[str, Any]:
    if path in (CHAT, MESSAGES):
        body = {"model": "sim", "messages": [{"role": "user", "content": "x"}], "stream": stream}
        return body if path == CHAT else {**body, "max_tokens": 9}
    return {"input": "x", "stream": stream}
