"""A forecast as JSON: what each step would do, and what placement thinks of every unit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.http.errors import status_of
from gateway.observe.explain import candidate_view
from gateway.pipeline.forecast import Forecast, StepForecast
from gateway.pipeline.plan import RetrievalPlan
from grid.errors import GridError


def plan_view(forecast: Forecast, doubts: Sequence[str] = ()) -> dict[str, Any]:
    plan = forecast.plan
    versions = [step.decision.fleet_version for step in forecast.steps if step.decision is not None]
    answer = plan.generation
    return {
        "request_id": plan.request_id,
        "pipeline_id": plan.pipeline_id,
        "revision": plan.revision,
        "runnable": forecast.runnable,
        "steps": [_step_view(step) for step in forecast.steps],
        "ttft_ms": round(forecast.ttft_ms, 3),
        "total_ms": round(forecast.total_ms, 3),
        "cu_seconds": round(forecast.cu_seconds, 6),
        "fleet_version": max(versions, default=0),
        "allowed_regions": plan.allowed_regions,
        "execution_hints": answer.hints.model_dump(mode="json") if answer is not None else {},
        "stream_control": answer.stream_control.model_dump(mode="json") if answer is not None else {},
        "warnings": [*plan.warnings, *doubts],
    }


def _step_view(forecast: StepForecast) -> dict[str, Any]:
    step, decision = forecast.step, forecast.decision
    retrieving = isinstance(step, RetrievalPlan)
    candidates = [candidate_view(candidate) for candidate in forecast.candidates]
    return {
        "step_id": step.step_id,
        "type": "retrieval" if retrieving else "generation",
        "uses": sorted(step.uses),
        "model": step.source.embedding_model if isinstance(step, RetrievalPlan) else step.model,
        "prompt_tokens": forecast.request.prompt_tokens,
        "max_output_tokens": forecast.request.max_output_tokens,
        "begins_ms": round(forecast.begins_ms, 3),
        "chosen": candidates[0] if candidates else None,
        "next_best": candidates[1] if len(candidates) > 1 else None,
        "candidates": candidates,
        "candidate_count": decision.candidates if decision is not None else 0,
        "rejections": [rejection._asdict() for rejection in forecast.rejections],
        "rejected_by_code": dict(forecast.rejected_by_code),
        "refusal": _refusal_view(forecast.refusal) if forecast.refusal is not None else None,
    }


def _refusal_view(refusal: GridError) -> dict[str, Any]:
    return {"status": status_of(refusal)[0], "code": refusal.code, "message": refusal.message}
