"""When a declared pipeline counts as deployed: what has to be asked, and what the answers mean. Pure.

    deploying ──all steps can run──▶ active
        │                              ▲
        └──a step can't──▶ failed ─────┘   looked at again when the fleet or a data source changed

An active pipeline stays active: units come and go, and each call is told by itself when none is left. A look
that could not be finished (placement was away) changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.pipeline.contract import Contract, RetrievalStep
from gateway.records import DataSourceRecord, PipelineRecord, PipelineStatus
from grid.errors import GridError, InvalidRequest, NoEligibleUnit, Saturated
from grid.words import PlacementRequest, Task


class Seen(NamedTuple):
    """The state of the world that a look was taken at."""

    fleet_version: int
    sources_version: int


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look said of one step."""

    step_id: str
    problem: str = ""
    """Why the step can't run, with what would have to change; "" if it can."""
    conclusive: bool = True
    """False: nothing was learnt."""


class Transition(NamedTuple):
    status: PipelineStatus
    reason: str


def transition(status: PipelineStatus, findings: Sequence[Finding]) -> Transition | None:
    """Return what becomes of a pipeline, or None if it stays as it is."""
    if status is PipelineStatus.ACTIVE:
        return None
    problems = [f"{finding.step_id}: {finding.problem}" for finding in findings if finding.problem]
    if problems:
        return Transition(PipelineStatus.FAILED, "; ".join(problems))
    if not all(finding.conclusive for finding in findings):
        return None
    return Transition(PipelineStatus.ACTIVE, "")


def is_due(tried: Seen | None, now: Seen) -> bool:
    """A pipeline that was found wanting is looked at again when something changed."""
    return tried != now


def finding_of(step_id: str, refusal: GridError | None) -> Finding:
    """Return what placement's answer to a step's dry run means; None is a decision.

    Units that could run the step but are busy or silent do as well: `ever` tells them from none at all.
    """
    if refusal is None or (isinstance(refusal, NoEligibleUnit | Saturated) and refusal.details.get("ever")):
        return Finding(step_id)
    if isinstance(refusal, NoEligibleUnit | InvalidRequest):
        return Finding(step_id, problem=refusal.message)
    return Finding(step_id, conclusive=False)


def dry_runs(
    record: PipelineRecord, sources: Mapping[str, DataSourceRecord], now: Seen
) -> list[PlacementRequest]:
    """Return one dry run a step: of its generation, or of its query's embedding with the source's model.

    `sources` holds the data source of each retrieval step that has one, by step id.
    """
    requests = []
    # The request id tells one look from the next in the placement actor's log; nothing is reserved under it.
    request_id = f"deploy_{record.pipeline_id}_{record.revision}_{now.fleet_version}_{now.sources_version}"
    hints = record.contract.execution_hints
    for step in record.contract.pipeline.steps:
        step_id = step.id or step.type
        if isinstance(step, RetrievalStep):
            if step_id in sources:
                requests.append(
                    PlacementRequest(
                        request_id=request_id,
                        step_id=step_id,
                        attempt=1,
                        tenant_id=record.tenant_id,
                        task=Task.EMBED,
                        model=sources[step_id].embedding_model,
                        prompt_tokens=1,
                        max_output_tokens=0,
                        dry_run=True,
                    )
                )
            continue
        requests.append(
            PlacementRequest(
                request_id=request_id,
                step_id=step_id,
                attempt=1,
                tenant_id=record.tenant_id,
                task=Task.GENERATE,
                model=step.model,
                prompt_tokens=1,
                max_output_tokens=step.max_output_tokens,
                prefer_regions=hints.prefer_region,
                avoid_models=hints.avoid_models,
                min_memory_mb=hints.min_gpu_memory_mb,
                lowest_precision=hints.lowest_precision,
                dry_run=True,
            )
        )
    return requests


def retrieval_steps(contract: Contract) -> list[tuple[str, RetrievalStep]]:
    return [(step.id or step.type, step) for step in contract.pipeline.retrievals]
