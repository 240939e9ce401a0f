"""Fleet files: which GPUs stand where. A mistake is named with its line, its field and the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grid.errors import InvalidRequest
from placement.simulator.geography import RoundTrips
from placement.simulator.hardware import MODELS, Gpu, Kernels
from placement.simulator.steps import step_times
from placement.simulator.world import UnitPlan

MAX_UNITS = 20_000
"""Twice what one cell is built for."""


class Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: str
    region: str
    count: int = Field(ge=1, le=MAX_UNITS)


class FleetFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    model: str
    precision: str
    units: list[Group] = Field(min_length=1)


def read_fleet(path: Path) -> FleetFile:
    """Return what the file says. Raises InvalidRequest."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(
            f"{path}: can't be read ({error.strerror}): check the path", param="fleet"
        ) from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        fields = yaml.safe_load(text)
    except yaml.YAMLError as error:
        line = getattr(getattr(error, "problem_mark", None), "line", 0) + 1
        raise InvalidRequest(
            f"{path}: line {line}: is not YAML ({getattr(error, 'problem', error)})", param="fleet"
        ) from error
    try:
        fleet = FleetFile.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise _mistake(path, node, first["loc"], first["msg"]) from error
    if MODELS.get(fleet.model) != fleet.precision:
        field = "model" if fleet.model not in MODELS else "precision"
        offered = ", ".join(f"{model} in {precision}" for model, precision in MODELS.items())
        raise _mistake(path, node, (field,), f"what can be simulated is {offered}")
    return fleet


def _mistake(path: Path, node: Any, place: Sequence[int | str], said: str) -> InvalidRequest:
    field = ".".join(str(part) for part in place) or "the file"
    remedy = "it should be as in `units: [{gpu: H100-SXM, region: us-east-1, count: 4}]`"
    return InvalidRequest(f"{path}: line {_line(node, place)}: {field}: {said}; {remedy}", param=field)


def _line(node: Any, place: Sequence[int | str]) -> int:
    """Return the line of the deepest part of `place` that is in the file."""
    for part in place:
        if isinstance(node, yaml.MappingNode):
            below = next((value for key, value in node.value if key.value == part), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            below = node.value[part]
        else:
            below = None
        if below is None:
            break
        node = below
    return int(node.start_mark.line) + 1 if node is not None else 1


def plan_units(
    fleet: FleetFile, path: Path, gpus: Mapping[str, Gpu], kernels: Mapping[str, Kernels], trips: RoundTrips
) -> list[UnitPlan]:
    """Return the fleet's units in the file's order. Raises InvalidRequest for a GPU or region that is
    unknown."""
    node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    units: list[UnitPlan] = []
    times = {}
    for number, group in enumerate(fleet.units):
        gpu = gpus.get(group.gpu)
        if gpu is None:
            raise _mistake(
                path, node, ("units", number, "gpu"), f"{group.gpu!r} is none of {', '.join(sorted(gpus))}"
            )
        if gpu.kv_tokens < 1 or math.isinf(gpu.kv_tokens):
            raise _mistake(
                path, node, ("units", number, "gpu"), f"{group.gpu} has no room beside the model's weights"
            )
        try:
            trips.check((group.region,), "region")
        except InvalidRequest as error:
            raise _mistake(path, node, ("units", number, "region"), error.message) from error
        if group.gpu not in times:
            times[group.gpu] = step_times(gpu, gpus, kernels)
        units += [UnitPlan(gpu, group.region, times[group.gpu])] * group.count
    return units
