"""Whose units a pipeline's figures speak of."""

from __future__ import annotations

import pytest
from support.fleet import make_card, make_load

from gateway.http.metrics import capacity, models_of
from gateway.observe.figures import Window
from gateway.pipeline.contract import Contract
from gateway.records import PipelineRecord, PipelineStatus, Revision
from grid.config import Config
from grid.words import FleetUnit, UnitState

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


def window(cu_seconds: float) -> Window:
    return Window(60.0, 6, 6, 0, 0, 0, 10, 0, 10, cu_seconds, 5.0)


def fleet_unit(model: str, cu_factor: float, state: UnitState = UnitState.READY) -> FleetUnit:
    card = make_card(model=model, cu_factor=cu_factor)
    return FleetUnit(card, make_load(card, state=int(state)), 0, 1.0)


def test_utilisation_is_what_was_used_of_what_the_ready_units_could_do() -> None:
    units = [
        fleet_unit("m", 2.0),
        fleet_unit("m", 0.5),
        fleet_unit("other", 8.0),
        fleet_unit("m", 4.0, UnitState.STARTING),
    ]
    assert capacity(units, frozenset({"m"})) == 2.5
    assert capacity(units, None) == 10.5
    # 2.5 a second over a minute are 150.
    assert window(30.0).busy_share(2.5) == pytest.approx(0.2)
    assert window(0.0).busy_share(2.5) == 0.0
    assert window(1000.0).busy_share(2.5) == 1.0
    assert window(30.0).busy_share(capacity([], None)) == 0.0
