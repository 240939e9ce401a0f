"""From a compatible route's conversation to a plan: for a model, an alias, or the pipeline whose id stands
in `model`. What the caller says itself replaces the generation step's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.http.call import Call
from gateway.http.serving import plan_of, to_run
from gateway.pipeline.contract import Contract, GenerationStep
from gateway.pipeline.invocation import ChatMessage, Invocation
from gateway.pipeline.plan import Plan, plan_chat
from gateway.records import PipelineRecord
from grid.errors import InvalidRequest, NotFound

PIPELINE_PREFIX = "pl-"


async def plan_conversation(
    call: Call,
    model: str,
    messages: tuple[ChatMessage, ...],
    sampling: Mapping[str, Any],
    *,
    stream: bool | None = None,
) -> Plan:
    """Plan an answer to `messages`. `sampling` holds checked fields of a generation step.

    Raises NotFound (param `model`) for a model or pipeline that the tenant doesn't have.
    """
    record = await pipeline_named(call, model)
    if record is None:
        return plan_chat(
            GenerationStep(model=model).model_copy(update=sampling),
            messages,
            request_id=call.request_id,
            tenant=call.tenant,
            config=call.services.config,
            residency=call.residency,
        )
    record = to_run(call, record)
    record = replace(record, contract=_with_sampling(record.contract, model, sampling))
    return await plan_of(call, record, Invocation.model_construct(messages=messages, stream=stream))


async def pipeline_named(call: Call, model: str) -> PipelineRecord | None:
    """Return the pipeline whose id `model` is; None where it is a model's name. Raises NotFound."""
    if not model.startswith(PIPELINE_PREFIX):
        return None
    try:
        return await call.services.registry.get_pipeline(call.tenant.tenant_id, model)
    except NotFound as unknown:
        raise NotFound(unknown.message, param="model") from None


def _with_sampling(contract: Contract, model: str, sampling: Mapping[str, Any]) -> Contract:
    generation = contract.pipeline.generation
    if generation is None:
        raise InvalidRequest(f"model: {model} only retrieves; invoke it instead", param="model")
    steps = (*contract.pipeline.steps[:-1], generation.model_copy(update=sampling))
    return contract.model_copy(update={"pipeline": contract.pipeline.model_copy(update={"steps": steps})})
