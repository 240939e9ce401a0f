"""When a pipeline is active, failed, or neither yet."""

from __future__ import annotations

import pytest

from gateway.pipeline.contract import Contract
from gateway.pipeline.deployment import Finding, Seen, Transition, dry_runs, finding_of, is_due, transition
from gateway.records import DataSourceRecord, PipelineRecord, PipelineStatus
from grid.errors import DeadlineExceeded, GridError, InvalidRequest, NoEligibleUnit, Saturated
from grid.words import Precision, Task

FINE, BROKEN, UNKNOWN = Finding("a"), Finding("b", problem="no unit"), Finding("c", conclusive=False)
DEPLOYING, ACTIVE, FAILED = PipelineStatus.DEPLOYING, PipelineStatus.ACTIVE, PipelineStatus.FAILED


@pytest.mark.parametrize(
    ("status", "findings", "expected"),
    [
        (DEPLOYING, [FINE, FINE], Transition(ACTIVE, "")),
        (DEPLOYING, [FINE, BROKEN], Transition(FAILED, "b: no unit")),
        (DEPLOYING, [BROKEN, BROKEN], Transition(FAILED, "b: no unit; b: no unit")),
        (DEPLOYING, [FINE, UNKNOWN], None),
        (DEPLOYING, [BROKEN, UNKNOWN], Transition(FAILED, "b: no unit")),
        (FAILED, [FINE], Transition(ACTIVE, "")),
        (FAILED, [BROKEN], Transition(FAILED, "b: no unit")),
        (FAILED, [UNKNOWN], None),
        (ACTIVE, [BROKEN], None),
        (ACTIVE, [FINE], None),
    ],
)
def test_transitions(status: PipelineStatus, findings: list[Finding], expected: Transition | None) -> None:
    assert transition(status, findings) == expected


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (None, FINE),
        (Saturated("full", ever=True), FINE),
        (NoEligibleUnit("draining", ever=True), FINE),
        (NoEligibleUnit("no unit", ever=False), Finding("a", problem="no unit")),
        (InvalidRequest("no such model"), Finding("a", problem="no such model")),
        (Saturated("the placement actor can't be reached"), Finding("a", conclusive=False)),
        (DeadlineExceeded("late"), Finding("a", conclusive=False)),
    ],
)
def test_what_placement_says_means(refusal: GridError | None, expected: Finding) -> None:
    assert finding_of("a", refusal) == expected


def test_a_look_is_due_when_the_world_changed() -> None:
    assert is_due(None, Seen(1, 1))
    assert not is_due(Seen(1, 1), Seen(1, 1))
    assert is_due(Seen(1, 1), Seen(2, 1))
    assert is_due(Seen(1, 1), Seen(1, 2))


def test_every_step_is_asked_for_as_it_will_run_and_reserves_nothing() -> None:
    contract = Contract.model_validate_json(
        """{"pipeline": {"steps": [
            {"type": "retrieval", "data_source_id": "ds-1"}, {"type": "retrieval", "source": "gone"},
            {"type": "generation", "model": "m", "max_output_tokens": 64}]},
            "execution_hints": {"min_gpu_memory_mb": 20000, "quantization": "fp8", "avoid_models": ["x"]}}"""
    )
    record = PipelineRecord("pl-1", "acme", "", 3, contract, DEPLOYING, "", "", "")
    source = DataSourceRecord("ds-1", "acme", "kb", "qdrant", {}, "local", "minilm", 384, 0, "", "")
    embed, generate = dry_runs(record, {"retrieval-1": source}, Seen(7, 9))
    assert (embed.step_id, embed.task, embed.model) == ("retrieval-1", Task.EMBED, "minilm")
    assert (generate.task, generate.model, generate.max_output_tokens) == (Task.GENERATE, "m", 64)
    assert (generate.min_memory_mb, generate.lowest_precision) == (20_000, Precision.FP8)
    assert generate.avoid_models == ("x",)
    assert embed.dry_run
    assert generate.dry_run
    assert {embed.tenant_id, generate.tenant_id} == {"acme"}
