"""Pipelines over HTTP: declare, revise, list, read, delete, plan; invoke and one-shot (hot, raw ASGI)."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query

from gateway.http.batches import input_id, streamed_each, whole_each
from gateway.http.call import Call, InCall, Json
from gateway.http.documented import body, errors
from gateway.http.exchange import unless_client_leaves
from gateway.http.forecasts import plan_view
from gateway.http.runs import region_header, streamed, whole
from gateway.http.serving import plan_of, present_sources, serving, to_run
from gateway.http.shapes.pipelines import PipelineList, PipelineView, PlanView
from gateway.http.shapes.shape import Deleted
from gateway.http.views import GridEvents, whole_answer
from gateway.observe.figures import StepFigures
from gateway.pipeline.contract import Contract, parse
from gateway.pipeline.forecast import doubts, forecast
from gateway.pipeline.invocation import Invocation, OneShot, overridden
from gateway.pipeline.plan import streams
from gateway.pipeline.registry import MAX_PAGE
from gateway.pipeline.resolution import check_models, check_sources
from gateway.records import PipelineRecord, PipelineStatus
from gateway.trust.residency import check_marks, texts_within
from grid.errors import InvalidRequest

NOTHING_ASKED = (b"", b"{}")

router = APIRouter(tags=["pipelines"])


@router.post(
    "/v1/pipelines",
    status_code=201,
    responses={201: {"model": PipelineView}, **errors(400, 403, 413, 422)},
    openapi_extra=body(Contract),
)
async def create_pipeline(call: InCall) -> Json:
    """Declare a pipeline. It answers at once as `deploying`; the status becomes `active` or `failed`."""
    record = await call.services.registry.create_pipeline(
        call.tenant.tenant_id, await declared(call), idempotency_key=call.exchange.header(b"idempotency-key")
    )
    call.services.deployer.wake()
    return Json(orjson.dumps(pipeline_view(record)), status_code=201)


@router.get("/v1/pipelines", responses={200: {"model": PipelineList}, **errors(400)})
async def list_pipelines(
    call: InCall,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="at most so many")] = MAX_PAGE,
    after: Annotated[str, Query(description="the `next` of the page before")] = "",
) -> Json:
    """List the tenant's pipelines, oldest first, in pages."""
    registry = call.services.registry
    records, following = await registry.list_pipelines(call.tenant.tenant_id, limit=limit, after=after)
    views = [pipeline_view(record) for record in records]
    return Json(orjson.dumps({"pipelines": views, "next": following or None}))


@router.get("/v1/pipelines/{pipeline_id}", responses={200: {"model": PipelineView}, **errors(404)})
async def read_pipeline(call: InCall, pipeline_id: str) -> Json:
    """Read one pipeline with its contract, its status, and how its serving steps did in the last hour."""
    record = await call.services.registry.read_pipeline(call.tenant.tenant_id, pipeline_id)
    run = record if record.serving is None else serving(record)
    known = await call.services.figures.steps(call.tenant.tenant_id, pipeline_id, run.revision)
    step_metrics = [
        step_metrics_view(step.id or "", known.get(step.id or "", StepFigures()))
        for step in run.contract.pipeline.steps
    ]
    return Json(orjson.dumps({**pipeline_view(record), "step_metrics": step_metrics}))


@router.put(
    "/v1/pipelines/{pipeline_id}",
    responses={200: {"model": PipelineView}, **errors(400, 403, 404, 409, 413, 422)},
    openapi_extra=body(Contract),
)
async def revise_pipeline(call: InCall, pipeline_id: str) -> Json:
    """Make the body the pipeline's next revision, which is `deploying` as a new pipeline is. Calls in flight
    finish on the revision that they began with; new ones run the last active one until this one is active.
    A body that equals the newest revision makes none: the answer is the pipeline as it is."""
    record = await call.services.registry.revise_pipeline(
        call.tenant.tenant_id,
        pipeline_id,
        await declared(call),
        idempotency_key=call.exchange.header(b"idempotency-key"),
    )
    call.services.deployer.wake()
    return Json(orjson.dumps(pipeline_view(record)))


async def declared(call: Call) -> Contract:
    """Return the contract in the body, as far as it can be checked before it is deployed."""
    contract = parse(Contract, await call.body())
    if call.residency.regions is not None:
        check_marks(call.residency, texts_within(contract.model_dump()))
    check_models(contract, call.services.config)
    check_sources(contract, await present_sources(call, contract), call.services.config)
    return contract


@router.delete("/v1/pipelines/{pipeline_id}", responses={200: {"model": Deleted}, **errors(404)})
async def delete_pipeline(call: InCall, pipeline_id: str) -> Json:
    """Delete a pipeline; calls in flight finish."""
    await call.services.registry.delete_pipeline(call.tenant.tenant_id, pipeline_id)
    return Json(orjson.dumps({"deleted": True, "id": pipeline_id}))


