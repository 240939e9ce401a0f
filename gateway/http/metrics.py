"""Figures over HTTP: `/metrics` of the whole cell, and of the caller's own calls all others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Request, Response

from gateway.http.call import CALL, Call, InCall, Json
from gateway.http.documented import errors
from gateway.http.operations import unit_view
from gateway.http.shapes.metrics import Explanation, MetricsView, UsageAnswer
from gateway.observe.figures import UsageHour, UsageSum
from gateway.observe.ledger import HOUR_S
from gateway.observe.prometheus import CONTENT_TYPE, render
from gateway.observe.series import health
from gateway.observe.totals import MICRO
from gateway.pipeline.contract import GenerationStep
from gateway.pipeline.resolution import stands_for
from gateway.records import PipelineRecord
from gateway.services import Services
from grid.config import Config
from grid.errors import InvalidRequest
from grid.words import FleetUnit, UnitState

BURST_HEADER = "x-burst-detection-active"
USAGE_DEFAULT_HOURS = 24
MAX_ID_CHARS = 64
"""No request id of ours is longer."""
MAX_USAGE_ROWS = 10_000
"""Of one answer, about 2 MB; more can be had by asking for less time at once."""
USAGE_PRECISION = 6
"""Decimals of `cu_seconds`: they are counted in millionths."""

router = APIRouter(tags=["metrics"])


@router.get("/v1/metrics", responses={200: {"model": MetricsView}, **errors(400, 404, 503)})
async def read_metrics(
    call: InCall, pipeline_id: str | None = None, detail: Literal["hardware"] | None = None
) -> Json:
    """Say how a pipeline's calls went in the last minute, or all of the tenant's."""
    record = await _pipeline(call, pipeline_id)
    figures, tenant_id = call.services.figures, call.tenant.tenant_id
    window = await figures.window(tenant_id, pipeline_id or "")
    burst = await figures.burst(tenant_id, pipeline_id or "")
    fleet = call.services.placement.fleet.units
    models = models_of(record, call.services.config) if record is not None else None
    answer: dict[str, Any] = {
        "pipeline_id": pipeline_id,
        "metrics": {
            "request_rate_per_second": round(window.rate_per_s, 3),
            "p99_latency_ms": None if window.p99_ms is None else round(window.p99_ms, 3),
            "cache_hit_ratio": None if window.cached_share is None else round(window.cached_share, 6),
            "cu_utilization_pct": round(100 * window.busy_share(capacity(fleet, models)), 3),
            "error_rate_5xx": round(window.failed_share, 6),
            "burst_detection_active": burst,
        },
    }
    if detail == "hardware":
        stale_after_ms = call.services.config.placement.stale_after_ms
        answer["hardware"] = [
            {**unit_view(unit), "health": health(unit, stale_after_ms)}
            for unit in sorted(fleet, key=lambda unit: unit.card.unit_id)
        ]
    return Json(orjson.dumps(answer), headers={BURST_HEADER: _flag(burst)})


@router.head("/v1/metrics", responses={200: {"description": "the flag is in the header"}, **errors(400, 404)})
async def peek_metrics(call: InCall, pipeline_id: str | None = None) -> Response:
    """Say in the header `x-burst-detection-active` whether calls come much faster than before."""
    await _pipeline(call, pipeline_id)
    burst = await call.services.figures.burst(call.tenant.tenant_id, pipeline_id or "")
    return Response(headers={BURST_HEADER: _flag(burst)})


@router.get("/v1/usage", responses={200: {"model": UsageAnswer}, **errors(400, 503)})
async def read_usage(
    call: InCall,
    pipeline_id: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> Json:
    """Say what was used by pipeline and hour; without `since`, over the last 24 hours. The answer's `since`
    and `until` are whole hours, within what is kept and no later than this one.

    Usage outlives its pipeline, so an id that is not known any more is answered too, with nothing if it never
    was.
    """
    now = datetime.now(UTC)
    kept = timedelta(days=call.services.config.observe.usage_kept_days)
    end = _utc(until) if until is not None else now
    if since is not None and until is not None and _utc(since) > end:
        raise InvalidRequest("`since` lies after `until`; exchange them", param="since")
    if since is not None and _utc(since) > now:
        raise InvalidRequest(
            f"since: {_stamp(_utc(since))} lies in the future, of which nothing is known; it is "
            f"{_stamp(now.replace(microsecond=0))} now",
            param="since",
        )
    # Nothing is known beyond what is kept.
    end = _hour_above(min(max(end, now - kept), now))
    begin = _utc(since) if since is not None else end - timedelta(hours=USAGE_DEFAULT_HOURS)
    begin = _hour(min(max(begin, now - kept), now))
    rows = await call.services.figures.usage(call.tenant.tenant_id, begin, end, pipeline_id or "")
    if len(rows) > MAX_USAGE_ROWS:
        raise InvalidRequest(
            f"that are {len(rows)} rows, and {MAX_USAGE_ROWS} are given at once; ask for less time, "
            "or for one pipeline",
            param="since",
        )
    return Json(orjson.dumps(usage_answer(rows, begin, end)))


@router.get("/v1/requests/{request_id}", responses={200: {"model": Explanation}, **errors(404, 503)})
async def explain(call: InCall, request_id: str) -> Json:
    """Say what was decided for a call, what was rejected, and how it went against what was predicted.

    It is there within a second of the call's end.
    """
    told = await call.services.figures.explained(call.tenant.tenant_id, request_id[:MAX_ID_CHARS])
    return Json(orjson.dumps(told))


@router.get(
    "/metrics",
    responses={
        200: {
            "content": {"text/plain": {"schema": {"type": "string"}}},
            "description": "Prometheus' text format",
        },
        **errors(403, 503),
    },
)
async def scrape(request: Request) -> Response:
    """The whole cell's figures for Prometheus, from any replica. The operator's, unless
    `observe.open_metrics` opens them to all."""
    call: Call | None = request.scope.get(CALL)
    if call is not None:
        call.require_operator()
    services: Services = call.services if call is not None else request.scope["state"]["services"]
    totals = await services.figures.totals()
    fleet = services.placement.fleet
    text = render(totals, fleet, services.config.placement.stale_after_ms)
    return Response(text, media_type=CONTENT_TYPE)


def usage_answer(rows: list[UsageHour], begin: datetime, end: datetime) -> dict[str, Any]:
    total, by_pipeline = UsageSum(), defaultdict[str, UsageSum](UsageSum)
    for row in rows:
        for into in (total, by_pipeline[row.pipeline_id]):
            into.merge(row.used)
    return {
        "since": _stamp(begin),
        "until": _stamp(end),
        "total": _used(total),
        "pipelines": [{"pipeline_id": name or None, **_used(used)} for name, used in by_pipeline.items()],
        "hours": [
            {"hour": _stamp(row.hour), "pipeline_id": row.pipeline_id or None, **_used(row.used)}
            for row in rows
        ],
    }


def models_of(record: PipelineRecord, config: Config) -> frozenset[str]:
    """Return the models whose units a pipeline's calls run on, as far as their contract names them."""
    named = []
    for step in (record.serving or record).contract.pipeline.steps:
        if isinstance(step, GenerationStep):
            named.append(step.model)
        elif step.query_embedding is not None:
            named.append(step.query_embedding.model)
    return frozenset(stands_for(name, config) for name in named)


