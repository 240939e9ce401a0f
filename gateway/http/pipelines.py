"""Pipelines over HTTP: declare, list, read, delete, and invoke (the hot route, raw ASGI)."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson
from fastapi import APIRouter

from gateway.http.call import Call, InCall, Json
from gateway.http.documented import body, errors
from gateway.http.errors import envelope
from gateway.http.exchange import unless_client_leaves
from gateway.http.runs import WholeRun, failure, region_header, streamed, usage, whole
from gateway.http.shapes import Deleted, PipelineList, PipelineView
from gateway.http.sse import event
from gateway.pipeline.contract import Contract, Invocation, RetrievalStep, parse
from gateway.pipeline.events import Chunk, Finished, Retrieved, RunEvent, Started, StepPlacement, StepTiming
from gateway.pipeline.plan import Plan, check_models, check_sources, plan_invocation
from gateway.records import DataSourceRecord, PipelineRecord, PipelineStatus, RetrievedDocument
from gateway.trust.residency import check_marks, texts_within
from grid.errors import NoEligibleUnit, NotFound

router = APIRouter(tags=["pipelines"])


@router.post(
    "/v1/pipelines",
    status_code=201,
    responses={201: {"model": PipelineView}, **errors(400, 403, 413, 422)},
    openapi_extra=body(Contract),
)
async def create_pipeline(call: InCall) -> Json:
    """Declare a pipeline. It answers at once as `deploying`; the status becomes `active` or `failed`."""
    contract = parse(Contract, await call.body())
    if call.residency.regions is not None:
        check_marks(call.residency, texts_within(contract.model_dump()))
    check_models(contract, call.services.config)
    check_sources(contract, await present_sources(call, contract), call.services.config)
    record = await call.services.registry.create_pipeline(
        call.tenant.tenant_id, contract, idempotency_key=call.exchange.header(b"idempotency-key")
    )
    call.services.deployer.wake()
    return Json(orjson.dumps(pipeline_view(record)), status_code=201)


@router.get("/v1/pipelines", responses={200: {"model": PipelineList}})
async def list_pipelines(call: InCall) -> Json:
    """List the tenant's pipelines, oldest first."""
    records = await call.services.registry.list_pipelines(call.tenant.tenant_id)
    return Json(orjson.dumps({"pipelines": [pipeline_view(record) for record in records]}))


@router.get("/v1/pipelines/{pipeline_id}", responses={200: {"model": PipelineView}, **errors(404)})
async def read_pipeline(call: InCall, pipeline_id: str) -> Json:
    """Read one pipeline with its contract and status."""
    record = await call.services.registry.get_pipeline(call.tenant.tenant_id, pipeline_id)
    return Json(orjson.dumps(pipeline_view(record)))


@router.delete("/v1/pipelines/{pipeline_id}", responses={200: {"model": Deleted}, **errors(404)})
async def delete_pipeline(call: InCall, pipeline_id: str) -> Json:
    """Delete a pipeline; calls in flight finish."""
    await call.services.registry.delete_pipeline(call.tenant.tenant_id, pipeline_id)
    return Json(orjson.dumps({"deleted": True, "id": pipeline_id}))


async def invoke(call: Call, pipeline_id: str) -> None:
    """Run a pipeline: SSE unless the body, the contract or the accept header asks for JSON."""
    invocation = parse(Invocation, await call.body())
    record = await call.services.registry.get_pipeline(call.tenant.tenant_id, pipeline_id)
    await unless_client_leaves(call.exchange, answer(call, record, invocation))


async def answer(call: Call, record: PipelineRecord, invocation: Invocation) -> None:
    refuse_failed(record)
    plan = await plan_of(call, record, invocation)
    run = call.services.runner.run(plan)
    json_wanted = invocation.stream is None and only_json(call.exchange.header(b"accept"))
    if plan.stream and not json_wanted:
        await streamed(call, plan, run, GridEvents(call.request_id))
    else:
        result = await whole(run)
        payload = whole_answer(result)
        await call.exchange.respond(200, payload, region_header([*result.ends()]))


def refuse_failed(record: PipelineRecord) -> None:
    """Raise what keeps a pipeline from running. One that is still being deployed is tried."""
    if record.status is PipelineStatus.FAILED:
        raise NoEligibleUnit(
            f"pipeline {record.pipeline_id} is not deployed: {record.reason}",
            pipeline_status=record.status.value,
        )


