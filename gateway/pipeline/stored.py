"""Records as bytes in Redis and back. Pure; a record of another release that can't be read says so."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
from pydantic import ValidationError

from gateway.pipeline.contract import Contract
from gateway.records import DataSourceRecord, PipelineRecord, PipelineStatus
from grid.errors import InternalError


def store_pipeline(record: PipelineRecord) -> bytes:
    return orjson.dumps(
        {
            "pipeline_id": record.pipeline_id,
            "tenant_id": record.tenant_id,
            "name": record.name,
            "revision": record.revision,
            "contract": record.contract.model_dump(mode="json", exclude_unset=True),
            "status": record.status.value,
            "reason": record.reason,
            "created_at": record.created_at,
            "updated_at": record.updated_at,
        }
    )


def load_pipeline(stored: bytes) -> PipelineRecord:
    """Raises InternalError when this release can't read the record."""
    fields: dict[str, Any] = orjson.loads(stored)
    try:
        contract = Contract.model_validate_json(orjson.dumps(fields["contract"]))
        return PipelineRecord(**{**fields, "contract": contract, "status": PipelineStatus(fields["status"])})
    except (ValidationError, KeyError, TypeError, ValueError):
        raise InternalError(
            f"the stored pipeline {fields.get('pipeline_id')} can't be read by this release; create it anew"
        ) from None


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