@router.post(
    "/v1/pipelines/{pipeline_id}/dry-run",
    responses={200: {"model": PlanView}, **errors(400, 403, 404, 413, 429)},
    openapi_extra=body(Invocation),
)
async def dry_run(call: InCall, pipeline_id: str) -> Json:
    """Say what a call would do: where each step would run, what every unit would take for it, and why others
    can't. Nothing is computed, reserved or charged. Without a body, or with `{}`, any call's plan is told."""
    given = (await call.body()).strip()
    invocation = parse(Invocation, given) if given not in NOTHING_ASKED else None
    if invocation is not None and invocation.inputs is not None:
        raise InvalidRequest("inputs: a dry-run plans one call; send one of them as `input`", param="inputs")
    record = await call.services.registry.get_pipeline(call.tenant.tenant_id, pipeline_id)
    if record.serving is not None:
        record = serving(record)
    return Json(orjson.dumps(await forecast_view(call, record, invocation)))


async def forecast_view(call: Call, record: PipelineRecord, invocation: Invocation | None) -> dict[str, Any]:
    """Plan a call, and ask placement what would become of it."""
    told = await forecast(await plan_of(call, record, invocation), call.services.placement)
    return plan_view(told, doubts(told, call.services.config))


async def invoke(call: Call, pipeline_id: str) -> None:
    """Run a pipeline: SSE unless the body, the contract or the accept header asks for JSON."""
    record = await call.services.registry.get_pipeline(call.tenant.tenant_id, pipeline_id)
    record = to_run(call, record)
    invocation = parse(Invocation, await call.body())
    await unless_client_leaves(call.exchange, answer(call, record, invocation))


async def one_shot(call: Call) -> None:
    """Run a contract that comes with its input, exactly as `invoke` does; without input say what it would do.
    Nothing is stored."""
    request = parse(OneShot, await call.body())
    record = unstored(call, request.contract)
    if request.invocation is not None:
        await unless_client_leaves(call.exchange, answer(call, record, request.invocation))
        return
    call.story.route = ""  # nothing runs, so it is counted as no call
    await call.exchange.respond(200, await forecast_view(call, record, None))


def unstored(call: Call, contract: Contract) -> PipelineRecord:
    """Return a contract as a pipeline without an id, which no registry knows."""
    return PipelineRecord(
        pipeline_id="",
        tenant_id=call.tenant.tenant_id,
        name=contract.name or "",
        revision=0,
        contract=contract,
        status=PipelineStatus.ACTIVE,
        reason="",
        created_at="",
        updated_at="",
    )


async def answer(call: Call, record: PipelineRecord, invocation: Invocation) -> None:
    """Run a call, or each of its inputs, and answer it as it asks."""
    accepts_json = invocation.stream is None and only_json(call.exchange.header(b"accept"))
    stream = streams(record.contract, invocation) and not accepts_json
    if invocation.inputs is not None:
        makers = [
            partial(plan_of, call, record, each, request_id=input_id(call.request_id, number))
            for number, each in enumerate(invocation.each())
        ]
        control = overridden(record.contract.stream_control, invocation.stream_control)
        if stream:
            await streamed_each(call, makers, control.max_latency_ms / 1000)
        else:
            await whole_each(call, makers)
        return
    plan = await plan_of(call, record, invocation)
    run = call.services.runner.run(plan, call.story)
    if stream:
        await streamed(call, plan, run, GridEvents(call.request_id, call.exchange.ecosystem))
    else:
        result = await whole(run)
        await call.exchange.respond(200, whole_answer(result), region_header([*result.ends()]))


def only_json(accept: str) -> bool:
    """Say whether the accept header asks for JSON and doesn't name event streams."""
    return "application/json" in accept and "text/event-stream" not in accept


def step_metrics_view(step_id: str, figures: StepFigures) -> dict[str, Any]:
    return {
        "step_id": step_id,
        "calls": figures.calls,
        "errors": figures.errors,
        "p50_ms": None if figures.p50_ms is None else round(figures.p50_ms, 3),
        "p99_ms": None if figures.p99_ms is None else round(figures.p99_ms, 3),
        "tokens": figures.tokens,
    }


def pipeline_view(record: PipelineRecord) -> dict[str, Any]:
    return {
        "pipeline_id": record.pipeline_id,
        "name": record.name,
        "revision": record.revision,
        "serving_revision": serving_revision(record),
        "status": record.status.value,
        "reason": record.reason or None,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
        "contract": record.contract.model_dump(mode="json", exclude_none=True),
    }


def serving_revision(record: PipelineRecord) -> int | None:
    """Return the active revision, which calls run; None where there is none yet."""
    if record.serving is not None:
        return record.serving.number
    return record.revision if record.status is PipelineStatus.ACTIVE else None