async def plan_of(call: Call, record: PipelineRecord, invocation: Invocation) -> Plan:
    """Plan one call of a stored pipeline. Raises NotFound for a data source that is gone."""
    return plan_invocation(
        record.contract,
        invocation,
        request_id=call.request_id,
        pipeline_id=record.pipeline_id,
        revision=record.revision,
        tenant=call.tenant,
        config=call.services.config,
        sources={step.id or "": await source_of(call, step) for step in record.contract.pipeline.retrievals},
        residency=call.residency,
    )


async def present_sources(call: Call, contract: Contract) -> dict[str, DataSourceRecord]:
    """Return the data sources of a contract that exist already, by step id."""
    found = {}
    for step in contract.pipeline.retrievals:
        with contextlib.suppress(NotFound):
            found[step.id or ""] = await source_of(call, step)
    return found


async def source_of(call: Call, step: RetrievalStep) -> DataSourceRecord:
    registry = call.services.registry
    if step.data_source_id is not None:
        return await registry.get_source(call.tenant.tenant_id, step.data_source_id)
    return await registry.find_source(call.tenant.tenant_id, step.source or "")


def only_json(accept: str) -> bool:
    """Say whether the accept header asks for JSON and doesn't name event streams."""
    return "application/json" in accept and "text/event-stream" not in accept


class GridEvents:
    """Encodes a run as the grid's own events."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def __call__(self, item: RunEvent) -> bytes:
        if isinstance(item, Chunk):
            return b'event: token\ndata: {"index":%d,"text":%b,"tokens":%d}\n\n' % (
                item.index,
                orjson.dumps(item.text),
                item.tokens,
            )
        if isinstance(item, Started):
            return event("start", start_view(item))
        if isinstance(item, Retrieved):
            return event("retrieval", retrieval_view(item))
        if isinstance(item, Finished):
            moves = sum(placed.moves for placed in item.placement)
            return event("done", {**finished_view(item), "moves": moves})
        return event("error", envelope(failure(item), self._request_id))


def whole_answer(result: WholeRun) -> dict[str, Any]:
    started, finished = result.ends()
    return {
        "request_id": started.request_id,
        "pipeline_id": started.pipeline_id,
        "revision": started.revision,
        "model": started.model,
        "output": result.output,
        "retrieval": [retrieval_view(item) for item in result.retrieved],
        **finished_view(finished),
        "warnings": started.warnings,
    }


def start_view(item: Started) -> dict[str, Any]:
    return {
        "request_id": item.request_id,
        "pipeline_id": item.pipeline_id,
        "revision": item.revision,
        "model": item.model,
        "steps": item.steps,
        "input_tokens": item.input_tokens,
        "cached_tokens": item.cached_tokens,
        "region": item.region,
        "warnings": item.warnings,
    }


def retrieval_view(item: Retrieved) -> dict[str, Any]:
    return {
        "step_id": item.step_id,
        "documents": [document_view(document) for document in item.documents],
        "dropped": item.dropped,
    }


def document_view(document: RetrievedDocument) -> dict[str, Any]:
    return {
        "id": document.document_id,
        "text": document.text,
        "score": round(document.score, 6),
        "metadata": document.metadata,
    }


def finished_view(item: Finished) -> dict[str, Any]:
    return {
        "finish_reason": item.finish_reason,
        "usage": usage(item.usage),
        "ttft_ms": round(item.ttft_ms, 3),
        "total_ms": round(item.total_ms, 3),
        "timing": [timing_view(step) for step in item.timing],
        "placement": [placement_view(step) for step in item.placement],
        "exact": item.exact,
    }


def timing_view(step: StepTiming) -> dict[str, Any]:
    return {
        "step_id": step.step_id,
        "type": step.type,
        "total_ms": round(step.total_ms, 3),
        "placement_ms": round(step.placement_ms, 3),
        "embed_ms": round(step.embed_ms, 3),
        "search_ms": round(step.search_ms, 3),
        "queue_ms": round(step.queue_ms, 3),
        "prefill_ms": round(step.prefill_ms, 3),
        "decode_ms": round(step.decode_ms, 3),
    }


def placement_view(step: StepPlacement) -> dict[str, Any]:
    return {
        "step_id": step.step_id,
        "unit_id": step.unit_id,
        "model": step.model,
        "region": step.region,
        "gpu_type": step.gpu_type,
        "simulated": step.simulated,
        "predicted_ttft_ms": round(step.predicted_ttft_ms, 3),
        "why": step.why,
        "moves": step.moves,
    }


def pipeline_view(record: PipelineRecord) -> dict[str, Any]:
    return {
        "pipeline_id": record.pipeline_id,
        "name": record.name,
        "revision": record.revision,
        "status": record.status.value,
        "reason": record.reason or None,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
        "contract": record.contract.model_dump(mode="json", exclude_none=True),
    }
