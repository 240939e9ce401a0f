"""Routes of the operator and of machines: health, readiness, units, keys."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
from fastapi import APIRouter, Request
from pydantic import Field

from gateway.http.call import InCall, Json
from gateway.http.documented import body, errors
from gateway.http.shapes.operations import Health, KeyList, NewKeyView, Readiness, UnitList, UnitView
from gateway.http.shapes.shape import Deleted
from gateway.pipeline.contract import Part, parse
from gateway.services import Services
from gateway.trust.tenants import MAX_LABEL_CHARS
from grid.errors import InvalidRequest
from grid.hardware import catalogue
from grid.hardware.telemetry import throttle_reasons
from grid.words import UNKNOWN, FleetGpu, FleetUnit, GpuSample, Precision, Task, UnitState

PLACEMENT_TIMEOUT_S = 5.0
"""The placement actor is back from a restart within it."""

router = APIRouter(tags=["operations"])


class NewKey(Part):
    tenant_id: str = Field(min_length=1, max_length=64)
    operator: bool = False
    label: str = Field("", max_length=MAX_LABEL_CHARS)


class DrainOrder(Part):
    draining: bool = True
    """False undoes it."""
    restart: bool = False
    """Once it has nothing left to do, its process is replaced by a new one, which takes work again."""


@router.get("/healthz", responses={200: {"model": Health}}, openapi_extra={"security": []})
async def healthz() -> Json:
    """Answer while the process serves at all."""
    return Json(b'{"status":"ok"}')


@router.get(
    "/readyz",
    responses={200: {"model": Readiness}, 503: {"model": Readiness}},
    openapi_extra={"security": []},
)
async def readyz(request: Request) -> Json:
    """Say whether the cell can run its models now, and if not, why."""
    services: Services = request.scope["state"]["services"]
    reasons = await services.not_ready()
    ready = {"ready": not reasons, "reasons": reasons}
    return Json(orjson.dumps(ready), status_code=503 if reasons else 200)


@router.get("/v1/units", responses={200: {"model": UnitList}, **errors()})
async def list_units(call: InCall) -> Json:
    """The hardware view: every unit and GPU of the cell, each with its newest sample, and the queues."""
    fleet = call.services.placement.fleet
    units = [unit_view(unit) for unit in sorted(fleet.units, key=lambda unit: unit.card.unit_id)]
    gpus = [gpu_view(gpu) for gpu in sorted(fleet.gpus, key=lambda gpu: (gpu.node_id, gpu.card.number))]
    queues = [queue._asdict() for queue in sorted(fleet.queues)]
    answer = {"fleet_version": fleet.version, "units": units, "gpus": gpus, "queues": queues}
    return Json(orjson.dumps(answer))


@router.post(
    "/v1/units/{unit_id}/drain",
    responses={200: {"model": UnitView}, **errors(400, 403, 404, 504)},
    openapi_extra=body(DrainOrder),
)
async def drain_unit(call: InCall, unit_id: str) -> Json:
    """Let a unit take no new work, or take it again; what runs moves on or ends. The operator's."""
    call.require_operator()
    order = parse(DrainOrder, await call.body() or b"{}")
    if order.restart and not order.draining:
        raise InvalidRequest("restart: a unit that is not to be drained can't be restarted", param="restart")
    unit = await call.services.placement.drain(
        unit_id, draining=order.draining, restart=order.restart, timeout_s=PLACEMENT_TIMEOUT_S
    )
    return Json(orjson.dumps(unit_view(unit)))


@router.get("/v1/keys", responses={200: {"model": KeyList}, **errors(403)})
async def list_keys(call: InCall) -> Json:
    """List keys, never their secrets. The operator's."""
    call.require_operator()
    keys = await call.services.tenants.list_keys()
    return Json(orjson.dumps({"keys": [asdict(key) for key in keys]}))