def capacity(units: Iterable[FleetUnit], models: frozenset[str] | None) -> float:
    """Return how many `cu_seconds` the ready units (of `models`, or all) can do in a second."""
    return sum(
        unit.card.cu_factor
        for unit in units
        if unit.load.state == UnitState.READY
        and not unit.isolated
        and (models is None or unit.card.model in models)
    )


async def _pipeline(call: Call, pipeline_id: str | None) -> PipelineRecord | None:
    """Raises NotFound, for a foreign id too."""
    if pipeline_id is None:
        return None
    return await call.services.registry.get_pipeline(call.tenant.tenant_id, pipeline_id)


def _used(used: UsageSum) -> dict[str, Any]:
    return {
        "calls": used.calls,
        "input_tokens": used.input_tokens,
        "cached_tokens": used.cached_tokens,
        "output_tokens": used.output_tokens,
        "cu_seconds": round(used.cu_micro / MICRO, USAGE_PRECISION),
    }


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _utc(moment: datetime) -> datetime:
    """A moment without a zone is in UTC. Raises InvalidRequest at the ends of the calendar."""
    try:
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError:
        raise InvalidRequest(f"{moment.isoformat()} is no moment that can be asked for") from None


def _hour(moment: datetime) -> datetime:
    return moment.replace(minute=0, second=0, microsecond=0)


def _hour_above(moment: datetime) -> datetime:
    hour = _hour(moment)
    return hour if hour == moment else hour + timedelta(seconds=HOUR_S)


def _stamp(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
