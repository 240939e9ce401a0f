"""Whose units a pipeline's figures speak of."""

from __future__ import annotations

from gateway.http.metrics import models_of
from gateway.pipeline.contract import Contract
from gateway.records import PipelineRecord, PipelineStatus, Revision
from grid.config import Config

CONFIG = Config.model_validate(
    {
        "models": [{"name": "old", "engine": "simulated"}, {"name": "new", "engine": "simulated"}],
        "aliases": {"newest": "new"},
    }
)


def contract_of(model: str) -> Contract:
    return Contract.model_validate({"pipeline": {"steps": [{"type": "generation", "model": model}]}})


def record_of(status: PipelineStatus, serving: Revision | None) -> PipelineRecord:
    return PipelineRecord("pl-1", "t", "p", 2, contract_of("newest"), status, "", "", "", serving)


def test_an_alias_stands_for_its_model() -> None:
    assert models_of(record_of(PipelineStatus.ACTIVE, None), CONFIG) == {"new"}


def test_until_a_revision_is_active_the_models_are_those_of_the_one_that_calls_run() -> None:
    before = Revision(1, contract_of("old"))
    for status in (PipelineStatus.DEPLOYING, PipelineStatus.FAILED):
        assert models_of(record_of(status, before), CONFIG) == {"old"}
