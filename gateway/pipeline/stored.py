"""Records as bytes in Redis and back. Pure; a record of another release that can't be read says so."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
from pydantic import ValidationError

from gateway.pipeline.contract import Contract
from gateway.records import DataSourceRecord, PipelineRecord, PipelineStatus, Revision
from grid.errors import InternalError


def store_pipeline(record: PipelineRecord) -> bytes:
    return orjson.dumps(
        {
            "pipeline_id": record.pipeline_id,
            "tenant_id": record.tenant_id,
            "name": record.name,
            "revision": record.revision,
            "contract": _store_contract(record.contract),
            "status": record.status.value,
            "reason": record.reason,
            "created_at": record.created_at,
            "updated_at": record.updated_at,
            "serving": record.serving
            and {"number": record.serving.number, "contract": _store_contract(record.serving.contract)},
        }
    )


def load_pipeline(stored: bytes) -> PipelineRecord:
    """Raises InternalError when this release can't read the record."""
    fields: dict[str, Any] = orjson.loads(stored)
    try:
        kept = fields.get("serving")
        read = {
            "contract": _load_contract(fields["contract"]),
            "status": PipelineStatus(fields["status"]),
            "serving": kept and Revision(kept["number"], _load_contract(kept["contract"])),
        }
        return PipelineRecord(**{**fields, **read})
    except (ValidationError, KeyError, TypeError, ValueError):
        raise InternalError(
            f"the stored pipeline {fields.get('pipeline_id')} can't be read by this release; create it anew"
        ) from None


def age_of(stored: bytes) -> tuple[str, str]:
    """Return what a stored pipeline is ordered by in a list: when it was made, and its id."""
    fields: dict[str, Any] = orjson.loads(stored)
    return fields["created_at"], fields["pipeline_id"]


def _store_contract(contract: Contract) -> dict[str, Any]:
    return contract.model_dump(mode="json", exclude_unset=True)


def _load_contract(fields: dict[str, Any]) -> Contract:
    return Contract.model_validate_json(orjson.dumps(fields))


def store_source(record: DataSourceRecord) -> bytes:
    return orjson.dumps(asdict(record))


def load_source(stored: bytes) -> DataSourceRecord:
    """Raises InternalError when this release can't read the record."""
    fields: dict[str, Any] = orjson.loads(stored)
    try:
        return DataSourceRecord(**fields)
    except TypeError:
        raise InternalError(
            f"the stored data source {fields.get('data_source_id')} can't be read by this release"
        ) from None