@router.post(
    "/v1/keys",
    status_code=201,
    responses={201: {"model": NewKeyView}, **errors(400, 403)},
    openapi_extra=body(NewKey),
)
async def create_key(call: InCall) -> Json:
    """Make a key for a tenant, and the tenant if it is new. The key is shown this once. The operator's."""
    call.require_operator()
    asked = parse(NewKey, await call.body())
    made = await call.services.tenants.create_key(asked.tenant_id, operator=asked.operator, label=asked.label)
    return Json(
        orjson.dumps({**asdict(made.info), "key": made.key}),
        status_code=201,
        headers={"cache-control": "no-store"},
    )


@router.delete("/v1/keys/{key_id}", responses={200: {"model": Deleted}, **errors(403, 404)})
async def revoke_key(call: InCall, key_id: str) -> Json:
    """End a key. The operator's."""
    call.require_operator()
    await call.services.tenants.revoke_key(key_id)
    return Json(orjson.dumps({"deleted": True, "id": key_id}))


def state_of(unit: FleetUnit) -> str:
    """Return a unit's state for people: `drained` once a draining unit has nothing left to do, `isolated` for
    a ready one that gets no work because it failed."""
    load = unit.load
    if load.state == UnitState.READY and unit.isolated:
        return "isolated"
    if load.state == UnitState.DRAINING and not (load.running or load.waiting or unit.reserved):
        return "drained"
    return UnitState(load.state).name.lower()


def unit_view(unit: FleetUnit) -> dict[str, Any]:
    card, load = unit.card, unit.load
    return {
        "unit_id": card.unit_id,
        "model": card.model,
        "task": Task(card.task).name.lower(),
        "state": state_of(unit),
        "isolated": unit.isolated or None,
        "simulated": card.simulated,
        "region": card.region,
        "node_id": card.node_id,
        "gpu_type": card.gpu_type,
        "gpus": card.gpus,
        "gpu_uuids": card.gpu_uuids,
        "memory_grant_mb": card.memory_grant_mb,
        "precision": Precision(card.precision).label,
        "fingerprint": card.fingerprint,
        "context_tokens": card.context_tokens,
        "dimension": card.dimension,
        "cu_factor": card.cu_factor,
        "running": load.running,
        "max_running": card.max_running,
        "waiting": load.waiting,
        "max_waiting": card.max_waiting,
        "reserved": unit.reserved,
        "kv_tokens_free": load.kv_tokens_free,
        "kv_tokens_total": load.kv_tokens_total,
        "prefill_tokens_per_s": known(load.prefill_tokens_per_s),
        "decode_ms_per_token": known(load.decode_ms_per_token),
        "prompt_tokens": load.prompt_tokens,
        "cached_tokens": load.cached_tokens,
        "admits": load.admits or card.max_running,
        "chunk_tokens": load.chunk_tokens or None,
        "preemptions": load.preemptions,
        "sample_age_ms": round(unit.sample_age_ms, 1),
    }


SAMPLE_DIGITS = 3
"""Of a reading: what NVML gives is no more precise."""
NO_READINGS = ("uuid", "throttle", "fault")
"""Fields of a sample that are no figures."""


def known(reading: float) -> float | None:
    """Return a reading as JSON has it: null where the hardware or engine can't tell."""
    return None if reading == UNKNOWN else round(reading, SAMPLE_DIGITS)


def gpu_view(gpu: FleetGpu) -> dict[str, Any]:
    card, sample = gpu.card, gpu.sample
    capability = card.compute_capability
    model = catalogue.known(card.product, card.memory_mb, capability)
    readings = {name: known(getattr(sample, name)) for name in GpuSample._fields if name not in NO_READINGS}
    return {
        "uuid": card.uuid,
        "node_id": gpu.node_id,
        "index": card.number,
        "product": card.product,
        "compute_capability": ".".join(map(str, capability)) if any(capability) else None,
        "catalogue_name": model.name if model.listed else None,
        "warning": None if model.listed else catalogue.unlisted_warning(model),
        "memory_total_mb": known(card.memory_mb),
        "nvlinks": card.nvlinks,
        "units": gpu.units,
        "fault": sample.fault or None,
        "throttled_by": None if sample.throttle == UNKNOWN else throttle_reasons(sample.throttle),
        **readings,
        "sample_age_ms": known(gpu.sample_age_ms),
    }
