"""An authenticated call: who asks, of which cell, over which exchange. What every route is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request, Response

from gateway.http.exchange import Exchange
from gateway.http.pace import Pace
from gateway.observe.story import Story
from gateway.records import Tenant
from gateway.services import Services
from gateway.trust.residency import Residency
from grid.errors import Forbidden

CALL = "zerogrid.call"
"""Scope key: the authenticated call; absent on open routes."""
EXCHANGE = "zerogrid.exchange"
"""Scope key: the exchange, on every request."""


@dataclass(frozen=True, slots=True)
class Call:
    exchange: Exchange
    services: Services
    tenant: Tenant
    pace: Pace
    residency: Residency
    """Where the call may run, as its header narrows it."""
    story: Story

    @property
    def request_id(self) -> str:
        return self.exchange.request_id

    async def body(self) -> bytes:
        return await self.exchange.body(self.services.config.gateway.max_body_bytes)

    def require_operator(self) -> None:
        if not self.tenant.operator:
            raise Forbidden("this route is the operator's; use the operator key that `grid up` printed")


def call_of(request: Request) -> Call:
    call: Call = request.scope[CALL]
    return call


InCall = Annotated[Call, Depends(call_of)]


class Json(Response):
    """A JSON answer that is already encoded."""

    media_type = "application/json"
