"""From a stored pipeline to a plan: which revision calls of it run, and which data sources that one means."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from gateway.http.call import Call
from gateway.pipeline.contract import Contract, RetrievalStep
from gateway.pipeline.invocation import Invocation
from gateway.pipeline.plan import Plan, plan_invocation
from gateway.records import DataSourceRecord, PipelineRecord, PipelineStatus
from grid.errors import NoEligibleUnit, NotFound


def to_run(call: Call, record: PipelineRecord) -> PipelineRecord:
    """Return a pipeline as this call runs it, and write down which revision that is. Raises as `serving`."""
    call.story.of(record.pipeline_id, record.serving.number if record.serving else record.revision)
    return serving(record)


def serving(record: PipelineRecord) -> PipelineRecord:
    """Return a pipeline as calls run it: while its newest revision is not active, the one before that was.

    One that was never active is tried while it is being deployed. Raises NoEligibleUnit when it failed.
    """
    if record.serving is not None:
        number, contract = record.serving.number, record.serving.contract
        return replace(record, revision=number, contract=contract, status=PipelineStatus.ACTIVE, serving=None)
    if record.status is PipelineStatus.FAILED:
        raise NoEligibleUnit(
            f"pipeline {record.pipeline_id} is not deployed: {record.reason}",
            pipeline_status=record.status.value,
        )
    return record


async def plan_of(
    call: Call, record: PipelineRecord, invocation: Invocation | None, *, request_id: str = ""
) -> Plan:
    """Plan one call of a pipeline, under an id of its own where it has one. Raises NotFound for a data source
    that is gone."""
    return plan_invocation(
        record.contract,
        invocation,
        request_id=request_id or call.request_id,
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
