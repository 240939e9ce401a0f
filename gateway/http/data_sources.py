"""Data sources over HTTP: create, list, read, delete, and add documents to one."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query
from pydantic import BeforeValidator, Field

from gateway.http.call import Call, InCall, Json
from gateway.http.documented import body, errors
from gateway.http.shapes.data_sources import DataSourceList, DataSourceView, DocumentsAnswer
from gateway.http.shapes.shape import Deleted
from gateway.knowledge.documents import MAX_DOCUMENT_CHARS, MAX_DOCUMENT_ID_CHARS, MAX_DOCUMENTS
from gateway.knowledge.sources import STORES
from gateway.pipeline.contract import MAX_DIMENSION, Name, Part, RegionName, parse
from gateway.records import DataSourceRecord
from gateway.trust.residency import check_marks, texts_within
from grid.config import Config
from grid.errors import InvalidRequest
from grid.words import Task

router = APIRouter(tags=["data sources"])


def _known_type(value: Any) -> Any:
    if isinstance(value, str) and value not in STORES:
        raise ValueError(f"type {value[:64]!r} is not supported by this cell; supported: {', '.join(STORES)}")
    return value


class NewDataSource(Part):
    name: Name
    type: Annotated[str, BeforeValidator(_known_type)]
    config: dict[str, Any] = Field(default_factory=dict)
    """Empty: the cell's own store. Which Qdrant that is, is the operator's setting."""
    embedding_model: Name | None = None
    """A model of the cell or an alias; None: the cell's first embedding model."""
    dimension: int | None = Field(None, ge=1, le=MAX_DIMENSION)
    """Only checked; the model decides."""
    region: RegionName | None = None


class NewDocument(Part):
    id: Annotated[str, Field(min_length=1, max_length=MAX_DOCUMENT_ID_CHARS)]
    text: Annotated[str, Field(min_length=1, max_length=MAX_DOCUMENT_CHARS)]
    metadata: dict[str, Any] = Field(default_factory=dict)


class NewDocuments(Part):
    documents: tuple[NewDocument, ...] = Field(
        min_length=1, max_length=MAX_DOCUMENTS, strict=False, fail_fast=True
    )


@router.post(
    "/v1/data-sources",
    status_code=201,
    responses={201: {"model": DataSourceView}, **errors(400, 409, 422)},
    openapi_extra=body(NewDataSource),
)
async def create_data_source(call: InCall) -> Json:
    """Create a collection in the cell's vector store."""
    asked = parse(NewDataSource, await call.body())
    check_config(asked)
    config = call.services.config
    if asked.region not in (None, config.cell.region):
        raise InvalidRequest(
            f"region: this cell stores in {config.cell.region!r}; leave the field out or ask another cell",
            param="region",
        )
    model = embedding_model(asked.embedding_model, config)
    record = await call.services.registry.create_source(
        call.tenant.tenant_id,
        name=asked.name,
        type=asked.type,
        config={},
        region=config.cell.region,
        embedding_model=model,
        dimension=check_dimension(asked.dimension, model, known_dimension(call, model)),
        idempotency_key=call.exchange.header(b"idempotency-key"),
    )
    return Json(orjson.dumps(source_view(record)), status_code=201)


@router.get("/v1/data-sources", responses={200: {"model": DataSourceList}, **errors()})
async def list_data_sources(call: InCall) -> Json:
    """List the tenant's data sources, oldest first."""
    records = await call.services.registry.list_sources(call.tenant.tenant_id)
    return Json(orjson.dumps({"data_sources": [source_view(record) for record in records]}))


@router.get("/v1/data-sources/{data_source_id}", responses={200: {"model": DataSourceView}, **errors(404)})
async def read_data_source(call: InCall, data_source_id: str) -> Json:
    """Read one data source with its count of documents."""
    record = await call.services.registry.read_source(call.tenant.tenant_id, data_source_id)
    return Json(orjson.dumps(source_view(record)))


@router.delete("/v1/data-sources/{data_source_id}", responses={200: {"model": Deleted}, **errors(404, 409)})
async def delete_data_source(
    call: InCall,
    data_source_id: str,
    force: Annotated[bool, Query(description="also while pipelines read it")] = False,
) -> Json:
    """Delete a data source with its documents. One that pipelines read is kept (409, which names them) unless
    `force` is true; their calls answer 404 from then on."""
    await call.services.documents.delete_source(call.tenant, data_source_id, force=force)
    return Json(orjson.dumps({"deleted": True, "id": data_source_id}))


@router.post(
    "/v1/data-sources/{data_source_id}/documents",
    responses={200: {"model": DocumentsAnswer}, **errors(400, 403, 404, 413, 429, 503)},
    openapi_extra=body(NewDocuments),
)
async def add_documents(call: InCall, data_source_id: str) -> Json:
    """Add documents, or replace those of the same id. Embedding them is the grid's work."""
    asked = parse(NewDocuments, await call.body())
    check_marks(
        call.residency,
        (text for document in asked.documents for text in (document.text, *texts_within(document.metadata))),
    )
    source = await call.services.registry.get_source(call.tenant.tenant_id, data_source_id)
    counts = await call.services.documents.add(
        call.tenant, source, asked.documents, allowed_regions=call.residency.allowed_regions
    )
    return Json(orjson.dumps({"data_source_id": data_source_id, **counts}))


def check_config(asked: NewDataSource) -> None:
    """Raise InvalidRequest for settings of a store that a tenant can't choose."""
    if asked.config:
        raise InvalidRequest(
            "config: data sources of this cell live in its own Qdrant, which takes no settings; an outside "
            "server is the operator's to configure (vectors.qdrant_url)",
            param="config",
        )


def embedding_model(name: str | None, config: Config, param: str = "embedding_model") -> str:
    """Return the embedding model that `name`, the value of `param`, stands for. Raises InvalidRequest that
    lists the cell's."""
    models = [model.name for model in config.models if model.engine == "embedding"]
    if name is None and models:
        return models[0]
    alias = config.aliases.get(name or "")
    resolved = alias.model if alias is not None else name
    if resolved not in models:
        raise InvalidRequest(
            f"{param}: {name!r} is no embedding model of this cell; it has {', '.join(models) or 'none'}",
            param=param,
        )
    return resolved


def known_dimension(call: Call, model: str) -> int:
    """Return the vector length of `model`, 0 before a unit says it."""
    cards = (unit.card for unit in call.services.placement.fleet.units)
    return next((card.dimension for card in cards if card.task == Task.EMBED and card.model == model), 0)


def check_dimension(asked: int | None, model: str, known: int) -> int:
    """Return the vector length to record. Raises InvalidRequest where the caller thinks of another one."""
    if asked is not None and known and asked != known:
        raise InvalidRequest(
            f"dimension: {model} makes vectors of {known} numbers, not {asked}", param="dimension"
        )
    return known or asked or 0


def source_view(record: DataSourceRecord) -> dict[str, Any]:
    return {
        "data_source_id": record.data_source_id,
        "name": record.name,
        "type": record.type,
        "config": record.config,
        "region": record.region,
        "embedding_model": record.embedding_model,
        "dimension": record.dimension,
        "document_count": record.document_count,
        "created_at": record.created_at,
        "last_updated_at": record.last_updated_at,
    }
