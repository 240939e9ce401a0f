"""The FastAPI application for every route that is not hot. `GatewayApp` stands in front of it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import orjson
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse
from starlette.routing import Match

from gateway.http import anthropic, data_sources, metrics, openai, operations, pipelines
from gateway.http.api_document import document
from gateway.http.call import EXCHANGE, Json
from gateway.http.docs_page import CONTENT_POLICY, page
from gateway.http.errors import INTERNAL_MESSAGE, MethodNotAllowed, error_headers
from gateway.http.exchange import Exchange
from gateway.http.queries import query_known
from gateway.pipeline.refusals import query_refusal
from grid.errors import GridError, InternalError, NotFound


class ColdApp(FastAPI):
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = document(self, self.version)
        return self.openapi_schema


def build_cold_app() -> FastAPI:
    app = ColdApp(
        title="Zerogrid", version=version("zerogrid"), redirect_slashes=False, docs_url=None, redoc_url=None
    )
    for routes in (pipelines, data_sources, openai, anthropic, metrics, operations):
        app.include_router(routes.router, dependencies=[Depends(query_known)])
    app.add_api_route("/docs", _docs, include_in_schema=False)
    app.add_exception_handler(GridError, _refuse)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _bug)
    return app


async def _docs(request: Request) -> HTMLResponse:
    headers = {"content-security-policy": CONTENT_POLICY}
    return HTMLResponse(page(request.app.openapi()), headers=headers)


async def _refuse(request: Request, error: Exception) -> Json:
    assert isinstance(error, GridError)
    exchange: Exchange = request.scope[EXCHANGE]
    told = exchange.ecosystem
    answer = Json(orjson.dumps(told.envelope(error, exchange.request_id)), status_code=told.status(error))
    answer.raw_headers.extend(error_headers(error))
    return answer


async def _http_error(request: Request, error: Exception) -> Json:
    """The router's own refusals: a path that doesn't exist, or exists for another method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = allowed_methods(request)
        message = f"{request.url.path} takes {', '.join(allowed)}, not {request.method}"
        return await _refuse(request, MethodNotAllowed(message, allowed=allowed))
    return await _refuse(request, NotFound("there is no such route; /docs lists them"))


def allowed_methods(request: Request) -> list[str]:
    """Return what the path takes, over all routes; the router itself names only those of the first one."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods)


async def _invalid(request: Request, error: Exception) -> Json:
    assert isinstance(error, RequestValidationError)
    return await _refuse(request, query_refusal(error.errors()[0]))


async def _bug(request: Request, error: Exception) -> Json:
    """The exception goes on to `GatewayApp`, which logs it."""
    del error
    return await _refuse(request, InternalError(INTERNAL_MESSAGE))
