"""The HTTP face of a cell as one raw ASGI callable. Every response leaves through here.

For each request it makes the request id, authenticates, and hands over: the hot routes directly, all
others to a FastAPI application that shares the call, the ids and the error envelope. It is pickled to the
replicas, so what holds sockets is built in the lifespan, in the serving loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import FastAPI

from gateway.http import anthropic, embeddings, openai, pipelines
from gateway.http.call import CALL, EXCHANGE, Call
from gateway.http.cold import build_cold_app
from gateway.http.errors import ANTHROPIC, GRID, MethodNotAllowed, ecosystem_at, unexpected
from gateway.http.exchange import Exchange, Message, Receive, Scope, Send, client_request_id
from gateway.http.pace import Pace
from gateway.http.queries import check_query
from gateway.http.traced import traced
from gateway.http.versions import (
    ADAPTERS,
    ALIAS,
    CURRENT,
    HEADER,
    ecosystem_of,
    served_headers,
    version_asked,
)
from gateway.observe.story import CLIENT_LEFT, Story
from gateway.services import Services
from gateway.trust.residency import HEADER as RESIDENCY_HEADER
from gateway.trust.residency import Residency, parse_rule
from grid.config import Config
from grid.errors import Forbidden, GridError, InvalidRequest, Rejected, Saturated, Unauthorised
from grid.words import new_id

logger = logging.getLogger(__name__)

REQUEST_ID = "zerogrid.request_id"
"""Scope key: the id that a middleware in front already made."""
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
"""What answers without a key: nothing there belongs to a tenant."""
SCRAPE_PATH = "/metrics"
INVOKE_PREFIX, INVOKE_SUFFIX = "/v1/pipelines/", "/invoke"
INVOKE_ROUTE = "/v1/pipelines/{pipeline_id}/invoke"
FULL_RETRY_AFTER_S = 1.0
"""A replica at its stream cap frees a place about as often as a short answer ends."""

Hot = Callable[[Call], Awaitable[None]]
HOT: dict[str, Hot] = {
    "/v1/chat/completions": openai.chat_completions,
    "/v1/embeddings": embeddings.create_embeddings,
    "/v1/messages": anthropic.create_message,
    "/v1/pipeline": pipelines.one_shot,
}
"""Beside the invocation of a pipeline, whose path holds its id."""


class GatewayApp:
    """`build` makes the services of this replica when it starts."""

    def __init__(self, config: Config, build: Callable[[], Awaitable[Services]]) -> None:
        self._config = config
        self._build = build
        self._services: Services | None = None
        self._cold: FastAPI | None = None
        self._pace = Pace()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await send(
                {"type": "websocket.close", "code": 1003, "reason": "this server speaks HTTP and SSE only"}
            )

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message: Message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    self._services = await self._build()
                    self._cold = build_cold_app()
                except Exception as error:
                    logger.exception("the gateway did not start")
                    await send(
                        {"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"}
                    )
                    return
                self._pace.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                self._pace.close()
                if self._services is not None:
                    await self._services.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, scope.get(REQUEST_ID) or new_id("req_"))
        given = exchange.header(b"x-client-request-id")
        if not given and REQUEST_ID not in scope:
            given = exchange.header(b"x-request-id")
        if echo := client_request_id(given):
            exchange.extra_headers.append((b"x-client-request-id", echo.encode()))
        exchange.ecosystem = ecosystem_at(exchange.path)
        if exchange.ecosystem is ANTHROPIC:
            exchange.extra_headers.append((b"request-id", exchange.request_id.encode()))
        scope[EXCHANGE] = exchange
        tracer = self._services.tracer if self._services is not None else None
        if tracer is None:
            await self._answer(exchange)
        else:
            await traced(tracer, exchange, self._answer)

    async def _answer(self, exchange: Exchange) -> None:
        story = Story(exchange.request_id, time.monotonic(), time.time())
        error: GridError | None = None
        try:
            await self._dispatch(exchange, story)
        except GridError as refusal:
            error = refusal
            await self._fail(exchange, error)
        except Exception as bug:
            error = unexpected(bug, exchange.request_id)
            await self._fail(exchange, error)
        finally:
            # The one place where a call ends, whichever way it does.
            if story.route and self._services is not None:
                story.end(status_seen(exchange, story, error), error, time.monotonic())
                self._services.recorder.take(story)

    async def _dispatch(self, exchange: Exchange, story: Story) -> None:
        services = self._services
        if services is None:
            raise Rejected("the gateway is starting; try again in a second", retry_after_s=FULL_RETRY_AFTER_S)
        path = exchange.path
        if path in OPEN_PATHS or (path == SCRAPE_PATH and self._config.observe.open_metrics):
            exchange.scope["state"] = {"services": services}
            await self._cold_app(exchange)
            return
        hot = self._hot(path)
        if hot is not None:
            story.route = INVOKE_ROUTE if path.startswith(INVOKE_PREFIX) else path
        speak_version(exchange)
        tenant = await services.tenants.authenticate(presented_key(exchange))
        story.tenant_id = tenant.tenant_id
        residency = self._residency(exchange)
        call = Call(exchange, services, tenant, self._pace, residency, story)
        if hot is None:
            exchange.scope[CALL] = call
            await self._cold_app(exchange)
            return
        if exchange.method != "POST":
            raise MethodNotAllowed(f"{path} takes POST, not {exchange.method}", allowed=["POST"])
        check_query(path, exchange.scope.get("query_string", b"").decode("latin-1"))
        self._refuse_when_full()
        # A body that dribbles in holds no place, so the places may be gone once it is there.
        await call.body()
        self._refuse_when_full()
        self._pace.streams += 1
        try:
            await hot(call)
        finally:
            self._pace.streams -= 1

    def _refuse_when_full(self) -> None:
        if self._pace.streams >= self._config.gateway.max_streams_per_replica:
            raise Saturated(
                "this gateway replica runs as many requests as it may (gateway.max_streams_per_replica)",
                retry_after_s=FULL_RETRY_AFTER_S,
            )

    def _residency(self, exchange: Exchange) -> Residency:
        """Return where the call may run. Raises Forbidden, before the body is read, if that is not here, and
        InvalidRequest for a header that is blank or repeated."""
        residency = parse_rule(exchange.single_header(RESIDENCY_HEADER.encode()) or "")
        region = self._config.cell.region
        if not residency.allows(region):
            raise Forbidden(
                f"this gateway is in {region!r}, outside of {residency.rule!r}; call a gateway inside",
                param=RESIDENCY_HEADER,
                allowed_regions=list(residency.allowed_regions),
            )
        return residency

    def _hot(self, path: str) -> Hot | None:
        if path in HOT:
            return HOT[path]
        if path.startswith(INVOKE_PREFIX) and path.endswith(INVOKE_SUFFIX):
            pipeline_id = path[len(INVOKE_PREFIX) : -len(INVOKE_SUFFIX)]
            if pipeline_id and "/" not in pipeline_id:
                return partial(pipelines.invoke, pipeline_id=pipeline_id)
        return None

    async def _cold_app(self, exchange: Exchange) -> None:
        assert self._cold is not None
        await self._cold(exchange.scope, exchange.receive, exchange.send)

    async def _fail(self, exchange: Exchange, error: GridError) -> None:
        if not exchange.started:
            await exchange.refuse(error)
        elif not exchange.finished:
            # Too late for a status; an unfinished body is the only honest sign left.
            raise error


def status_seen(exchange: Exchange, story: Story, error: GridError | None) -> int:
    """Return the status of a call's end: as its client saw it, or would have had the status line waited.

    In the grid's own numbers, so that figures mean the same on every route.
    """
    if error is not None:
        return GRID.status(error)
    if not exchange.finished:
        return CLIENT_LEFT
    return max(exchange.status, *(GRID.status(run.error) for run in story.runs if run.error is not None), 0)


def speak_version(exchange: Exchange) -> None:
    """Let the exchange speak the version that its caller asks for. Raises InvalidRequest, told in the current
    version, for one that isn't served."""
    try:
        version = version_asked(
            exchange.single_header(HEADER.encode()), exchange.single_header(ALIAS.encode()), exchange.path
        )
    except InvalidRequest:
        exchange.extra_headers += served_headers(CURRENT)
        raise
    exchange.extra_headers += served_headers(version)
    if version in ADAPTERS:
        exchange.translate = partial(translated, exchange, version)
        if exchange.ecosystem is GRID:
            exchange.ecosystem = ecosystem_of(version)


def translated(exchange: Exchange, version: str, body: bytes) -> bytes:
    """Return the body as the current version has it; what is wrong with it is told in its caller's words."""
    current, renamed = ADAPTERS[version].request(exchange.path, body)
    if renamed:
        exchange.ecosystem = ecosystem_of(version, renamed)
    return current


def presented_key(exchange: Exchange) -> str:
    """Return the key that the caller presents. Raises Unauthorised when there is none."""
    key = exchange.header(b"x-api-key").strip()
    if not key:
        scheme, _, value = exchange.header(b"authorization").partition(" ")
        key = value.strip() if scheme.lower() == "bearer" else ""
    if not key:
        raise Unauthorised("no key; send it as `x-api-key: …` or `Authorization: Bearer …`")
    return key
